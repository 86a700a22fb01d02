"""Query prepare (K1a): norm and rope of the indexer's query heads, prefill rows.

    q_normed[r, h] = rope(norm(index_qk[b, t, h], w_q), position p),   p = query_starts[b] + t

Grid: (batch * seq_len); a warp a head (`common/rope_norm.py`). Padded rows (p at or past the context length or
the rope table) are written as zeros and read nothing.

Baked: type. The caller guarantees: 8-byte aligned rows with unit inner stride.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import INDEX_HEADS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common import rope_norm as rn
from qsa_cute.kernels.common.params import f32, i32, i64, ptr

PARAMS = (
    ptr("q_normed_ptr", "elem", 8),
    ptr("index_qk_ptr", "elem", 8),
    ptr("cos_sin_ptr", "f32", 16),
    ptr("context_lengths", "i32"),
    ptr("query_starts", "i32"),
    ptr("w_q_ptr", "elem", 8),
    i32("seq_len"),
    i32("max_positions"),
    i64("index_stride_batch"),
    i64("index_stride_row"),
    i64("q_normed_stride_row"),
    f32("rms_eps"),
)


class Prepare:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.dtype = dtype
        self.threads = 32 * INDEX_HEADS
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self,
        q_normed_ptr: cute.Pointer,
        index_qk_ptr: cute.Pointer,
        cos_sin_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        w_q_ptr: cute.Pointer,
        seq_len: Int32,
        max_positions: Int32,
        index_stride_batch: Int64,
        index_stride_row: Int64,
        q_normed_stride_row: Int64,
        rms_eps: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_normed_ptr,
            index_qk_ptr,
            cos_sin_ptr,
            context_lengths,
            query_starts,
            w_q_ptr,
            seq_len,
            max_positions,
            index_stride_batch,
            index_stride_row,
            q_normed_stride_row,
            rms_eps,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        q_normed_ptr: cute.Pointer,
        index_qk_ptr: cute.Pointer,
        cos_sin_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        w_q_ptr: cute.Pointer,
        seq_len: Int32,
        max_positions: Int32,
        index_stride_batch: Int64,
        index_stride_row: Int64,
        q_normed_stride_row: Int64,
        rms_eps: Float32,
    ):
        early.begin()
        row, _, _ = cute.arch.block_idx()
        head = cute.arch.warp_idx()
        lane = cute.arch.lane_idx()
        sequence = row // seq_len
        t = row % seq_len
        start = query_starts.toint()
        position = t + ops.load_global_i32_if(Int32(start != 0), start + Int64(sequence) * 4, Int32(0))
        length = ops.load_global_i32(context_lengths.toint() + Int64(sequence) * 4)

        live = Int32(0)
        if position >= 0 and position < length and position < max_positions:
            live = Int32(1)
        at = Int64(head * rn.ROW_BYTES + lane * rn.LANE_BYTES)
        source = (Int64(sequence) * index_stride_batch + Int64(t) * index_stride_row) * 2 + at
        words = rn.load_i32x2_if(live, index_qk_ptr.toint() + source)
        weight = rn.load_i32x2_if(live, w_q_ptr.toint() + Int64(lane * rn.LANE_BYTES))
        rope = rn.lane_rope(live, cos_sin_ptr.toint(), position, lane)
        x = rn.unpack_2(self.dtype, words[0]) + rn.unpack_2(self.dtype, words[1])
        q = rn.norm_rope(self.dtype, x, weight, rope, rms_eps, lane)
        out = q_normed_ptr.toint() + Int64(row) * q_normed_stride_row * 2 + at
        zero = Int32(0)
        ops.store_global_i32x2(out, q[0] if live != 0 else zero, q[1] if live != 0 else zero)
