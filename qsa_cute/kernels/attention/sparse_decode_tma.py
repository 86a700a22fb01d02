"""Split-K sparse decode attention on SM90 that gathers by TMA: the splits of a row are the blocks of one cluster.

The rows, lists and guards of `sparse_decode.py`. How a block gathers and multiplies is `box_gather.py`'s, how the
blocks of a cluster merge `box_merge.py`'s: no workspace, no counters, nothing to zero.

Grid: as `sparse_decode.py`, in clusters of (1, num_splits, 1), num_splits 1..16, given at launch.

Baked: head dim, type, stages of the ring. Run-time: everything else. `kv_map` is a tensor map over the pool, encoded
by the host: (64 columns, 128 tokens, head_dim / 64 parts of a row, KV heads, pages), boxes of (64, 4, head_dim / 64,
1, 1), 128-byte swizzle. TMA reads it where it stands among the parameters, so six pointers come before it: that puts it
at a multiple of 64 bytes.

The caller guarantees: 16-byte aligned rows with unit inner stride. `split_counters`, when given, are left zero, as
hosts expect.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention.box_padded import PaddedBoxes, StagedTokens
from qsa_cute.kernels.attention.box_products import TABLE_PAGES, WARPS, BoxShare
from qsa_cute.kernels.attention.row_gather import RowOutput
from qsa_cute.kernels.common import early, ops, tma
from qsa_cute.kernels.common.params import f32, i32, i64, ptr, tensor_map

PARAMS = (
    ptr("q_ptr", "elem", 16),
    ptr("kv_pool_ptr", "elem", 16),
    ptr("k_page_table", "i32"),
    ptr("v_page_table", "i32"),
    ptr("indices", "i32"),
    ptr("context_lengths", "i32"),
    tensor_map("kv_map"),
    ptr("o_ptr", "elem", 16),
    ptr("lse_ptr", "f32"),
    ptr("split_counters", "i32"),
    i32("query_len"),
    i32("num_kv_heads"),
    i32("group_size"),
    i32("num_flat_pages"),
    i32("max_pages_per_seq"),
    i32("top_k"),
    i32("num_splits"),
    i64("q_stride_row"),
    i64("q_stride_head"),
    i64("o_stride_row"),
    i64("o_stride_head"),
    i64("page_table_stride"),
    i64("page_stride"),
    i64("token_stride"),
    i64("head_stride"),
    i64("indices_stride_row"),
    f32("attention_scale"),
)


class SparseDecodeTma(PaddedBoxes):
    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        kv_pool_ptr: cute.Pointer,
        k_page_table: cute.Pointer,
        v_page_table: cute.Pointer,
        indices: cute.Pointer,
        context_lengths: cute.Pointer,
        kv_map: tuple,
        o_ptr: cute.Pointer,
        lse_ptr: cute.Pointer,
        split_counters: cute.Pointer,
        query_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        num_flat_pages: Int32,
        max_pages_per_seq: Int32,
        top_k: Int32,
        num_splits: Int32,
        q_stride_row: Int64,
        q_stride_head: Int64,
        o_stride_row: Int64,
        o_stride_head: Int64,
        page_table_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        head_stride: Int64,
        indices_stride_row: Int64,
        attention_scale: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_ptr,
            kv_pool_ptr,
            k_page_table,
            v_page_table,
            indices,
            context_lengths,
            kv_map,
            o_ptr,
            lse_ptr,
            split_counters,
            query_len,
            num_kv_heads,
            group_size,
            num_flat_pages,
            max_pages_per_seq,
            top_k,
            num_splits,
            q_stride_row,
            q_stride_head,
            o_stride_row,
            o_stride_head,
            page_table_stride,
            page_stride,
            token_stride,
            head_stride,
            indices_stride_row,
            attention_scale,
        ).launch(
            grid=(1, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        q_ptr: cute.Pointer,
        kv_pool_ptr: cute.Pointer,
        k_page_table: cute.Pointer,
        v_page_table: cute.Pointer,
        indices: cute.Pointer,
        context_lengths: cute.Pointer,
        kv_map: tuple,
        o_ptr: cute.Pointer,
        lse_ptr: cute.Pointer,
        split_counters: cute.Pointer,
        query_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        num_flat_pages: Int32,
        max_pages_per_seq: Int32,
        top_k: Int32,
        num_splits: Int32,
        q_stride_row: Int64,
        q_stride_head: Int64,
        o_stride_row: Int64,
        o_stride_head: Int64,
        page_table_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        head_stride: Int64,
        indices_stride_row: Int64,
        attention_scale: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row, split, kv_head = cute.arch.block_idx()
        unit = row * num_kv_heads + kv_head
        sequence = row
        if query_len > 1:  # the division is worth a branch: everything waits for it
            sequence = row // query_len
        smem = ops.forget(Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024).toint()))
        share = BoxShare.of(split, num_splits, group_size)
        pool = tma.parameter_address(kv_map[0])
        if warp == WARPS:  # the first that gathers
            tma.prefetch_tensor_map(pool)
        self.begin(smem, share, tid)

        head = Int64(kv_head * group_size)
        in_page = kv_pool_ptr.toint() + Int64(kv_head) * head_stride * 2
        table = Int64(sequence) * page_table_stride * 4
        ids = indices.toint() + Int64(row) * indices_stride_row * 4
        k_table, v_table = k_page_table.toint() + table, v_page_table.toint() + table
        q = q_ptr.toint() + (Int64(row) * q_stride_row + head * q_stride_head) * 2
        context_length = context_lengths.toint() + Int64(sequence) * 4
        early.wait()
        if warp >= WARPS:
            gatherer = warp - WARPS
            first = self.entries(ids, top_k, share, Int32(0), gatherer, cute.arch.lane_idx())
            length = ops.load_global_i32(context_length)
            source = StagedTokens(
                in_page,
                in_page,
                k_table,
                v_table,
                page_stride * 2,
                token_stride * 2,
                length,
                num_flat_pages,
                max_pages_per_seq,
                smem + self.at["table"] if max_pages_per_seq <= TABLE_PAGES else Int32(0),
                pool,
                kv_head,
            )
            self.produce(smem, source, ids, top_k, Int32(0), share, first, gatherer)
            lse = lse_ptr.toint()
            if lse != 0:
                lse = lse + Int64(unit) * group_size * 4
            self.merge(smem, lse, share, gatherer, cute.arch.lane_idx())
        else:
            self.stage_tables(smem, k_table, v_table, max_pages_per_seq, tid)
            self.survey(smem, ids, top_k, share, tid)
            self.load_q(smem, q, q_stride_head * 2, group_size, tid)  # there before the first boxes are
            tO = cute.make_rmem_tensor((self.warp_cols // 2,), Float32)
            tMax = cute.make_rmem_tensor((2,), Float32)
            tSum = cute.make_rmem_tensor((2,), Float32)
            tTo = cute.make_rmem_tensor((2 * self.warp_groups,), Int32)
            slots = share.divide(self.groups + num_splits - 1)  # of a rank in the inbox
            self.address_columns(smem, share, slots, tTo, tid)
            if num_splits > 1:
                cute.arch.cluster_wait()  # while the first boxes are on their way
            self.consume(smem, attention_scale * ops.LOG2_E, top_k, share, tO, tMax, tSum, tid)
            lse = lse_ptr.toint()
            if lse != 0:
                lse = lse + Int64(unit) * group_size * 4
            o = o_ptr.toint() + (Int64(row) * o_stride_row + head * o_stride_head) * 2
            out = RowOutput(o, o_stride_head * 2, lse)
            self.store(smem, out, share, slots, tO, tMax, tSum, tTo, tid)
            if split_counters.toint() != 0 and split == 0 and tid == 0:
                ops.store_global_i32(split_counters.toint() + Int64(unit) * 4, Int32(0))
