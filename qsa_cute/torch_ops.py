"""The attention runners as torch operators: `torch.ops.qsa_cute.*`, traceable by torch.compile and capturable.

Importing this module registers the operators; nothing else in the package imports it. Each runs on its tensors' own
device and that device's current stream. Inference only: no gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsa_cute.runners import SparseDecodeParams, SparseDecodeRunner, SparsePrefillParams, SparsePrefillRunner
from qsa_cute.runners.sparse_decode import SPLIT_KV, algorithm_for

_library = torch.library.Library("qsa_cute", "DEF")

_PREFILL = "Tensor q, Tensor k, Tensor v, Tensor indices, Tensor context_lengths, float scale"
_DECODE = "Tensor q, Tensor kv_pool, Tensor page_table, Tensor indices, Tensor context_lengths, float scale"
_library.define(
    f"sparse_prefill({_PREFILL}, Tensor? query_starts=None, bool return_lse=False) -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    f"sparse_prefill_out({_PREFILL}, Tensor? query_starts=None, *, Tensor(a!) out, Tensor(b!)? lse=None) -> ()",
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
) -> None:
    """As `sparse_prefill`, into the caller's `out` and, where given, `lse` (contiguous)."""
    params = SparsePrefillParams.from_tensors(
        q, k, v, out, indices, context_lengths, attention_scale=scale, query_starts=query_starts, lse=lse
    )
    with torch.cuda.device(q.device):
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
        algorithm: "cluster" or "split_kv"; None picks what suits the device.

    Returns, raises: as `sparse_prefill`. A workspace is allocated where the algorithm needs one.
    """
    out, lse = _outputs(q, return_lse)
    workspace = {} if q.device.type != "cuda" else _workspace(q, kv_pool, algorithm)
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
    params = SparseDecodeParams.from_tensors(
        q,
        kv_pool,
        page_table,
        indices,
        context_lengths,
        out,
        attention_scale=scale,
        lse=lse,
        partial_o=partial_o,
        partial_stats=partial_stats,
        split_counters=split_counters,
        algorithm=algorithm,
    )
    with torch.cuda.device(q.device):
        SparseDecodeRunner.run(q.dtype, params)


def _outputs(q: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32, device=q.device)


def _workspace(q: Tensor, kv_pool: Tensor, algorithm: str | None) -> dict[str, Tensor]:
    with torch.cuda.device(q.device):
        if (algorithm or algorithm_for(q.device.index)) != SPLIT_KV or q.dim() != 4 or kv_pool.dim() != 4:
            return {}
    batch, query_len, _, head_dim = q.shape
    layout = SparseDecodeRunner.workspace_size(batch, kv_pool.shape[2], head_dim, max(1, query_len))
    kinds = {"f32": torch.float32, "i32": torch.int32}
    return {part.name: torch.empty(part.shape, dtype=kinds[part.dtype], device=q.device) for part in layout.parts}


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
