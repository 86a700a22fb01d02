"""Scores of prefill rows on the tensor cores: FP32 queries as the sum of two terms of the keys' type, 4 heads of 128.

    scores[r, b] = 1 / sqrt(128) * sum_h relu(q[r, h] . block_keys[b])   for b < (first_pos + r + 1) // ratio, else -inf

A query's one rounding to bf16 would move up to 16 of a row's 512 selected blocks where heads cancel; with q = high +
low, low the rounded rest, 2^-17 of q is left, and the selection is the exact kernel's. Both terms' products go to one
FP32 accumulator.

Grid, tiles and orders in shared memory are `indexer/scores_prefill.py`'s: 32 rows by 64-block steps, rows' terms split
while they are copied. Baked: type. Run-time: rows, blocks, ratio. The caller guarantees: contiguous, 16-byte aligned
q [rows, 4, 128] and block_keys. A block that no row of a tile sees is not read.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import INDEX_HEAD_DIM, INDEX_HEADS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common import rope_norm as rn
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.indexer.scores_ops import CHUNKS, ROW_BYTES, RowTile, logit, q_rows
from qsa_cute.kernels.indexer.scores_prefill import TILE, ScoresPrefill
from qsa_cute.kernels.metrale.scores import complete_blocks

PARAMS = (
    ptr("q", "f32", 16),
    ptr("block_keys", "elem", 16),
    ptr("scores", "f32"),
    i32("rows"),
    i32("n_blocks_max"),
    i32("first_pos"),
    i32("ratio"),
    i64("score_stride"),
)

QUERY_BYTES = INDEX_HEADS * INDEX_HEAD_DIM * 4  # of a row


def load_global_f32x4(addr: Int64) -> tuple:
    return cute.arch.inline_ptx(
        "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Float32] * 4, read_only_args=[addr]
    )


@dataclass(frozen=True)
class MaskedTile(RowTile):
    """Rows of which each sees the blocks complete at its position, at a run-time ratio; the others score -inf."""

    ratio: Int32

    @cute.jit
    def visible(self, row: Int32) -> Int32:
        count = complete_blocks(row, self.position, self.ratio, self.width)
        return count if row < self.live else Int32(0)

    @cute.jit
    def store(self, row: Int32, column: Int32, values, fill: Int32):
        limit = self.visible(row)
        at = self.logits + Int64(row) * self.stride + Int64(column) * 4
        if row < self.last:
            for i in cutlass.range_constexpr(len(values)):
                if column + i < self.width:
                    ops.store_global_f32(at + i * 4, values[i] if column + i < limit else -Float32.inf)


@cute.jit
def locate(
    index: Int32,
    tile_rows: cutlass.Constexpr[int],
    q: Int64,
    block_keys: Int64,
    scores: Int64,
    rows: Int32,
    n_blocks_max: Int32,
    first_pos: Int32,
    ratio: Int32,
    score_stride: Int64,
):
    """The `index`-th tile of `tile_rows` rows."""
    row = index * tile_rows
    live = cutlass.min(rows - row, Int32(tile_rows))
    return MaskedTile(
        q + Int64(row) * QUERY_BYTES,
        block_keys,
        scores + Int64(row) * score_stride * 4,
        score_stride * 4,
        Int32(0),
        live,
        live,
        first_pos + row,
        n_blocks_max,
        ratio,
    )


@cute.jit
def split_query(dtype: cutlass.Constexpr[str], tile: MaskedTile, row: Int32, head: Int32, chunk: Int32):
    """8 dims of a query head as the words of its two terms; zeros, unread, of a row that sees nothing."""
    live = tile.visible(row) > 0
    source = tile.q + Int64(row if live else Int32(0)) * QUERY_BYTES + Int64(head * (2 * ROW_BYTES) + chunk * 32)
    x = load_global_f32x4(source) + load_global_f32x4(source + 16)
    high, low = [], []
    for pair in cutlass.range_constexpr(4):
        a = x[2 * pair] if live else Float32(0.0)
        b = x[2 * pair + 1] if live else Float32(0.0)
        word = ops.pack_2(dtype, a, b)
        kept = rn.unpack_2(dtype, word)
        high = high + [word]
        low = low + [ops.pack_2(dtype, a - kept[0], b - kept[1])]
    return tuple(high), tuple(low)


@cute.jit
def mask_rest(tile: MaskedTile, begin: Int32, end: Int32, tid: Int32, threads: cutlass.Constexpr[int]):
    """Columns [begin, end) of the tile's rows to -inf."""
    for row in cutlass.range(tile.last, unroll=1):
        at = tile.logits + Int64(row) * tile.stride
        for column in cutlass.range(begin + tid, end, threads, unroll=1):
            ops.store_global_f32(at + Int64(column) * 4, -Float32.inf)


class TwoTermLaunch:
    """What `ScoreRowsTc` and its wgmma twin are launched by."""

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        block_keys: cute.Pointer,
        scores: cute.Pointer,
        rows: Int32,
        n_blocks_max: Int32,
        first_pos: Int32,
        ratio: Int32,
        score_stride: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(q, block_keys, scores, rows, n_blocks_max, first_pos, ratio, score_stride).launch(
            grid=(1, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=self.min_blocks,
            preferred_smem_carveout=100,
        )


class ScoreRowsTc(TwoTermLaunch, ScoresPrefill):
    def __init__(self, head_dim: int, dtype: str):
        super().__init__(head_dim, dtype)
        self.term = self.rows * INDEX_HEADS * ROW_BYTES  # bytes of one term of the tile's queries
        self.k_offset = 2 * self.term
        self.smem_bytes = self.k_offset + self.stages * TILE * ROW_BYTES

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,
        block_keys: cute.Pointer,
        scores: cute.Pointer,
        rows: Int32,
        n_blocks_max: Int32,
        first_pos: Int32,
        ratio: Int32,
        score_stride: Int64,
    ):
        early.begin()
        tid, _, _ = cute.arch.thread_idx()
        index, split, _ = cute.arch.block_idx()
        _, splits, _ = cute.arch.grid_dim()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        tile = locate(
            index,
            self.rows,
            q.toint(),
            block_keys.toint(),
            scores.toint(),
            rows,
            n_blocks_max,
            first_pos,
            ratio,
            score_stride,
        )
        begin, end, steps = self.columns(tile, split, splits)
        if steps > 0:
            self.copy_keys(smem + self.k_offset, tile, Int64(ROW_BYTES), begin, tid)
            cute.arch.cp_async_commit_group()
            self.split_queries(smem, tile, tid)
            for i in cutlass.range(steps, unroll=1):
                column = begin + i * TILE
                if i + 1 < steps:
                    slot = smem + self.k_offset + ((i + 1) % self.stages) * (TILE * ROW_BYTES)
                    self.copy_keys(slot, tile, Int64(ROW_BYTES), column + TILE, tid)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(1)
                cute.arch.sync_threads()
                slot = smem + self.k_offset + (i % self.stages) * (TILE * ROW_BYTES)
                self.score_terms(smem, slot, tile, column, tid)
                cute.arch.sync_threads()
        mask_rest(tile, begin + steps * TILE, end, tid, self.threads)

    @cute.jit
    def split_queries(self, sQ: Int32, tile: MaskedTile, tid: Int32):
        """The tile's queries to shared memory as two terms, in the order of `copy_queries`; unseen rows are zeros."""
        chunk = tid % CHUNKS
        lane_row = tid // CHUNKS
        for i in cutlass.range_constexpr(self.rows * INDEX_HEADS // 8):
            linear = 8 * i + lane_row
            at = q_rows(8 * i, lane_row)
            high, low = split_query(self.dtype, tile, linear // INDEX_HEADS, linear % INDEX_HEADS, chunk)
            dst = sQ + at * ROW_BYTES + (chunk ^ (at % 8)) * 16
            ops.store_shared_i32x4(dst, high)
            ops.store_shared_i32x4(dst + self.term, low)

    @cute.jit
    def score_terms(self, sQ: Int32, sK: Int32, tile: MaskedTile, column: Int32, tid: Int32):
        """`ScoresPrefill.score` of both terms: a step's keys are read once and multiplied twice."""
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
            for term in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(4):
                    b = ops.ldmatrix_x4(sQ + term * self.term + (b_row + 16 * n) * ROW_BYTES + b_chunk * 16)
                    for half in cutlass.range_constexpr(2):
                        ops.add_mma_16816(self.dtype, acc, 4 * (2 * n + half), a0, (b[2 * half], b[2 * half + 1]))
                        ops.add_mma_16816(self.dtype, acc, 32 + 4 * (2 * n + half), a1, (b[2 * half], b[2 * half + 1]))
        self.store_tile(acc, tile, rows + lane % 4, column + keys + (lane // 4) * 4, column)

    @cute.jit
    def store_tile(self, acc: cute.Tensor, tile: MaskedTile, row: Int32, block: Int32, column: Int32):
        careful = self.needs_care(tile, column, 4) or tile.logits % 16 != 0
        for j in cutlass.range_constexpr(4):
            values = []
            for t in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    v = 32 * t + 8 * j + 2 * e
                    values.append(logit(acc[v], acc[v + 1], acc[v + 4], acc[v + 5]))
            if careful:
                tile.store(row + 4 * j, block, values, Int32(1))
            else:
                at = tile.logits + Int64(row + 4 * j) * tile.stride + Int64(block) * 4
                ops.store_global_f32x4(at, (values[0], values[1], values[2], values[3]))
