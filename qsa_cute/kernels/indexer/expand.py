"""Expand (K4): a row's best blocks into its list of tokens, the open block's tokens after them.

Row r = row_start + i is token t = r % seq_len of sequence b at position p = query_starts[b] + t; it sees
(p + 1) // 4 blocks, of which it has chosen the first min(512, seen) of sorted_ids[i].

    out[r] = 4 id + 0 .. 3 for each chosen id, the (p + 1) % 4 tokens of the open block, -1 up to 2051

Padded rows (p at or past the context length) are all -1 and read no ids. Grid: (num_rows).
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS, INDEX_WIDTH, TOP_BLOCKS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr

PARAMS = (
    ptr("out_idx_ptr", "i32"),
    ptr("sorted_ids_ptr", "i32"),
    ptr("context_lengths", "i32"),
    ptr("query_starts", "i32"),
    i32("seq_len"),
    i32("row_start"),
    i64("out_stride_row"),
    i64("sorted_stride_row"),
)


class Expand:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.threads = 256
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self,
        out_idx_ptr: cute.Pointer,
        sorted_ids_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        seq_len: Int32,
        row_start: Int32,
        out_stride_row: Int64,
        sorted_stride_row: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            out_idx_ptr,
            sorted_ids_ptr,
            context_lengths,
            query_starts,
            seq_len,
            row_start,
            out_stride_row,
            sorted_stride_row,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        out_idx_ptr: cute.Pointer,
        sorted_ids_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        seq_len: Int32,
        row_start: Int32,
        out_stride_row: Int64,
        sorted_stride_row: Int64,
    ):
        early.begin()
        local, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        row = row_start + local
        sequence = row // seq_len
        starts = query_starts.toint()
        start = ops.load_global_i32_if(Int32(starts != 0), starts + Int64(sequence) * 4, Int32(0))
        position = start + row % seq_len
        length = ops.load_global_i32(context_lengths.toint() + Int64(sequence) * 4)
        seen = (position + 1) // BLOCK_TOKENS
        chosen = cutlass.min(seen, Int32(TOP_BLOCKS)) * BLOCK_TOKENS
        count = chosen + (position + 1) % BLOCK_TOKENS
        if position < 0 or position >= length:
            chosen = Int32(0)
            count = Int32(0)
        ids = sorted_ids_ptr.toint() + Int64(local) * sorted_stride_row * 4
        out = out_idx_ptr.toint() + Int64(row) * out_stride_row * 4
        for step in cutlass.range_constexpr(-(-INDEX_WIDTH // 256)):
            at = tid + step * 256
            if at < INDEX_WIDTH:
                block = ops.load_global_i32_if(
                    Int32(at < chosen), ids + Int64(at // BLOCK_TOKENS) * 4, seen + (at - chosen) // BLOCK_TOKENS
                )
                token = block * BLOCK_TOKENS + at % BLOCK_TOKENS  # chosen is a multiple of 4
                ops.store_global_i32(out + Int64(at) * 4, token if at < count else Int32(-1))
