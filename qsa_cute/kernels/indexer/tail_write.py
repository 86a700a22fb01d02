"""Raw-key tail write of prefill: the raw keys of the open block's tokens to their K-tails, bit by bit.

Tokens t of [length - length % 4, length) that are among the rows (start <= t < start + seq_len) copy columns
[512, 640) of index_qk row t - start. No other cell of the pool is touched. Earlier tokens of the open block were
stored by the calls that brought them.

Grid: (batch); a warp a token. Baked: type. The caller guarantees: 8-byte aligned rows with unit inner stride.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common import rope_norm as rn
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.indexer.tails import RAW_KEY, tails_of

PARAMS = (
    ptr("index_qk_ptr", "elem", 8),
    ptr("context_lengths", "i32"),
    ptr("query_starts", "i32"),
    ptr("pool_ptr", "elem", 8),
    ptr("k_page_table", "i32"),
    i32("seq_len"),
    i32("num_flat_pages"),
    i32("max_pages_per_seq"),
    i64("index_stride_batch"),
    i64("index_stride_row"),
    i64("page_table_stride"),
    i64("page_stride"),
    i64("token_stride"),
    i64("tail_offset"),
)


class TailWrite:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.threads = 32 * (BLOCK_TOKENS - 1)
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self,
        index_qk_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        pool_ptr: cute.Pointer,
        k_page_table: cute.Pointer,
        seq_len: Int32,
        num_flat_pages: Int32,
        max_pages_per_seq: Int32,
        index_stride_batch: Int64,
        index_stride_row: Int64,
        page_table_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        tail_offset: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            index_qk_ptr,
            context_lengths,
            query_starts,
            pool_ptr,
            k_page_table,
            seq_len,
            num_flat_pages,
            max_pages_per_seq,
            index_stride_batch,
            index_stride_row,
            page_table_stride,
            page_stride,
            token_stride,
            tail_offset,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        index_qk_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        pool_ptr: cute.Pointer,
        k_page_table: cute.Pointer,
        seq_len: Int32,
        num_flat_pages: Int32,
        max_pages_per_seq: Int32,
        index_stride_batch: Int64,
        index_stride_row: Int64,
        page_table_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        tail_offset: Int64,
    ):
        early.begin()
        sequence, _, _ = cute.arch.block_idx()
        lane_bytes = cute.arch.lane_idx() * rn.LANE_BYTES
        length = ops.load_global_i32(context_lengths.toint() + Int64(sequence) * 4)
        starts = query_starts.toint()
        start = ops.load_global_i32_if(Int32(starts != 0), starts + Int64(sequence) * 4, Int32(0))
        token = length // BLOCK_TOKENS * BLOCK_TOKENS + cute.arch.warp_idx()
        tails = tails_of(
            sequence,
            lane_bytes,
            k_page_table,
            pool_ptr,
            num_flat_pages,
            max_pages_per_seq,
            page_table_stride,
            page_stride,
            token_stride,
            tail_offset,
        )
        if token < length and token >= start and token - start < seq_len:
            page = tails.page(token)
            if page >= 0:
                row = Int64(sequence) * index_stride_batch + Int64(token - start) * index_stride_row
                source = index_qk_ptr.toint() + row * 2 + RAW_KEY + Int64(lane_bytes)
                words = rn.load_i32x2_if(Int32(1), source)
                ops.store_global_i32x2(tails.address(page, token), words[0], words[1])
