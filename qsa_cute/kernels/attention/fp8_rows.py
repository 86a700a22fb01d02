"""The row kernels' products with K and V in e4m3: converted to fp16 on the way from shared memory to the registers.

A word of `ldmatrix` holds four bytes where it would hold two 16-bit elements. What that does to the order of elements
costs nothing in QK^T, where any order of the columns will do as long as Q has the same; in PV the two tokens of a word
are put together by one byte permutation, and a warp's columns of O come out permuted by pairs, which `arrange` undoes
once a row. Q, bf16, becomes fp16: exact from 6e-5 to 65504 in magnitude. P is fp16 and at most 2^8.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from qsa_cute.kernels.attention.row_gather import RowGather
from qsa_cute.kernels.common import ops
from qsa_cute.kernels.common.rope_norm import unpack_2

PAIR_TOKENS = 0x3120  # (t0 c0, t0 c1, t1 c0, t1 c1) -> (t0 c0, t1 c0, t0 c1, t1 c1)


class Fp8RowGather(RowGather):
    @cute.jit
    def read_q(self, smem: Int32, tQ: cute.Tensor, lane: Int32):
        """Q's A fragments in fp16: k-step c has columns 16 c + 4 q + {0, 1} where PTX has 2 q + {0, 1}, and + {2, 3}
        where it has 8 + 2 q + {0, 1}; q = lane % 4."""
        if cutlass.const_expr(not self.fp8):
            RowGather.read_q(self, smem, tQ, lane)
        else:
            for r in cutlass.range_constexpr(2):
                row = lane // 4 + 8 * r
                base = smem + self.at["q"] + row * self.q_pitch + (lane % 2) * 8
                for c in cutlass.range_constexpr(self.head_dim // 16):
                    chunk = self.swizzle(2 * (c % 4) + lane % 4 // 2, row)
                    words = ops.load_shared_i32x2(base + chunk * 16 + (c // 4) * 128)
                    for i in cutlass.range_constexpr(2):
                        low, high = unpack_2("bf16", words[i])
                        tQ[4 * c + 2 * i + r] = ops.pack_2("fp16", low, high)

    @cute.jit
    def qk(self, sK: Int32, tQ: cute.Tensor, tS: cute.Tensor, lane: Int32):
        if cutlass.const_expr(not self.fp8):
            RowGather.qk(self, sK, tQ, tS, lane)
        else:
            row = lane % 8
            base = sK + row * self.pitch
            acc = cute.make_rmem_tensor((4 * self.chains,), cutlass.Float32)
            acc.fill(0.0)
            for k in cutlass.range_constexpr(self.head_dim // 64):
                words = ops.ldmatrix_x4(base + self.swizzle(4 * (k % 2) + lane // 8, row) * 16 + (k // 2) * 128)
                for m in cutlass.range_constexpr(4):
                    at = 4 * (4 * k + m)
                    a = (tQ[at], tQ[at + 1], tQ[at + 2], tQ[at + 3])
                    ops.add_mma_16816(self.mma_dtype, acc, 4 * (m % self.chains), a, ops.e4m3_to_half(words[m]))
            self.sum_chains(acc, tS)

    @cute.jit
    def pv(self, smem: Int32, sV: Int32, tO: cute.Tensor, tid: Int32):
        """As the base's, but tO[8 g + 4 e + i] is column 16 g + 2 n + e where n is PTX's column of i."""
        if cutlass.const_expr(not self.fp8):
            RowGather.pv(self, smem, sV, tO, tid)
        else:
            lane = tid % 32
            groups = self.warp_cols // 16
            steps = 2 // groups  # k-steps of 16 tokens that one ldmatrix of four covers
            for k in cutlass.range_constexpr(self.tile // (16 * steps)):
                token = 16 * k * steps + (lane % 16 if groups == 2 else lane)
                chunk = (tid // 32) * groups + (lane // 16 if groups == 2 else 0)
                words = ops.ldmatrix_x4_trans(sV + token * self.pitch + self.swizzle(chunk, token) * 16)
                for half in cutlass.range_constexpr(2):
                    step, group = (k, half) if groups == 2 else (2 * k + half, 0)
                    row = lane % 16
                    a = ops.ldmatrix_x4(
                        smem + self.at["p"] + row * self.p_pitch + ((2 * step + lane // 16) ^ (row % 8)) * 16
                    )
                    first, second = (
                        ops.e4m3_to_half(ops.permute_bytes(words[2 * half + i], PAIR_TOKENS)) for i in range(2)
                    )
                    for e in cutlass.range_constexpr(2):
                        ops.add_mma_16816(self.mma_dtype, tO, 8 * group + 4 * e, a, (first[e], second[e]))

    @cute.jit
    def arrange(self, tO: cute.Tensor, tid: Int32):
        """tO from `pv`'s columns to the base's: each lane has columns 4 q .. 4 q + 3 of 16 and gets 2 q, 2 q + 1,
        8 + 2 q and 9 + 2 q."""
        if cutlass.const_expr(self.fp8):
            q = tid % 4
            for g in cutlass.range_constexpr(self.warp_cols // 16):
                for r in cutlass.range_constexpr(2):
                    at = 8 * g + 2 * r
                    mine = (tO[at], tO[at + 4], tO[at + 1], tO[at + 5])
                    for n in cutlass.range_constexpr(2):
                        source = tid % 32 - q + 2 * n + q // 2
                        for i in cutlass.range_constexpr(2):
                            low = cute.arch.shuffle_sync(mine[i], source)
                            high = cute.arch.shuffle_sync(mine[2 + i], source)
                            tO[at + 4 * n + i] = high if q % 2 == 1 else low
