"""Expansion of block ids to vLLM's counted lists.

    out[r] = 4 id + 0 .. 3 for each of the first min(visible_blocks[r], top_blocks) ids of block_indices[r], the
             (p + 1) % 4 tokens of the open block of position p = query_positions[r], -1 up to the last column,
             and there the number of the tokens before it

An id below 0 gives -1.

Grid: (rows). A thread stores a block's four tokens at once where rows are 16-byte aligned. Positions are int32 or the
low words of int64: `positions_step` words apart.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr

PARAMS = (
    ptr("out_ptr", "i32"),
    ptr("block_indices", "i32"),
    ptr("query_positions", "i32"),
    ptr("visible_blocks", "i32"),
    i32("top_blocks"),
    i32("positions_step"),
    i64("out_stride_row"),
    i64("blocks_stride_row"),
)


class ExpandCounted:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.threads = 128
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self,
        out_ptr: cute.Pointer,
        block_indices: cute.Pointer,
        query_positions: cute.Pointer,
        visible_blocks: cute.Pointer,
        top_blocks: Int32,
        positions_step: Int32,
        out_stride_row: Int64,
        blocks_stride_row: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            out_ptr,
            block_indices,
            query_positions,
            visible_blocks,
            top_blocks,
            positions_step,
            out_stride_row,
            blocks_stride_row,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        out_ptr: cute.Pointer,
        block_indices: cute.Pointer,
        query_positions: cute.Pointer,
        visible_blocks: cute.Pointer,
        top_blocks: Int32,
        positions_step: Int32,
        out_stride_row: Int64,
        blocks_stride_row: Int64,
    ):
        row, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        position = query_positions.toint() + Int64(row) * positions_step * 4
        visible = visible_blocks.toint() + Int64(row) * 4
        if tid == 0:
            early.prefetch(position)
            early.prefetch(visible)
        early.begin()
        length = ops.load_global_i32(position) + 1
        chosen = ops.load_global_i32(visible)
        chosen = cutlass.min(chosen, top_blocks)
        open_start = self.whole_blocks(length)
        tail = length - open_start
        ids = block_indices.toint() + Int64(row) * blocks_stride_row * 4
        out = out_ptr.toint() + Int64(row) * out_stride_row * 4
        aligned = out % 16 == 0
        # Piece i is columns 4i .. 4i + 3; the last one ends with the count.
        for i in cutlass.range(tid, top_blocks + 1, self.threads, unroll=4):
            # Read before it is known which count: one latency instead of two.
            block = ops.load_global_i32_if(Int32(i < top_blocks), ids + Int64(i) * 4, Int32(-1))
            tokens = []
            for e in cutlass.range_constexpr(BLOCK_TOKENS):
                past = (i - chosen) * BLOCK_TOKENS + e
                token = Int32(-1)
                if past < 0:
                    token = block * BLOCK_TOKENS + e
                elif past < tail and past < BLOCK_TOKENS - 1:
                    token = open_start + past
                tokens.append(cutlass.max(token, Int32(-1)))
            if i == top_blocks:
                tokens[BLOCK_TOKENS - 1] = chosen * BLOCK_TOKENS + tail
            at = out + Int64(i) * (4 * BLOCK_TOKENS)
            if aligned:
                ops.store_global_i32x4(at, tokens)
            else:
                for e in cutlass.range_constexpr(BLOCK_TOKENS):
                    ops.store_global_i32(at + 4 * e, tokens[e])

    @cute.jit
    def whole_blocks(self, length: Int32) -> Int32:
        """Tokens of the complete blocks; rounded towards zero, as vLLM's division does below it."""
        return (length + ((length >> 31) & (BLOCK_TOKENS - 1))) & -BLOCK_TOKENS
