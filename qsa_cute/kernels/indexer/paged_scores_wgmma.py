"""Block scores of prefill rows over vLLM's compressed key cache on SM90: `paged_scores_prefill.py` by wgmma.

As `scores_prefill_wgmma.py`: 64 rows of one request a consumer warpgroup, whose 256 (row, head) pairs stay in shared
memory as B; steps of 64 columns are A and stream through a ring that one warp fills. fp8 goes to the fp8 tensor cores,
k32 a product, whose sums keep about 14 bits of the largest addend (docs/lab-vllm-select.md has the error); bf16 and
fp16 give the bits of the other kernels.

Grid, parameters, guarantees: `paged_scores_prefill.py`, with tiles of 64 rows a warpgroup.

Baked: type, consumer warpgroups, stages of the ring.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.indexer import paged_ops as po
from qsa_cute.kernels.indexer.paged_ops import PagedKeys, RequestTile
from qsa_cute.kernels.indexer.paged_scores_prefill import PARAMS as PREFILL_PARAMS
from qsa_cute.kernels.indexer.paged_scores_prefill import TILE, PagedScoresPrefill
from qsa_cute.kernels.indexer.scores_prefill_wgmma import GROUP_COLUMNS, GROUP_ROWS, HALF
from qsa_cute.kernels.indexer.wgmma_turns import PRODUCER, WgmmaTurns

PARAMS = PREFILL_PARAMS


class PagedScoresWgmma(WgmmaTurns, PagedScoresPrefill):
    def __init__(self, head_dim: int, dtype: str, groups: int, stages: int):
        self._type(head_dim, dtype)
        self.elem = ops.ELEMENTS[dtype]
        self.groups = groups
        self.stages = stages
        self.open_steps = self.row_bytes // 64  # half of a step's products, see `WgmmaTurns.multiply`
        self.rows = GROUP_ROWS * groups
        self.threads = 128 * groups + PRODUCER
        self.min_blocks = 2 if groups == 1 else 1
        self.k_offset = groups * GROUP_COLUMNS * self.row_bytes
        self.barrier_offset = self.k_offset + stages * TILE * self.row_bytes  # full[stages], empty[stages]
        self.limits_offset = self.barrier_offset + 16 * stages
        self.smem_bytes = self.limits_offset + self.rows * 4

    @cute.kernel
    def kernel(
        self,
        q_ptr: cute.Pointer,
        k_cache_ptr: cute.Pointer,
        page_table: cute.Pointer,
        query_start_loc: cute.Pointer,
        visible_blocks: cute.Pointer,
        logits_ptr: cute.Pointer,
        lengths_ptr: cute.Pointer,
        num_requests: Int32,
        row_start: Int32,
        num_rows: Int32,
        num_heads: Int32,
        num_pages: Int32,
        page_size: Int32,
        num_columns: Int32,
        q_stride_row: Int64,
        q_stride_head: Int64,
        cache_stride_page: Int64,
        cache_stride_token: Int64,
        page_table_stride: Int64,
        logits_stride_row: Int64,
    ):
        tid, _, _ = cute.arch.thread_idx()
        slot, split, _ = cute.arch.block_idx()
        _, splits, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        smem = Int32(base.toint())
        full, empty = self.make_ring(smem, tid)
        early.begin()
        request, first, count = po.find_tile(
            slot, self.rows, query_start_loc.toint(), num_requests, row_start, row_start + num_rows
        )
        limits = smem + self.limits_offset
        q_row, q_head = q_stride_row * self.size, q_stride_head * self.size
        q = q_ptr.toint() + Int64(first) * q_row
        if warp < 4 * self.groups and count > 0:
            self.copy_group(smem, q, q_row, q_head, num_heads, count, tid)
        self.read_limits(limits, visible_blocks.toint(), first, count, num_columns, tid)
        cute.arch.sync_threads()
        tile = self.make_tile(
            logits_ptr.toint() + Int64(first - row_start) * logits_stride_row * 4, logits_stride_row * 4, limits
        )
        begin, steps = self.columns(tile, split, splits)
        if warp == 4 * self.groups:
            keys = PagedKeys(
                k_cache_ptr.toint(),
                page_table.toint() + Int64(request) * page_table_stride * 4,
                cache_stride_page * self.size,
                cache_stride_token * self.size,
                num_pages,
                page_size,
                num_columns,
            )
            self.produce(smem, keys, tile.most, begin, steps, full, empty)
        else:
            if split == 0:
                po.write_lengths(
                    lengths_ptr.toint(),
                    visible_blocks.toint(),
                    query_start_loc.toint(),
                    slot * self.rows,
                    self.rows,
                    num_requests,
                    row_start,
                    row_start + num_rows,
                    num_columns,
                    tid,
                )
            if steps > 0:
                self.consume(base, tile, begin, steps, full, empty, tid)
            else:
                cute.arch.cp_async_wait_group(0)

    # ---- producer ------------------------------------------------------------------------------------

    @cute.jit
    def produce(
        self,
        smem: Int32,
        keys: PagedKeys,
        seen: Int32,
        begin: Int32,
        steps: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
    ):
        """Copy the keys step by step; pages are read one step ahead. A step is announced once the next one is under
        way: its copies are then complete and fenced for the tensor cores, which read through the async proxy."""
        lane = cute.arch.lane_idx()
        slot = Int32(0)
        phase = Int32(1)
        before = Int32(0)
        page_a, token_a = keys.fetch(begin + lane)
        page_b, token_b = keys.fetch(begin + 32 + lane)
        for i in cutlass.range(steps, unroll=1):
            column = begin + i * TILE
            cute.arch.mbarrier_wait(empty + slot, phase)
            at = smem + self.k_offset + slot * (TILE * self.row_bytes)
            self.copy_step(at, keys, page_a, token_a, page_b, token_b, column, seen, lane)
            cute.arch.cp_async_commit_group()
            page_a, token_a = keys.fetch(column + TILE + lane)
            page_b, token_b = keys.fetch(column + TILE + 32 + lane)
            if i > 0:
                cute.arch.cp_async_wait_group(1)
                cute.arch.fence_view_async_shared()
                cute.arch.mbarrier_arrive(full + before)
            before = slot
            slot = slot + 1
            if slot == self.stages:
                slot = Int32(0)
                phase = phase ^ 1
        if steps > 0:
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            cute.arch.mbarrier_arrive(full + before)

    @cute.jit
    def copy_step(
        self,
        sK: Int32,
        keys: PagedKeys,
        page_a: Int32,
        token_a: Int32,
        page_b: Int32,
        token_b: Int32,
        column: Int32,
        seen: Int32,
        lane: Int32,
    ):
        """A step's keys to [half][64 rows][128 bytes], swizzled, column 16w + 2l + e to row 16w + 8e + l: rows l and
        l + 8 of warp w's accumulators are neighbours. Columns that no row sees become zeros, unread."""
        low_a, high_a = keys.locate(page_a, token_a, column + lane < seen)
        low_b, high_b = keys.locate(page_b, token_b, column + 32 + lane < seen)
        chunk = lane % self.chunks
        sub = lane // self.chunks
        per = 32 // self.chunks  # keys that the warp copies at once: 2, or 4 of fp8
        to = sK + (chunk // 8) * (TILE * HALF) + (sub % 2) * (8 * HALF)
        if cutlass.const_expr(per == 4):
            to = to + (sub // 2) * HALF
        for i in cutlass.range_constexpr(TILE // per):
            if cutlass.const_expr(per == 2):
                line, turn = 16 * (i // 8) + i % 8, Int32(i % 8)
            else:
                line, turn = 16 * (i // 4) + 2 * (i % 4), 2 * (i % 4) + sub // 2
            dst = to + line * HALF + ((chunk % 8) ^ turn) * 16
            if cutlass.const_expr(per * i < 32):
                keys.copy(dst, low_a, high_a, per * i + sub, chunk * 16)
            else:
                keys.copy(dst, low_b, high_b, per * i - 32 + sub, chunk * 16)

    # ---- consumer ------------------------------------------------------------------------------------

    @cute.jit
    def copy_group(self, smem: Int32, q: Int64, q_row: Int64, q_head: Int64, heads: Int32, count: Int32, tid: Int32):
        """Start copying each group's queries to [half][256 rows][128 bytes], swizzled."""
        group = tid // 128
        sQ = smem + group * (GROUP_COLUMNS * self.row_bytes)
        chunk = tid % self.chunks
        sub = tid % 128 // self.chunks
        per = 128 // self.chunks
        for i in cutlass.range_constexpr(GROUP_COLUMNS // per):
            linear = per * i + sub
            at = po.pair_row(linear)
            dst = sQ + ((chunk // 8) * GROUP_COLUMNS + at) * HALF + ((chunk % 8) ^ (at & 7)) * 16
            po.copy_query(dst, q, q_row, q_head, heads, count, group * GROUP_COLUMNS + linear, chunk * 16)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def consume(
        self,
        base: cute.Pointer,
        tile: RequestTile,
        begin: Int32,
        steps: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        tid: Int32,
    ):
        group = cute.arch.make_warp_uniform(tid // 128)
        mma, tK, tQ, tS = self.fragments(base, GROUP_COLUMNS, self.head_dim, self.groups)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        if cutlass.const_expr(self.groups == 2):
            if group == 1:
                self.pass_turn(Int32(0))
        for i in cutlass.range(steps, unroll=1):
            slot = i % self.stages
            cute.arch.mbarrier_wait(full + slot, (i // self.stages) % 2)
            self.multiply(mma, tS, tK[None, None, None, slot], (tQ[None, None, None, group],), group, i + 1 < steps)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + slot)
            self.store_step(tS, tile, group * GROUP_ROWS, begin + i * TILE, tid % 128)

    @cute.jit
    def store_step(self, acc: cute.Tensor, tile: RequestTile, row0: Int32, column: Int32, tid: Int32):
        S = cute.make_tensor(acc.iterator, cute.make_layout(TILE * GROUP_COLUMNS // 128))
        lane = tid % 32
        row = row0 + lane % 4
        at_column = column + (tid // 32) * 16 + (lane // 4) * 2
        to = tile.logits + Int64(row) * tile.stride + Int64(at_column) * 4
        step = tile.stride * 4
        if self.needs_care(tile, column, 2):
            for j in cutlass.range_constexpr(GROUP_ROWS // 4):
                tile.store(to, row + 4 * j, at_column, self.pair(S, j))
                to = to + step
        else:
            for j in cutlass.range_constexpr(GROUP_ROWS // 4):
                v = self.pair(S, j)
                ops.store_global_f32x2(to, v[0], v[1])
                to = to + step

    @cute.jit
    def pair(self, S: cute.Tensor, j: cutlass.Constexpr[int]):
        """The thread's two logits of row 4j + c."""
        values = []
        for e in cutlass.range_constexpr(2):
            at = 8 * j + 2 * e
            values.append(po.head_sum(S[at], S[at + 1], S[at + 4], S[at + 5]))
        return values
