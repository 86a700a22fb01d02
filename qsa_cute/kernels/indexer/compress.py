"""Key compress (K1b), dense and paged: the raw keys of every complete block of 4 tokens into one block key.

    kbar[b, g] = rope(norm(cast(mean of the raw keys of tokens 4g .. 4g + 3), w_k), position 4g)

Rows of index_qk are the tokens from start[b] on: query_starts[b], or past_len where there are none. A block is
computed when it is complete (4g + 3 < context_lengths[b]) and lies in the rows; it goes to the dense output and,
where there is a pool, to the V-tail of its first token. With read_pool, a block that the rows complete takes the raw
keys of earlier tokens from their K-tails, and one wholly before the rows is copied from its V-tail to the dense
output. All others are zeros in the dense output and leave the pool alone; nothing is read for them.

Grid: (ceil(batch * block_count / 4)); a warp a block, blocks block_begin .. block_begin + block_count a sequence.

Baked: type. kbar_ptr 0: no dense output. max_pages_per_seq 0: no pool. The caller guarantees: 8-byte aligned rows with
unit inner stride; tails of completed blocks, and of the open block at `start`, as earlier calls left them.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common import rope_norm as rn
from qsa_cute.kernels.common.params import f32, i32, i64, ptr
from qsa_cute.kernels.indexer.tails import RAW_KEY, load_raw_keys, tails_of

PARAMS = (
    ptr("kbar_ptr", "elem", 8),
    ptr("index_qk_ptr", "elem", 8),
    ptr("cos_sin_ptr", "f32", 16),
    ptr("context_lengths", "i32"),
    ptr("query_starts", "i32"),
    ptr("w_k_ptr", "elem", 8),
    ptr("pool_ptr", "elem", 8),
    ptr("k_page_table", "i32"),
    ptr("v_page_table", "i32"),
    i32("batch_size"),
    i32("seq_len"),
    i32("block_begin"),
    i32("block_count"),
    i32("past_len"),
    i32("read_pool"),
    i32("max_positions"),
    i32("num_flat_pages"),
    i32("max_pages_per_seq"),
    i64("index_stride_batch"),
    i64("index_stride_row"),
    i64("kbar_stride_batch"),
    i64("kbar_stride_block"),
    i64("page_table_stride"),
    i64("page_stride"),
    i64("token_stride"),
    i64("tail_offset"),
    f32("rms_eps"),
)

WARPS = 4


class Compress:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.dtype = dtype
        self.threads = 32 * WARPS
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self,
        kbar_ptr: cute.Pointer,
        index_qk_ptr: cute.Pointer,
        cos_sin_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        w_k_ptr: cute.Pointer,
        pool_ptr: cute.Pointer,
        k_page_table: cute.Pointer,
        v_page_table: cute.Pointer,
        batch_size: Int32,
        seq_len: Int32,
        block_begin: Int32,
        block_count: Int32,
        past_len: Int32,
        read_pool: Int32,
        max_positions: Int32,
        num_flat_pages: Int32,
        max_pages_per_seq: Int32,
        index_stride_batch: Int64,
        index_stride_row: Int64,
        kbar_stride_batch: Int64,
        kbar_stride_block: Int64,
        page_table_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        tail_offset: Int64,
        rms_eps: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            kbar_ptr,
            index_qk_ptr,
            cos_sin_ptr,
            context_lengths,
            query_starts,
            w_k_ptr,
            pool_ptr,
            k_page_table,
            v_page_table,
            batch_size,
            seq_len,
            block_begin,
            block_count,
            past_len,
            read_pool,
            max_positions,
            num_flat_pages,
            max_pages_per_seq,
            index_stride_batch,
            index_stride_row,
            kbar_stride_batch,
            kbar_stride_block,
            page_table_stride,
            page_stride,
            token_stride,
            tail_offset,
            rms_eps,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        kbar_ptr: cute.Pointer,
        index_qk_ptr: cute.Pointer,
        cos_sin_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        w_k_ptr: cute.Pointer,
        pool_ptr: cute.Pointer,
        k_page_table: cute.Pointer,
        v_page_table: cute.Pointer,
        batch_size: Int32,
        seq_len: Int32,
        block_begin: Int32,
        block_count: Int32,
        past_len: Int32,
        read_pool: Int32,
        max_positions: Int32,
        num_flat_pages: Int32,
        max_pages_per_seq: Int32,
        index_stride_batch: Int64,
        index_stride_row: Int64,
        kbar_stride_batch: Int64,
        kbar_stride_block: Int64,
        page_table_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        tail_offset: Int64,
        rms_eps: Float32,
    ):
        early.begin()
        group, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        unit = group * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        sequence = unit // block_count
        if sequence < batch_size:
            block = block_begin + unit % block_count
            first = block * BLOCK_TOKENS
            last = first + BLOCK_TOKENS - 1
            length = ops.load_global_i32(context_lengths.toint() + Int64(sequence) * 4)
            starts = query_starts.toint()
            start = ops.load_global_i32_if(Int32(starts != 0), starts + Int64(sequence) * 4, past_len)
            lane_bytes = lane * rn.LANE_BYTES
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
            v_tails = tails_of(sequence, lane_bytes, v_page_table, *pool)

            complete = last < length and first < max_positions
            straddles = first < start and last >= start and read_pool != 0
            k_page = k_tails.page(first if complete and straddles else Int32(-1))
            v_page = v_tails.page(first if complete else Int32(-1))
            computed = Int32(0)
            if complete and last - start < seq_len and (first >= start or (straddles and k_page >= 0)):
                computed = Int32(1)
            copied = Int32(0)
            if complete and last < start and read_pool != 0 and v_page >= 0:
                copied = Int32(1)

            key = rn.load_i32x2_if(copied, v_tails.address(v_page, first))
            if computed != 0:
                rows = index_qk_ptr.toint() + Int64(sequence) * index_stride_batch * 2 + RAW_KEY + Int64(lane_bytes)
                raw = load_raw_keys(computed, rows, index_stride_row * 2, start, first, k_tails, k_page)
                weight = rn.load_i32x2_if(computed, w_k_ptr.toint() + Int64(lane_bytes))
                rope = rn.lane_rope(computed, cos_sin_ptr.toint(), first, lane)
                key = rn.block_key(self.dtype, raw, weight, rope, rms_eps, lane)
                if v_page >= 0:
                    ops.store_global_i32x2(v_tails.address(v_page, first), key[0], key[1])
            kbar = kbar_ptr.toint()
            if kbar != 0:
                at = (Int64(sequence) * kbar_stride_batch + Int64(block) * kbar_stride_block) * 2 + Int64(lane_bytes)
                ops.store_global_i32x2(kbar + at, key[0], key[1])
