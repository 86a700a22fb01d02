"""The attention runners as torch operators: `torch.ops.qsa_cute.*`, traceable by torch.compile and capturable.

Importing this module registers the operators; nothing else in the package imports it. Each runs on its tensors' own
device and that device's current stream. Inference only: no gradients.

A params object says nothing but addresses, sizes and constants, so one is kept for the next call with the same: an
engine's buffers come back at the same addresses, and checking them again would cost more than the launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from qsa_cute.runners import SparseDecodeParams, SparseDecodeRunner, SparsePrefillParams, SparsePrefillRunner, boxes
from qsa_cute.runners.sparse_decode import SPLIT_KV, algorithm_for
from qsa_cute.runners.sparse_prefill import union_for
from qsa_cute.runners.workspace import Workspace

P = TypeVar("P")

KEPT = 512  # params objects of an operator; about 2 KB each, 20 KB where they share a gather
_HALVES = (torch.bfloat16, torch.float16)

_library = torch.library.Library("qsa_cute", "DEF")

_PREFILL = "Tensor q, Tensor k, Tensor v, Tensor indices, Tensor context_lengths, float scale"
_DECODE = "Tensor q, Tensor kv_pool, Tensor page_table, Tensor indices, Tensor context_lengths, float scale"
_library.define(
    f"sparse_prefill({_PREFILL}, Tensor? query_starts=None, bool return_lse=False) -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    f"sparse_prefill_out({_PREFILL}, Tensor? query_starts=None, *, Tensor(a!) out, Tensor(b!)? lse=None, "
    "Tensor(c!)? workspace=None) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    f"sparse_decode({_DECODE}, bool return_lse=False, str? algorithm=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    f"sparse_decode_out({_DECODE}, str? algorithm=None, *, Tensor(a!) out, Tensor(b!)? lse=None, "
    "Tensor(c!)? partial_o=None, Tensor(d!)? partial_stats=None, Tensor(e!)? split_counters=None) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


class _Kept(Generic[P]):
    """The params objects of an operator, by all that they are made from; at most `KEPT`, then none.

    Safe from any thread: a look-up or an entry is one step of a dict, and two threads that make the same object make
    equal ones.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, P] = {}

    def get(self, key: Hashable, make: Callable[[], P]) -> P:
        found = self._found.get(key)
        if found is None:
            found = make()
            if len(self._found) >= KEPT:
                self._found.clear()
            self._found[key] = found
        return found


_prefills: _Kept[SparsePrefillParams] = _Kept()
_decodes: _Kept[SparseDecodeParams] = _Kept()


def _of(tensor: Tensor | None) -> Hashable:
    """Everything that a params object takes from a tensor."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _on_gpu(tensor: Tensor) -> bool:
    return str(tensor.device.type) == "cuda"


def _stream(tensor: Tensor) -> int:
    """The current stream of the tensor's device; 0 where that is no GPU, which the params refuse."""
    if not _on_gpu(tensor):
        return 0
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def sparse_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    context_lengths: Tensor,
    scale: float,
    query_starts: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of query rows over their lists of tokens; see `SparsePrefillParams`.

    Args:
        q: bf16 or fp16 [batch, rows, q_heads, head_dim] on a GPU.
        k, v: [batch, kv_rows, kv_heads, head_dim], q's type.
        indices: int32 [batch, rows, top_k]; context_lengths, query_starts: int32 [batch].

    Where rows share their gather (see `SparsePrefillParams`), the workspace for it is allocated, as torch allocates.

    Returns:
        (out like q, natural-log LSE FP32 [batch, rows, q_heads], or an empty tensor where it was not asked for).

    Raises:
        ArgumentError: rank, shape, type, device, stride or alignment does not fit.
    """
    out, lse = _outputs(q, return_lse)
    sparse_prefill_out(q, k, v, indices, context_lengths, scale, query_starts, out=out, lse=lse if return_lse else None)
    return out, lse


def sparse_prefill_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    context_lengths: Tensor,
    scale: float,
    query_starts: Tensor | None = None,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """As `sparse_prefill`, into the caller's `out` and, where given, `lse` (contiguous), with the caller's `workspace`
    (uint8, see `SparsePrefillRunner.workspace_size`)."""
    if workspace is None:
        workspace = _prefill_workspace(q, k, v, indices)
    stream = _stream(q)
    tensors = (q, k, v, out, indices, context_lengths, query_starts, lse, workspace)

    def make() -> SparsePrefillParams:
        return SparsePrefillParams.from_tensors(
            *tensors[:6],
            attention_scale=scale,
            query_starts=query_starts,
            lse=lse,
            workspace=workspace,
            stream=stream,
        )

    params = _prefills.get((scale, stream, *map(_of, tensors)), make)
    SparsePrefillRunner.run(q.dtype, params)


def sparse_decode(
    q: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    indices: Tensor,
    context_lengths: Tensor,
    scale: float,
    return_lse: bool = False,
    algorithm: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over their lists, K and V in a paged pool; see `SparseDecodeParams`.

    Args:
        q: bf16 or fp16 [batch, query_len, q_heads, head_dim] on a GPU.
        kv_pool: [flat_pages, 128, kv_heads, pool_head_dim], q's type; page_table: int32 [batch, 2, max_pages].
        indices: int32 [batch, query_len, top_k]; context_lengths: int32 [batch].
        algorithm: "tma" or "split_kv"; None picks what suits the device.

    Returns, raises: as `sparse_prefill`. A workspace is allocated where the algorithm needs one.
    """
    out, lse = _outputs(q, return_lse)
    workspace = _decode_workspace(q, kv_pool, algorithm)
    sparse_decode_out(
        q,
        kv_pool,
        page_table,
        indices,
        context_lengths,
        scale,
        algorithm,
        out=out,
        lse=lse if return_lse else None,
        **workspace,
    )
    return out, lse


def sparse_decode_out(
    q: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    indices: Tensor,
    context_lengths: Tensor,
    scale: float,
    algorithm: str | None = None,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    partial_o: Tensor | None = None,
    partial_stats: Tensor | None = None,
    split_counters: Tensor | None = None,
) -> None:
    """As `sparse_decode`, into the caller's `out`, `lse` and workspace (see `SparseDecodeRunner.workspace_size`)."""
    stream = _stream(q)
    tensors = (q, kv_pool, page_table, indices, context_lengths, out, lse, partial_o, partial_stats, split_counters)

    def make() -> SparseDecodeParams:
        return SparseDecodeParams.from_tensors(
            *tensors[:6],
            attention_scale=scale,
            lse=lse,
            partial_o=partial_o,
            partial_stats=partial_stats,
            split_counters=split_counters,
            algorithm=algorithm,
            stream=stream,
        )

    params = _decodes.get((scale, algorithm, stream, *map(_of, tensors)), make)
    SparseDecodeRunner.run(q.dtype, params)


def _outputs(q: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32, device=q.device)


def _prefill_workspace(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor | None:
    """Memory for a shared gather where the runner would take it; None where not, or where the shapes do not fit.

    It is used on the current stream alone, so torch may hand it out again as soon as the operator returns.
    """
    fits = {q.dim(), k.dim(), indices.dim() + 1} == {4} and k.shape == v.shape and q.dtype in _HALVES
    if not fits or not _on_gpu(q):
        return None
    if 0 in k.stride() or 0 in v.stride():  # an expanded tensor has no tensor map
        return None
    batch, rows, q_heads, head_dim = q.shape
    size = _union_size(batch, rows, k.shape[1], q_heads, k.shape[2], head_dim, indices.shape[2])
    if not size or not union_for(q.dtype, head_dim, q.device.index):
        return None
    return torch.empty(size, dtype=torch.uint8, device=q.device)


@functools.lru_cache(KEPT)
def _union_size(batch: int, rows: int, kv_rows: int, q_heads: int, kv_heads: int, head_dim: int, top_k: int) -> int:
    return SparsePrefillRunner.shared_workspace(batch, rows, kv_rows, q_heads, kv_heads, head_dim, top_k)


def _decode_workspace(q: Tensor, kv_pool: Tensor, algorithm: str | None) -> dict[str, Tensor]:
    if not _on_gpu(q) or q.dim() != 4 or kv_pool.dim() != 4:
        return {}
    batch, query_len, _, head_dim = q.shape
    (pages, tokens, heads, _), (page, token, head, _) = kv_pool.shape, kv_pool.stride()
    boxed = algorithm is not None or boxes.strides((tokens, heads, pages), (token, head, page), head_dim) is not None
    if (algorithm or algorithm_for(q.device.index)) != SPLIT_KV and boxed:
        return {}
    layout = _split_layout(batch, heads, head_dim, max(1, query_len))
    kinds = {"f32": torch.float32, "i32": torch.int32}
    return {part.name: torch.empty(part.shape, dtype=kinds[part.dtype], device=q.device) for part in layout.parts}


@functools.lru_cache(KEPT)
def _split_layout(batch: int, kv_heads: int, head_dim: int, query_len: int) -> Workspace:
    return SparseDecodeRunner.workspace_size(batch, kv_heads, head_dim, query_len)


def _prefill_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    context_lengths: Tensor,
    scale: float,
    query_starts: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    return _outputs(q, return_lse)


def _decode_fake(
    q: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    indices: Tensor,
    context_lengths: Tensor,
    scale: float,
    return_lse: bool = False,
    algorithm: str | None = None,
) -> tuple[Tensor, Tensor]:
    return _outputs(q, return_lse)


def _nothing(*args: object, **kwargs: object) -> None:
    """The out= forms return nothing and change no shape."""


# Every device, so that a tensor that is not on a GPU gets the runner's sentence and not a dispatcher's.
for _name, _run, _fake in (
    ("sparse_prefill", sparse_prefill, _prefill_fake),
    ("sparse_prefill_out", sparse_prefill_out, _nothing),
    ("sparse_decode", sparse_decode, _decode_fake),
    ("sparse_decode_out", sparse_decode_out, _nothing),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qsa_cute::{_name}", _fake, lib=_library)
