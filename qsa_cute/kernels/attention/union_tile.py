"""What one consumer warpgroup of `union_prefill` does with a chunk in registers: products, softmax, output.

Fragments are wgmma's 64 x N accumulators as flat register tensors: element 4 i + 2 j + k of a lane lies in row
lane // 4 + 8 j of its warp's 16 and column 8 i + 2 (lane % 4) + k. tMax, tSum and tScale are one a row j.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from qsa_cute import union_layout
from qsa_cute.kernels.common import ops

PAIRS = union_layout.PAIRS  # M extent of a tile: two warpgroups of 64
RESCALE_THRESHOLD = 8.0  # log2: O is rescaled only when a maximum grew by more; P stays below 2^8


class UnionTile:
    """Needs `head_dim`, `dtype` and `tile` of the kernel that inherits it."""

    @cute.jit
    def gemm(self, mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, zero: cutlass.Constexpr[bool]):
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not zero)
        for k in cutlass.range_constexpr(cute.size(a.shape[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    # ---- softmax -------------------------------------------------------------------------------------

    @cute.jit
    def apply_masks(self, tS: cute.Tensor, w0: Int32, w0_odd: Int32, w1: Int32, w1_odd: Int32):
        """-inf where the row's bit of the block is 0; words of the two rows, for even and odd columns."""
        words = (w0, w0_odd, w1, w1_odd)
        for i in cutlass.range_constexpr(self.tile // 8):
            for j in cutlass.range_constexpr(4):
                tS[4 * i + j] = tS[4 * i + j] if (words[j] & (1 << (2 * i))) != 0 else -Float32.inf

    @cute.jit
    def softmax(self, tS: cute.Tensor, tMax: cute.Tensor, tSum: cute.Tensor, tScale: cute.Tensor, scale_log2: Float32):
        """tS from scores to exponentials; maxima, this lane's sums, and the factor that O is still to be scaled by."""
        for j in cutlass.range_constexpr(2):
            old = tMax[j]
            p = [tS[2 * j], tS[2 * j + 1], tS[4 + 2 * j], tS[4 + 2 * j + 1]]
            for i in cutlass.range_constexpr(2, self.tile // 8, 2):
                for k in cutlass.range_constexpr(2):
                    p[k] = cute.arch.fmax(p[k], tS[4 * i + 2 * j + k])
                    p[2 + k] = cute.arch.fmax(p[2 + k], tS[4 * i + 4 + 2 * j + k])
            top = cute.arch.fmax(cute.arch.fmax(p[0], p[1]), cute.arch.fmax(p[2], p[3]))
            top = cute.arch.fmax(top, old)
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
            top = old if (top - old) * scale_log2 <= RESCALE_THRESHOLD else top
            tMax[j] = top
            shift = top * scale_log2
            factor = cute.math.exp2((old - top) * scale_log2, fastmath=True)
            sums = [tSum[j] * factor, Float32(0.0)]
            for i in cutlass.range_constexpr(self.tile // 8):
                for k in cutlass.range_constexpr(2):
                    e = cute.math.exp2(tS[4 * i + 2 * j + k] * scale_log2 - shift, fastmath=True)
                    tS[4 * i + 2 * j + k] = e
                    sums[k] = sums[k] + e
            tSum[j] = sums[0] + sums[1]
            tScale[j] = factor

    @cute.jit
    def rescale(self, tO: cute.Tensor, tScale: cute.Tensor):
        """Scale O by what `softmax` left; most chunks need none, so one vote spares the warp the products."""
        if cute.arch.vote_any_sync((tScale[0] != 1.0) | (tScale[1] != 1.0)):
            for i in cutlass.range_constexpr(self.head_dim // 8):
                for j in cutlass.range_constexpr(4):
                    tO[4 * i + j] = tO[4 * i + j] * tScale[j // 2]

    @cute.jit
    def pack(self, tS: cute.Tensor, tP: cute.Tensor):
        for i in cutlass.range_constexpr(self.tile // 4):
            tP[i] = ops.pack_2(self.dtype, tS[2 * i], tS[2 * i + 1])

    # ---- output --------------------------------------------------------------------------------------

    @cute.jit
    def check_finite(self, tO: cute.Tensor, flag: Int64, lane: Int32):
        """Give the tile to the row path if O holds an inf or NaN, whosever it is."""
        check = [Float32(0.0), Float32(0.0)]
        for i in cutlass.range_constexpr(self.head_dim // 2):
            check[i % 2] = tO[i] * 0.0 + check[i % 2]
        total = check[0] + check[1]
        if cute.arch.vote_any_sync(total != 0.0):
            if lane == 0:
                ops.store_global_i32(flag, Int32(1))

    @cute.jit
    def store(
        self,
        tO: cute.Tensor,
        tMax: cute.Tensor,
        tSum: cute.Tensor,
        o: Int64,
        o_row: Int64,
        o_head: Int64,
        lse: Int64,
        lse_row: Int32,
        start: Int32,
        live: Int32,
        group_size: Int32,
        scale_log2: Float32,
        pair0: Int32,
        lane: Int32,
    ):
        """Normalise and store; a row with nothing selected is zeros, its LSE -inf. Four lanes hold 8 columns in
        turn, 2 each; exchanging them gives each lane 8 neighbours, 16 bytes."""
        for j in cutlass.range_constexpr(2):
            pair = pair0 + 8 * j
            row = (start + pair) // group_size
            head = start + pair - row * group_size
            inverse = cute.arch.rcp_approx(tSum[j]) if tSum[j] > 0.0 else Float32(0.0)
            at = o + Int64(row) * o_row + Int64(head) * o_head + Int64((lane % 4) * 16)
            for k in cutlass.range_constexpr(self.head_dim // 32):
                v = [
                    ops.pack_2(
                        self.dtype, tO[16 * k + 4 * i + 2 * j] * inverse, tO[16 * k + 4 * i + 2 * j + 1] * inverse
                    )
                    for i in range(4)
                ]
                v = self.transpose_quad(v[0], v[1], v[2], v[3], lane)
                if pair < live:
                    ops.store_global_i32x4(at + k * 64, v)
            if pair < live and lane % 4 == 0 and lse != 0:
                value = -Float32.inf
                if tSum[j] > 0.0:
                    value = (tMax[j] * scale_log2 + cute.math.log2(tSum[j], fastmath=True)) * ops.LN_2
                ops.store_global_f32(lse + (Int64(row) * Int64(lse_row) + Int64(head)) * 4, value)

    @cute.jit
    def transpose_quad(self, v0: Int32, v1: Int32, v2: Int32, v3: Int32, lane: Int32):
        """Among four lanes: lane l gets everybody's v_l, in lane order."""
        odd = lane % 2 == 1
        a = cute.arch.shuffle_sync_bfly(v0 if odd else v1, offset=1)
        b = cute.arch.shuffle_sync_bfly(v2 if odd else v3, offset=1)
        v0, v1 = a if odd else v0, v1 if odd else a
        v2, v3 = b if odd else v2, v3 if odd else b
        high = lane % 4 >= 2
        a = cute.arch.shuffle_sync_bfly(v0 if high else v2, offset=2)
        b = cute.arch.shuffle_sync_bfly(v1 if high else v3, offset=2)
        v0, v2 = a if high else v0, v2 if high else a
        v1, v3 = b if high else v1, v3 if high else b
        return v0, v1, v2, v3
