"""A whole QSA layer after its projections: the indexer chooses, the attention attends. One call a prefill, one a step.

    prefill   key compress, raw-key tails, query prepare, then scores and selection by chunks of rows, then attention
    decode    pre-decode, scores, selection, attention: four launches on SM90

Keys and values are the host's to write, dense for prefill and in the pool for decode, before the call. The workspace
holds nothing between calls, so that layers that run one after another share one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks
from qsa_cute.runners.indexer import (
    SCRATCH_BYTES,
    IndexerDecodeParams,
    IndexerDecodeRunner,
    IndexerPrefillParams,
    IndexerPrefillRunner,
    decode_parts,
    indexer_support,
    prefill_parts,
)
from qsa_cute.runners.sparse_decode import SparseDecodeParams, SparseDecodeRunner
from qsa_cute.runners.sparse_prefill import SparsePrefillParams, SparsePrefillRunner
from qsa_cute.runners.workspace import PartSpec, Workspace
from qsa_cute.support import Support


def _part(workspace: Any, needed: Workspace, name: str) -> Any:
    """A part of a torch uint8 workspace, once that is found large enough."""
    if workspace.shape[0] < needed.size:
        raise ArgumentError(
            f"workspace has {workspace.shape[0]} bytes; this call needs {needed.size}, see workspace_size"
        )
    return needed.tensor(workspace, name)


def _check_pair(indexer: Any, attention: Any, rows: str) -> None:
    """The two halves of a layer work on the same rows, lists, stream and device."""
    pairs = [
        ("indices", indexer.out_idx_ptr, attention.indices),
        ("context_lengths", indexer.context_lengths, attention.context_lengths),
        *(
            (name, getattr(indexer, name), getattr(attention, name))
            for name in ("batch_size", rows, "stream", "device")
        ),
    ]
    if indexer.dtype and attention.dtype:
        pairs.append(("dtype", indexer.dtype, attention.dtype))
    for name, chosen, attended in pairs:
        if chosen != attended:
            raise ArgumentError(f"{name} is {chosen} for the indexer and {attended} for the attention; they must agree")


@dataclass(frozen=True, slots=True)
class QsaLayerPrefillParams:
    """One prefill of a layer.

    Attributes:
        indexer, attention: the two halves; the attention's `indices` are the indexer's `out_idx_ptr`.

    Raises:
        ArgumentError: the halves do not belong together.
    """

    indexer: IndexerPrefillParams
    attention: SparsePrefillParams

    def __post_init__(self) -> None:
        checks.instance("indexer", self.indexer, IndexerPrefillParams)
        checks.instance("attention", self.attention, SparsePrefillParams)
        _check_pair(self.indexer, self.attention, "seq_len")
        if self.indexer.query_starts != self.attention.query_starts:
            raise ArgumentError("query_starts are not the same for the indexer and for the attention")

    @classmethod
    def from_tensors(
        cls,
        index_qk: Any,
        cos_sin: Any,
        w_q: Any,
        w_k: Any,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        context_lengths: Any,
        workspace: Any,
        *,
        attention_scale: float,
        kv_pool: Any = None,
        page_table: Any = None,
        query_starts: Any = None,
        max_context_len: int | None = None,
        rms_eps: float = geometry.RMS_EPS,
        scratch_bytes: int = SCRATCH_BYTES,
        stream: int | None = None,
    ) -> QsaLayerPrefillParams:
        """From torch tensors on one CUDA device.

        Args:
            index_qk: [batch, seq_len, 640], the indexer's projections.
            cos_sin: FP32 [max_positions, 64]. w_q, w_k: [128].
            q, o: [batch, seq_len, q_heads, head_dim].
            k, v: [batch, kv_rows, kv_heads, head_dim] of the whole context, earlier chunks included.
            context_lengths: int32 [batch], these rows included.
            workspace: uint8 of `QsaLayer.prefill_workspace_size`; with the heads given there, rows share their gather.
            kv_pool, page_table: the pool that decode will read, [2 * num_pages, 128, kv_heads, pool_head_dim] and int32
                [batch, 2, max_pages]; only the indexer's columns are written.
            query_starts: int32 [batch], tokens of earlier chunks.

        Raises:
            ArgumentError: as `IndexerPrefillParams.from_tensors` and `SparsePrefillParams.from_tensors`.
        """
        batch, rows = index_qk.shape[:2]
        longest = k.shape[1] if max_context_len is None else max_context_len
        needed = QsaLayer.prefill_workspace_size(batch, rows, longest, scratch_bytes)
        heads = (q.shape[2], k.shape[2], q.shape[3], k.shape[1])
        shared = QsaLayer.prefill_workspace_size(batch, rows, longest, scratch_bytes, *heads)
        lists = _part(workspace, needed, "indices")
        union = None
        if workspace.shape[0] >= shared.size:
            part = shared.parts[-1]
            union = workspace[part.offset : part.offset + part.size]
        indexer = IndexerPrefillParams.from_tensors(
            index_qk,
            cos_sin,
            context_lengths,
            w_q,
            w_k,
            lists,
            workspace,
            kv_pool=kv_pool,
            page_table=page_table,
            head_size=q.shape[3],
            query_starts=query_starts,
            max_context_len=longest,
            rms_eps=rms_eps,
            scratch_bytes=scratch_bytes,
            stream=stream,
        )
        attention = SparsePrefillParams.from_tensors(
            q,
            k,
            v,
            o,
            lists,
            context_lengths,
            attention_scale=attention_scale,
            query_starts=query_starts,
            workspace=union,
            stream=stream,
        )
        return cls(indexer, attention)


@dataclass(frozen=True, slots=True)
class QsaLayerDecodeParams:
    """One decode step of a layer.

    Attributes:
        indexer, attention: the two halves; the attention's `indices` are the indexer's `out_idx_ptr`.

    Raises:
        ArgumentError: the halves do not belong together.
    """

    indexer: IndexerDecodeParams
    attention: SparseDecodeParams

    def __post_init__(self) -> None:
        checks.instance("indexer", self.indexer, IndexerDecodeParams)
        checks.instance("attention", self.attention, SparseDecodeParams)
        _check_pair(self.indexer, self.attention, "query_len")

    @classmethod
    def from_tensors(
        cls,
        index_qk: Any,
        cos_sin: Any,
        w_q: Any,
        w_k: Any,
        q: Any,
        kv_pool: Any,
        page_table: Any,
        o: Any,
        context_lengths: Any,
        workspace: Any,
        *,
        attention_scale: float,
        max_context_len: int | None = None,
        rms_eps: float = geometry.RMS_EPS,
        stream: int | None = None,
    ) -> QsaLayerDecodeParams:
        """From torch tensors on one CUDA device.

        Args:
            index_qk: [batch, query_len, 640]. q, o: [batch, query_len, q_heads, head_dim].
            kv_pool, page_table: [2 * num_pages, 128, kv_heads, pool_head_dim] with the new tokens' keys and values, and
                int32 [batch, 2, max_pages].
            context_lengths: int32 [batch], the new tokens included.
            workspace: uint8 of `QsaLayer.decode_workspace_size`.
            max_context_len: longest context that the launches must serve; None is all that the page table can map.

        Raises:
            ArgumentError: as `IndexerDecodeParams.from_tensors` and `SparseDecodeParams.from_tensors`.
        """
        batch, query_len, _, head_dim = q.shape
        longest = page_table.shape[2] * geometry.PAGE_TOKENS if max_context_len is None else max_context_len
        needed = QsaLayer.decode_workspace_size(batch, kv_pool.shape[2], head_dim, longest, query_len)
        lists, partial_o, partial_stats, split_counters = (
            _part(workspace, needed, name) for name in ("indices", "partial_o", "partial_stats", "split_counters")
        )
        indexer = IndexerDecodeParams.from_tensors(
            index_qk,
            cos_sin,
            context_lengths,
            w_q,
            w_k,
            lists,
            workspace,
            kv_pool,
            page_table,
            head_size=head_dim,
            max_context_len=longest,
            rms_eps=rms_eps,
            stream=stream,
        )
        attention = SparseDecodeParams.from_tensors(
            q,
            kv_pool,
            page_table,
            lists,
            context_lengths,
            o,
            attention_scale=attention_scale,
            partial_o=partial_o,
            partial_stats=partial_stats,
            split_counters=split_counters,
            stream=stream,
        )
        return cls(indexer, attention)


class QsaLayer:
    """Indexer and attention of one layer. All methods are static; none synchronises."""

    def __new__(cls) -> QsaLayer:
        raise ArgumentError("QsaLayer has static methods only; call them on the class")

    @staticmethod
    def can_implement(
        num_q_heads: object,
        num_kv_heads: object,
        head_dim: object,
        pool_head_dim: object,
        sm_version: object,
        dtype: object,
    ) -> Support:
        """Whether the kernels cover a layer of this shape, prefill and decode. Never raises.

        Args: as for `SparseDecodeRunner.can_implement`.

        Returns: a `Support`, true or with its reason.
        """
        answers = (
            SparsePrefillRunner.can_implement(num_q_heads, num_kv_heads, head_dim, sm_version, dtype),
            SparseDecodeRunner.can_implement(num_q_heads, num_kv_heads, head_dim, pool_head_dim, sm_version, dtype),
            indexer_support(geometry.INDEX_HEADS, geometry.INDEX_HEAD_DIM, sm_version, dtype),
        )
        return next((answer for answer in answers if not answer), answers[0])

    canImplement = can_implement  # noqa: N815 - the hosts' name

    @staticmethod
    def prefill_workspace_size(
        batch_size: int,
        seq_len: int,
        max_context_len: int | None = None,
        scratch_bytes: int = SCRATCH_BYTES,
        num_q_heads: int = 0,
        num_kv_heads: int = 0,
        head_dim: int = 0,
        kv_seq_len: int | None = None,
    ) -> Workspace:
        """Memory of a prefill: `IndexerPrefillRunner.workspace_size`, and the lists. With the heads, also what lets the
        attention's rows share their gather on SM90 (`SparsePrefillRunner.workspace_size`).

        Args:
            kv_seq_len: rows of K and V; max_context_len when None.

        Raises:
            ArgumentError: a size is out of range.
        """
        longest = seq_len if max_context_len is None else max_context_len
        IndexerPrefillRunner.workspace_size(batch_size, seq_len, longest, scratch_bytes)  # raises for what is wrong
        lists: PartSpec = ("indices", "i32", (batch_size, seq_len, geometry.INDEX_WIDTH))
        parts = [*prefill_parts(batch_size, seq_len, longest, scratch_bytes), lists]
        if num_q_heads:
            kv_rows = longest if kv_seq_len is None else kv_seq_len
            shared = SparsePrefillRunner.workspace_size(
                batch_size, seq_len, kv_rows, num_q_heads, num_kv_heads, head_dim, geometry.INDEX_WIDTH
            )
            parts.append(("union", "i32", (shared.size // 4,)))
        return Workspace.of(*parts)

    @staticmethod
    def decode_workspace_size(
        batch_size: int, num_kv_heads: int, head_dim: int, max_context_len: int, query_len: int = 1
    ) -> Workspace:
        """Memory of a decode step: `IndexerDecodeRunner.workspace_size`, the lists, and the attention's partials.

        Raises:
            ArgumentError: a size is out of range.
        """
        IndexerDecodeRunner.workspace_size(batch_size, max_context_len, query_len)  # raises for what is wrong
        partials = SparseDecodeRunner.workspace_size(batch_size, num_kv_heads, head_dim, query_len)
        return Workspace.of(
            *decode_parts(batch_size, query_len, max_context_len),
            ("indices", "i32", (batch_size, query_len, geometry.INDEX_WIDTH)),
            *((part.name, part.dtype, part.shape) for part in partials.parts),
        )

    @staticmethod
    def preflight(
        dtype: object, stream: int | None = None, device: int | None = None, head_dim: int | None = None
    ) -> None:
        """Load what `prefill` and `decode` may pick. Args and errors as for `SparsePrefillRunner.preflight`."""
        IndexerPrefillRunner.preflight(dtype, stream, device)
        IndexerDecodeRunner.preflight(dtype, stream, device)
        SparsePrefillRunner.preflight(dtype, stream, device, head_dim)
        SparseDecodeRunner.preflight(dtype, stream, device, head_dim)

    @staticmethod
    def prefill(dtype: object, params: QsaLayerPrefillParams) -> None:
        """Launch on the params' stream. Allocates nothing, safe under capture.

        Raises: as `SparsePrefillRunner.run`.
        """
        checks.instance("params", params, QsaLayerPrefillParams)
        IndexerPrefillRunner.run(dtype, params.indexer)
        SparsePrefillRunner.run(dtype, params.attention)

    @staticmethod
    def decode(dtype: object, params: QsaLayerDecodeParams) -> None:
        """As `prefill`; at most four launches on SM90."""
        checks.instance("params", params, QsaLayerDecodeParams)
        IndexerDecodeRunner.run(dtype, params.indexer)
        SparseDecodeRunner.run(dtype, params.attention)
