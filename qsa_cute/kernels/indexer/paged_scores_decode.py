"""Block scores of decode rows over vLLM's compressed key cache, every SM from 80 up (fp8 from 89 up).

    logits[r, c] = sum_h relu(q[r, h] . key[b, c]),   h ascending, FP32, not scaled

for the columns c < min(visible_blocks[r], num_columns) of rows r = b * query_len + j; the others are not written.
lengths[r], in tokens, is 4 times that number: what the selection takes. A page outside the cache reads nothing and
counts as zeros. Keys and queries: `paged_ops.py`.

Grid: (column shares, requests). As `scores_decode.py`, every warp works alone: a step is 32 columns, gathered by
cp.async into the warp's ring; keys are A and the queries, kept in registers, are B. A lane finds one column's key. With
two rows, all (row, head) pairs are one n-tile, and neighbouring lanes bring a row's heads together.

Baked: type, query rows a request (the registers they take), warps, stages. The caller guarantees: 16-byte aligned
keys and queries; query_len <= the baked rows; 1 to 4 heads; page_size a multiple of 4, so that logits are 16-byte
aligned.

Few warps ask for their first keys before they wait for the kernels before, by the page table as it is then: for the L2
alone, no result depends on it.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.indexer.paged_ops import PagedKeys, clamp, head_sum, pair_sum

PARAMS = (
    ptr("q_ptr", "elem", 16),
    ptr("k_cache_ptr", "elem", 16),
    ptr("page_table", "i32"),
    ptr("visible_blocks", "i32"),
    ptr("logits_ptr", "f32", 16),
    ptr("lengths_ptr", "i32"),
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
    i64("logits_stride_row"),
)

STEP = 32  # columns that a warp scores at once: a lane finds each


class PagedScoresDecode:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str, rows: int, warps: int, stages: int):
        self.dtype, self.rows, self.warps, self.stages = dtype, rows, warps, stages
        self.size = ops.ELEM_BYTES[dtype]
        self.row_bytes = head_dim * self.size
        self.chunks = self.row_bytes // 16
        self.steps_k = self.row_bytes // 32
        self.groups = max(1, rows // 4)  # of rows whose heads lie in two n-tiles
        self.tiles = max(1, rows // 2)
        self.unit = STEP * self.row_bytes  # bytes of a ring slot
        self.threads = 32 * warps
        self.smem_bytes = warps * stages * self.unit

    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        k_cache_ptr: cute.Pointer,
        page_table: cute.Pointer,
        visible_blocks: cute.Pointer,
        logits_ptr: cute.Pointer,
        lengths_ptr: cute.Pointer,
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
        logits_stride_row: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_ptr,
            k_cache_ptr,
            page_table,
            visible_blocks,
            logits_ptr,
            lengths_ptr,
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
            logits_stride_row,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        q_ptr: cute.Pointer,
        k_cache_ptr: cute.Pointer,
        page_table: cute.Pointer,
        visible_blocks: cute.Pointer,
        logits_ptr: cute.Pointer,
        lengths_ptr: cute.Pointer,
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
        logits_stride_row: Int64,
    ):
        early.let_next_start()
        share, request, _ = cute.arch.block_idx()
        shares, requests, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        ring = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint()) + warp * (self.stages * self.unit)
        first = share * self.warps + warp
        step = shares * self.warps
        row0 = Int64(request) * query_len
        keys = PagedKeys(
            k_cache_ptr.toint(),
            page_table.toint() + Int64(request) * page_table_stride * 4,
            cache_stride_page * self.size,
            cache_stride_token * self.size,
            num_pages,
            page_size,
            num_columns,
        )
        if step * requests <= early.FEW_WARPS:
            keys.prefetch(first * STEP + lane, self.row_bytes)
        early.wait()
        # Columns of a lane are `step * STEP` apart, which is `skip` pages and `rest` tokens: one division for all.
        skip = step * STEP // page_size
        rest = step * STEP - skip * page_size
        page, token = keys.fetch(first * STEP + lane)
        table_slot = (first * STEP + lane) // page_size
        tL = cute.make_rmem_tensor((self.groups,), Int32)
        seen = self.read_limits(tL, visible_blocks.toint() + row0 * 4, query_len, num_columns, lane)
        tQ = cute.make_rmem_tensor((self.tiles * 2 * self.steps_k,), Int32)
        self.read_q(
            tQ,
            q_ptr.toint() + row0 * q_stride_row * self.size,
            q_stride_row * self.size,
            q_stride_head * self.size,
            query_len,
            num_heads,
            lane,
        )
        if first == 0:
            self.write_lengths(tL, lengths_ptr.toint() + row0 * 4, query_len, lane)
        out = logits_ptr.toint() + row0 * logits_stride_row * 4
        row_bytes = logits_stride_row * 4
        self.walk(keys, tQ, tL, ring, out, row_bytes, page, token, table_slot, skip, rest, first, step, seen, lane)

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
        """Score a warp's steps, `first` and each `step`-th after it; page and token: the lane's first column."""
        page_size = keys.page_size
        steps = (seen + STEP - 1) // STEP
        for s in cutlass.range_constexpr(self.stages - 1):
            self.gather(ring + s * self.unit, keys, page, token, (first + s * step) * STEP, seen, lane)
            table_slot, token = self.advance(table_slot, token, skip, rest, page_size)
            page = keys.read_table(table_slot, (first + (s + 1) * step) * STEP + lane)
        slot = Int32(0)
        ahead = Int32(self.stages - 1)
        for at in cutlass.range(first, steps, step, unroll=1):
            coming = at + (self.stages - 1) * step
            self.gather(ring + ahead * self.unit, keys, page, token, coming * STEP, seen, lane)
            table_slot, token = self.advance(table_slot, token, skip, rest, page_size)
            page = keys.read_table(table_slot, (coming + step) * STEP + lane)
            cute.arch.cp_async_wait_group(self.stages - 1)
            cute.arch.sync_warp()
            self.score(ring + slot * self.unit, tQ, tL, out, row_bytes, at * STEP, lane)
            cute.arch.sync_warp()
            slot = slot + 1 if slot + 1 < self.stages else Int32(0)
            ahead = ahead + 1 if ahead + 1 < self.stages else Int32(0)
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def advance(self, slot: Int32, token: Int32, skip: Int32, rest: Int32, page_size: Int32):
        """The next column's slot of the table and token of the page."""
        slot = slot + skip
        token = token + rest
        if token >= page_size:
            slot = slot + 1
            token = token - page_size
        return slot, token

    def lane_row(self, lane: Int32) -> Int32:
        """Which row of a group of rows a lane's accumulators are of."""
        return lane % 4 if self.rows > 2 else lane % 4 // 2

    @cute.jit
    def read_limits(self, tL: cute.Tensor, visible: Int64, query_len: Int32, num_columns: Int32, lane: Int32):
        """The limits of the lane's rows, and the largest of all rows."""
        most = Int32(0)
        for m in cutlass.range_constexpr(self.groups):
            row = 4 * m + self.lane_row(lane)
            found = ops.load_global_i32_if(Int32(row < query_len), visible + Int64(row) * 4, Int32(0))
            tL[m] = clamp(found, num_columns)
            most = cutlass.max(most, tL[m])
        for d in cutlass.range_constexpr(2):
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=1 << d))
        return cute.arch.make_warp_uniform(most)

    @cute.jit
    def write_lengths(self, tL: cute.Tensor, lengths: Int64, query_len: Int32, lane: Int32):
        for m in cutlass.range_constexpr(self.groups):
            row = 4 * m + self.lane_row(lane)
            if lane < 4 and row < query_len:
                ops.store_global_i32(lengths + Int64(row) * 4, tL[m] * BLOCK_TOKENS)

    @cute.jit
    def read_q(
        self,
        tQ: cute.Tensor,
        q: Int64,
        row_bytes: Int64,
        head_bytes: Int64,
        query_len: Int32,
        num_heads: Int32,
        lane: Int32,
    ):
        """B fragments. n-tile 2m + i has heads 2i and 2i + 1 of row 4m + c in columns 2c and 2c + 1; the only n-tile of
        two rows has head h of row r in column 4r + h."""
        n = lane // 4
        for tile in cutlass.range_constexpr(self.tiles):
            if cutlass.const_expr(self.rows > 2):
                row, head = 4 * (tile // 2) + n // 2, 2 * (tile % 2) + n % 2
            else:
                row, head = n // 4, n % 4
            wanted = Int32(row < query_len and head < num_heads)
            at = q + Int64(row) * row_bytes + Int64(head) * head_bytes + Int64((lane % 4) * 4)
            for k in cutlass.range_constexpr(self.steps_k):
                for half in cutlass.range_constexpr(2):
                    tQ[(tile * self.steps_k + k) * 2 + half] = ops.load_global_i32_if(
                        wanted, at + (32 * k + 16 * half), Int32(0)
                    )

    @cute.jit
    def gather(self, slot: Int32, keys: PagedKeys, page: Int32, token: Int32, column: Int32, seen: Int32, lane: Int32):
        """Start copying a step's keys, column 4l + 2t + e to row 16t + 8e + l; those not seen become zeros, unread."""
        low, high = keys.locate(page, token, column + lane < seen)
        chunk = lane % self.chunks
        sub = lane // self.chunks
        per = 32 // self.chunks  # keys that a warp copies at once: 2, or 4 of fp8
        if column < seen:
            for i in cutlass.range_constexpr(STEP // per):
                if cutlass.const_expr(per == 2):
                    line, turn = 16 * (i % 2) + i // 2, i // 2
                    row = line + 8 * sub
                else:
                    line, turn = i, i
                    row = line + 16 * (sub // 2) + 8 * (sub % 2)
                dst = slot + row * self.row_bytes + (chunk ^ (turn % 8)) * 16
                keys.copy(dst, low, high, per * i + sub, chunk * 16)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def score(
        self,
        slot: Int32,
        tQ: cute.Tensor,
        tL: cute.Tensor,
        out: Int64,
        row_bytes: Int64,
        column0: Int32,
        lane: Int32,
    ):
        """Multiply a step's keys with all rows and store."""
        acc = cute.make_rmem_tensor((8 * self.tiles,), Float32)  # [m-tile 2][n-tile][4]
        acc.fill(0.0)
        at = slot + (lane % 16) * self.row_bytes
        for k in cutlass.range_constexpr(self.steps_k):
            chunk = (2 * k + lane // 16) ^ (lane % 8)
            for t in cutlass.range_constexpr(2):
                a = ops.ldmatrix_x4(at + 16 * t * self.row_bytes + chunk * 16)
                for n in cutlass.range_constexpr(self.tiles):
                    b = (tQ[(n * self.steps_k + k) * 2], tQ[(n * self.steps_k + k) * 2 + 1])
                    ops.add_mma_32_bytes(self.dtype, acc, 4 * (t * self.tiles + n), a, b)
        self.finish(acc, tL, out, row_bytes, column0, lane)

    @cute.jit
    def finish(self, acc: cute.Tensor, tL: cute.Tensor, out: Int64, row_bytes: Int64, column0: Int32, lane: Int32):
        """A step's products to logits."""
        column = column0 + (lane // 4) * 4
        for m in cutlass.range_constexpr(self.groups):
            values = []
            for t in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    v = 4 * (t * self.tiles + 2 * m) + 2 * e
                    if cutlass.const_expr(self.rows > 2):
                        values.append(head_sum(acc[v], acc[v + 1], acc[v + 4], acc[v + 5]))
                    else:
                        values.append(pair_sum(acc[v], acc[v + 1]))
            limit = tL[m]
            if cutlass.const_expr(self.rows == 2):
                if lane % 2 == 0:
                    limit = Int32(0)  # its neighbour has the sums
            self.store(out, row_bytes, 4 * m + self.lane_row(lane), column, values, limit)

    @cute.jit
    def store(self, out: Int64, row_bytes: Int64, row: Int32, column: Int32, values, limit: Int32):
        """Four logits of a row, as far as it sees."""
        to = out + Int64(row) * row_bytes + Int64(column) * 4
        if column + 4 <= limit:
            ops.store_global_f32x4(to, (values[0], values[1], values[2], values[3]))
        else:
            for i in cutlass.range_constexpr(4):
                if column + i < limit:
                    ops.store_global_f32(to + i * 4, values[i])
