"""Sparse attention in plain PyTorch, straight from the contract: the oracle of every attention test.

    O[r, h] = sum_i w_i V[id_i] / sum_i w_i,   w_i = exp(scale * Q[r, h] . K[id_i]) where id_i is valid, else 0

A duplicate counts twice, an invalid id not at all, and nothing that an invalid id names is looked at: its K and V
are replaced by zeros, so that NaN there cannot arrive as 0 x NaN. Runs on any device, a chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qsa_cute.geometry import PAGE_TOKENS

# (row numbers [R], ids [R, N]) -> K and V [R, N, Hkv, D], and which entries are valid [R, N].
Gather = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

_CHUNK_BYTES = 1 << 30  # of gathered K, and as much again of V


def sparse_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    context_lengths: Tensor,
    scale: float,
    query_starts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of dense query rows over their lists of tokens of the same sequence.

    Args:
        q: [batch, rows, q_heads, head_dim], any floating type.
        k, v: [batch, kv_rows, kv_heads, head_dim].
        indices: int32 [batch, rows, top_k]; valid where 0 <= id < min(context length, kv_rows).
        context_lengths: int32 [batch], tokens of each sequence.
        scale: factor of the scores.
        query_starts: int32 [batch], position of row 0 of each sequence; zeros when None. A row whose position is
            at or past the context length is zeros.
        dtype: type of all arithmetic.

    Returns:
        (out [batch, rows, q_heads, head_dim], natural-log LSE [batch, rows, q_heads]), both in `dtype`; a row
        with no valid entry is zeros and -inf.
    """
    batch, rows = q.shape[:2]
    lengths = context_lengths.long()
    starts = torch.zeros_like(lengths) if query_starts is None else query_starts.long()
    live = starts[:, None] + torch.arange(rows, device=q.device) < lengths[:, None]
    live = live.flatten()
    limits = lengths.clamp(max=k.shape[1])

    def gather(numbers: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sequence = numbers // rows
        valid = (ids >= 0) & (ids < limits[sequence, None]) & live[numbers, None]
        safe = torch.where(valid, ids, 0)
        return k[sequence[:, None], safe], v[sequence[:, None], safe], valid

    out, lse = _attend(q.flatten(0, 1), indices.flatten(0, 1), k.shape[2], scale, dtype, gather)
    return out.unflatten(0, (batch, rows)), lse.unflatten(0, (batch, rows))


def sparse_decode(
    q: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    indices: Tensor,
    context_lengths: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of each sequence's new tokens over their lists, K and V in a widened paged pool.

    Args:
        q: [batch, query_len, q_heads, head_dim].
        kv_pool: [flat_pages, 128, kv_heads, pool_head_dim]; only columns [0, head_dim) are K or V.
        page_table: int32 [batch, 2, max_pages], K pages and V pages; an entry outside [0, flat_pages) is unused.
        indices: int32 [batch, query_len, top_k]; valid where 0 <= id < context length and both pages are mapped.
        context_lengths: int32 [batch], with the new tokens.
        scale, dtype: as for `sparse_prefill`.

    Returns: as `sparse_prefill`, [batch, query_len, q_heads, head_dim] and [batch, query_len, q_heads].
    """
    batch, query_len, _, head_dim = q.shape
    lengths, table = context_lengths.long(), page_table.long()

    def gather(numbers: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sequence = (numbers // query_len)[:, None]
        slot = ids // PAGE_TOKENS
        valid = (ids >= 0) & (ids < lengths[sequence]) & (slot < table.shape[2])
        slot = torch.where(valid, slot, 0)
        pages = [table[sequence, plane, slot] for plane in (0, 1)]
        for page in pages:
            valid = valid & (page >= 0) & (page < kv_pool.shape[0])
        k, v = (kv_pool[torch.where(valid, page, 0), ids % PAGE_TOKENS, :, :head_dim] for page in pages)
        return k, v, valid

    out, lse = _attend(q.flatten(0, 1), indices.flatten(0, 1), kv_pool.shape[2], scale, dtype, gather)
    return out.unflatten(0, (batch, query_len)), lse.unflatten(0, (batch, query_len))


def _attend(
    q: Tensor, indices: Tensor, kv_heads: int, scale: float, dtype: torch.dtype, gather: Gather
) -> tuple[Tensor, Tensor]:
    """Rows q [R, q_heads, D] over lists [R, N], a chunk of rows at a time."""
    rows, q_heads, head_dim = q.shape
    out = torch.zeros(rows, q_heads, head_dim, dtype=dtype, device=q.device)
    lse = torch.full((rows, q_heads), float("-inf"), dtype=dtype, device=q.device)
    if not indices.shape[1]:
        return out, lse
    chunk = max(1, _CHUNK_BYTES // (indices.shape[1] * kv_heads * head_dim * dtype.itemsize))
    for begin in range(0, rows, chunk):
        numbers = torch.arange(begin, min(rows, begin + chunk), device=q.device)
        k, v, valid = gather(numbers, indices[numbers].long())
        k, v = (torch.where(valid[..., None, None], plane, 0).to(dtype) for plane in (k, v))
        # A dead row's query may hold anything; its scores are masked below, and NaN > -inf comparisons never arise.
        grouped = q[numbers].to(dtype).unflatten(1, (kv_heads, -1))
        scores = torch.einsum("rhgd,rnhd->rhgn", grouped, k) * scale
        scores = scores.masked_fill(~valid[:, None, None], float("-inf"))
        total = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - total[..., None]).masked_fill(~valid[:, None, None], 0)
        out[numbers] = torch.einsum("rhgn,rnhd->rhgd", weights, v).flatten(1, 2)
        lse[numbers] = total.flatten(1, 2)
    return out, lse
