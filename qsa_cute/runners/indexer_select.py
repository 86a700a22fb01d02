"""The indexer's scores and selection, launch by launch; conventions as in `indexer_launch.py`.

Logits are FP32 [rows, num_blocks] with rows `logits_stride_row` apart; that of a (row, block) pair has the same bits
in prefill and decode, whatever the chunk and the algorithm. Selection orders by value, descending, ties to the lower
block id, NaN lowest, -0 equal to +0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks
from qsa_cute.runners.dispatch import SM90, Baked, capability
from qsa_cute.runners.indexer_launch import (
    QUERY_COLUMNS,
    Launch,
    PoolLaunch,
    addresses,
    batch_of,
    chunk_of,
    place,
    pool_of,
    wanted,
)
from qsa_cute.runners.indexer_state import QsaIndexerPoolState
from qsa_cute.runtime import default_loader
from qsa_cute.variants import KERNELS

MAX_QUERY_LEN = 8  # new tokens a sequence that one decode step takes

MMA_ROWS = 32  # rows of a tile of the scores, by mma.sync
WGMMA_ROWS = 64 * KERNELS["scores_prefill_wgmma"].tuning[0].baked["groups"]  # and by wgmma: 64 a consumer warpgroup

# Grids, measured on an H200 (docs/lab-indexer.md).
PREFILL_SPLITS = 4  # column splits of a row tile
PREFILL_TARGET = 128  # thread blocks that a launch should at least have
# Decode scores: (query rows baked, sequences up to, warps a thread block, shares of a sequence's columns up to). One
# sequence is a chain of latencies, so it is spread thin; many are memory-bound: two pages at once a thread block.
DECODE = ((4, 1, 1, 256), (4, checks.MAX_GRID_YZ, 2, 128), (8, 1, 4, 128), (8, checks.MAX_GRID_YZ, 4, 64))
DECODE_BLOCKS = 4096  # thread blocks from which on more shares only cost
DECODE_LEAST = 16  # shares all the same: lengths differ
PAGE_BLOCKS = geometry.PAGE_TOKENS // geometry.BLOCK_TOKENS  # blocks that a warp scores at once

# Selection: (rows up to, blocks up to, kernel, threads, elements a thread holds, thread blocks that share a row); the
# first that fits is taken. A few rows are latency: the row in registers, a wide block. Many are throughput: the fewest
# threads that hold most of the row, so that several rows share an SM.
ANY = checks.INT32_MAX
SELECTION = (
    (128, 4096, "select", 512, 8, 1),
    (128, 16384, "select", 512, 32, 1),
    (128, ANY, "select", 1024, 8, 1),
    (ANY, 2048, "select", 256, 8, 1),
    (ANY, 4096, "select", 256, 16, 1),
    (ANY, 16384, "select", 256, 32, 1),
    (ANY, ANY, "select", 256, 16, 1),
)
# On SM90. `select_held` takes what threads * elements * thread blocks hold, and no more.
SELECTION_SM90 = (
    (ANY, 2048, "select_held", 256, 8, 1),
    (ANY, 4096, "select_held", 256, 16, 1),
    (128, 8192, "select_held", 512, 16, 1),
    (ANY, 8192, "select_held", 256, 32, 1),
    (256, 16384, "select_held", 512, 32, 1),
    (64, 32768, "select_held", 512, 32, 2),
    (32, 65536, "select_held", 512, 32, 4),
    (8, ANY, "select_cluster", 512, 8, 4),
    (16, ANY, "select_cluster", 512, 8, 2),
    (128, ANY, "select", 1024, 8, 1),
    (ANY, ANY, "select", 256, 16, 1),
)
ANY_CLUSTER = ("select_cluster", 512, 8)  # of the number of thread blocks that a caller asks for


def _logits_stride(launch: Any, blocks: int) -> int:
    return checks.stride("logits_stride_row", launch.logits_stride_row, blocks, step=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores(Launch):
    """K2: logits [num_rows, num_blocks] of rows [row_start, row_start + num_rows) of q_normed [batch * seq_len, 4, 128]
    against kbar [batch, num_blocks, 128]; all three 16-byte aligned.

    Attributes:
        fill: store -FLT_MAX for what a row does not see and for padded rows; without it that stays as it is.
        algorithm: "wgmma" (SM90) or "mma" (every SM), of equal bits; None picks what suits the device.
    """

    KERNEL: ClassVar[str] = "scores_prefill"
    TILES: ClassVar[dict[str, tuple[str, int]]] = {
        "mma": ("scores_prefill", MMA_ROWS),
        "wgmma": ("scores_prefill_wgmma", WGMMA_ROWS),
    }

    logits_ptr: int
    q_normed_ptr: int
    kbar_ptr: int
    context_lengths: int
    batch_size: int
    seq_len: int
    num_blocks: int
    row_start: int = 0
    num_rows: int | None = None
    query_starts: int = 0
    fill: bool = True
    algorithm: str | None = None
    q_stride_row: int | None = None
    kbar_stride_batch: int | None = None
    kbar_stride_block: int | None = None
    logits_stride_row: int | None = None
    _grids: dict[str, tuple[int, int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.settle(self, place(self) | batch_of(self))
        total = self.batch_size * self.seq_len
        start, rows = chunk_of(self, total)
        blocks = checks.integer("num_blocks", self.num_blocks, 0)
        if self.algorithm is not None and self.algorithm not in self.TILES:
            raise ArgumentError(f"algorithm is {checks.show(self.algorithm)}; it takes 'wgmma', 'mma' or None")
        launches = rows > 0 and blocks > 0
        checked = addresses(self, launches, logits_ptr=16, q_normed_ptr=16, kbar_ptr=16, context_lengths=4)
        block = checks.stride("kbar_stride_block", self.kbar_stride_block, geometry.INDEX_HEAD_DIM)
        grids = {
            name: score_grid(rows_a_tile, self.seq_len, start, rows, blocks) if launches else (0, 0, 0)
            for name, (_, rows_a_tile) in self.TILES.items()
        }
        checked |= addresses(self, False, query_starts=4) | {
            "row_start": start,
            "num_rows": rows,
            "num_blocks": blocks,
            "fill": int(bool(self.fill)),
            "q_stride_row": checks.stride("q_stride_row", self.q_stride_row, QUERY_COLUMNS),
            "kbar_stride_block": block,
            "kbar_stride_batch": checks.stride("kbar_stride_batch", self.kbar_stride_batch, blocks * block),
            "logits_stride_row": _logits_stride(self, blocks),
            "grid": rows if launches else 0,
        }
        checks.settle(self, checked)
        object.__setattr__(self, "_grids", grids)
        out = checks.extent("logits", self.logits_ptr, ((rows, self.logits_stride_row or 0),), blocks, 4)
        q = checks.extent("q_normed", self.q_normed_ptr, ((total, self.q_stride_row or 0),), QUERY_COLUMNS, 2)
        keys = ((self.batch_size, self.kbar_stride_batch or 0), (blocks, block))
        checks.disjoint([out], [q, checks.extent("kbar", self.kbar_ptr, keys, geometry.INDEX_HEAD_DIM, 2)])

    def run(self, dtype: object) -> None:
        if not self.grid:
            return
        loader = default_loader()
        algorithm = self.algorithm or ("wgmma" if capability(loader, self.device) == SM90 else "mma")
        kernel: Any = loader.peek(wanted(self.TILES[algorithm][0], dtype), self.device, self.stream)
        kernel.launch(self, self._grids[algorithm], self.stream)


def score_grid(rows_a_tile: int, seq_len: int, start: int, rows: int, blocks: int) -> tuple[int, int, int]:
    """(row tiles, column splits) of a chunk of rows; tiles begin at multiples of their size within a sequence."""
    tiles_a_sequence = -(-seq_len // rows_a_tile)

    def tile(row: int) -> int:
        return row // seq_len * tiles_a_sequence + row % seq_len // rows_a_tile

    tiles = tile(start + rows - 1) - tile(start) + 1
    splits = max(PREFILL_SPLITS, -(-PREFILL_TARGET // tiles))
    return tiles, max(1, min(splits, -(-blocks // 64), checks.MAX_GRID_YZ)), 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresDecode(PoolLaunch):
    """B2: logits [batch_size * query_len, max_blocks] of q_normed [batch_size * query_len, 4, 128], block keys from the
    pool's V-tails. Row j of sequence b has position context_lengths[b] - query_len + j; only the prefix of each row
    that it sees, at most max_blocks, is stored.

    Attributes:
        follows_prepare: the launch right before this one on the stream is `PreDecode` of the same step; keys written
            before it are then read while it runs.
    """

    KERNEL: ClassVar[str] = "scores_decode"

    logits_ptr: int
    q_normed_ptr: int
    context_lengths: int
    pool_state: QsaIndexerPoolState
    batch_size: int
    max_blocks: int
    query_len: int = 1
    follows_prepare: bool = False
    logits_stride_row: int | None = None
    _baked: Baked = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.pool_state is None:
            raise ArgumentError("pool_state is None; decode reads its keys from a pool")
        checks.settle(self, place(self) | batch_of(self, "query_len") | pool_of(self.pool_state))
        checks.integer("batch_size", self.batch_size, 0, checks.MAX_GRID_YZ)
        query_len = checks.integer("query_len", self.query_len, 1, MAX_QUERY_LEN)
        blocks = checks.integer("max_blocks", self.max_blocks, 0)
        launches = self.batch_size > 0 and blocks > 0
        checked: dict[str, Any] = dict(addresses(self, launches, logits_ptr=16, q_normed_ptr=16, context_lengths=4))
        baked, shares = decode_choice(query_len, self.batch_size, blocks, bool(self.follows_prepare))
        checked |= {
            "query_len": query_len,
            "follows_prepare": int(bool(self.follows_prepare)),
            "max_blocks": blocks,
            "logits_stride_row": _logits_stride(self, blocks),
            "grid": (shares, self.batch_size, 1) if launches else 0,
        }
        checks.settle(self, checked)
        object.__setattr__(self, "_baked", baked)
        rows = self.batch_size * query_len
        out = checks.extent("logits", self.logits_ptr, ((rows, self.logits_stride_row or 0),), blocks, 4)
        checks.disjoint([out], [checks.extent("q_normed", self.q_normed_ptr, (), rows * QUERY_COLUMNS, 2)])

    def run(self, dtype: object) -> None:
        if self.grid:
            kernel: Any = default_loader().peek(wanted(self.KERNEL, dtype, self._baked), self.device, self.stream)
            kernel.launch(self, self.grid, self.stream)


def decode_choice(query_len: int, batch: int, blocks: int, follows_prepare: bool = False) -> tuple[Baked, int]:
    """(baked constants, shares of a sequence's columns) of the decode scores."""
    rows, _, warps, most = next(entry for entry in DECODE if query_len <= entry[0] and batch <= entry[1])
    if follows_prepare and batch == 1:
        most *= 2  # a page a warp up to 64K: all of them are on their way before the wait
    shares = min(most, max(DECODE_LEAST, DECODE_BLOCKS // max(1, batch)), -(-blocks // (PAGE_BLOCKS * warps)))
    return (("rows", rows), ("warps", warps)), shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Select(Launch):
    """Selection of each row's 512 best blocks from logits [num_rows, num_blocks]; B3 with from_end and expand.

    Row r = row_start + i is token t = r % seq_len of sequence b at position p: query_starts[b] + t, or with from_end
    context_lengths[b] - seq_len + t. It sees min((p + 1) // 4, num_blocks) blocks; with at most 512 it takes them all
    and its logits are not read. Padded rows are all -1.

    Attributes:
        out_ptr: row i of the output, int32: 512 block ids, or with expand the 2051 tokens: four a block, the open
            block's after them. The rest is -1. Ids ascend, or with ranked go from the best down.
        split_counters: int32 [num_rows, num_kv_heads], zeroed; 0 for none.
        cluster: thread blocks that share a row, 1, 2, 4 or 8; more than 1 on SM90 only. None picks.
    """

    KERNEL: ClassVar[str] = "select"

    logits_ptr: int
    out_ptr: int
    context_lengths: int
    batch_size: int
    seq_len: int
    num_blocks: int
    row_start: int = 0
    num_rows: int | None = None
    query_starts: int = 0
    from_end: bool = False
    ranked: bool = False
    expand: bool = True
    split_counters: int = 0
    num_kv_heads: int = geometry.NUM_KV_HEADS
    logits_stride_row: int | None = None
    out_stride_row: int | None = None
    cluster: int | None = None

    def __post_init__(self) -> None:
        checks.settle(self, place(self) | batch_of(self))
        total = self.batch_size * self.seq_len
        start, rows = chunk_of(self, total)
        blocks = checks.integer("num_blocks", self.num_blocks, 0)
        if self.cluster is not None and self.cluster not in (1, 2, 4, 8):
            raise ArgumentError(f"cluster is {checks.show(self.cluster)}; it takes 1, 2, 4, 8 or None")
        width = geometry.INDEX_WIDTH if self.expand else geometry.TOP_BLOCKS
        checked = addresses(self, rows > 0, out_ptr=4, context_lengths=4)
        checked |= addresses(self, rows > 0 and blocks > geometry.TOP_BLOCKS, logits_ptr=4)
        checked |= addresses(self, False, query_starts=4, split_counters=4) | {
            "row_start": start,
            "num_rows": rows,
            "num_blocks": blocks,
            "num_kv_heads": checks.integer("num_kv_heads", self.num_kv_heads, 1),
            "from_end": int(bool(self.from_end)),
            "ranked": int(bool(self.ranked)),
            "expand": int(bool(self.expand)),
            "logits_stride_row": _logits_stride(self, blocks),
            "out_stride_row": checks.stride("out_stride_row", self.out_stride_row, width, step=1),
            "grid": rows,
        }
        checks.settle(self, checked)
        out = checks.extent("out", self.out_ptr, ((rows, self.out_stride_row or 0),), width, 4)
        counters = checks.extent("split_counters", self.split_counters, (), rows * self.num_kv_heads, 4)
        logits = checks.extent("logits", self.logits_ptr, ((rows, self.logits_stride_row or 0),), blocks, 4)
        checks.disjoint([out, counters], [logits])

    def run(self, dtype: object = "bf16") -> None:
        """Launch; which dtype's artifact is used makes no difference."""
        if not self.grid:
            return
        loader, rows = default_loader(), self.num_rows or 0
        sm90 = capability(loader, self.device) == SM90
        name, baked, ranks = selection_choice(rows, self.num_blocks, sm90, self.cluster)
        kernel: Any = loader.peek(wanted(name, dtype, baked), self.device, self.stream)
        if ranks == 1:
            kernel.launch(self, rows, self.stream)
        else:
            kernel.launch(self, (rows, ranks, 1), self.stream, (1, ranks, 1))


@functools.cache
def selection_choice(rows: int, blocks: int, sm90: bool, ranks: int | None = None) -> tuple[str, Baked, int]:
    """(kernel, baked constants, thread blocks that share a row), the last 1 where it is not SM90.

    Args:
        ranks: asked for; None leaves it to the table.
    """
    if ranks is not None and ranks > 1 and rows <= checks.INT32_MAX // ranks:
        return *_selection_kernel(*ANY_CLUSTER, ranks), ranks
    for most_rows, most_blocks, kernel, threads, held, shared in SELECTION_SM90 if sm90 else SELECTION:
        if rows <= most_rows and blocks <= most_blocks and (ranks is None or shared == 1):
            return *_selection_kernel(kernel, threads, held, shared), shared
    raise AssertionError("the last entry takes any shape")


def _selection_kernel(kernel: str, threads: int, held: int, ranks: int) -> tuple[str, Baked]:
    baked: Baked = (("threads", threads), ("held", held))
    return kernel, (*baked, ("ranks", ranks)) if kernel == "select_held" else baked


def selection_kernels(sm90: bool) -> list[tuple[str, Baked]]:
    """(kernel, baked) of what a selection may run."""
    return list(dict.fromkeys(_selection_kernel(*entry[2:]) for entry in (SELECTION_SM90 if sm90 else SELECTION)))


def prefill_kernels(sm90: bool) -> list[tuple[str, Baked]]:
    """(kernel, baked) of what the launches of a prefill may run."""
    scores = "wgmma" if sm90 else "mma"
    names = ("index_prepare", "index_compress", "index_tail_write", Scores.TILES[scores][0])
    return [(name, ()) for name in names] + selection_kernels(sm90)


def decode_kernels(sm90: bool) -> list[tuple[str, Baked]]:
    """(kernel, baked) of what the launches of a decode step may run."""
    scores = dict.fromkeys((("rows", rows), ("warps", warps)) for rows, _, warps, _ in DECODE)
    found: list[tuple[str, Baked]] = [("index_pre_decode", ()), *(("scores_decode", baked) for baked in scores)]
    return found + selection_kernels(sm90)
