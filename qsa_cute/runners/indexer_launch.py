"""The indexer's launches one by one: each a frozen dataclass of addresses and sizes, checked when it is made, and
`run(dtype)`, which launches it and allocates nothing.

What all share: bf16 or fp16 (the dtype given to `run`), unit inner strides, other strides in elements and contiguous
where None. `index_qk` is [batch_size, seq_len, 640]: 4 query heads of 128, then the raw key. `context_lengths` is
int32 [batch_size], these rows included; `query_starts` int32 [batch_size], the position of row 0, or 0 for none
(all zero). `cos_sin` is FP32 [max_positions, 64], cos then sin; rows at or past max_positions count as padding.
`stream` is a CUstream as an integer, `device` an ordinal or -1 for the current context's. Every constructor raises
ArgumentError for a value that no launch could take; `run` raises as `SparsePrefillRunner.run` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks, dispatch
from qsa_cute.runners.indexer_state import QsaIndexerPoolState
from qsa_cute.runtime import Wanted, default_loader

Grid = int | tuple[int, int, int]

INDEX_COLUMNS = (geometry.INDEX_HEADS + 1) * geometry.INDEX_HEAD_DIM
QUERY_COLUMNS = geometry.INDEX_HEADS * geometry.INDEX_HEAD_DIM
_LANE_ELEMS = 4  # a lane's piece of a row: rows are aligned to it
_BLOCKS_PER_CTA = 4  # of key compress: a warp each
_FILL_COLUMNS = 1024  # of a row of ids that one thread block fills
_POOL_FIELDS = (
    "pool_ptr",
    "k_page_table",
    "v_page_table",
    "num_flat_pages",
    "max_pages_per_seq",
    "page_table_stride",
    "page_stride",
    "token_stride",
    "tail_offset",
)


def wanted(kernel: str, dtype: object, baked: dispatch.Baked = ()) -> Wanted:
    """The variant to ask the loader for. Raises UnsupportedError: no such type."""
    return dispatch.wanted(kernel, geometry.INDEX_HEAD_DIM, dtype, baked)


def addresses(launch: Any, required: bool, **aligned: int) -> dict[str, int]:
    """The named addresses, each a multiple of so many bytes."""
    return {name: checks.address(name, getattr(launch, name), align, required) for name, align in aligned.items()}


def place(launch: Any) -> dict[str, int]:
    """Stream and device."""
    stream = checks.address("stream", launch.stream, 1, required=False)
    return {"stream": stream, "device": checks.integer("device", launch.device, -1)}


def index_rows(launch: Any, rows: int) -> dict[str, int]:
    """Address and strides of `index_qk` with so many rows a sequence."""
    row = checks.stride("index_stride_row", launch.index_stride_row, INDEX_COLUMNS, _LANE_ELEMS)
    batch = checks.stride("index_stride_batch", launch.index_stride_batch, rows * row, _LANE_ELEMS)
    address = checks.address("index_qk_ptr", launch.index_qk_ptr, 8, launch.batch_size > 0 and rows > 0)
    return {"index_qk_ptr": address, "index_stride_row": row, "index_stride_batch": batch}


def index_extent(launch: Any, rows: int) -> checks.Extent:
    dims = ((launch.batch_size, launch.index_stride_batch), (rows, launch.index_stride_row))
    return checks.extent("index_qk", launch.index_qk_ptr, dims, INDEX_COLUMNS, checks.ELEM_BYTES)


def batch_of(launch: Any, rows: str = "seq_len") -> dict[str, int]:
    """Batch and rows a sequence, whose product one grid takes."""
    batch = checks.integer("batch_size", launch.batch_size, 0)
    count = checks.integer(rows, getattr(launch, rows), 0)
    checks.grid(f"batch_size x {rows}", batch * count)
    return {"batch_size": batch, rows: count}


def chunk_of(launch: Any, total: int) -> tuple[int, int]:
    """First row and number of rows, of `total`, that a launch works on."""
    start = checks.integer("row_start", launch.row_start, 0, total)
    left = total - start
    return start, checks.integer("num_rows", left if launch.num_rows is None else launch.num_rows, 0, left)


def pool_of(state: QsaIndexerPoolState | None) -> dict[str, int]:
    """The pool's kernel parameters; without one, a table of no pages."""
    if state is None:
        return dict.fromkeys(_POOL_FIELDS, 0)
    checks.instance("pool_state", state, QsaIndexerPoolState)
    return {name: getattr(state, name) for name in _POOL_FIELDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What every launch has. An empty grid launches nothing."""

    KERNEL: ClassVar[str] = ""

    stream: int = 0
    device: int = -1
    packed: object = field(init=False, default=None, repr=False, compare=False)  # kept by the runtime's launch
    grid: Grid = field(init=False, default=0)

    def run(self, dtype: object) -> None:
        if self.grid:
            kernel: Any = default_loader().peek(wanted(self.KERNEL, dtype), self.device, self.stream)
            kernel.launch(self, self.grid, self.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLaunch(Launch):
    """The pool's parameters, from a `pool_state`."""

    pool_ptr: int = field(init=False, repr=False)
    k_page_table: int = field(init=False, repr=False)
    v_page_table: int = field(init=False, repr=False)
    num_flat_pages: int = field(init=False, repr=False)
    max_pages_per_seq: int = field(init=False, repr=False)
    page_table_stride: int = field(init=False, repr=False)
    page_stride: int = field(init=False, repr=False)
    token_stride: int = field(init=False, repr=False)
    tail_offset: int = field(init=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryPrepare(Launch):
    """K1a: norm and rope of the query heads. `w_q` [128], as stored; q_normed [batch_size * seq_len, 4, 128], zeros in
    padded rows, which are not read."""

    KERNEL: ClassVar[str] = "index_prepare"

    q_normed_ptr: int
    index_qk_ptr: int
    cos_sin_ptr: int
    context_lengths: int
    w_q_ptr: int
    batch_size: int
    seq_len: int
    rms_eps: float = geometry.RMS_EPS
    query_starts: int = 0
    max_positions: int = checks.INT32_MAX
    index_stride_batch: int | None = None
    index_stride_row: int | None = None
    q_normed_stride_row: int | None = None

    def __post_init__(self) -> None:
        checks.settle(self, place(self) | batch_of(self))
        rows = self.batch_size * self.seq_len
        checked = index_rows(self, self.seq_len) | addresses(
            self, rows > 0, q_normed_ptr=8, cos_sin_ptr=16, context_lengths=4, w_q_ptr=8
        )
        checked |= addresses(self, False, query_starts=4)
        checked["q_normed_stride_row"] = checks.stride(
            "q_normed_stride_row", self.q_normed_stride_row, QUERY_COLUMNS, _LANE_ELEMS
        )
        checks.settle(self, checked | _numbers(self) | {"grid": rows})
        out = checks.extent("q_normed", self.q_normed_ptr, ((rows, self.q_normed_stride_row or 0),), QUERY_COLUMNS, 2)
        checks.disjoint([out], [index_extent(self, self.seq_len)])


def _numbers(launch: Any) -> dict[str, Any]:
    return {
        "rms_eps": checks.scalar("rms_eps", launch.rms_eps),
        "max_positions": checks.integer("max_positions", launch.max_positions, 0),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCompress(PoolLaunch):
    """K1b, dense and, with a `pool_state`, paged: keys of the complete blocks that lie in the rows.

    `w_k` [128], as stored. kbar [batch_size, num_blocks, 128]: blocks [block_begin, block_end) are written, zeros where
    there is no key; 0 for no dense output. With a pool, keys go to their V-tails, too.

    Attributes:
        past_len: position of row 0 of every sequence where there are no query_starts.
        read_pool: take what lies before the rows from the pool: a block that they complete, its earlier raw keys; a
            block wholly before them, its key (into kbar).
    """

    KERNEL: ClassVar[str] = "index_compress"

    kbar_ptr: int
    index_qk_ptr: int
    cos_sin_ptr: int
    context_lengths: int
    w_k_ptr: int
    batch_size: int
    seq_len: int
    num_blocks: int
    block_begin: int = 0
    block_end: int | None = None
    past_len: int = 0
    rms_eps: float = geometry.RMS_EPS
    pool_state: QsaIndexerPoolState | None = None
    read_pool: bool = False
    query_starts: int = 0
    max_positions: int = checks.INT32_MAX
    index_stride_batch: int | None = None
    index_stride_row: int | None = None
    kbar_stride_batch: int | None = None
    kbar_stride_block: int | None = None
    block_count: int = field(init=False)

    def __post_init__(self) -> None:
        blocks = checks.integer("num_blocks", self.num_blocks, 0, checks.INT32_MAX // geometry.BLOCK_TOKENS)
        end = checks.integer("block_end", blocks if self.block_end is None else self.block_end, 0, blocks)
        begin = checks.integer("block_begin", self.block_begin, 0, end)
        if self.read_pool and self.pool_state is None:
            raise ArgumentError("read_pool is set without a pool_state; give the pool that holds the earlier tokens")
        checks.settle(self, place(self) | batch_of(self) | pool_of(self.pool_state))
        units = self.batch_size * (end - begin)
        checked = index_rows(self, self.seq_len) | addresses(
            self, units > 0, cos_sin_ptr=16, context_lengths=4, w_k_ptr=8
        )
        block = checks.stride("kbar_stride_block", self.kbar_stride_block, geometry.INDEX_HEAD_DIM, _LANE_ELEMS)
        checked |= addresses(self, False, query_starts=4, kbar_ptr=8) | {
            "kbar_stride_block": block,
            "kbar_stride_batch": checks.stride(
                "kbar_stride_batch", self.kbar_stride_batch, blocks * block, _LANE_ELEMS
            ),
            "past_len": checks.integer("past_len", self.past_len, 0),
            "read_pool": int(bool(self.read_pool)),
            "num_blocks": blocks,
            "block_begin": begin,
            "block_end": end,
            "block_count": end - begin,
            "grid": -(-checks.grid("batch_size x blocks", units) // _BLOCKS_PER_CTA),
        }
        checks.settle(self, checked | _numbers(self))
        dims = ((self.batch_size, self.kbar_stride_batch or 0), (blocks, block))
        out = checks.extent("kbar", self.kbar_ptr, dims, geometry.INDEX_HEAD_DIM, checks.ELEM_BYTES)
        checks.disjoint([out], [index_extent(self, self.seq_len)])


@dataclass(frozen=True, slots=True, kw_only=True)
class RawKeyTailWrite(PoolLaunch):
    """The raw keys of each sequence's open block, as far as they are among the rows, to their K-tails, bit by bit."""

    KERNEL: ClassVar[str] = "index_tail_write"

    index_qk_ptr: int
    context_lengths: int
    pool_state: QsaIndexerPoolState
    batch_size: int
    seq_len: int
    query_starts: int = 0
    index_stride_batch: int | None = None
    index_stride_row: int | None = None

    def __post_init__(self) -> None:
        if self.pool_state is None:
            raise ArgumentError("pool_state is None; raw keys go to a pool")
        checks.settle(self, place(self) | batch_of(self) | pool_of(self.pool_state))
        rows = self.batch_size * self.seq_len
        checked = index_rows(self, self.seq_len) | addresses(self, rows > 0, context_lengths=4)
        checks.settle(self, checked | addresses(self, False, query_starts=4) | {"grid": self.batch_size if rows else 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreDecode(PoolLaunch):
    """B1: queries of each sequence's last `query_len` tokens, and what their keys leave in the pool.

    index_qk is [batch_size, query_len, 640], q_normed [batch_size * query_len, 4, 128]. Token j has position
    context_lengths[b] - query_len + j; where that is negative its queries are zeros and nothing else happens.
    """

    KERNEL: ClassVar[str] = "index_pre_decode"

    q_normed_ptr: int
    index_qk_ptr: int
    cos_sin_ptr: int
    context_lengths: int
    w_q_ptr: int
    w_k_ptr: int
    pool_state: QsaIndexerPoolState
    batch_size: int
    query_len: int = 1
    rms_eps: float = geometry.RMS_EPS
    max_positions: int = checks.INT32_MAX
    index_stride_batch: int | None = None
    index_stride_row: int | None = None
    q_normed_stride_row: int | None = None

    def __post_init__(self) -> None:
        if self.pool_state is None:
            raise ArgumentError("pool_state is None; decode keeps its keys in a pool")
        checks.settle(self, place(self) | batch_of(self, "query_len") | pool_of(self.pool_state))
        rows = self.batch_size * self.query_len
        checked = index_rows(self, self.query_len) | addresses(
            self, rows > 0, q_normed_ptr=8, cos_sin_ptr=16, context_lengths=4, w_q_ptr=8, w_k_ptr=8
        )
        checked["q_normed_stride_row"] = checks.stride(
            "q_normed_stride_row", self.q_normed_stride_row, QUERY_COLUMNS, _LANE_ELEMS
        )
        checks.settle(self, checked | _numbers(self) | {"grid": rows})
        out = checks.extent("q_normed", self.q_normed_ptr, ((rows, self.q_normed_stride_row or 0),), QUERY_COLUMNS, 2)
        checks.disjoint([out], [index_extent(self, self.query_len)])


@dataclass(frozen=True, slots=True, kw_only=True)
class IdsFill(Launch):
    """ids[r, c] = c, int32 [num_rows, num_blocks]."""

    KERNEL: ClassVar[str] = "index_ids_fill"

    ids_ptr: int
    num_rows: int
    num_blocks: int
    ids_stride_row: int | None = None

    def __post_init__(self) -> None:
        rows = checks.integer("num_rows", self.num_rows, 0)
        blocks = checks.integer("num_blocks", self.num_blocks, 0)
        groups = checks.grid("rows of ids", rows * -(-blocks // _FILL_COLUMNS))
        stride = checks.stride("ids_stride_row", self.ids_stride_row, blocks, step=1)
        checks.settle(
            self, place(self) | addresses(self, groups > 0, ids_ptr=4) | {"ids_stride_row": stride, "grid": groups}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expand(Launch):
    """K4: out_idx int32 [batch_size * seq_len, 2051], rows [row_start, row_start + num_rows) from sorted_ids
    [num_rows, num_blocks], block ids best first, of which min(512, visible) are read.

    A row's list: the blocks' tokens, then the open block's up to the row's own, then -1; all -1 for padded rows.
    """

    KERNEL: ClassVar[str] = "index_expand"

    out_idx_ptr: int
    sorted_ids_ptr: int
    context_lengths: int
    batch_size: int
    seq_len: int
    num_blocks: int
    row_start: int = 0
    num_rows: int | None = None
    query_starts: int = 0
    out_stride_row: int = geometry.INDEX_WIDTH
    sorted_stride_row: int | None = None

    def __post_init__(self) -> None:
        checks.settle(self, place(self) | batch_of(self))
        total = self.batch_size * self.seq_len
        start, rows = chunk_of(self, total)
        blocks = checks.integer("num_blocks", self.num_blocks, 0)
        stride = checks.stride("sorted_stride_row", self.sorted_stride_row, blocks, step=1)
        checked = addresses(self, rows > 0, out_idx_ptr=4, context_lengths=4)
        checked |= addresses(self, rows > 0 and blocks > 0, sorted_ids_ptr=4) | addresses(self, False, query_starts=4)
        checked["out_stride_row"] = checks.stride("out_stride_row", self.out_stride_row, geometry.INDEX_WIDTH, step=1)
        checks.settle(self, checked | {"row_start": start, "num_rows": rows, "sorted_stride_row": stride, "grid": rows})
        lists = ((total, self.out_stride_row),)
        out = checks.extent("out_idx", self.out_idx_ptr, lists, geometry.INDEX_WIDTH, 4)
        ids = checks.extent("sorted_ids", self.sorted_ids_ptr, ((rows, stride),), blocks, 4)
        checks.disjoint([out], [ids])
