"""Prepared queries in FP32: norm and rope of the indexer's query heads, with angles computed from theta.

    q_out[r, h] = rope(norm(q_in[r, h], w), position first_pos + r)

q_in rows are `pitch` elements apart (the width of the indexer's projection; their first columns are the heads), q_out
is contiguous FP32 [rows, n_heads, hd]. A decode query is one row. The arithmetic up to the angles and the last
rounding, which there is none of here, is `indexer/prepare.py`'s.

Grid: thread blocks of 4 warps, which take the (row, head) vectors in turn, one a warp (`vectors.py`).

Baked: type of q_in. The caller guarantees: 8-byte aligned rows, 16-byte aligned q_out; hd a multiple of 4 up to 1024,
rot even and at most hd.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common import rope_norm as rn
from qsa_cute.kernels.common.params import f32, i32, i64, ptr
from qsa_cute.kernels.metrale.vectors import (
    LANE_DIMS,
    PIECE,
    WARPS,
    VectorNorm,
    frequency_bytes,
    store_shared_f32x4,
)

PARAMS = (
    ptr("q_in", "elem", 8),
    ptr("q_norm_w", "elem", 8),
    ptr("q_out", "f32", 16),
    i32("rows"),
    i32("first_pos"),
    i32("n_heads"),
    i32("hd"),
    i32("rot"),
    i64("pitch"),
    i64("rope_step"),
    f32("eps"),
)


class QueryPrep(VectorNorm):
    early_launch = early.SUPPORTED

    @cute.jit
    def __call__(
        self,
        q_in: cute.Pointer,
        q_norm_w: cute.Pointer,
        q_out: cute.Pointer,
        rows: Int32,
        first_pos: Int32,
        n_heads: Int32,
        hd: Int32,
        rot: Int32,
        pitch: Int64,
        rope_step: Int64,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(q_in, q_norm_w, q_out, rows, first_pos, n_heads, hd, rot, pitch, rope_step, eps).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        q_in: cute.Pointer,
        q_norm_w: cute.Pointer,
        q_out: cute.Pointer,
        rows: Int32,
        first_pos: Int32,
        n_heads: Int32,
        hd: Int32,
        rot: Int32,
        pitch: Int64,
        rope_step: Int64,
        eps: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        groups, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        buffer = smem + frequency_bytes(rot) + warp * hd * 4
        self.frequencies(smem, rope_step, rot, tid)
        early.begin()
        for vector in cutlass.range(group * WARPS + warp, rows * n_heads, groups * WARPS, unroll=1):
            row = vector // n_heads
            head = vector % n_heads
            source = q_in.toint() + (Int64(row) * pitch + Int64(head) * hd) * 2
            squares = Float32(0.0)
            for d in cutlass.range(lane * LANE_DIMS, hd, PIECE, unroll=1):
                words = rn.load_i32x2_if(Int32(1), source + Int64(d) * 2)
                x = rn.unpack_2(self.dtype, words[0]) + rn.unpack_2(self.dtype, words[1])
                store_shared_f32x4(buffer + d * 4, x)
                for i in cutlass.range_constexpr(LANE_DIMS):
                    squares = rn.add(squares, rn.multiply(x[i], x[i]))
            self.norm_rope(smem, buffer, squares, q_norm_w.toint(), hd, rot, first_pos + row, eps, lane)
            to = q_out.toint() + Int64(vector) * hd * 4
            for d in cutlass.range(lane * LANE_DIMS, hd, PIECE, unroll=1):
                ops.store_global_f32x4(to + Int64(d) * 4, ops.load_shared_f32x4(buffer + d * 4))
