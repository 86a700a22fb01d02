"""Scores and selection of decode rows over vLLM's compressed key cache in one launch, on SM90.

What `paged_scores_decode.py` scores and `select_held.py` selects, to the bit: block_indices[r] are the ids of the 512
best columns of row r = b * query_len + j, ascending; a row that sees <= 512 takes them all, unscored, and -1 follows.

Grid: (ranks, requests), in clusters of (ranks, 1, 1). The blocks of a cluster share a request's columns, step by step
in turn. A row's logits never reach global memory: they go by `st.async` to the shared memory of rank j, the row's
number in its request, and complete an mbarrier there. That block then selects; the others leave.

Shared memory: the warps' rings, an mbarrier, the row. What the selection needs takes the place of the rings.

Baked: type, query rows a request, warps that score, their stages, threads, elements that a thread of the selection
holds, blocks an SM has registers for. The caller guarantees: 16-byte aligned keys and queries; query_len <= the baked
rows and the ranks, 2 to 16; 1 to 4 heads; num_columns <= threads * held; shared memory for num_columns logits.

Few warps ask for their first keys before they wait for the kernels before, by the page table as it is then: for the L2
alone, no result depends on it.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint64

from qsa_cute.geometry import TOP_BLOCKS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.indexer import select_ops as so
from qsa_cute.kernels.indexer.paged_ops import PagedKeys, clamp
from qsa_cute.kernels.indexer.paged_scores_decode import STEP, PagedScoresDecode
from qsa_cute.kernels.indexer.select_chosen import CHUNK
from qsa_cute.kernels.indexer.select_held import SelectHeld

PARAMS = (
    ptr("q_ptr", "elem", 16),
    ptr("k_cache_ptr", "elem", 16),
    ptr("page_table", "i32"),
    ptr("visible_blocks", "i32"),
    ptr("out_ptr", "i32"),
    i32("query_len"),
    i32("num_heads"),
    i32("num_pages"),
    i32("page_size"),
    i32("num_columns"),
    i64("q_stride_row"),
    i64("q_stride_head"),
    i64("cache_stride_page"),
    i64("cache_stride_token"),
    i64("page_table_stride"),
    i64("out_stride_row"),
)


class SelectRow(SelectHeld):
    """`SelectHeld` of a row in shared memory, whose address takes the place of the logits'."""

    def __init__(self, threads: int, held: int):
        super().__init__(0, "", threads, held, 1, 1)

    @cute.jit
    def read_row(self, tV: cute.Tensor, row: Int32, origin: Int32, visible: Int32, lane: Int32):
        """This thread's elements; nothing is read from `visible` on."""
        first = origin + lane * 4
        last = (visible - 1) // 4 * 4
        for i in cutlass.range_constexpr(self.chunks):
            at = first + i * CHUNK
            v = ops.load_shared_f32x4(row + cutlass.min(at, last) * 4)
            for e in cutlass.range_constexpr(4):
                tV[4 * i + e] = v[e]
        if origin + self.segment > visible:
            self.mask(tV, first, visible)

    @cute.jit
    def reread(self, logits: Int64, single: Int32, first: Int32, visible: Int32) -> Uint64:
        j = 31 - Int32(cute.arch.clz(single))
        index = first + j // 4 * CHUNK + j % 4
        value = Float32(float("nan"))
        if index < visible:
            value = ops.load_shared_f32(Int32(logits) + index * 4)
        return so.rank_number(value, index)


class PagedSelectDecode(PagedScoresDecode):
    def __init__(
        self,
        head_dim: int,
        dtype: str,
        rows: int,
        warps: int,
        stages: int,
        threads: int,
        held: int,
        blocks_per_sm: int,
    ):
        super().__init__(head_dim, dtype, rows, warps, stages)
        self.pick = SelectRow(threads, held)
        self.threads, self.min_blocks = threads, blocks_per_sm
        self.barrier = max(warps * stages * self.unit, self.pick.smem_bytes)
        self.row = self.barrier + 16
        self.smem_bytes = self.row + threads * held * 4

    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        k_cache_ptr: cute.Pointer,
        page_table: cute.Pointer,
        visible_blocks: cute.Pointer,
        out_ptr: cute.Pointer,
        query_len: Int32,
        num_heads: Int32,
        num_pages: Int32,
        page_size: Int32,
        num_columns: Int32,
        q_stride_row: Int64,
        q_stride_head: Int64,
        cache_stride_page: Int64,
        cache_stride_token: Int64,
        page_table_stride: Int64,
        out_stride_row: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_ptr,
            k_cache_ptr,
            page_table,
            visible_blocks,
            out_ptr,
            query_len,
            num_heads,
            num_pages,
            page_size,
            num_columns,
            q_stride_row,
            q_stride_head,
            cache_stride_page,
            cache_stride_token,
            page_table_stride,
            out_stride_row,
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
        k_cache_ptr: cute.Pointer,
        page_table: cute.Pointer,
        visible_blocks: cute.Pointer,
        out_ptr: cute.Pointer,
        query_len: Int32,
        num_heads: Int32,
        num_pages: Int32,
        page_size: Int32,
        num_columns: Int32,
        q_stride_row: Int64,
        q_stride_head: Int64,
        cache_stride_page: Int64,
        cache_stride_token: Int64,
        page_table_stride: Int64,
        out_stride_row: Int64,
    ):
        tid, _, _ = cute.arch.thread_idx()
        rank, request, _ = cute.arch.block_idx()
        ranks, requests, _ = cute.arch.grid_dim()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        barrier = ops.shared_barrier(smem + self.barrier)
        if tid == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()  # a peer's barrier may be reached for once it is set up
        early.let_next_start()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row0 = Int64(request) * query_len
        visible = visible_blocks.toint() + row0 * 4
        if tid == 0:
            early.prefetch(visible)
        lane = cute.arch.lane_idx()
        keys = PagedKeys(
            k_cache_ptr.toint(),
            page_table.toint() + Int64(request) * page_table_stride * 4,
            cache_stride_page * self.size,
            cache_stride_token * self.size,
            num_pages,
            page_size,
            num_columns,
        )
        first = warp * ranks + rank
        if warp < self.warps and ranks * requests * self.warps <= early.FEW_WARPS:
            keys.prefetch(first * STEP + lane, self.row_bytes)
        early.wait()
        own = ops.load_global_i32_if(Int32(rank < query_len), visible + Int64(rank) * 4, Int32(0))
        if warp < self.warps:
            page, token = keys.fetch(first * STEP + lane)
            tL = cute.make_rmem_tensor((self.groups,), Int32)
            seen = self.read_limits(tL, visible, query_len, num_columns, lane)
            tQ = cute.make_rmem_tensor((self.tiles * 2 * self.steps_k,), Int32)
            q = q_ptr.toint() + row0 * q_stride_row * self.size
            self.read_q(tQ, q, q_stride_row * self.size, q_stride_head * self.size, query_len, num_heads, lane)
            cute.arch.cluster_wait()
            ring = smem + warp * (self.stages * self.unit)
            row = Int64(smem + self.row)
            step = ranks * self.warps
            skip = step * STEP // page_size  # pages and tokens from a step to the next, as in the base's kernel
            rest = step * STEP - skip * page_size
            table_slot = (first * STEP + lane) // page_size
            self.walk(keys, tQ, tL, ring, row, Int64(0), page, token, table_slot, skip, rest, first, step, seen, lane)
        else:
            cute.arch.cluster_wait()
        if rank < query_len:
            cute.arch.sync_threads()  # the rings are free
            out = out_ptr.toint() + (row0 + rank) * out_stride_row * 4
            self.select(smem, out, clamp(own, num_columns), tid)

    @cute.jit
    def walk(
        self,
        keys: PagedKeys,
        tQ: cute.Tensor,
        tL: cute.Tensor,
        ring: Int32,
        out: Int64,
        row_bytes: Int64,
        page: Int32,
        token: Int32,
        table_slot: Int32,
        skip: Int32,
        rest: Int32,
        first: Int32,
        step: Int32,
        seen: Int32,
        lane: Int32,
    ):
        """With one stage, its halves are refilled as they are used: something is on its way all the time."""
        if cutlass.const_expr(self.stages > 1):
            PagedScoresDecode.walk(
                self, keys, tQ, tL, ring, out, row_bytes, page, token, table_slot, skip, rest, first, step, seen, lane
            )
        else:
            low, high = keys.locate(page, token, first * STEP + lane < seen)
            for t in cutlass.range_constexpr(2):
                self.gather_half(ring, keys, low, high, first * STEP < seen, t, lane)
            table_slot, token = self.advance(table_slot, token, skip, rest, keys.page_size)
            page = keys.read_table(table_slot, (first + step) * STEP + lane)
            acc = cute.make_rmem_tensor((8 * self.tiles,), Float32)  # [m-tile 2][n-tile][4]
            for at in cutlass.range(first, (seen + STEP - 1) // STEP, step, unroll=1):
                coming = (at + step) * STEP
                low, high = keys.locate(page, token, coming + lane < seen)
                table_slot, token = self.advance(table_slot, token, skip, rest, keys.page_size)
                page = keys.read_table(table_slot, coming + step * STEP + lane)
                acc.fill(0.0)
                for t in cutlass.range_constexpr(2):
                    cute.arch.cp_async_wait_group(1)
                    cute.arch.sync_warp()
                    self.multiply_half(ring, tQ, acc, t, lane)
                    cute.arch.sync_warp()
                    self.gather_half(ring, keys, low, high, coming < seen, t, lane)
                self.finish(acc, tL, out, row_bytes, at * STEP, lane)
            cute.arch.cp_async_wait_group(0)

    @cute.jit
    def gather_half(
        self, slot: Int32, keys: PagedKeys, low: Int32, high: Int32, any_live, t: cutlass.Constexpr[int], lane: Int32
    ):
        """Start copying the keys of m-tile t of a step, which `gather` copies whole."""
        if any_live:
            for i in cutlass.range_constexpr(8):
                row = 16 * t + i + 8 * (lane // 16)
                dst = slot + row * self.row_bytes + (lane % 16 ^ i) * 16
                keys.copy(dst, low, high, 4 * i + 2 * t + lane // 16, lane % 16 * 16)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def multiply_half(self, slot: Int32, tQ: cute.Tensor, acc: cute.Tensor, t: cutlass.Constexpr[int], lane: Int32):
        at = slot + (16 * t + lane % 16) * self.row_bytes
        for k in cutlass.range_constexpr(self.steps_k):
            a = ops.ldmatrix_x4(at + ((2 * k + lane // 16) ^ (lane % 8)) * 16)
            for n in cutlass.range_constexpr(self.tiles):
                b = (tQ[(n * self.steps_k + k) * 2], tQ[(n * self.steps_k + k) * 2 + 1])
                ops.add_mma_32_bytes(self.dtype, acc, 4 * (t * self.tiles + n), a, b)

    @cute.jit
    def read_limits(self, tL: cute.Tensor, visible: Int64, query_len: Int32, num_columns: Int32, lane: Int32):
        """Of rows that see no more than they take, 0: they need no logits."""
        most = PagedScoresDecode.read_limits(self, tL, visible, query_len, num_columns, lane)
        for m in cutlass.range_constexpr(self.groups):
            tL[m] = tL[m] if tL[m] > TOP_BLOCKS else Int32(0)
        return most if most > TOP_BLOCKS else Int32(0)

    @cute.jit
    def store(self, out: Int64, row_bytes: Int64, row: Int32, column: Int32, values, limit: Int32):
        """Four logits to the rank that has the row; the selection knows where the row ends."""
        if column < limit:
            at = Int32(out)
            to = ops.map_cluster(at + column * 4, row)
            full = ops.map_cluster(at + (self.barrier - self.row), row)
            ops.store_cluster_async_x4(to, (values[0], values[1], values[2], values[3]), full)

    @cute.jit
    def select(self, smem: Int32, out: Int64, visible: Int32, tid: Int32):
        barrier = ops.shared_barrier(smem + self.barrier)
        if visible <= TOP_BLOCKS:
            for i in cutlass.range(tid, TOP_BLOCKS, self.threads, unroll=1):
                ops.store_global_i32(out + Int64(i) * 4, i if i < visible else Int32(-1))
        else:
            if tid == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, (visible + 3) // 4 * 16)
            pick = self.pick
            pick.prepare(smem, tid)
            row = smem + self.row
            origin = tid // 32 * pick.segment
            cute.arch.mbarrier_wait(barrier, 0)
            tV = cute.make_rmem_tensor((pick.held,), Float32)
            pick.read_row(tV, row, origin, visible, tid % 32)
            pick.choose(smem, tV, Int64(row), out, origin, visible, Int32(0), Int32(0), Int32(0), Int32(0), tid)
