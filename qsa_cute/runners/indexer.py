"""The indexer: from its projections to each query row's list of tokens, prefill and decode.

Both are made of the launches in `indexer_launch.py` and `indexer_select.py`, whose conventions hold here, and leave in
the pool what later calls need: block keys in V-tails, the open block's raw keys in K-tails. A row's list has the same
blocks whichever calls brought its context: one prefill, chunks of any length, decode steps of 1 to 8 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks, dispatch
from qsa_cute.runners.dispatch import SM90, capability
from qsa_cute.runners.indexer_launch import (
    INDEX_COLUMNS,
    KeyCompress,
    Launch,
    PreDecode,
    QueryPrepare,
    RawKeyTailWrite,
    wanted,
)
from qsa_cute.runners.indexer_select import (
    MAX_QUERY_LEN,
    Scores,
    ScoresDecode,
    Select,
    decode_kernels,
    prefill_kernels,
)
from qsa_cute.runners.indexer_state import QsaIndexerPoolState
from qsa_cute.runners.tensors import Binder, current_stream
from qsa_cute.runners.workspace import ALIGNMENT, PartSpec, Workspace
from qsa_cute.runtime import default_loader
from qsa_cute.support import Support, SupportCode

SCRATCH_BYTES = 512 << 20  # of logits that a prefill holds at a time
ROW_STEP = 128  # rows of a chunk: a multiple of this, the largest tile of the scores
STRIDE_STEP = 4  # FP32 logits of 16 bytes
# A context up to here has no row that sees more than 512 blocks: all are taken, nothing need be scored.
UNSCORED_CONTEXT = (geometry.TOP_BLOCKS + 1) * geometry.BLOCK_TOKENS - 1


def _context(value: object) -> int:
    return checks.integer("max_context_len", value, 0, checks.INT32_MAX - 2 * geometry.PAGE_TOKENS)


def _logits_row(max_context_len: int) -> int:
    """Width of a row of logits: the blocks of a context, 16-byte rows; 0 where nothing is scored."""
    if max_context_len <= UNSCORED_CONTEXT:
        return 0
    return -(-(max_context_len // geometry.BLOCK_TOKENS) // STRIDE_STEP) * STRIDE_STEP


def chunk_rows(rows: int, max_context_len: int, scratch_bytes: int) -> int:
    """Query rows whose logits fit the scratch at a time; at least 1."""
    width = _logits_row(max_context_len)
    if not width:
        return rows
    fit = max(1, scratch_bytes // (4 * width))
    return min(rows, fit // ROW_STEP * ROW_STEP or fit)


def prefill_parts(batch: int, rows: int, max_context_len: int, scratch_bytes: int) -> list[PartSpec]:
    """What a prefill's workspace holds, for `Workspace.of`."""
    width, dim = _logits_row(max_context_len), geometry.INDEX_HEAD_DIM
    if not width:
        return []
    return [
        ("q_normed", "elem", (batch * rows, geometry.INDEX_HEADS, dim)),
        ("kbar", "elem", (batch, max_context_len // geometry.BLOCK_TOKENS, dim)),
        ("logits", "f32", (chunk_rows(batch * rows, max_context_len, scratch_bytes), width)),
    ]


def decode_parts(batch: int, query_len: int, max_context_len: int) -> list[PartSpec]:
    """What a decode step's workspace holds, for `Workspace.of`."""
    rows, width = batch * query_len, _logits_row(max_context_len)
    parts: list[PartSpec] = [("q_normed", "elem", (rows, geometry.INDEX_HEADS, geometry.INDEX_HEAD_DIM))]
    return [*parts, ("logits", "f32", (rows, width))] if width else parts


def take_workspace(params: Any, needed: Workspace) -> dict[str, int]:
    """The parts' addresses in `params.workspace`, once it is found large enough."""
    base = checks.address("workspace", params.workspace, ALIGNMENT, needed.size > 0)
    if params.workspace_bytes is not None and params.workspace_bytes < needed.size:
        raise ArgumentError(
            f"workspace has {params.workspace_bytes} bytes; this call needs {needed.size}, see workspace_size"
        )
    return needed.addresses(base)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerPrefillParams:
    """One prefill of the indexer, for prompts or chunks of them.

    Shapes as in `indexer_launch.py`: index_qk [batch_size, seq_len, 640], cos_sin FP32 [max_positions, 64], w_q and w_k
    [128] as stored, out_idx int32 [batch_size * seq_len, 2051]: a row's chosen tokens, then -1; all -1 for padded rows.

    Attributes:
        pool_state: where keys are kept; None for a prefill that no other call follows.
        query_starts: int32 [batch_size], tokens already in the pool, any number; 0 for none.
        max_context_len: longest context, these rows included, as the host knows it: what is beyond it is not scored.
            None: seq_len, or with query_starts all that the page table can map.
        workspace, workspace_bytes: address and size of `IndexerPrefillRunner.workspace_size`; None: not checked.
        scratch_bytes: of the workspace for logits; rows are taken in chunks that fit.
        dtype: of the projections, weights and keys, which `run` must then be given; "" where it is not known, of raw
            addresses.
        launches: what `run` launches, in order.

    Raises:
        ArgumentError: a value that no launch could take, a workspace too small, or an output that overlaps an input.
    """

    index_qk_ptr: int
    cos_sin_ptr: int
    context_lengths: int
    w_q_ptr: int
    w_k_ptr: int
    out_idx_ptr: int
    batch_size: int
    seq_len: int
    workspace: int = 0
    workspace_bytes: int | None = None
    pool_state: QsaIndexerPoolState | None = None
    query_starts: int = 0
    max_context_len: int | None = None
    max_positions: int = checks.INT32_MAX
    rms_eps: float = geometry.RMS_EPS
    index_stride_batch: int | None = None
    index_stride_row: int | None = None
    out_stride_row: int = geometry.INDEX_WIDTH
    scratch_bytes: int = SCRATCH_BYTES
    stream: int = 0
    device: int = -1
    dtype: str = ""
    launches: tuple[Launch, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        batch, rows = checks.integer("batch_size", self.batch_size, 0), checks.integer("seq_len", self.seq_len, 0)
        if self.query_starts and self.pool_state is None:
            raise ArgumentError("query_starts are given without a pool_state; earlier keys are read from the pool")
        longest = self.max_context_len
        if longest is None:
            longest = self.pool_state.reach if self.query_starts and self.pool_state is not None else rows
        longest = _context(longest)
        if self.pool_state is not None:
            checks.reach(self.pool_state.max_pages_per_seq, longest)
        scratch = checks.integer("scratch_bytes", self.scratch_bytes, 1, 1 << 48)
        dtype = checks.element("dtype", self.dtype)
        checks.settle(self, {"max_context_len": longest, "scratch_bytes": scratch, "dtype": dtype, "launches": ()})
        if batch * rows:
            at = take_workspace(self, Workspace.of(*prefill_parts(batch, rows, longest, scratch)))
            checks.settle(self, {"launches": (*self._keys(at), *self._lists(at))})

    def _common(self, *names: str) -> dict[str, Any]:
        every = ("context_lengths", "batch_size", "seq_len", "query_starts", "stream", "device", *names)
        return {name: getattr(self, name) for name in every}

    def _keys(self, at: dict[str, int]) -> list[Launch]:
        """The pool brought up to date, and all block keys of the context in one dense array where they are scored."""
        rows = self._common("index_qk_ptr", "index_stride_batch", "index_stride_row")
        weights = {name: getattr(self, name) for name in ("cos_sin_ptr", "max_positions", "w_k_ptr", "rms_eps")}
        state = self.pool_state
        found: list[Launch] = []
        if state is not None or at:
            compress = KeyCompress(
                kbar_ptr=at.get("kbar", 0),
                num_blocks=(self.max_context_len or 0) // geometry.BLOCK_TOKENS,
                read_pool=bool(self.query_starts),
                pool_state=state,
                **rows,
                **weights,
            )
            found.append(compress)
        if state is not None:
            found.append(RawKeyTailWrite(pool_state=state, **rows))
        return found

    def _lists(self, at: dict[str, int]) -> list[Launch]:
        """Queries, then scores and selection of a chunk of rows after the other."""
        found: list[Launch] = []
        longest, total = self.max_context_len or 0, self.batch_size * self.seq_len
        common, blocks = self._common(), longest // geometry.BLOCK_TOKENS
        stride = checks.stride("out_stride_row", self.out_stride_row, geometry.INDEX_WIDTH, step=1)
        logits: dict[str, Any] = {"logits_ptr": at.get("logits", 0), "logits_stride_row": _logits_row(longest)}
        logits["num_blocks"] = blocks
        if at:
            rows = self._common("index_qk_ptr", "index_stride_batch", "index_stride_row", "max_positions")
            rows |= {name: getattr(self, name) for name in ("cos_sin_ptr", "w_q_ptr", "rms_eps")}
            found.append(QueryPrepare(q_normed_ptr=at["q_normed"], **rows))
        step = chunk_rows(total, longest, self.scratch_bytes)
        for start in range(0, total, step):
            chunk: dict[str, Any] = {"row_start": start, "num_rows": min(step, total - start)}
            if at:
                keys: dict[str, Any] = {"q_normed_ptr": at["q_normed"], "kbar_ptr": at["kbar"]}
                found.append(Scores(fill=False, **keys, **logits, **chunk, **common))
            out = self.out_idx_ptr + 4 * start * stride if self.out_idx_ptr else 0
            found.append(Select(out_ptr=out, out_stride_row=stride, **logits, **chunk, **common))
        return found

    @classmethod
    def from_tensors(
        cls,
        index_qk: Any,
        cos_sin: Any,
        context_lengths: Any,
        w_q: Any,
        w_k: Any,
        out_idx: Any,
        workspace: Any,
        *,
        kv_pool: Any = None,
        page_table: Any = None,
        head_size: int = geometry.HEAD_DIM,
        query_starts: Any = None,
        max_context_len: int | None = None,
        rms_eps: float = geometry.RMS_EPS,
        scratch_bytes: int = SCRATCH_BYTES,
        stream: int | None = None,
    ) -> IndexerPrefillParams:
        """From CUDA tensors of the shapes above: torch's, or what `runners.tensors` takes.

        Args:
            out_idx: int32 [batch, seq_len, 2051].
            workspace: uint8 [bytes]; None where `workspace_size` is 0.
            kv_pool, page_table: [2 * num_pages, 128, kv_heads, pool_head_dim] and int32 [batch, 2, max_pages].
            stream: CUstream as an integer; None is torch's current stream on the tensors' device.

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit, or memory overlaps.
        """
        binder = Binder()
        common = take_rows(binder, index_qk, cos_sin, context_lengths, w_q, w_k, out_idx, workspace)
        state = None
        if kv_pool is not None:
            state = QsaIndexerPoolState.from_tensors(kv_pool, page_table, head_size=head_size, binder=binder)
        return cls(
            **common,
            seq_len=binder.size("rows"),
            pool_state=state,
            query_starts=binder.pointer("query_starts", query_starts, "batch", "i32"),
            max_context_len=max_context_len,
            rms_eps=rms_eps,
            scratch_bytes=scratch_bytes,
            stream=current_stream(binder.device, index_qk) if stream is None else stream,
        )


def take_rows(
    binder: Binder,
    index_qk: Any,
    cos_sin: Any,
    context_lengths: Any,
    w_q: Any,
    w_k: Any,
    out_idx: Any,
    workspace: Any,
) -> dict[str, Any]:
    """The fields that prefill and decode have in common, from tensors."""
    qk = binder.take("index_qk", index_qk, f"batch rows {INDEX_COLUMNS}", "elem")
    table = binder.take("cos_sin", cos_sin, f"max_positions {geometry.ROPE_DIM}", "f32", contiguous=True)
    out = binder.take("out_idx", out_idx, f"batch rows {geometry.INDEX_WIDTH}", "i32")
    dim = f"{geometry.INDEX_HEAD_DIM}"
    space = None if workspace is None else binder.take("workspace", workspace, "workspace_bytes", "u8")
    return {
        "index_qk_ptr": qk.pointer,
        "cos_sin_ptr": table.pointer,
        "context_lengths": binder.pointer("context_lengths", context_lengths, "batch", "i32"),
        "w_q_ptr": binder.pointer("w_q", w_q, dim, "elem"),
        "w_k_ptr": binder.pointer("w_k", w_k, dim, "elem"),
        "out_idx_ptr": out.pointer,
        "batch_size": binder.size("batch"),
        "workspace": space.pointer if space else 0,
        "workspace_bytes": space.shape[0] if space else 0,
        "max_positions": binder.size("max_positions"),
        "index_stride_batch": qk.strides[0],
        "index_stride_row": qk.strides[1],
        "out_stride_row": out.row_stride(),
        "device": binder.device,
        "dtype": binder.dtype,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerDecodeParams:
    """One decode step of the indexer: 1 to 8 new tokens a sequence, positions in order.

    index_qk is [batch_size, query_len, 640], out_idx int32 [batch_size * query_len, 2051]; the rest as for
    `IndexerPrefillParams`. context_lengths include the new tokens. Lengths are the truth: what a sequence's rejected
    tokens left behind is overwritten by the step that brings tokens in their place, and not read before.

    Attributes:
        max_context_len: longest context, as the host knows it; None is all that the page table can map. It fixes the
            grids, so that a captured step serves every shorter context.
        split_counters: int32 [batch_size * query_len, num_kv_heads], zeroed on the way; 0 for none.
        launches: what `run` launches, in order; three, or two where no context can have more than 512 blocks.

    Raises:
        ArgumentError: as `IndexerPrefillParams`.
    """

    index_qk_ptr: int
    cos_sin_ptr: int
    context_lengths: int
    w_q_ptr: int
    w_k_ptr: int
    out_idx_ptr: int
    pool_state: QsaIndexerPoolState
    batch_size: int
    query_len: int = 1
    workspace: int = 0
    workspace_bytes: int | None = None
    max_context_len: int | None = None
    max_positions: int = checks.INT32_MAX
    rms_eps: float = geometry.RMS_EPS
    split_counters: int = 0
    num_kv_heads: int = geometry.NUM_KV_HEADS
    index_stride_batch: int | None = None
    index_stride_row: int | None = None
    out_stride_row: int = geometry.INDEX_WIDTH
    stream: int = 0
    device: int = -1
    dtype: str = ""
    launches: tuple[Launch, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        batch = checks.integer("batch_size", self.batch_size, 0)
        query_len = checks.integer("query_len", self.query_len, 1, MAX_QUERY_LEN)
        checks.instance("pool_state", self.pool_state, QsaIndexerPoolState)
        longest = _context(self.pool_state.reach if self.max_context_len is None else self.max_context_len)
        checks.reach(self.pool_state.max_pages_per_seq, longest)
        dtype = checks.element("dtype", self.dtype)
        checks.settle(self, {"max_context_len": longest, "dtype": dtype, "launches": ()})
        if batch:
            at = take_workspace(self, Workspace.of(*decode_parts(batch, query_len, longest)))
            checks.settle(self, {"launches": self._launches(at, longest // geometry.BLOCK_TOKENS)})

    def _launches(self, at: dict[str, int], blocks: int) -> tuple[Launch, ...]:
        common = {name: getattr(self, name) for name in ("context_lengths", "batch_size", "stream", "device")}
        own = "index_qk_ptr index_stride_batch index_stride_row cos_sin_ptr max_positions w_q_ptr w_k_ptr rms_eps"
        fields = {name: getattr(self, name) for name in (*own.split(), "query_len", "pool_state")}
        prepare = PreDecode(q_normed_ptr=at["q_normed"], **fields, **common)
        logits: dict[str, Any] = {"logits_ptr": at.get("logits", 0)}
        logits["logits_stride_row"] = _logits_row(self.max_context_len or 0)
        select = Select(
            out_ptr=self.out_idx_ptr,
            out_stride_row=self.out_stride_row,
            num_blocks=blocks,
            seq_len=self.query_len,
            from_end=True,
            split_counters=self.split_counters,
            num_kv_heads=self.num_kv_heads,
            **logits,
            **common,
        )
        if "logits" not in at:
            return prepare, select
        state, queries = self.pool_state, at["q_normed"]
        scores = ScoresDecode(
            q_normed_ptr=queries,
            max_blocks=blocks,
            query_len=self.query_len,
            follows_prepare=True,
            pool_state=state,
            **logits,
            **common,
        )
        return prepare, scores, select

    @classmethod
    def from_tensors(
        cls,
        index_qk: Any,
        cos_sin: Any,
        context_lengths: Any,
        w_q: Any,
        w_k: Any,
        out_idx: Any,
        workspace: Any,
        kv_pool: Any,
        page_table: Any,
        *,
        head_size: int = geometry.HEAD_DIM,
        max_context_len: int | None = None,
        rms_eps: float = geometry.RMS_EPS,
        split_counters: Any = None,
        stream: int | None = None,
    ) -> IndexerDecodeParams:
        """From CUDA tensors: index_qk [batch, query_len, 640], out_idx int32 [batch, query_len, 2051], split_counters
        int32 [batch, query_len, kv_heads]; the rest as for `IndexerPrefillParams.from_tensors`.

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit, or memory overlaps.
        """
        binder = Binder()
        common = take_rows(binder, index_qk, cos_sin, context_lengths, w_q, w_k, out_idx, workspace)
        state = QsaIndexerPoolState.from_tensors(kv_pool, page_table, head_size=head_size, binder=binder)
        return cls(
            **common,
            query_len=binder.size("rows"),
            pool_state=state,
            max_context_len=max_context_len,
            rms_eps=rms_eps,
            split_counters=binder.pointer("split_counters", split_counters, "batch rows kv_heads", "i32"),
            num_kv_heads=binder.size("kv_heads"),
            stream=current_stream(binder.device, index_qk) if stream is None else stream,
        )


def indexer_support(num_heads: object, head_dim: object, sm_version: object, dtype: object) -> Support:
    """Whether the indexer's kernels cover this shape, type and SM. Never raises, whatever it is given."""
    if checks.whole(num_heads) != geometry.INDEX_HEADS:
        reason = f"{checks.show(num_heads)} indexer heads; the kernels take {geometry.INDEX_HEADS}"
        return Support.no(SupportCode.HEADS, reason)
    if checks.whole(head_dim) != geometry.INDEX_HEAD_DIM:
        reason = f"indexer head dim {checks.show(head_dim)}; the kernels take {geometry.INDEX_HEAD_DIM}"
        return Support.no(SupportCode.HEAD_DIM, reason)
    return dispatch.target_support(Select.KERNEL, geometry.INDEX_HEAD_DIM, sm_version, dtype)


class IndexerPrefillRunner:
    """The indexer over prefill rows. All methods are static; none synchronises."""

    def __new__(cls) -> IndexerPrefillRunner:
        raise ArgumentError("IndexerPrefillRunner has static methods only; call them on the class")

    @staticmethod
    def can_implement(num_heads: object, head_dim: object, sm_version: object, dtype: object) -> Support:
        """Whether the kernels cover an indexer of this shape, from numbers alone. Never raises.

        Args:
            num_heads, head_dim: the indexer's query heads and their dim.
            sm_version, dtype: as for `SparsePrefillRunner.can_implement`.

        Returns: a `Support`, true or with its reason.
        """
        return indexer_support(num_heads, head_dim, sm_version, dtype)

    canImplement = can_implement  # noqa: N815 - the hosts' name

    @staticmethod
    def workspace_size(
        batch_size: int, seq_len: int, max_context_len: int | None = None, scratch_bytes: int = SCRATCH_BYTES
    ) -> Workspace:
        """Memory for prepared queries, block keys and logits; free again after the call, for other layers to use.

        Args:
            max_context_len: as in the parameters; seq_len when None.

        Raises:
            ArgumentError: a size is out of range.
        """
        batch, rows = checks.integer("batch_size", batch_size, 0), checks.integer("seq_len", seq_len, 0)
        longest = _context(rows if max_context_len is None else max_context_len)
        scratch = checks.integer("scratch_bytes", scratch_bytes, 1, 1 << 48)
        return Workspace.of(*prefill_parts(batch, rows, longest, scratch))

    @staticmethod
    def preflight(dtype: object, stream: int | None = None, device: int | None = None) -> None:
        """Load what `run` may pick, in the current context or `device`'s. Idempotent; can be tried again.

        Args:
            stream: asked whether it is being captured, when a load is needed.
            device: ordinal; the current context's device when None.

        Raises:
            UnsupportedError, ArtifactError, CaptureError, DriverError: see `errors`.
        """
        loader = default_loader()
        sm90 = capability(loader, -1 if device is None else device) == SM90
        each = [wanted(name, dtype, baked) for name, baked in prefill_kernels(sm90)]
        dispatch.preload(loader, each, device, stream, strict=True)

    @staticmethod
    def run(dtype: object, params: IndexerPrefillParams) -> None:
        """Launch on `params.stream`; nothing to do for an empty batch. Allocates nothing, safe under capture.

        Raises:
            UnsupportedError: no kernel for the type.
            CaptureError: the first use in this context is under capture; call `preflight` before.
            ArtifactError, DriverError: loading or launching failed.
            ArgumentError: params of another class, or of tensors of another type.
        """
        _run(dtype, params, IndexerPrefillParams)


class IndexerDecodeRunner:
    """The indexer's decode step. All methods are static; none synchronises."""

    def __new__(cls) -> IndexerDecodeRunner:
        raise ArgumentError("IndexerDecodeRunner has static methods only; call them on the class")

    can_implement = IndexerPrefillRunner.can_implement
    canImplement = can_implement  # noqa: N815 - the hosts' name

    @staticmethod
    def workspace_size(batch_size: int, max_context_len: int, query_len: int = 1) -> Workspace:
        """Memory for prepared queries and logits; free again after the call, for other layers to use.

        Raises:
            ArgumentError: a size is out of range.
        """
        batch = checks.integer("batch_size", batch_size, 0)
        rows = checks.integer("query_len", query_len, 1, MAX_QUERY_LEN)
        return Workspace.of(*decode_parts(batch, rows, _context(max_context_len)))

    @staticmethod
    def preflight(dtype: object, stream: int | None = None, device: int | None = None) -> None:
        """As `IndexerPrefillRunner.preflight`."""
        loader = default_loader()
        sm90 = capability(loader, -1 if device is None else device) == SM90
        each = [wanted(name, dtype, baked) for name, baked in decode_kernels(sm90)]
        dispatch.preload(loader, each, device, stream, strict=True)

    @staticmethod
    def run(dtype: object, params: IndexerDecodeParams) -> None:
        """As `IndexerPrefillRunner.run`; two or three launches."""
        _run(dtype, params, IndexerDecodeParams)


def _run(dtype: object, params: Any, kind: type) -> None:
    checks.instance("params", params, kind)
    if params.dtype and params.launches and params.dtype != wanted(Select.KERNEL, dtype).dtype:
        raise checks.other_dtype(dtype, params.dtype)
    for launch in params.launches:
        launch.run(dtype)
