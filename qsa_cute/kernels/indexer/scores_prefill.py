"""Block scores of prefill rows (K2): the logits of a chunk of query rows, every SM from 80 up.

    logits[r - row_start, g] = 1 / sqrt(128) * sum_h relu(q[r, h] . kbar[b, g]),   h ascending, FP32

for the blocks g < (p + 1) // 4 that row r at position p = query_starts[b] + r % seq_len sees; -FLT_MAX for the
others and for padded rows (p >= context_lengths[b]). With fill = 0 what a row does not see is left unwritten.

Grid: (row tiles, column splits). A row tile is 32 rows of one sequence (`scores_ops.locate_rows`), its 128
(row, head) pairs in shared memory for the block's life; 64-block tiles of keys stream through two stages. Four
warps: two over the keys (A of m16n8k16), two over the rows (B). Row orders in shared memory are chosen so that
a thread ends with all heads of its (row, block) pairs and four consecutive blocks a row (`q_rows`, `copy_keys`).

Baked: type. Run-time: everything else. The caller guarantees: 16-byte aligned rows of q and kbar, unit inner
stride. A logit is a function of its query row and block key alone.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.indexer.scores_ops import CHUNKS, MASKED, ROW_BYTES, RowTile, locate_rows, logit, q_rows

PARAMS = (
    ptr("q_normed_ptr", "elem", 16),
    ptr("kbar_ptr", "elem", 16),
    ptr("logits_ptr", "f32", 16),
    ptr("context_lengths", "i32"),
    ptr("query_starts", "i32"),
    i32("seq_len"),
    i32("num_blocks"),
    i32("row_start"),
    i32("num_rows"),
    i32("fill"),
    i64("q_stride_row"),
    i64("kbar_stride_batch"),
    i64("kbar_stride_block"),
    i64("logits_stride_row"),
)

TILE = 64  # block keys a step


class ScoresPrefill:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.dtype = dtype
        self.rows = 32
        self.threads = 128
        self.stages = 2
        self.k_offset = self.rows * 4 * ROW_BYTES
        self.smem_bytes = self.k_offset + self.stages * TILE * ROW_BYTES
        self.min_blocks = 2

    @cute.jit
    def __call__(
        self,
        q_normed_ptr: cute.Pointer,
        kbar_ptr: cute.Pointer,
        logits_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        seq_len: Int32,
        num_blocks: Int32,
        row_start: Int32,
        num_rows: Int32,
        fill: Int32,
        q_stride_row: Int64,
        kbar_stride_batch: Int64,
        kbar_stride_block: Int64,
        logits_stride_row: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_normed_ptr,
            kbar_ptr,
            logits_ptr,
            context_lengths,
            query_starts,
            seq_len,
            num_blocks,
            row_start,
            num_rows,
            fill,
            q_stride_row,
            kbar_stride_batch,
            kbar_stride_block,
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
        q_normed_ptr: cute.Pointer,
        kbar_ptr: cute.Pointer,
        logits_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        seq_len: Int32,
        num_blocks: Int32,
        row_start: Int32,
        num_rows: Int32,
        fill: Int32,
        q_stride_row: Int64,
        kbar_stride_batch: Int64,
        kbar_stride_block: Int64,
        logits_stride_row: Int64,
    ):
        early.begin()
        tid, _, _ = cute.arch.thread_idx()
        index, split, _ = cute.arch.block_idx()
        _, splits, _ = cute.arch.grid_dim()
        tile = locate_rows(
            index,
            self.rows,
            q_normed_ptr.toint(),
            kbar_ptr.toint(),
            logits_ptr.toint(),
            context_lengths.toint(),
            query_starts.toint(),
            seq_len,
            num_blocks,
            row_start,
            num_rows,
            q_stride_row,
            kbar_stride_batch,
            logits_stride_row,
        )
        begin, end, steps = self.columns(tile, split, splits)
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        if steps > 0:
            self.copy_queries(smem, tile, q_stride_row * 2, tid)
            self.copy_keys(smem + self.k_offset, tile, kbar_stride_block * 2, begin, tid)
            cute.arch.cp_async_commit_group()
            for i in cutlass.range(steps, unroll=1):
                column = begin + i * TILE
                if i + 1 < steps:
                    slot = smem + self.k_offset + ((i + 1) % self.stages) * (TILE * ROW_BYTES)
                    self.copy_keys(slot, tile, kbar_stride_block * 2, column + TILE, tid)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(1)
                cute.arch.sync_threads()
                slot = smem + self.k_offset + (i % self.stages) * (TILE * ROW_BYTES)
                self.score(smem, slot, tile, column, fill, tid)
                cute.arch.sync_threads()
        if fill != 0:
            self.mask(tile, begin + steps * TILE, end, tid, self.threads)

    @cute.jit
    def columns(self, tile: RowTile, split: Int32, splits: Int32):
        """This block's columns [begin, end), and how many steps of TILE from `begin` hold a block that a row sees."""
        steps = (tile.width + TILE - 1) // TILE
        share = (steps + splits - 1) // splits * TILE
        begin = split * share
        end = cutlass.min(begin + share, tile.width)
        seen = cutlass.min(tile.visible(tile.live - 1), end)
        return begin, end, cutlass.max((seen - begin + TILE - 1) // TILE, Int32(0))

    @cute.jit
    def copy_queries(self, sQ: Int32, tile: RowTile, row_bytes: Int64, tid: Int32):
        """Start copying the tile's queries; rows that may not be read become zeros."""
        chunk = tid % CHUNKS
        lane_row = tid // CHUNKS
        for i in cutlass.range_constexpr(self.rows * 4 // 8):
            linear = 8 * i + lane_row
            row = linear // 4
            live = tile.visible(row) > 0
            src = tile.q + Int64(row if live else tile.live - 1) * row_bytes + Int64(linear % 4) * ROW_BYTES
            at = q_rows(8 * i, lane_row)
            dst = sQ + at * ROW_BYTES + (chunk ^ (at % 8)) * 16
            ops.cp_async_16(dst, src + Int64(chunk) * 16, Int32(16) if live else Int32(0))

    @cute.jit
    def copy_keys(self, sK: Int32, tile: RowTile, row_bytes: Int64, column: Int32, tid: Int32):
        """Start copying a tile of block keys, block 32w + 4l + 2t + e to row 32w + 16t + 8e + l: a thread's
        accumulators (rows l and l + 8 of two m-tiles) are then four consecutive blocks. Blocks that no row
        sees become zeros and are not read."""
        chunk = tid % CHUNKS
        lane_row = tid // CHUNKS
        seen = tile.visible(tile.live - 1)
        for i in cutlass.range_constexpr(TILE // 8):
            block = 8 * i + lane_row
            live = column + block < seen
            src = tile.kbar + Int64(column + block if live else column) * row_bytes + Int64(chunk) * 16
            at = 32 * (i // 4) + 16 * ((lane_row % 4) // 2) + 8 * (lane_row % 2) + 2 * (i % 4) + lane_row // 4
            ops.cp_async_16(sK + at * ROW_BYTES + (chunk ^ (at % 8)) * 16, src, Int32(16) if live else Int32(0))

    @cute.jit
    def score(self, sQ: Int32, sK: Int32, tile: RowTile, column: Int32, fill: Int32, tid: Int32):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        keys = (warp % 2) * 32
        rows = (warp // 2) * 16
        acc = cute.make_rmem_tensor((64,), Float32)  # [m-tile 2][n-tile 8][4]
        acc.fill(0.0)
        a_row = keys + lane % 16
        b_row = rows * 4 + lane % 8 + (lane // 16) * 8
        for k in cutlass.range_constexpr(8):
            a_chunk = (2 * k + lane // 16) ^ (a_row % 8)
            b_chunk = (2 * k + (lane // 8) % 2) ^ (b_row % 8)
            a0 = ops.ldmatrix_x4(sK + a_row * ROW_BYTES + a_chunk * 16)
            a1 = ops.ldmatrix_x4(sK + (a_row + 16) * ROW_BYTES + a_chunk * 16)
            for n in cutlass.range_constexpr(4):
                b = ops.ldmatrix_x4(sQ + (b_row + 16 * n) * ROW_BYTES + b_chunk * 16)
                for half in cutlass.range_constexpr(2):
                    ops.add_mma_16816(self.dtype, acc, 4 * (2 * n + half), a0, (b[2 * half], b[2 * half + 1]))
                    ops.add_mma_16816(self.dtype, acc, 32 + 4 * (2 * n + half), a1, (b[2 * half], b[2 * half + 1]))

        row = rows + lane % 4
        block = column + keys + (lane // 4) * 4
        careful = self.needs_care(tile, column, 4)
        for j in cutlass.range_constexpr(4):
            values = []
            for t in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    v = 32 * t + 8 * j + 2 * e
                    values.append(logit(acc[v], acc[v + 1], acc[v + 4], acc[v + 5]))
            if careful:
                tile.store(row + 4 * j, block, values, fill)
            else:
                at = tile.logits + Int64(row + 4 * j) * tile.stride + Int64(block) * 4
                ops.store_global_f32x4(at, (values[0], values[1], values[2], values[3]))

    @cute.jit
    def needs_care(self, tile: RowTile, column: Int32, vector: cutlass.Constexpr[int]):
        """Whether some row is not seen whole, or rows are not aligned to `vector` floats."""
        whole = tile.first == 0 and tile.live == self.rows and tile.visible(Int32(0)) >= column + TILE
        return not (whole and tile.stride % (4 * vector) == 0)

    @cute.jit
    def mask(self, tile: RowTile, begin: Int32, end: Int32, tid: Int32, threads: cutlass.Constexpr[int]):
        """Columns [begin, end) of the tile's rows to -FLT_MAX."""
        for row in cutlass.range(tile.first, tile.last, unroll=1):
            at = tile.logits + Int64(row) * tile.stride
            for column in cutlass.range(begin + tid, end, threads, unroll=1):
                ops.store_global_f32(at + Int64(column) * 4, Float32(MASKED))
