"""Split-K sparse decode attention over a widened paged pool, one launch, every SM from 80 up.

    O[r, h] = sum_i softmax_i(scale * Q[r, h] . K[id_i]) V[id_i],   id = indices[r], K and V through the page tables

Grid: (rows, splits, KV heads); row = sequence * query_len + j. The splits of a row take the tiles of its list in turn
(`row_gather.py`), so a short row leaves the later splits idle. A split with entries writes its unnormalised FP32 O,
maximum and sum to the partial workspace; the last block of a row to arrive merges them in split order, whoever it
is: the bits do not depend on the order of arrival.

Baked: head dim, type, warps, pipeline depth, the workspace's split stride. Run-time: everything else. Pages
hold 128 tokens. A page id outside the pool, an unused page (-1), or a token at or past the sequence's length
makes an entry invalid: weight 0, nothing read.

The caller guarantees: split counters zero at launch (left zero), 16-byte aligned rows with unit inner stride.
Workspace: partial_o [rows * kv_heads * max_splits][16][head_dim], partial_stats [..][2][16] (max in log2, sum).
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import PAGE_TOKENS
from qsa_cute.kernels.attention.row_gather import EMPTY_MAX, ROWS, RowGather, RowOutput, Share, TokenSource
from qsa_cute.kernels.common import ops
from qsa_cute.kernels.common.params import f32, i32, i64, ptr

PARAMS = (
    ptr("q_ptr", "elem", 16),
    ptr("k_pool_ptr", "elem", 16),
    ptr("v_pool_ptr", "elem", 16),
    ptr("k_page_table", "i32"),
    ptr("v_page_table", "i32"),
    ptr("indices", "i32"),
    ptr("context_lengths", "i32"),
    ptr("o_ptr", "elem", 16),
    ptr("lse_ptr", "f32"),
    ptr("partial_o", "f32", 16),
    ptr("partial_stats", "f32"),
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


@dataclass(frozen=True)
class PagedTokens(TokenSource):
    """Rows of one sequence in the paged pool; addresses and strides in bytes. A slot is page * 128 + row."""

    k: Int64
    v: Int64
    k_table: Int64
    v_table: Int64
    page_stride: Int64
    token_stride: Int64
    length: Int32
    num_pages: Int32
    max_pages: Int32

    @cute.jit
    def look_up(self, token: Int32):
        at = token // PAGE_TOKENS
        mapped = Int32(0)
        if token >= 0 and at < self.max_pages:
            mapped = Int32(1)
        k_page = ops.load_global_i32_if(mapped, self.k_table + Int64(at) * 4, Int32(-1))
        v_page = ops.load_global_i32_if(mapped, self.v_table + Int64(at) * 4, Int32(-1))
        return k_page, v_page

    @cute.jit
    def slots(self, token: Int32, pages):
        k_slot, v_slot = Int32(-1), Int32(-1)
        known = pages[0] >= 0 and pages[0] < self.num_pages and pages[1] >= 0 and pages[1] < self.num_pages
        if known and token < self.length:
            k_slot = pages[0] * PAGE_TOKENS + token % PAGE_TOKENS
            v_slot = pages[1] * PAGE_TOKENS + token % PAGE_TOKENS
        return k_slot, v_slot

    @cute.jit
    def address(self, slot: Int32, plane: cutlass.Constexpr[int]) -> Int64:
        in_page = Int64(slot // PAGE_TOKENS) * self.page_stride + Int64(slot % PAGE_TOKENS) * self.token_stride
        if cutlass.const_expr(plane == 1):
            return self.v + in_page
        return self.k + in_page


@dataclass(frozen=True)
class Workspace:
    """Addresses of the split-K workspace, and a (row, KV head)'s place in it: row * num_kv_heads + kv_head."""

    partial_o: Int64
    partial_stats: Int64
    counters: Int64  # 0: none
    unit: Int32


class SparseDecode(RowGather):
    def __init__(
        self,
        head_dim: int,
        dtype: str,
        warps: int,
        k_stages: int,
        v_stages: int,
        blocks_per_sm: int,
        max_splits: int,
    ):
        super().__init__(head_dim, dtype, warps, k_stages, v_stages, blocks_per_sm)
        self.max_splits = max_splits
        self.sizes["arrival"] = 16  # one word: what the counter said
        self.lay_out()

    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        k_pool_ptr: cute.Pointer,
        v_pool_ptr: cute.Pointer,
        k_page_table: cute.Pointer,
        v_page_table: cute.Pointer,
        indices: cute.Pointer,
        context_lengths: cute.Pointer,
        o_ptr: cute.Pointer,
        lse_ptr: cute.Pointer,
        partial_o: cute.Pointer,
        partial_stats: cute.Pointer,
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
            k_pool_ptr,
            v_pool_ptr,
            k_page_table,
            v_page_table,
            indices,
            context_lengths,
            o_ptr,
            lse_ptr,
            partial_o,
            partial_stats,
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
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        q_ptr: cute.Pointer,
        k_pool_ptr: cute.Pointer,
        v_pool_ptr: cute.Pointer,
        k_page_table: cute.Pointer,
        v_page_table: cute.Pointer,
        indices: cute.Pointer,
        context_lengths: cute.Pointer,
        o_ptr: cute.Pointer,
        lse_ptr: cute.Pointer,
        partial_o: cute.Pointer,
        partial_stats: cute.Pointer,
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
        row, split, kv_head = cute.arch.block_idx()
        unit = row * num_kv_heads + kv_head
        sequence = row
        if query_len > 1:  # the division is worth a branch: everything waits for it
            sequence = row // query_len
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())

        head = Int64(kv_head * group_size)
        share = Share(split, num_splits, group_size)
        q = q_ptr.toint() + (Int64(row) * q_stride_row + head * q_stride_head) * 2
        self.load_q(smem, q, q_stride_head * 2, group_size, tid)
        in_page = Int64(kv_head) * head_stride * 2
        table = Int64(sequence) * page_table_stride * 4
        source = PagedTokens(
            k_pool_ptr.toint() + in_page,
            v_pool_ptr.toint() + in_page,
            k_page_table.toint() + table,
            v_page_table.toint() + table,
            page_stride * 2,
            token_stride * 2,
            ops.load_global_i32(context_lengths.toint() + Int64(sequence) * 4),
            num_flat_pages,
            max_pages_per_seq,
        )
        ids = indices.toint() + Int64(row) * indices_stride_row * 4

        tO = cute.make_rmem_tensor((self.warp_cols // 2,), Float32)
        tMax = cute.make_rmem_tensor((2,), Float32)
        tSum = cute.make_rmem_tensor((2,), Float32)
        self.attend(smem, source, ids, top_k, attention_scale * ops.LOG2_E, share, tO, tMax, tSum, tid)
        lse = lse_ptr.toint()
        if lse != 0:
            lse = lse + Int64(unit) * group_size * 4
        out = RowOutput(o_ptr.toint() + (Int64(row) * o_stride_row + head * o_stride_head) * 2, o_stride_head * 2, lse)
        work = Workspace(partial_o.toint(), partial_stats.toint(), split_counters.toint(), unit)
        self.finish(smem, out, work, share, tO, tMax, tSum, tid)

    @cute.jit
    def finish(
        self,
        smem: Int32,
        out: RowOutput,
        work: Workspace,
        share: Share,
        tO: cute.Tensor,
        tMax: cute.Tensor,
        tSum: cute.Tensor,
        tid: Int32,
    ):
        if share.num_splits == 1:
            self.store_row(out, share.group, tO, tMax, tSum, tid)
        else:
            self.write_partial(work, share, tO, tMax, tSum, tid)
            if self.arrived_last(smem, work, share, tid):
                self.merge(out, work, share, tid)

    @cute.jit
    def write_partial(
        self, work: Workspace, share: Share, tO: cute.Tensor, tMax: cute.Tensor, tSum: cute.Tensor, tid: Int32
    ):
        """This split's O (where it has entries), maxima and sums to the workspace."""
        lane = tid % 32
        slot = Int64(work.unit) * self.max_splits + share.split
        for r in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * r
            if row < share.group:
                if tSum[r] > 0.0:
                    col = (tid // 32) * self.warp_cols + (lane % 4) * 2
                    at = work.partial_o + ((slot * ROWS + row) * self.head_dim + col) * 4
                    for n in cutlass.range_constexpr(self.warp_cols // 8):
                        ops.store_global_f32x2(at + 32 * n, tO[4 * n + 2 * r], tO[4 * n + 2 * r + 1])
                if tid < 32 and lane % 4 == 0:
                    stats = work.partial_stats + (slot * (2 * ROWS) + row) * 4
                    ops.store_global_f32(stats, tMax[r])
                    ops.store_global_f32(stats + ROWS * 4, tSum[r])

    @cute.jit
    def arrived_last(self, smem: Int32, work: Workspace, share: Share, tid: Int32):
        """Count this block in; true in the block that completes the row. The counter ends at zero."""
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_threads()
        flag = smem + self.at["arrival"]
        if tid == 0:
            counter = work.counters + Int64(work.unit) * 4
            before = ops.atomic_add_i32(counter, Int32(1))
            ops.store_shared_i32(flag, before)
            if before == share.num_splits - 1:
                ops.store_global_i32(counter, Int32(0))
        cute.arch.sync_threads()
        cute.arch.fence_acq_rel_gpu()
        return ops.load_shared_i32(flag) == share.num_splits - 1

    @cute.jit
    def merge(self, out: RowOutput, work: Workspace, share: Share, tid: Int32):
        """Sum the splits' partials in split order and store, four columns a thread."""
        quads = self.head_dim // 4
        slot = Int64(work.unit) * self.max_splits
        for i in cutlass.range(tid, share.group * quads, self.threads, unroll=1):
            row = i // quads
            col = (i % quads) * 4
            part = work.partial_o + ((slot * ROWS + row) * self.head_dim + col) * 4
            stats = work.partial_stats + (slot * (2 * ROWS) + row) * 4
            top = Float32(EMPTY_MAX)
            for s in cutlass.range(share.num_splits, unroll=4):
                top = cute.arch.fmax(top, ops.load_global_f32(stats + Int64(s) * (2 * ROWS * 4)))
            total = Float32(0.0)
            o0, o1, o2, o3 = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
            for s in cutlass.range(share.num_splits, unroll=4):
                at = stats + Int64(s) * (2 * ROWS * 4)
                length = ops.load_global_f32(at + ROWS * 4)
                if length > 0.0:
                    factor = cute.math.exp2(ops.load_global_f32(at) - top, fastmath=True)
                    v = ops.load_global_f32x4(part + Int64(s) * (ROWS * self.head_dim * 4))
                    total = total + factor * length
                    o0, o1, o2, o3 = o0 + factor * v[0], o1 + factor * v[1], o2 + factor * v[2], o3 + factor * v[3]
            inverse = self.inverse(total)
            self.store_quad(out, row, col, (o0 * inverse, o1 * inverse, o2 * inverse, o3 * inverse))
            if col == 0 and out.lse != 0:
                self.store_lse(out.lse + Int64(row) * 4, top, total)
