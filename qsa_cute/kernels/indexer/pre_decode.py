"""Pre-decode (B1): a decode step's queries, and what its new tokens leave in the pool, in one launch.

New token j of sequence b has position p = context_lengths[b] - query_len + j. Its queries are prepared as in
`prepare.py`. Its key: where p completes a block (p % 4 == 3), the block's key is computed as in `compress.py` and
stored in the V-tail of its first token; else the raw key is stored in p's K-tail, bit by bit, even where a later
token of the step completes the block: should that one be rejected, the block is open again. Raw keys of a completed
block come from index_qk for this step's tokens and from their K-tails for earlier ones, so no block of threads waits
for another, and what rejected tokens left behind is never read.

Grid: (batch * query_len); five warps: a query head each, and the key. Positions before 0 or past the rope table:
queries are zeros, nothing is read or stored.

Baked: type. The caller guarantees: 8-byte aligned rows with unit inner stride.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS, INDEX_HEADS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common import rope_norm as rn
from qsa_cute.kernels.common.params import f32, i32, i64, ptr
from qsa_cute.kernels.indexer.tails import RAW_KEY, load_raw_keys, tails_of

PARAMS = (
    ptr("q_normed_ptr", "elem", 8),
    ptr("index_qk_ptr", "elem", 8),
    ptr("cos_sin_ptr", "f32", 16),
    ptr("context_lengths", "i32"),
    ptr("w_q_ptr", "elem", 8),
    ptr("w_k_ptr", "elem", 8),
    ptr("pool_ptr", "elem", 8),
    ptr("k_page_table", "i32"),
    ptr("v_page_table", "i32"),
    i32("query_len"),
    i32("max_positions"),
    i32("num_flat_pages"),
    i32("max_pages_per_seq"),
    i64("index_stride_batch"),
    i64("index_stride_row"),
    i64("q_normed_stride_row"),
    i64("page_table_stride"),
    i64("page_stride"),
    i64("token_stride"),
    i64("tail_offset"),
    f32("rms_eps"),
)


class PreDecode:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.dtype = dtype
        self.threads = 32 * (INDEX_HEADS + 1)
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self,
        q_normed_ptr: cute.Pointer,
        index_qk_ptr: cute.Pointer,
        cos_sin_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        w_q_ptr: cute.Pointer,
        w_k_ptr: cute.Pointer,
        pool_ptr: cute.Pointer,
        k_page_table: cute.Pointer,
        v_page_table: cute.Pointer,
        query_len: Int32,
        max_positions: Int32,
        num_flat_pages: Int32,
        max_pages_per_seq: Int32,
        index_stride_batch: Int64,
        index_stride_row: Int64,
        q_normed_stride_row: Int64,
        page_table_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        tail_offset: Int64,
        rms_eps: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_normed_ptr,
            index_qk_ptr,
            cos_sin_ptr,
            context_lengths,
            w_q_ptr,
            w_k_ptr,
            pool_ptr,
            k_page_table,
            v_page_table,
            query_len,
            max_positions,
            num_flat_pages,
            max_pages_per_seq,
            index_stride_batch,
            index_stride_row,
            q_normed_stride_row,
            page_table_stride,
            page_stride,
            token_stride,
            tail_offset,
            rms_eps,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        q_normed_ptr: cute.Pointer,
        index_qk_ptr: cute.Pointer,
        cos_sin_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        w_q_ptr: cute.Pointer,
        w_k_ptr: cute.Pointer,
        pool_ptr: cute.Pointer,
        k_page_table: cute.Pointer,
        v_page_table: cute.Pointer,
        query_len: Int32,
        max_positions: Int32,
        num_flat_pages: Int32,
        max_pages_per_seq: Int32,
        index_stride_batch: Int64,
        index_stride_row: Int64,
        q_normed_stride_row: Int64,
        page_table_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        tail_offset: Int64,
        rms_eps: Float32,
    ):
        early.wait()
        early.let_next_start()  # the scores read old keys before they wait for this kernel
        row, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        sequence = row
        if query_len > 1:  # the division is worth a branch: everything waits for it
            sequence = row // query_len
        t = row - sequence * query_len
        length = ops.load_global_i32(context_lengths.toint() + Int64(sequence) * 4)
        start = length - query_len
        position = start + t
        live = Int32(0)
        if position >= 0 and position < max_positions:
            live = Int32(1)
        lane_bytes = lane * rn.LANE_BYTES
        rows = index_qk_ptr.toint() + Int64(sequence) * index_stride_batch * 2 + Int64(lane_bytes)
        rope_table = cos_sin_ptr.toint()

        if warp < INDEX_HEADS:
            at = warp * rn.ROW_BYTES
            words = rn.load_i32x2_if(live, rows + Int64(t) * index_stride_row * 2 + Int64(at))
            weight = rn.load_i32x2_if(live, w_q_ptr.toint() + Int64(lane_bytes))
            rope = rn.lane_rope(live, rope_table, position, lane)
            x = rn.unpack_2(self.dtype, words[0]) + rn.unpack_2(self.dtype, words[1])
            q = rn.norm_rope(self.dtype, x, weight, rope, rms_eps, lane)
            out = q_normed_ptr.toint() + Int64(row) * q_normed_stride_row * 2 + Int64(at + lane_bytes)
            zero = Int32(0)
            ops.store_global_i32x2(out, q[0] if live != 0 else zero, q[1] if live != 0 else zero)
        elif live != 0:
            pool = (
                pool_ptr,
                num_flat_pages,
                max_pages_per_seq,
                page_table_stride,
                page_stride,
                token_stride,
                tail_offset,
            )
            k_tails = tails_of(sequence, lane_bytes, k_page_table, *pool)
            k_page = k_tails.page(position)  # a block never straddles a page
            first = position // BLOCK_TOKENS * BLOCK_TOKENS
            if position != first + BLOCK_TOKENS - 1:
                if k_page >= 0:
                    words = rn.load_i32x2_if(live, rows + Int64(t) * index_stride_row * 2 + RAW_KEY)
                    ops.store_global_i32x2(k_tails.address(k_page, position), words[0], words[1])
            else:
                v_tails = tails_of(sequence, lane_bytes, v_page_table, *pool)
                v_page = v_tails.page(position)
                if v_page >= 0 and (k_page >= 0 or first >= start):
                    raw = load_raw_keys(live, rows + RAW_KEY, index_stride_row * 2, start, first, k_tails, k_page)
                    weight = rn.load_i32x2_if(live, w_k_ptr.toint() + Int64(lane_bytes))
                    rope = rn.lane_rope(live, rope_table, first, lane)
                    key = rn.block_key(self.dtype, raw, weight, rope, rms_eps, lane)
                    ops.store_global_i32x2(v_tails.address(v_page, first), key[0], key[1])
