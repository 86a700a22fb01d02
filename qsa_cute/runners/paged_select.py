"""Scores over vLLM's compressed key cache, launch by launch, and expansion to counted lists.

The cache is [num_pages, page_size, 1, 128] behind a block table int32 [requests, table_width]; `visible_blocks` int32
[rows] bounds a row's columns, which are compressed keys of its request in order. bf16, fp16 or fp8 e4m3, queries and
keys alike, unscaled. Logits are FP32, ReLU per head, heads summed in ascending order, not scaled; what a row does not
see is not written. `lengths` int32 [rows], 4 times what a row sees, is what `indexer_select.Select` takes as
context_lengths with seq_len 1 and from_end. Conventions as in `indexer_launch.py`; a launch knows its own type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError, UnsupportedError
from qsa_cute.runners import checks, dispatch
from qsa_cute.runners.dispatch import SM90, Baked, capability
from qsa_cute.runners.indexer_launch import Launch, addresses, place, wanted
from qsa_cute.runners.indexer_select import (
    MAX_QUERY_LEN,
    MMA_ROWS,
    PREFILL_SPLITS,
    PREFILL_TARGET,
    Select,
    decode_kernels,
)
from qsa_cute.runners.splits import CLUSTERS_AT_ONCE
from qsa_cute.runtime import Wanted, default_loader
from qsa_cute.support import Support, SupportCode
from qsa_cute.variants import KERNELS

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp8_e4m3": 1}
MAX_HEADS = geometry.INDEX_HEADS
TOKEN_TOP_K = geometry.TOP_BLOCKS * geometry.BLOCK_TOKENS
MAX_COLUMNS = checks.INT32_MAX // geometry.BLOCK_TOKENS  # lengths are tokens in int32
STEP = 64  # columns that a thread block of the prefill scores at once
WGMMA_ROWS = 64 * KERNELS["paged_scores_wgmma"].tuning[0].baked["groups"]
# Grids of decode, measured on an H200 (docs/lab-vllm-select.md).
DECODE_ROWS = {2: 2, 4: 2, 8: 4}  # query rows baked -> warps of a thread block
DECODE_STEP = 32  # columns that a warp scores at once
DECODE_SHARES = (16, 256)  # of a request's columns, least and most
DECODE_BLOCKS = 8192  # thread blocks from which on more shares only cost
# Scores and selection of decode in one launch, measured there, too.
# Type of the keys -> baked constants, shorter rows first.
ONE_LAUNCH = {
    dtype: [tuning.baked for tuning in KERNELS["paged_select_decode"].tuning if dtype in tuning.dtypes]
    for dtype in ITEM_BYTES
}
ONE_LAUNCH_ROWS = ONE_LAUNCH["bf16"][0]["rows"]  # query rows baked, of each
ONE_LAUNCH_PAYS = ((3072, 1), (8192, checks.INT32_MAX), (checks.INT32_MAX, 8))  # columns up to -> requests from
ONE_LAUNCH_REQUESTS = 256  # and up to
ONE_LAUNCH_BLOCKS = 192  # thread blocks in all of short rows, of which an SM holds two
ONE_LAUNCH_SHORT = ((8, 16), (checks.INT32_MAX, 8))  # requests up to -> ranks of short rows up to
# Of long rows of many requests, whatever fits in one wave: one long row among short ones takes its cluster's time. An
# fp8 row is half as long, and loses more by a second wave.
ONE_LAUNCH_RANKS = {2: 4, 1: 2}
SELECT_DTYPE = "bf16"  # whose artifact the kernels without a type of their own are


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeysLaunch(Launch):
    """Queries and keys.

    Attributes:
        num_columns: that a row may see, at most table_width x page_size, which it is when None.
    """

    q_ptr: int
    k_cache_ptr: int
    page_table: int
    visible_blocks: int
    num_pages: int
    page_size: int
    table_width: int
    dtype: str = "bf16"
    num_heads: int = MAX_HEADS
    num_columns: int | None = None
    q_stride_row: int | None = None
    q_stride_head: int | None = None
    cache_stride_page: int | None = None
    cache_stride_token: int | None = None
    page_table_stride: int | None = None

    def _settle_keys(self, rows: int) -> bool:
        """Whether there is anything to score."""
        dim = geometry.INDEX_HEAD_DIM
        if self.dtype not in ITEM_BYTES:
            raise ArgumentError(f"dtype is {checks.show(self.dtype)}; it takes {', '.join(ITEM_BYTES)}")
        step = checks.ALIGNMENT // ITEM_BYTES[self.dtype]
        heads = checks.integer("num_heads", self.num_heads, 1, MAX_HEADS)
        page = checks.integer("page_size", self.page_size, 1)
        if page % geometry.BLOCK_TOKENS:
            raise ArgumentError(f"page_size is {page}; it takes a multiple of {geometry.BLOCK_TOKENS}")
        most = checks.integer("table_width", self.table_width, 0) * page
        columns = checks.integer("num_columns", most if self.num_columns is None else self.num_columns, 0, most)
        checks.integer("num_columns", columns, 0, MAX_COLUMNS)
        head = checks.stride("q_stride_head", self.q_stride_head, dim, step)
        token = checks.stride("cache_stride_token", self.cache_stride_token, dim, step)
        launches = rows > 0 and columns > 0
        align = {"q_ptr": 16, "k_cache_ptr": 16, "page_table": 4, "visible_blocks": 4}
        checked = place(self) | addresses(self, launches, **align)
        checked |= {
            "num_heads": heads,
            "num_pages": checks.integer("num_pages", self.num_pages, 0),
            "page_size": page,
            "num_columns": columns,
            "q_stride_head": head,
            "q_stride_row": checks.stride("q_stride_row", self.q_stride_row, heads * dim, step),
            "cache_stride_token": token,
            "cache_stride_page": checks.stride("cache_stride_page", self.cache_stride_page, page * token, step),
            "page_table_stride": checks.stride("page_table_stride", self.page_table_stride, self.table_width, step=1),
        }
        checks.settle(self, checked)
        return launches

    def _inputs(self, rows: int) -> list[checks.Extent]:
        size, dim = ITEM_BYTES[self.dtype], geometry.INDEX_HEAD_DIM
        queries = ((rows, self.q_stride_row or 0), (self.num_heads, self.q_stride_head or 0))
        keys = ((self.num_pages, self.cache_stride_page or 0), (self.page_size, self.cache_stride_token or 0))
        q = checks.extent("q", self.q_ptr, queries, dim, size)
        return [q, checks.extent("k_cache", self.k_cache_ptr, keys, dim, size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PagedLaunch(_KeysLaunch):
    """What scores of prefill and decode have in common: num_columns is a row's logits."""

    logits_ptr: int
    lengths_ptr: int
    logits_stride_row: int | None = None

    def _settle(self, rows: int) -> None:
        launches = self._settle_keys(rows)
        columns = self.num_columns or 0
        checked = addresses(self, launches, logits_ptr=16, lengths_ptr=4)
        checked["logits_stride_row"] = checks.stride("logits_stride_row", self.logits_stride_row, columns, step=4)
        checks.settle(self, checked)
        out = checks.extent("logits", self.logits_ptr, ((rows, self.logits_stride_row or 0),), columns, 4)
        checks.disjoint([out, checks.extent("lengths", self.lengths_ptr, (), rows, 4)], self._inputs(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedScoresDecode(_PagedLaunch):
    """logits [num_requests * query_len, num_columns]; rows are request-major, query_len 1 to 8 a request."""

    KERNEL: ClassVar[str] = "paged_scores_decode"

    num_requests: int
    query_len: int = 1
    _wanted: Wanted = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        requests = checks.integer("num_requests", self.num_requests, 0, checks.MAX_GRID_YZ)
        query_len = checks.integer("query_len", self.query_len, 1, MAX_QUERY_LEN)
        self._settle(requests * query_len)
        baked, shares = decode_choice(query_len, requests, self.num_columns or 0)
        grid = (shares, requests, 1) if requests and self.num_columns else 0
        checks.settle(self, {"grid": grid, "_wanted": wanted(self.KERNEL, self.dtype, baked)})

    def run(self, dtype: object = None) -> None:
        """Launch; `dtype` is not looked at."""
        if self.grid:
            kernel: Any = default_loader().peek(self._wanted, self.device, self.stream)
            kernel.launch(self, self.grid, self.stream)


def decode_choice(query_len: int, requests: int, columns: int) -> tuple[Baked, int]:
    """(baked constants, shares of a request's columns) of the decode scores."""
    rows, warps = next(entry for entry in DECODE_ROWS.items() if query_len <= entry[0])
    least, most = DECODE_SHARES
    shares = min(most, max(least, DECODE_BLOCKS // max(1, requests)), -(-columns // (DECODE_STEP * warps)))
    return (("rows", rows), ("warps", warps)), shares


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSelectDecode(_KeysLaunch):
    """Scores and selection in one launch, on SM90: out int32 [num_requests * query_len, 512], the ids that `select_ids`
    gives of `PagedScoresDecode`. query_len 1 or 2, at most 18432 columns.

    Attributes:
        ranks: thread blocks that share a request, 2 to 16; None picks.
    """

    KERNEL: ClassVar[str] = "paged_select_decode"

    out_ptr: int
    num_requests: int
    query_len: int = 1
    out_stride_row: int | None = None
    ranks: int | None = None
    _wanted: Wanted = field(init=False, repr=False, compare=False)
    _unused: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        requests = checks.integer("num_requests", self.num_requests, 0, checks.MAX_GRID_YZ)
        query_len = checks.integer("query_len", self.query_len, 1, ONE_LAUNCH_ROWS)
        rows, top = requests * query_len, geometry.TOP_BLOCKS
        launches = self._settle_keys(rows)
        columns = checks.integer("num_columns", self.num_columns, 0, one_launch_columns())
        if rows and not columns:  # there is no launch that would write the -1 of such rows
            raise ArgumentError(f"num_columns is 0 with {rows} rows; one launch takes at least 1: `select_ids` takes 0")
        baked, unused = one_launch(columns, self.dtype)
        ranks = one_launch_ranks(requests, columns, self.dtype) if self.ranks is None else self.ranks
        checked: dict[str, Any] = dict(addresses(self, launches, out_ptr=4))
        checked |= {
            "out_stride_row": checks.stride("out_stride_row", self.out_stride_row, top, step=1),
            "ranks": checks.integer("ranks", ranks, 2, geometry.MAX_CLUSTER),
            "grid": (ranks, requests, 1) if launches else 0,
            "_wanted": wanted(self.KERNEL, self.dtype, baked),
            "_unused": unused,
        }
        checks.settle(self, checked)
        out = checks.extent("out", self.out_ptr, ((rows, self.out_stride_row or 0),), top, 4)
        checks.disjoint([out], self._inputs(rows))

    def run(self, dtype: object = None) -> None:
        """Launch; `dtype` is not looked at."""
        if self.grid:
            kernel: Any = default_loader().peek(self._wanted, self.device, self.stream)
            smem = kernel.record.smem_bytes - self._unused
            kernel.launch(self, self.grid, self.stream, (self.ranks, 1, 1), smem)


def one_launch_columns() -> int:
    """Most columns that one launch takes, of keys of any type."""
    return min(_columns(baked[-1]) for baked in ONE_LAUNCH.values())


def _columns(baked: Mapping[str, int]) -> int:
    return baked["threads"] * baked["held"]


def one_launch(columns: int, dtype: str) -> tuple[Baked, int]:
    """(baked constants, bytes of its shared memory that rows of so many columns do without)."""
    tuning = next(baked for baked in ONE_LAUNCH[dtype] if columns <= _columns(baked))
    return tuple(tuning.items()), (_columns(tuning) - columns) // 4 * 16


def one_launch_ranks(requests: int, columns: int, dtype: str) -> int:
    """Thread blocks that share a request."""
    if columns <= _columns(ONE_LAUNCH[dtype][0]):
        most = next(most for few, most in ONE_LAUNCH_SHORT if requests <= few)
        return min(most, max(2, ONE_LAUNCH_BLOCKS // max(1, requests)))
    fits = max((blocks for blocks, most in enumerate(CLUSTERS_AT_ONCE, 1) if requests <= most), default=1)
    return fits if fits > 2 else ONE_LAUNCH_RANKS[ITEM_BYTES[dtype]]


def one_launch_pays(query_len: int, requests: int, columns: int) -> bool:
    """Whether one launch covers a decode and takes less time than two."""
    if query_len > ONE_LAUNCH_ROWS or not 0 < columns <= one_launch_columns():
        return False
    least = next(requests for most, requests in ONE_LAUNCH_PAYS if columns <= most)
    return least <= requests <= ONE_LAUNCH_REQUESTS


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedScores(_PagedLaunch):
    """logits [num_rows, num_columns] of rows [row_start, row_start + num_rows) of `total_rows`.

    Attributes:
        query_start_loc: int32 [num_requests + 1]; request b has rows query_start_loc[b] to query_start_loc[b + 1], both
            less query_start_loc[0]. A row of no request sees nothing.
        max_query_len: most rows of a request; None: unknown.
        algorithm: "wgmma" (SM90) or "mma"; None picks what suits the device. Of equal bits but for fp8.
    """

    TILES: ClassVar[dict[str, tuple[str, int]]] = {
        "mma": ("paged_scores_prefill", MMA_ROWS),
        "wgmma": ("paged_scores_wgmma", WGMMA_ROWS),
    }

    query_start_loc: int
    num_requests: int
    total_rows: int
    row_start: int = 0
    num_rows: int | None = None
    max_query_len: int | None = None
    algorithm: str | None = None
    _each: dict[str, tuple[Wanted, tuple[int, int, int]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        total = checks.integer("total_rows", self.total_rows, 0)
        start = checks.integer("row_start", self.row_start, 0, total)
        rows = total - start if self.num_rows is None else self.num_rows
        rows = checks.integer("num_rows", rows, 0, total - start)
        requests = checks.integer("num_requests", self.num_requests, 0)
        longest = rows if self.max_query_len is None else self.max_query_len
        longest = checks.integer("max_query_len", longest, 0)
        if self.algorithm is not None and self.algorithm not in self.TILES:
            raise ArgumentError(f"algorithm is {checks.show(self.algorithm)}; it takes 'wgmma', 'mma' or None")
        self._settle(rows)
        launches = rows > 0 and self.num_columns
        checked: dict[str, Any] = dict(addresses(self, bool(launches), query_start_loc=4))
        checked |= {"row_start": start, "num_rows": rows, "grid": rows if launches else 0}
        each = {
            name: (wanted(kernel, self.dtype), prefill_grid(tile, requests, longest, rows, self.num_columns or 0))
            for name, (kernel, tile) in self.TILES.items()
        }
        checks.settle(self, checked | {"_each": each})

    def run(self, dtype: object = None) -> None:
        """Launch; `dtype` is not looked at."""
        if self.grid:
            loader = default_loader()
            algorithm = self.algorithm or ("wgmma" if capability(loader, self.device) == SM90 else "mma")
            which, grid = self._each[algorithm]
            kernel: Any = loader.peek(which, self.device, self.stream)
            kernel.launch(self, grid, self.stream)


def prefill_grid(tile: int, requests: int, longest: int, rows: int, columns: int) -> tuple[int, int, int]:
    """(slots, column splits): a slot for each tile of `tile` rows of one request that there can be, and for all rows'
    lengths."""
    full = -(-rows // tile)
    slots = min(requests * -(-longest // tile), (rows + requests * (tile - 1)) // tile)
    splits = max(PREFILL_SPLITS, -(-PREFILL_TARGET // max(1, full)))
    splits = max(1, min(splits, -(-columns // STEP), checks.MAX_GRID_YZ))
    return checks.grid("tiles of rows", max(slots, full)), splits, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandCounted(Launch):
    """out int32 [num_rows, 4 * top_blocks + 4]: counted lists from block_indices int32 [num_rows, top_blocks], of which
    min(visible_blocks, top_blocks) are read.

    Attributes:
        query_positions: int32 [num_rows], or int64 with positions_step 2.
    """

    KERNEL: ClassVar[str] = "expand_counted"

    out_ptr: int
    block_indices: int
    query_positions: int
    visible_blocks: int
    num_rows: int
    top_blocks: int = geometry.TOP_BLOCKS
    positions_step: int = 1
    out_stride_row: int | None = None
    blocks_stride_row: int | None = None

    def __post_init__(self) -> None:
        rows = checks.integer("num_rows", self.num_rows, 0)
        top = checks.integer("top_blocks", self.top_blocks, 1, MAX_COLUMNS - 1)
        width = geometry.BLOCK_TOKENS * (top + 1)
        names = dict.fromkeys(("out_ptr", "block_indices", "query_positions", "visible_blocks"), 4)
        checked = place(self) | addresses(self, rows > 0, **names)
        checked |= {
            "top_blocks": top,
            "positions_step": checks.integer("positions_step", self.positions_step, 1, 2),
            "out_stride_row": checks.stride("out_stride_row", self.out_stride_row, width, step=1),
            "blocks_stride_row": checks.stride("blocks_stride_row", self.blocks_stride_row, top, step=1),
            "grid": checks.grid("rows", rows),
        }
        checks.settle(self, checked)
        out = checks.extent("out", self.out_ptr, ((rows, self.out_stride_row or 0),), width, 4)
        ids = ((rows, self.blocks_stride_row or 0),)
        checks.disjoint([out], [checks.extent("block_indices", self.block_indices, ids, top, 4)])

    def run(self, dtype: object = SELECT_DTYPE) -> None:
        """Launch; `dtype` is not looked at."""
        if self.grid:
            which = wanted(self.KERNEL, SELECT_DTYPE)
            kernel: Any = default_loader().peek(which, self.device, self.stream)
            kernel.launch(self, self.grid, self.stream)


def select_ids(logits: _PagedLaunch, rows: int, out_ptr: int, out_stride_row: int) -> Select:
    """The selection of a scores launch's rows: `rows` lists of 512 ascending block ids, then -1."""
    return Select(
        logits_ptr=logits.logits_ptr,
        out_ptr=out_ptr,
        context_lengths=logits.lengths_ptr,
        batch_size=rows,
        seq_len=1,
        num_blocks=logits.num_columns or 0,
        from_end=True,
        expand=False,
        logits_stride_row=logits.logits_stride_row,
        out_stride_row=out_stride_row,
        stream=logits.stream,
        device=logits.device,
    )


class PagedSelectRunner:
    """Questions about, and loading of, the kernels above. All methods are static; none synchronises."""

    def __new__(cls) -> PagedSelectRunner:
        raise ArgumentError("PagedSelectRunner has static methods only; call them on the class")

    @staticmethod
    def can_implement(
        num_heads: object,
        head_dim: object,
        page_size: object,
        token_topk: object,
        compress_ratio: object,
        sm_version: object,
        dtype: object,
        decode_query_len: object = 1,
    ) -> Support:
        """Whether the kernels cover a selection of this shape, from numbers alone. Never raises.

        Args:
            num_heads, head_dim: the indexer's query heads, 1 to 4, and their dim, 128.
            page_size: of the compressed cache, a multiple of 4.
            token_topk, compress_ratio: 2048 and 4.
            sm_version, dtype: as for `SparsePrefillRunner.can_implement`; fp8 e4m3 from SM89 up.
            decode_query_len: rows a request of a decode step, 1 to 8.

        Returns: a `Support`, true or with its reason.
        """
        show = checks.show
        heads, page, length = checks.whole(num_heads), checks.whole(page_size), checks.whole(decode_query_len)
        if heads is None or not 1 <= heads <= MAX_HEADS:
            reason = f"{show(num_heads)} indexer heads; the kernels take 1 to {MAX_HEADS}"
            return Support.no(SupportCode.HEADS, reason)
        if checks.whole(head_dim) != geometry.INDEX_HEAD_DIM:
            reason = f"indexer head dim {show(head_dim)}; the kernels take {geometry.INDEX_HEAD_DIM}"
            return Support.no(SupportCode.HEAD_DIM, reason)
        if page is None or page < 1 or page % geometry.BLOCK_TOKENS:
            reason = f"pages of {show(page_size)} compressed keys; the kernels take a multiple of 4"
            return Support.no(SupportCode.PAGE_SIZE, reason)
        if (checks.whole(token_topk), checks.whole(compress_ratio)) != (TOKEN_TOP_K, geometry.BLOCK_TOKENS):
            reason = (
                f"top {show(token_topk)} tokens in blocks of {show(compress_ratio)}; the kernels take {TOKEN_TOP_K} in "
                f"blocks of {geometry.BLOCK_TOKENS}"
            )
            return Support.no(SupportCode.TOP_K, reason)
        if length is None or not 1 <= length <= MAX_QUERY_LEN:
            reason = f"{show(decode_query_len)} query tokens a request; the kernels take 1 to {MAX_QUERY_LEN}"
            return Support.no(SupportCode.QUERY_LEN, reason)
        return dispatch.target_support(PagedScoresDecode.KERNEL, geometry.INDEX_HEAD_DIM, sm_version, dtype)

    canImplement = can_implement  # noqa: N815 - the hosts' name

    @staticmethod
    def preflight(dtype: object, stream: int | None = None, device: int | None = None) -> None:
        """Load all that scores, selection and expansion may pick, in the current context or `device`'s. Idempotent.

        Args:
            stream: asked whether it is being captured, when a load is needed.
            device: ordinal; the current context's device when None.

        Raises:
            UnsupportedError, ArtifactError, CaptureError, DriverError: see `errors`.
        """
        loader = default_loader()
        sm90 = capability(loader, -1 if device is None else device) == SM90
        dispatch.preload(loader, paged_kernels(sm90, dtype), device, stream, strict=True)


def paged_kernels(sm90: bool, dtype: object) -> list[Wanted]:
    """What scores, selection and expansion may run."""
    scores: list[tuple[str, Baked]] = [("paged_scores_wgmma" if sm90 else "paged_scores_prefill", ())]
    scores += [("paged_scores_decode", decode_choice(rows, 1, 1)[0]) for rows in DECODE_ROWS]
    if sm90:
        name = checks.dtype_name(dtype)
        scores += [(PagedSelectDecode.KERNEL, tuple(baked.items())) for baked in ONE_LAUNCH.get(name or "", ())]
    typeless = [("expand_counted", ()), *(each for each in decode_kernels(sm90) if each[0].startswith("select"))]
    return [wanted(name, dtype, baked) for name, baked in scores] + [
        wanted(name, SELECT_DTYPE, baked) for name, baked in typeless
    ]


def require(support: Support) -> None:
    """Raises UnsupportedError with the reason of a no."""
    if not support:
        raise UnsupportedError(support.reason)
