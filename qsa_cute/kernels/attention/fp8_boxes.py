"""Decode's products over boxes of K and V in e4m3: converted to fp16 on the way from shared memory to the registers.

As in `fp8_rows.py`, from which Q's fragments come: a word of `ldmatrix` holds four columns of K, or two columns of two
tokens of V. A lane's part of O are then four neighbouring columns of a row, as they are sent and stored: nothing has to
be put in order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from qsa_cute.kernels.attention.box_merge import BoxMerge
from qsa_cute.kernels.attention.fp8_rows import PAIR_TOKENS, Fp8RowGather
from qsa_cute.kernels.common import ops


class Fp8Boxes(Fp8RowGather, BoxMerge):
    def multiply_k(self, acc: cute.Tensor, tQ: cute.Tensor, k: int, b: tuple):
        if not self.fp8:
            BoxMerge.multiply_k(self, acc, tQ, k, b)
            return
        for m in range(4):
            at = 4 * (4 * k + m)
            a = (tQ[at], tQ[at + 1], tQ[at + 2], tQ[at + 3])
            ops.add_mma_16816(self.mma_dtype, acc, 4 * (m % self.chains), a, ops.e4m3_to_half(b[m]))

    @cute.jit
    def multiply_v(self, p: Int32, line: Int32, chunk: Int32, tO: cute.Tensor):
        """As the base's, but tO[8 g + 4 e + i] is column 16 g + 2 n + e where n is PTX's column of i."""
        if cutlass.const_expr(not self.fp8):
            BoxMerge.multiply_v(self, p, line, chunk, tO)
        else:
            a = ops.ldmatrix_x4(p)
            words = ops.ldmatrix_x4_trans(line + ((chunk ^ ((line >> 7) & 7)) << 4))  # a warp's only chunk comes twice
            for g in cutlass.range_constexpr(self.warp_chunks):
                first, second = (ops.e4m3_to_half(ops.permute_bytes(words[2 * g + i], PAIR_TOKENS)) for i in range(2))
                for e in cutlass.range_constexpr(2):
                    ops.add_mma_16816(self.mma_dtype, tO, 8 * g + 4 * e, a, (first[e], second[e]))

    def lane_rows(self, lane: Int32) -> list:
        if not self.fp8:
            return BoxMerge.lane_rows(self, lane)
        return [(lane >> 2) + 8 * r for r in range(2)]

    def lane_places(self, tid: Int32) -> list:
        if not self.fp8:
            return BoxMerge.lane_places(self, tid)
        first = (tid >> 5) * self.warp_groups + (tid >> 1 & 1)
        return [[(first + 2 * g, tid & 1) for g in range(self.warp_chunks)]] * 2

    @cute.jit
    def lane_quads(self, tO: cute.Tensor, lane: Int32):
        if cutlass.const_expr(not self.fp8):
            return BoxMerge.lane_quads(self, tO, lane)
        return [[[tO[8 * g + 2 * r + i] for i in (0, 4, 1, 5)] for g in range(self.warp_chunks)] for r in range(2)]
