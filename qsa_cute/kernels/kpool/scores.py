"""Pool scores on SM90's fp8 tensor cores, of prefill rows and of decode, keys straight from the paged cache.

    logits[r, g] = (sum_h weights[r, h] relu(q[r, h] . key[g])) scale[g],   h ascending, FP32

for the pools g < min(seq_lens[r] // 4, num_pools) that row r sees; what it does not see is not written. Pool g of
request b lies on page block_table[b, g // page_size] of the cache (`compress_write`'s layout); a page outside the cache
reads nothing and counts as zeros, and so do all pages of a request that is none.

Grid: (row tiles, column splits). A row tile is `tile_rows` consecutive rows, at most `rows` a consumer warpgroup, whose
rows x 32 queries stay in shared memory as B of m64nNk32; 64-pool tiles of keys are A and stream through a ring, their
scales beside them. One warp copies the keys (cp.async: pages lie anywhere). Columns of B are ordered so that a thread
ends with all heads of its rows and two neighbouring pools: it sums the heads by itself. With two groups the warpgroups
take turns at the tensor cores, one sums and stores while the other multiplies.

Rows of one request share a pass over its keys; a tile whose rows belong to several requests makes a pass for each. The
request of a row is row_requests[r], or the tile's number with by_tile, or 0.

Baked: consumer warpgroups, rows of each (4 or 8), stages of the ring. The caller guarantees: 16-byte aligned queries,
weights and pages, pages of a multiple of 8 pools, an even logits_stride_row. A logit is a function of its row's query
and weights and its pool's key alone: prefill's and decode's are equal bit by bit.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS, INDEX_HEAD_DIM, KPOOL_HEADS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common import rope_norm as rn
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.indexer.wgmma_turns import PRODUCER, TILE, WgmmaTurns
from qsa_cute.kernels.kpool import pool_ops as po

PARAMS = (
    ptr("q_ptr", "elem", 16),
    ptr("weights_ptr", "f32", 16),
    ptr("cache_ptr", "u8", 16),
    ptr("block_table_ptr", "i32"),
    ptr("seq_lens_ptr", "i32"),
    ptr("row_requests_ptr", "i32"),
    ptr("logits_ptr", "f32", 8),
    i32("num_rows"),
    i32("tile_rows"),
    i32("by_tile"),
    i32("num_requests"),
    i32("num_pools"),
    i32("page_size"),
    i32("num_pages"),
    i32("max_pages"),
    i64("q_stride_row"),
    i64("weights_stride_row"),
    i64("block_table_stride"),
    i64("page_stride"),
    i64("logits_stride_row"),
)

KEY = INDEX_HEAD_DIM  # bytes of a key, and of a query head
LAST = 2  # k steps of a tile, of 4, that are not complete when the turn is passed on
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 56, 224
GROUP = 8  # pools whose page is looked up at once


class Scores(WgmmaTurns):
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str, rows: int, groups: int, stages: int):
        self.elem = ops.ELEMENTS[dtype]
        self.rows, self.groups, self.stages = rows, groups, stages
        self.columns = rows * KPOOL_HEADS
        self.held = rows // 4  # rows a thread
        # Eight rows a group need more registers than 9 warps leave: the producer's warpgroup then gives its own away.
        self.trades = rows == 8
        self.threads = 128 * groups + (128 if self.trades else PRODUCER)
        self.min_blocks = 3 if groups == 1 else 1
        self.k_offset = groups * self.columns * KEY
        self.scale_offset = self.k_offset + stages * TILE * KEY
        self.info_offset = self.scale_offset + stages * TILE * 4  # request and visible pools of each row, then the mask
        self.barrier_offset = self.info_offset + 8 * 32 + 8  # full[stages], empty[stages]
        self.smem_bytes = self.barrier_offset + 16 * stages
        self.open_steps = LAST
        self.lag = stages - 2  # tiles under way behind the one that is announced

    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        weights_ptr: cute.Pointer,
        cache_ptr: cute.Pointer,
        block_table_ptr: cute.Pointer,
        seq_lens_ptr: cute.Pointer,
        row_requests_ptr: cute.Pointer,
        logits_ptr: cute.Pointer,
        num_rows: Int32,
        tile_rows: Int32,
        by_tile: Int32,
        num_requests: Int32,
        num_pools: Int32,
        page_size: Int32,
        num_pages: Int32,
        max_pages: Int32,
        q_stride_row: Int64,
        weights_stride_row: Int64,
        block_table_stride: Int64,
        page_stride: Int64,
        logits_stride_row: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_ptr,
            weights_ptr,
            cache_ptr,
            block_table_ptr,
            seq_lens_ptr,
            row_requests_ptr,
            logits_ptr,
            num_rows,
            tile_rows,
            by_tile,
            num_requests,
            num_pools,
            page_size,
            num_pages,
            max_pages,
            q_stride_row,
            weights_stride_row,
            block_table_stride,
            page_stride,
            logits_stride_row,
        ).launch(
            grid=(1, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=self.min_blocks,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        q_ptr: cute.Pointer,
        weights_ptr: cute.Pointer,
        cache_ptr: cute.Pointer,
        block_table_ptr: cute.Pointer,
        seq_lens_ptr: cute.Pointer,
        row_requests_ptr: cute.Pointer,
        logits_ptr: cute.Pointer,
        num_rows: Int32,
        tile_rows: Int32,
        by_tile: Int32,
        num_requests: Int32,
        num_pools: Int32,
        page_size: Int32,
        num_pages: Int32,
        max_pages: Int32,
        q_stride_row: Int64,
        weights_stride_row: Int64,
        block_table_stride: Int64,
        page_stride: Int64,
        logits_stride_row: Int64,
    ):
        early.begin()
        tid, _, _ = cute.arch.thread_idx()
        index, split, _ = cute.arch.block_idx()
        _, splits, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        smem = Int32(base.toint())
        row0 = index * tile_rows
        count = cutlass.min(tile_rows, num_rows - row0)
        full, empty = self.make_ring(smem, tid)
        if warp == 0:
            self.describe_rows(
                smem + self.info_offset,
                seq_lens_ptr.toint() + Int64(row0) * 4,
                row_requests_ptr.toint(),
                row0,
                count,
                index if by_tile != 0 else Int32(0),
                num_pools,
                lane,
            )
        cute.arch.sync_threads()
        request = ops.load_shared_i32(smem + self.info_offset + lane * 8)
        visible = ops.load_shared_i32(smem + self.info_offset + lane * 8 + 4)
        mask = ops.load_shared_i32(smem + self.info_offset + 256)
        tiles = (num_pools + TILE - 1) // TILE
        share = (tiles + splits - 1) // splits * TILE
        begin = split * share
        end = cutlass.min(begin + share, num_pools)
        work = (mask, count, request, visible, begin, end)

        if warp >= 4 * self.groups:
            if cutlass.const_expr(self.trades):
                cute.arch.warpgroup_reg_dealloc(PRODUCER_REGISTERS)
            if warp == 4 * self.groups:
                self.produce(
                    smem,
                    work,
                    cache_ptr.toint(),
                    block_table_ptr.toint(),
                    block_table_stride * 4,
                    page_stride,
                    page_size,
                    num_pages,
                    max_pages,
                    num_requests,
                    full,
                    empty,
                    lane,
                )
        else:
            if cutlass.const_expr(self.trades):
                cute.arch.warpgroup_reg_alloc(CONSUMER_REGISTERS)
            self.consume(
                base,
                smem,
                work,
                q_ptr.toint() + Int64(row0) * q_stride_row,
                q_stride_row,
                weights_ptr.toint() + Int64(row0) * weights_stride_row * 4,
                weights_stride_row * 4,
                logits_ptr.toint() + Int64(row0) * logits_stride_row * 4,
                logits_stride_row * 4,
                full,
                empty,
                tid,
            )

    @cute.jit
    def describe_rows(
        self,
        info: Int32,
        seq_lens: Int64,
        row_requests: Int64,
        row0: Int32,
        count: Int32,
        request: Int32,
        num_pools: Int32,
        lane: Int32,
    ):
        """Lane i writes row i's request and visible pools, and the mask of rows where a request begins."""
        live = Int32(lane < count)
        listed = live if row_requests != 0 else Int32(0)
        request = ops.load_global_i32_if(listed, row_requests + Int64(row0 + lane) * 4, request)
        length = ops.load_global_i32_if(live, seq_lens + Int64(lane) * 4, Int32(0))
        visible = cutlass.min(cutlass.max(length, Int32(0)) // BLOCK_TOKENS, num_pools)
        before = cute.arch.shuffle_sync_up(request, offset=1)
        first = lane == 0 or before != request
        mask = cute.arch.vote_ballot_sync(first and lane < count)
        ops.store_shared_i32x2(info + lane * 8, request, visible)
        if lane == 0:
            ops.store_shared_i32(info + 256, mask)

    @cute.jit
    def segment(self, work: tuple, remaining: Int32, lane: Int32):
        """(first row, row past the last, request, pools seen, steps, what remains) of the next request's rows."""
        _, count, request, visible, begin, end = work
        first = ops.count_trailing_zeros(remaining)
        remaining = remaining & (remaining - 1)
        last = ops.count_trailing_zeros(remaining) if remaining != 0 else count
        own = visible if lane >= first and lane < last else Int32(0)
        for step in cutlass.range_constexpr(5):
            own = cutlass.max(own, cute.arch.shuffle_sync_bfly(own, offset=16 >> step))
        seen = cutlass.min(own, end)
        steps = cutlass.max((seen - begin + TILE - 1) // TILE, Int32(0))
        return first, last, cute.arch.shuffle_sync(request, first), seen, steps, remaining

    # ---- producer ------------------------------------------------------------------------------------

    @cute.jit
    def produce(
        self,
        smem: Int32,
        work: tuple,
        cache: Int64,
        table: Int64,
        table_bytes: Int64,
        page_stride: Int64,
        page_size: Int32,
        num_pages: Int32,
        max_pages: Int32,
        num_requests: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        lane: Int32,
    ):
        """Copy the keys tile by tile. A tile is announced once `lag` later ones are under way: its copies are then
        complete and fenced for the tensor cores, which read through the async proxy."""
        slot, phase = Int32(0), Int32(1)
        issued, announced = Int32(0), Int32(0)
        remaining = work[0]
        for _ in cutlass.range(cute.arch.popc(work[0]), unroll=1):
            _, _, request, seen, steps, remaining = self.segment(work, remaining, lane)
            pages = table + Int64(request) * table_bytes
            mapped = max_pages if request >= 0 and request < num_requests else Int32(0)
            for i in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + slot, phase)
                self.copy_keys(
                    smem,
                    slot,
                    work[4] + i * TILE,
                    seen,
                    cache,
                    pages,
                    page_stride,
                    page_size,
                    num_pages,
                    mapped,
                    lane,
                )
                cute.arch.cp_async_commit_group()
                if issued >= self.lag:
                    cute.arch.cp_async_wait_group(self.lag)
                    cute.arch.fence_view_async_shared()
                    cute.arch.mbarrier_arrive(full + announced)
                    announced = announced + 1 if announced + 1 < self.stages else Int32(0)
                issued = issued + 1
                slot = slot + 1
                if slot == self.stages:
                    slot = Int32(0)
                    phase = phase ^ 1
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        for _ in cutlass.range(cutlass.min(issued, Int32(self.lag)), unroll=1):
            cute.arch.mbarrier_arrive(full + announced)
            announced = announced + 1 if announced + 1 < self.stages else Int32(0)

    @cute.jit
    def copy_keys(
        self,
        smem: Int32,
        slot: Int32,
        column: Int32,
        seen: Int32,
        cache: Int64,
        pages: Int64,
        page_stride: Int64,
        page_size: Int32,
        num_pages: Int32,
        max_pages: Int32,
        lane: Int32,
    ):
        """A tile of keys to [64 rows][128 bytes], swizzled, pool 16w + 2l + e to row 16w + 8e + l: rows l and l + 8 of
        warp w's accumulators are neighbours; and the scales, in order. Pools that no row sees become zeros, unread."""
        # Lane g looks up the page of pools 8g .. 8g + 7.
        pool = column + (lane % GROUP) * GROUP
        number = pool // page_size
        place = pool - number * page_size
        page = ops.load_global_i32_if(
            Int32(Int32(pool < seen) & Int32(number < max_pages)), pages + Int64(number) * 4, Int32(-1)
        )
        page = page if page < num_pages else Int32(-1)
        chunk, quarter = lane % 8, lane // 8
        sK = smem + self.k_offset + slot * (TILE * KEY)
        to = sK + (8 * (quarter % 2) + quarter // 2) * KEY
        for g in cutlass.range_constexpr(TILE // GROUP):
            from_page, from_place = cute.arch.shuffle_sync(page, g), cute.arch.shuffle_sync(place, g)
            source = cache + Int64(cutlass.max(from_page, Int32(0))) * page_stride + Int64(chunk * 16)
            for half in cutlass.range_constexpr(2):
                j = 2 * g + half
                row = 4 * half + quarter
                live = from_page >= 0 and column + GROUP * g + row < seen
                at = (16 * (j // 4) + 2 * (j % 4)) * KEY + ((chunk ^ (2 * (j % 4) + quarter // 2)) * 16)
                src = source + Int64((from_place + row) * KEY)
                ops.cp_async_16(to + at, src if live else cache, Int32(16) if live else Int32(0))
        sScale = smem + self.scale_offset + slot * (TILE * 4)
        for half in cutlass.range_constexpr(TILE // 32):
            group = 4 * half + quarter
            from_page, from_place = cute.arch.shuffle_sync(page, group), cute.arch.shuffle_sync(place, group)
            live = from_page >= 0 and column + 32 * half + lane < seen
            src = cache + Int64(cutlass.max(from_page, Int32(0))) * page_stride + Int64(page_size * KEY)
            src = src + Int64((from_place + chunk) * 4)
            cp_async_4(sScale + (32 * half + lane) * 4, src if live else cache, Int32(4) if live else Int32(0))

    # ---- consumer ------------------------------------------------------------------------------------

    @cute.jit
    def copy_queries(self, sQ: Int32, q: Int64, row_bytes: Int64, row0: Int32, count: Int32, tid: Int32):
        """A group's queries, swizzled; those of rows past the tile become zeros. Row 4u + t's head h is column
        8 (16u + h // 2) + 2t + h % 2 of B."""
        chunk, part = tid % 8, tid // 8
        for i in cutlass.range_constexpr(self.columns // 16):
            row = i // 2  # 16 heads a step
            head = 16 * (i % 2) + part
            live = row0 + row < count
            src = q + Int64(row0 + row if live else Int32(0)) * row_bytes + Int64(head * KEY + chunk * 16)
            at = 8 * (16 * (row // 4) + head // 2) + 2 * (row % 4) + head % 2
            swizzled = chunk ^ (2 * (row % 4) + head % 2)
            ops.cp_async_16(sQ + at * KEY + swizzled * 16, src, Int32(16) if live else Int32(0))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def consume(
        self,
        base: cute.Pointer,
        smem: Int32,
        work: tuple,
        q: Int64,
        q_bytes: Int64,
        weights: Int64,
        weights_bytes: Int64,
        logits: Int64,
        logits_bytes: Int64,
        full: cute.Pointer,
        empty: cute.Pointer,
        tid: Int32,
    ):
        group = cute.arch.make_warp_uniform(tid // 128)
        lane = tid % 32
        row0 = group * self.rows
        self.copy_queries(smem + group * (self.columns * KEY), q, q_bytes, row0, work[1], tid % 128)
        W = self.load_weights(weights, weights_bytes, row0 + lane % 4, work[1])
        mma, tK, tQ, tS = self.fragments(base, self.columns, INDEX_HEAD_DIM, self.groups)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        left = self.total_steps(work, lane)
        if cutlass.const_expr(self.groups == 2):
            if group == 1 and left > 0:
                self.pass_turn(Int32(0))
        slot, phase = Int32(0), Int32(0)
        remaining = work[0]
        pool = (tid % 128 // 32) * 16 + (lane // 4) * 2
        for _ in cutlass.range(cute.arch.popc(work[0]), unroll=1):
            first, last, _, _, steps, remaining = self.segment(work, remaining, lane)
            limits = ()
            for u in cutlass.range_constexpr(self.held):
                row = row0 + lane % 4 + 4 * u
                seen = cute.arch.shuffle_sync(work[3], row)
                limits = limits + (cutlass.min(seen, work[5]) if row >= first and row < last else Int32(0),)
            for i in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(full + slot, phase)
                left = left - 1
                self.multiply(mma, tS, tK[None, None, None, slot], (tQ[None, None, None, group],), group, left > 0)
                scale = ops.load_shared_f32x2(smem + self.scale_offset + slot * (TILE * 4) + pool * 4)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(empty + slot)
                column = work[4] + i * TILE + pool
                at = logits + Int64(row0 + lane % 4) * logits_bytes + Int64(column) * 4
                self.store(tS, W, scale, limits, column, at, logits_bytes)
                slot = slot + 1
                if slot == self.stages:
                    slot = Int32(0)
                    phase = phase ^ 1

    @cute.jit
    def total_steps(self, work: tuple, lane: Int32):
        total = Int32(0)
        remaining = work[0]
        for _ in cutlass.range(cute.arch.popc(work[0]), unroll=1):
            _, _, _, _, steps, remaining = self.segment(work, remaining, lane)
            total = total + steps
        return total

    @cute.jit
    def load_weights(self, weights: Int64, row_bytes: Int64, row: Int32, count: Int32):
        """The 32 weights of the thread's rows, in registers."""
        W = cute.make_rmem_tensor((KPOOL_HEADS * self.held,), Float32)
        for u in cutlass.range_constexpr(self.held):
            live = Int32(row + 4 * u < count)
            for h in cutlass.range_constexpr(0, KPOOL_HEADS, 4):
                four = rn.load_f32x4_if(live, weights + Int64(row + 4 * u) * row_bytes + h * 4)
                for i in cutlass.range_constexpr(4):
                    W[KPOOL_HEADS * u + h + i] = four[i]
        return W

    @cute.jit
    def store(
        self, acc: cute.Tensor, W: cute.Tensor, scale: tuple, limits: tuple, column: Int32, at: Int64, row_bytes: Int64
    ):
        """Sum the heads of the thread's rows and two pools, and store what the rows see."""
        S = cute.make_tensor(acc.iterator, cute.make_layout(TILE * self.columns // 128))
        for u in cutlass.range_constexpr(self.held):
            values = []
            for e in cutlass.range_constexpr(2):
                total = Float32(0.0)
                for h in cutlass.range_constexpr(KPOOL_HEADS):
                    score = S[4 * (16 * u + h // 2) + 2 * e + h % 2]
                    total = ops.fma(W[KPOOL_HEADS * u + h], po.maximum(score, Float32(0.0)), total)
                values.append(total * scale[e])
            to = at + row_bytes * (4 * u)
            if column + 1 < limits[u]:
                ops.store_global_f32x2(to, values[0], values[1])
            elif column < limits[u]:
                ops.store_global_f32(to, values[0])


def cp_async_4(dst: Int32, src: Int64, size: Int32) -> None:
    """4 bytes global -> shared; with size 0 zeros are written and nothing is read."""
    cute.arch.inline_ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};", read_only_args=[dst, src, size])
