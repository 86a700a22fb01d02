"""Block scores of prefill rows over vLLM's compressed key cache, every SM from 80 up (fp8 from 89 up).

    logits[r - row_start, c] = sum_h relu(q[r, h] . key[b, c]),   h ascending, FP32, not scaled

for the columns c < min(visible_blocks[r], num_columns) of the rows r of the chunk [row_start, row_start + num_rows);
the others are not written. Request b has rows query_start_loc[b] to query_start_loc[b + 1], less query_start_loc[0].
lengths[r - row_start], in tokens, is 4 times the number of columns, 0 for a row of no request: what the selection
takes. A page outside the cache reads nothing and counts as zeros. Keys and queries: `paged_ops.py`.

Grid: (slots, column splits), a slot for each tile of rows that the chunk's requests can have (`find_tile`). As
`scores_prefill.py`: 32 rows of one request, 64 columns a step through two stages, four warps.

Baked: type. The caller guarantees: 16-byte aligned keys and queries; 1 to 4 heads; slots for all tiles and for
ceil(num_rows / 32). A logit is a function of its query row and key alone.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.indexer import paged_ops as po
from qsa_cute.kernels.indexer.paged_ops import PagedKeys, RequestTile

PARAMS = (
    ptr("q_ptr", "elem", 16),
    ptr("k_cache_ptr", "elem", 16),
    ptr("page_table", "i32"),
    ptr("query_start_loc", "i32"),
    ptr("visible_blocks", "i32"),
    ptr("logits_ptr", "f32", 16),
    ptr("lengths_ptr", "i32"),
    i32("num_requests"),
    i32("row_start"),
    i32("num_rows"),
    i32("num_heads"),
    i32("num_pages"),
    i32("page_size"),
    i32("num_columns"),
    i64("q_stride_row"),
    i64("q_stride_head"),
    i64("cache_stride_page"),
    i64("cache_stride_token"),
    i64("page_table_stride"),
    i64("logits_stride_row"),
)

TILE = 64  # columns a step


class PagedScoresPrefill:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self._type(head_dim, dtype)
        self.rows = 32
        self.threads = 128
        self.stages = 2
        self.min_blocks = 2
        self.k_offset = self.rows * 4 * self.row_bytes
        self.limits_offset = self.k_offset + self.stages * TILE * self.row_bytes
        self.smem_bytes = self.limits_offset + self.rows * 4

    def _type(self, head_dim: int, dtype: str) -> None:
        self.head_dim, self.dtype = head_dim, dtype
        self.size = ops.ELEM_BYTES[dtype]
        self.row_bytes = head_dim * self.size
        self.chunks = self.row_bytes // 16

    @cute.jit
    def __call__(
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
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_ptr,
            k_cache_ptr,
            page_table,
            query_start_loc,
            visible_blocks,
            logits_ptr,
            lengths_ptr,
            num_requests,
            row_start,
            num_rows,
            num_heads,
            num_pages,
            page_size,
            num_columns,
            q_stride_row,
            q_stride_head,
            cache_stride_page,
            cache_stride_token,
            page_table_stride,
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
        early.begin()
        tid, _, _ = cute.arch.thread_idx()
        slot, split, _ = cute.arch.block_idx()
        _, splits, _ = cute.arch.grid_dim()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
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
        request, first, count = po.find_tile(
            slot, self.rows, query_start_loc.toint(), num_requests, row_start, row_start + num_rows
        )
        limits = smem + self.limits_offset
        self.read_limits(limits, visible_blocks.toint(), first, count, num_columns, tid)
        cute.arch.sync_threads()
        tile = self.make_tile(
            logits_ptr.toint() + Int64(first - row_start) * logits_stride_row * 4, logits_stride_row * 4, limits
        )
        keys = PagedKeys(
            k_cache_ptr.toint(),
            page_table.toint() + Int64(request) * page_table_stride * 4,
            cache_stride_page * self.size,
            cache_stride_token * self.size,
            num_pages,
            page_size,
            num_columns,
        )
        begin, steps = self.columns(tile, split, splits)
        if steps > 0:
            q_row, q_head = q_stride_row * self.size, q_stride_head * self.size
            q = q_ptr.toint() + Int64(first) * q_row
            self.copy_queries(smem, q, q_row, q_head, num_heads, count, tid)
            lane = cute.arch.lane_idx()
            page_a, token_a = keys.fetch(begin + lane)
            page_b, token_b = keys.fetch(begin + 32 + lane)
            self.copy_keys(smem + self.k_offset, keys, page_a, token_a, page_b, token_b, begin, tile.most, tid)
            cute.arch.cp_async_commit_group()
            page_a, token_a = keys.fetch(begin + TILE + lane)
            page_b, token_b = keys.fetch(begin + TILE + 32 + lane)
            for i in cutlass.range(steps, unroll=1):
                column = begin + i * TILE
                if i + 1 < steps:
                    at = smem + self.k_offset + ((i + 1) % self.stages) * (TILE * self.row_bytes)
                    self.copy_keys(at, keys, page_a, token_a, page_b, token_b, column + TILE, tile.most, tid)
                cute.arch.cp_async_commit_group()
                page_a, token_a = keys.fetch(column + 2 * TILE + lane)
                page_b, token_b = keys.fetch(column + 2 * TILE + 32 + lane)
                cute.arch.cp_async_wait_group(1)
                cute.arch.sync_threads()
                self.score(smem, smem + self.k_offset + (i % self.stages) * (TILE * self.row_bytes), tile, column)
                cute.arch.sync_threads()

    @cute.jit
    def read_limits(self, limits: Int32, visible: Int64, first: Int32, count: Int32, num_columns: Int32, tid: Int32):
        """How many columns each row sees, to shared memory."""
        if tid < self.rows:
            found = ops.load_global_i32_if(Int32(tid < count), visible + Int64(first + tid) * 4, Int32(0))
            ops.store_shared_i32(limits + tid * 4, po.clamp(found, num_columns))

    @cute.jit
    def make_tile(self, logits: Int64, stride: Int64, limits: Int32):
        lane = cute.arch.lane_idx()
        most = ops.load_shared_i32(limits + lane * 4)
        least = most
        for i in cutlass.range_constexpr(1, self.rows // 32):
            other = ops.load_shared_i32(limits + (lane + 32 * i) * 4)
            most = cutlass.max(most, other)
            least = cutlass.min(least, other)
        for d in cutlass.range_constexpr(5):
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=1 << d))
            least = cutlass.min(least, cute.arch.shuffle_sync_bfly(least, offset=1 << d))
        most, least = cute.arch.make_warp_uniform(most), cute.arch.make_warp_uniform(least)
        return RequestTile(logits, stride, limits, most, least)

    @cute.jit
    def columns(self, tile: RequestTile, split: Int32, splits: Int32):
        """This block's first column, and its steps of TILE: its share of what some row sees."""
        steps = (tile.most + TILE - 1) // TILE
        share = cute.arch.make_warp_uniform((steps + splits - 1) // splits)
        begin = split * share
        return begin * TILE, cutlass.max(cutlass.min(share, steps - begin), Int32(0))

    @cute.jit
    def copy_queries(self, sQ: Int32, q: Int64, q_row: Int64, q_head: Int64, heads: Int32, count: Int32, tid: Int32):
        """Start copying the tile's queries."""
        chunk = tid % self.chunks
        sub = tid // self.chunks
        per = self.threads // self.chunks
        for i in cutlass.range_constexpr(self.rows * 4 // per):
            linear = per * i + sub
            at = po.pair_row(linear)
            dst = sQ + at * self.row_bytes + (chunk ^ (at & 7)) * 16
            po.copy_query(dst, q, q_row, q_head, heads, count, linear, chunk * 16)

    @cute.jit
    def copy_keys(
        self,
        sK: Int32,
        keys: PagedKeys,
        page_a: Int32,
        token_a: Int32,
        page_b: Int32,
        token_b: Int32,
        column: Int32,
        seen: Int32,
        tid: Int32,
    ):
        """Start copying a step's keys, column 32w + 4l + 2t + e to row 32w + 16t + 8e + l: a thread's accumulators
        (rows l and l + 8 of two m-tiles) are then four consecutive columns. A lane has found the pages of columns
        `lane` and 32 + `lane`."""
        lane = cute.arch.lane_idx()
        low_a, high_a = keys.locate(page_a, token_a, column + lane < seen)
        low_b, high_b = keys.locate(page_b, token_b, column + 32 + lane < seen)
        chunk = tid % self.chunks
        sub = tid // self.chunks
        per = self.threads // self.chunks
        for i in cutlass.range_constexpr(TILE // per):
            key = per * (i % (32 // per)) + sub
            at = 32 * (i // (32 // per)) + ((key & 2) << 3) + ((key & 1) << 3) + (key >> 2)
            dst = sK + at * self.row_bytes + (chunk ^ (at & 7)) * 16
            if cutlass.const_expr(i < 32 // per):
                keys.copy(dst, low_a, high_a, key, chunk * 16)
            else:
                keys.copy(dst, low_b, high_b, key, chunk * 16)

    @cute.jit
    def score(self, sQ: Int32, sK: Int32, tile: RequestTile, column: Int32):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first_key = (warp % 2) * 32
        rows = (warp // 2) * 16
        acc = cute.make_rmem_tensor((64,), Float32)  # [m-tile 2][n-tile 8][4]
        acc.fill(0.0)
        a_row = first_key + lane % 16
        b_row = rows * 4 + lane % 8 + (lane // 16) * 8
        for k in cutlass.range_constexpr(self.row_bytes // 32):
            a_chunk = (2 * k + lane // 16) ^ (a_row % 8)
            b_chunk = (2 * k + (lane // 8) % 2) ^ (b_row % 8)
            a0 = ops.ldmatrix_x4(sK + a_row * self.row_bytes + a_chunk * 16)
            a1 = ops.ldmatrix_x4(sK + (a_row + 16) * self.row_bytes + a_chunk * 16)
            for n in cutlass.range_constexpr(4):
                b = ops.ldmatrix_x4(sQ + (b_row + 16 * n) * self.row_bytes + b_chunk * 16)
                for half in cutlass.range_constexpr(2):
                    ops.add_mma_32_bytes(self.dtype, acc, 4 * (2 * n + half), a0, (b[2 * half], b[2 * half + 1]))
                    ops.add_mma_32_bytes(self.dtype, acc, 32 + 4 * (2 * n + half), a1, (b[2 * half], b[2 * half + 1]))

        row = rows + lane % 4
        at_column = column + first_key + (lane // 4) * 4
        careful = self.needs_care(tile, column, 4)
        for j in cutlass.range_constexpr(4):
            values = []
            for t in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    v = 32 * t + 8 * j + 2 * e
                    values.append(po.head_sum(acc[v], acc[v + 1], acc[v + 4], acc[v + 5]))
            to = tile.logits + Int64(row + 4 * j) * tile.stride + Int64(at_column) * 4
            if careful:
                tile.store(to, row + 4 * j, at_column, values)
            else:
                ops.store_global_f32x4(to, (values[0], values[1], values[2], values[3]))

    @cute.jit
    def needs_care(self, tile: RequestTile, column: Int32, vector: cutlass.Constexpr[int]):
        """Whether some row does not see the whole step, or rows are not aligned to `vector` floats."""
        return not (tile.least >= column + TILE and tile.stride % (4 * vector) == 0)
