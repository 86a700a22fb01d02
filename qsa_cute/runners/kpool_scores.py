"""Scoring and selection of pools, between kpool's cache and its expansion; conventions as in `kpool.py`.

A row is one query token: q e4m3 [num_rows, 32, 128] and FP32 weights [num_rows, 32], which carry whatever factors the
caller has (the query's quantisation scale, the softmax scale, the head's weight), as DeepGEMM's fp8_mqa_logits has it.

    logit[r, g] = (sum_h weights[r, h] relu(q[r, h] . key[g])) scale[g]     h ascending, g < seq_lens[r] // 4

seq_lens int32 [num_rows] counts the tokens that a row sees, its own included; a row sees no pool where it is below 4.
Pool g of request b lies on page block_table[b, g // page_size]; pages outside the cache count as zeros, unread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks, dispatch
from qsa_cute.runners.dispatch import SM90, Baked
from qsa_cute.runners.indexer_launch import addresses, place
from qsa_cute.runners.indexer_select import Select, selection_kernels
from qsa_cute.runners.kpool import HEAD_DIM, KpoolLaunch, cache_fields, cache_of
from qsa_cute.runners.kpool_expand import ExpandTail
from qsa_cute.runners.tensors import Binder, current_stream
from qsa_cute.runners.workspace import ALIGNMENT, Workspace
from qsa_cute.runtime import default_loader

HEADS, TOP, POOL = geometry.KPOOL_HEADS, geometry.TOP_BLOCKS, geometry.BLOCK_TOKENS
ROW_ELEMS = HEADS * HEAD_DIM
WIDTH = TOP * POOL + POOL - 1  # of a row's list of tokens
MAX_NEXT_N = 8  # new tokens a request that one decode step takes
SCRATCH_BYTES = 512 << 20  # of logits that a selection holds at a time
TILE = 64  # pools a step of the kernel
PAGE_STEP = 8  # a page has a multiple of this many pools

# (rows a tile, baked constants): of prefill, and of decode steps of up to so many tokens.
PREFILL: tuple[int, Baked] = (16, (("rows", 8), ("groups", 2), ("stages", 4)))
DECODE: tuple[tuple[int, Baked], ...] = (
    (4, (("rows", 4), ("groups", 1), ("stages", 6))),
    (8, (("rows", 4), ("groups", 2), ("stages", 6))),
)
# Thread blocks that a launch should have, by sharing out columns: some waves of an H200's 132 SMs (docs/lab-kpool.md).
PREFILL_BLOCKS, DECODE_BLOCKS = 1024, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolScores(KpoolLaunch):
    """logits FP32 [num_rows, num_pools] of what each row sees; the rest is not written.

    Attributes:
        next_n: 0 for prefill, whose rows belong to row_requests[r] (int32, equal ones together; 0: all to request 0).
            1 to 8 for a decode step: row r belongs to request r // next_n.
        block_table_ptr: int32 [num_requests, max_pages].
        q_stride_row, weights_stride_row, logits_stride_row, block_table_stride: in elements.
    """

    KERNEL: ClassVar[str] = "kpool_scores"
    DTYPE: ClassVar[str] = "fp8_e4m3"

    q_ptr: int
    weights_ptr: int
    cache_ptr: int
    block_table_ptr: int
    seq_lens_ptr: int
    logits_ptr: int
    num_rows: int
    num_pools: int
    num_requests: int
    page_size: int
    num_pages: int
    page_stride: int
    max_pages: int
    next_n: int = 0
    row_requests_ptr: int = 0
    q_stride_row: int | None = None
    weights_stride_row: int | None = None
    block_table_stride: int | None = None
    logits_stride_row: int | None = None
    tile_rows: int = field(init=False)
    by_tile: int = field(init=False)

    def __post_init__(self) -> None:
        rows, pools = checks.integer("num_rows", self.num_rows, 0), checks.integer("num_pools", self.num_pools, 0)
        next_n = checks.integer("next_n", self.next_n, 0, MAX_NEXT_N)
        requests = checks.integer("num_requests", self.num_requests, 0)
        if next_n and rows != next_n * requests:
            raise ArgumentError(f"num_rows is {rows}; {requests} requests of next_n {next_n} have {next_n * requests}")
        work = rows > 0 and pools > 0
        checked: dict[str, Any] = place(self) | cache_fields(self, True, align=16)
        if checked["page_size"] % PAGE_STEP:
            raise ArgumentError(f"page_size is {self.page_size}; scores take a multiple of {PAGE_STEP}")
        checked |= addresses(self, work, q_ptr=16, weights_ptr=16, block_table_ptr=4, seq_lens_ptr=4, logits_ptr=8)
        checked |= addresses(self, False, row_requests_ptr=4)
        pages = checks.integer("max_pages", self.max_pages, 0)
        held, baked = PREFILL if not next_n else next(entry for entry in DECODE if next_n <= entry[0])
        tile_rows = next_n or held
        tiles = -(-rows // tile_rows)
        splits = -(-(DECODE_BLOCKS if next_n else PREFILL_BLOCKS) // max(1, tiles))
        splits = min(splits, -(-pools // TILE), checks.MAX_GRID_YZ)
        checked |= {
            "max_pages": pages,
            "next_n": next_n,
            "tile_rows": tile_rows,
            "by_tile": int(next_n > 0),
            "q_stride_row": checks.stride("q_stride_row", self.q_stride_row, ROW_ELEMS, 16),
            "weights_stride_row": checks.stride("weights_stride_row", self.weights_stride_row, HEADS, 4),
            "block_table_stride": checks.stride("block_table_stride", self.block_table_stride, pages, 1),
            "logits_stride_row": checks.stride("logits_stride_row", self.logits_stride_row, pools + pools % 2, 2),
            "baked": baked,
            "grid": (tiles, splits, 1) if work else 0,
        }
        checks.settle(self, checked)
        out = checks.extent("logits", self.logits_ptr, ((rows, self.logits_stride_row or 0),), pools, 4)
        q = checks.extent("q", self.q_ptr, ((rows, self.q_stride_row or 0),), ROW_ELEMS, 1)
        checks.disjoint([out], [q])

    @classmethod
    def from_tensors(
        cls,
        q: Any,
        weights: Any,
        kv_cache: Any,
        block_table: Any,
        seq_lens: Any,
        logits: Any,
        *,
        row_requests: Any = None,
        next_n: int = 0,
        stream: int | None = None,
    ) -> PoolScores:
        """From CUDA tensors: q float8_e4m3fn [rows, 32, 128], weights FP32 [rows, 32], kv_cache uint8 [pages,
        page_size, 132], block_table int32 [requests, max_pages], seq_lens and row_requests int32 [rows], logits FP32
        [rows, pools].

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit.
        """
        binder = Binder()
        fields = _inputs(binder, q, weights, kv_cache, block_table, seq_lens, row_requests)
        out = binder.take("logits", logits, "rows pools", "f32")
        return cls(
            logits_ptr=out.pointer,
            logits_stride_row=out.strides[0] or None,
            num_pools=binder.size("pools"),
            next_n=next_n,
            stream=current_stream(binder.device, q) if stream is None else stream,
            device=binder.device,
            **fields,
        )


def _inputs(
    binder: Binder, q: Any, weights: Any, kv_cache: Any, block_table: Any, seq_lens: Any, row_requests: Any
) -> dict[str, int]:
    """Launch fields that scoring and selection share."""
    queries = binder.take("q", q, f"rows {HEADS} {HEAD_DIM}", "fp8_e4m3")
    if queries.strides[1] != HEAD_DIM:
        raise ArgumentError(f"q has strides {queries.strides}; the heads of a row are contiguous")
    factors = binder.take("weights", weights, f"rows {HEADS}", "f32")
    table = binder.take("block_table", block_table, "requests max_pages", "i32")
    cache = cache_of(binder, kv_cache)
    return {
        "q_ptr": queries.pointer,
        "weights_ptr": factors.pointer,
        "block_table_ptr": table.pointer,
        "seq_lens_ptr": binder.pointer("seq_lens", seq_lens, "rows", "i32"),
        "row_requests_ptr": binder.pointer("row_requests", row_requests, "rows", "i32"),
        "num_rows": binder.size("rows"),
        "num_requests": binder.size("requests"),
        "max_pages": binder.size("max_pages"),
        "q_stride_row": queries.strides[0],
        "weights_stride_row": factors.strides[0],
        "block_table_stride": table.strides[0],
        **cache,
    }


def _logits_row(max_seq_len: int) -> int:
    """Width of a row of logits: a context's pools, 16-byte rows; 0 where every row takes all it sees, unscored."""
    pools = max_seq_len // POOL
    return -(-pools // 4) * 4 if pools > TOP else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSelectParams:
    """The 512 best pools of each row, and with `tokens_ptr` their tokens: scores, selection and expansion.

    Fields as in `PoolScores`. pool_ids int32 [num_rows, 512], ascending, then -1; tokens int32 [num_rows, 2051], the
    pools' tokens, from column 2048 on those of the row's open pool, -1 elsewhere. Ties go to the lower pool.

    Attributes:
        max_seq_len: the longest of seq_lens, as the host knows it; pools beyond it are not scored. It fixes the
            workspace and the grid.
        workspace, workspace_bytes: address and size of `PoolSelectRunner.workspace_size`; None: not checked.
        scratch_bytes: of the workspace for logits; rows are taken in chunks that fit.
        launches: what `run` launches, in order.

    Raises:
        ArgumentError: a value that no launch could take, a workspace too small, a block table that does not reach
            max_seq_len, or an output that overlaps an input.
    """

    q_ptr: int
    weights_ptr: int
    cache_ptr: int
    block_table_ptr: int
    seq_lens_ptr: int
    pool_ids_ptr: int
    num_rows: int
    num_requests: int
    max_seq_len: int
    page_size: int
    num_pages: int
    page_stride: int
    max_pages: int
    next_n: int = 0
    row_requests_ptr: int = 0
    tokens_ptr: int = 0
    workspace: int = 0
    workspace_bytes: int | None = None
    scratch_bytes: int = SCRATCH_BYTES
    q_stride_row: int | None = None
    weights_stride_row: int | None = None
    block_table_stride: int | None = None
    stream: int = 0
    device: int = -1
    launches: tuple[Any, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = checks.integer("num_rows", self.num_rows, 0)
        longest = checks.integer("max_seq_len", self.max_seq_len, 0, checks.INT32_MAX // 2)
        next_n = checks.integer("next_n", self.next_n, 0, MAX_NEXT_N)
        requests = checks.integer("num_requests", self.num_requests, 0)
        if next_n and (rows % next_n or rows // next_n > requests):
            raise ArgumentError(
                f"block_table has {requests} requests, which have {next_n * requests} rows at next_n {next_n}; q has "
                f"{rows} rows"
            )
        reach = checks.integer("max_pages", self.max_pages, 0) * checks.integer("page_size", self.page_size, 1) * POOL
        if rows and longest // POOL * POOL > reach:
            raise ArgumentError(
                f"block_table has {self.max_pages} pages a request, which hold {reach} tokens; max_seq_len is {longest}"
            )
        needed = PoolSelectRunner.workspace_size(rows, longest, next_n, self.scratch_bytes)
        base = checks.address("workspace", self.workspace, ALIGNMENT, needed.size > 0)
        if self.workspace_bytes is not None and self.workspace_bytes < needed.size:
            raise ArgumentError(
                f"workspace has {self.workspace_bytes} bytes; this call needs {needed.size}, see workspace_size"
            )
        checked = addresses(self, rows > 0, pool_ids_ptr=4, seq_lens_ptr=4) | addresses(self, False, tokens_ptr=4)
        checks.settle(self, checked)
        step = chunk_rows(rows, longest, next_n, self.scratch_bytes)
        logits = needed.addresses(base).get("logits", 0)
        made: list[Any] = []
        for start in range(0, rows, max(1, step)):
            made += self._chunk(start, min(step, rows - start), _logits_row(longest), logits)
        if self.tokens_ptr:
            made.append(
                ExpandTail(
                    out_ptr=self.tokens_ptr,
                    ids_ptr=self.pool_ids_ptr,
                    seq_lens_ptr=self.seq_lens_ptr,
                    num_rows=rows,
                    topk=TOP * POOL,
                    tail=POOL - 1,
                    pool_size=POOL,
                    stream=self.stream,
                    device=self.device,
                )
            )
        object.__setattr__(self, "launches", tuple(made))

    def _chunk(self, start: int, rows: int, width: int, logits: int) -> list[Any]:
        """The launches of rows [start, start + rows)."""
        pools = self.max_seq_len // POOL
        made: list[Any] = []
        q_row = ROW_ELEMS if self.q_stride_row is None else self.q_stride_row
        weights_row = HEADS if self.weights_stride_row is None else self.weights_stride_row
        table_row = self.max_pages if self.block_table_stride is None else self.block_table_stride
        request = start // self.next_n if self.next_n else 0
        if width:
            scores = PoolScores(
                q_ptr=self.q_ptr + start * q_row,
                weights_ptr=self.weights_ptr + 4 * start * weights_row,
                cache_ptr=self.cache_ptr,
                block_table_ptr=self.block_table_ptr + 4 * request * table_row,
                seq_lens_ptr=self.seq_lens_ptr + 4 * start,
                row_requests_ptr=self.row_requests_ptr + 4 * start if self.row_requests_ptr else 0,
                logits_ptr=logits,
                num_rows=rows,
                num_pools=pools,
                num_requests=rows // self.next_n if self.next_n else self.num_requests,
                next_n=self.next_n,
                page_size=self.page_size,
                num_pages=self.num_pages,
                page_stride=self.page_stride,
                max_pages=self.max_pages,
                q_stride_row=q_row,
                weights_stride_row=weights_row,
                block_table_stride=table_row,
                logits_stride_row=width,
                stream=self.stream,
                device=self.device,
            )
            made.append(scores)
        # A row alone is a sequence of one query token at its end: it sees the blocks of its own length.
        select = Select(
            logits_ptr=logits,
            out_ptr=self.pool_ids_ptr + 4 * start * TOP,
            context_lengths=self.seq_lens_ptr + 4 * start,
            batch_size=rows,
            seq_len=1,
            num_blocks=pools,
            from_end=True,
            expand=False,
            logits_stride_row=width or pools,
            stream=self.stream,
            device=self.device,
        )
        return [*made, select]

    @classmethod
    def from_tensors(
        cls,
        q: Any,
        weights: Any,
        kv_cache: Any,
        block_table: Any,
        seq_lens: Any,
        pool_ids: Any,
        workspace: Any,
        *,
        max_seq_len: int,
        row_requests: Any = None,
        next_n: int = 0,
        tokens: Any = None,
        scratch_bytes: int = SCRATCH_BYTES,
        stream: int | None = None,
    ) -> PoolSelectParams:
        """From CUDA tensors: as `PoolScores.from_tensors`; pool_ids int32 [rows, 512], tokens int32 [rows, 2051] or
        None, workspace uint8 of `PoolSelectRunner.workspace_size` or None where that is 0.

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit, or as the class.
        """
        binder = Binder()
        fields = _inputs(binder, q, weights, kv_cache, block_table, seq_lens, row_requests)
        memory = None if workspace is None else binder.take("workspace", workspace, "bytes", "u8")
        return cls(
            pool_ids_ptr=binder.pointer("pool_ids", pool_ids, f"rows {TOP}", "i32"),
            tokens_ptr=binder.pointer("tokens", tokens, f"rows {WIDTH}", "i32"),
            max_seq_len=max_seq_len,
            next_n=next_n,
            workspace=memory.pointer if memory else 0,
            workspace_bytes=memory.shape[0] if memory else 0,
            scratch_bytes=scratch_bytes,
            stream=current_stream(binder.device, q) if stream is None else stream,
            device=binder.device,
            **fields,
        )


def chunk_rows(rows: int, max_seq_len: int, next_n: int, scratch_bytes: int) -> int:
    """Rows whose logits fit the scratch at a time: whole requests of a decode step, whole tiles of a prefill."""
    width = _logits_row(max_seq_len)
    if not width:
        return rows
    fit, step = max(1, scratch_bytes // (4 * width)), next_n or PREFILL[0]
    return min(rows, max(step if next_n else 1, fit // step * step or fit))


class PoolSelectRunner:
    """Scoring and selection of pools. All methods are static; none synchronises. See `KpoolRunner.can_implement`."""

    def __new__(cls) -> PoolSelectRunner:
        raise ArgumentError("PoolSelectRunner has static methods only; call them on the class")

    @staticmethod
    def workspace_size(
        num_rows: int, max_seq_len: int, next_n: int = 0, scratch_bytes: int = SCRATCH_BYTES
    ) -> Workspace:
        """Memory for logits; free again after the call. Nothing up to 2051 tokens, where every pool is taken.

        Raises:
            ArgumentError: a size is out of range.
        """
        rows = checks.integer("num_rows", num_rows, 0)
        longest = checks.integer("max_seq_len", max_seq_len, 0, checks.INT32_MAX // 2)
        n = checks.integer("next_n", next_n, 0, MAX_NEXT_N)
        scratch = checks.integer("scratch_bytes", scratch_bytes, 1, 1 << 48)
        width = _logits_row(longest)
        return Workspace.of(*([("logits", "f32", (chunk_rows(rows, longest, n, scratch), width))] if width else []))

    @staticmethod
    def preflight(stream: int | None = None, device: int | None = None) -> None:
        """Load what `run` may pick, in the current context or `device`'s. Idempotent; can be tried again.

        Raises:
            UnsupportedError, ArtifactError, CaptureError, DriverError: see `errors`.
        """
        loader = default_loader()
        sm90 = dispatch.capability(loader, -1 if device is None else device) == SM90
        each = [dispatch.wanted("kpool_scores", HEAD_DIM, "fp8_e4m3", baked) for _, baked in (PREFILL, *DECODE)]
        each += [dispatch.wanted(name, HEAD_DIM, "bf16", baked) for name, baked in selection_kernels(sm90)]
        each.append(dispatch.wanted("kpool_expand", HEAD_DIM, "bf16"))
        dispatch.preload(loader, each, device, stream, strict=True)

    @staticmethod
    def run(params: PoolSelectParams) -> None:
        """Launch on `params.stream`. Allocates nothing, safe under capture.

        Raises:
            CaptureError: the first use in this context is under capture; call `preflight` before.
            ArtifactError, DriverError: loading or launching failed.
            ArgumentError: params of another class.
        """
        checks.instance("params", params, PoolSelectParams)
        for launch in params.launches:
            launch.run()
