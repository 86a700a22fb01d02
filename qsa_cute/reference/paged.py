"""Sparse attention over vLLM's paged cache in plain PyTorch, straight from the contract: the oracle of its tests.

    O[r, h] = cast(v_scale * sum_i w_i V[id_i]) * sigmoid(gate[r, h])
    w = softmax_i(scale * k_scale * Q[r, h] . K[id_i])

over the first count entries of row r's list whose token is mapped; a duplicate counts twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsa_cute.reference.attention import _attend


def sparse_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    *,
    scale: float | None = None,
    gate: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gated attention of query rows over their counted lists.

    Args:
        q: [rows, q_heads, head_dim], any floating type.
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim], any floating type, fp8 e4m3 too.
        indices: int32 [rows, width + 1]; the last column is the number of entries, the ones past it mean nothing.
        block_table: int32 [requests, table_width], physical pages; one outside [0, pages) is unmapped.
        token_to_req: int32 [rows]; a row whose request does not exist is zeros.
        scale: of the scores; head_dim ** -0.5 when None.
        gate: [rows, q_heads, head_dim]; the attention output is rounded to q's type before it is applied.
        dtype: type of all arithmetic.

    Returns: [rows, q_heads, head_dim] in `dtype`, not rounded after the gate; without a gate not rounded at all.
    """
    pages, page_size, kv_heads, head_dim = k_cache.shape
    requests, table_width = block_table.shape
    width = indices.shape[1] - 1
    request, count = token_to_req.long(), indices[:, width].long().clamp(0, width)
    table = block_table.long()

    def read(cache: Tensor, page: Tensor, offset: Tensor) -> Tensor:
        if cache.dtype == torch.float8_e4m3fn:
            return cache.view(torch.uint8)[page, offset].view(torch.float8_e4m3fn).to(dtype)
        return cache[page, offset].to(dtype)

    def gather(numbers: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        row_request = request[numbers, None]
        valid = torch.arange(width, device=ids.device) < count[numbers, None]
        valid = valid & (row_request >= 0) & (row_request < requests)
        valid = valid & (ids >= 0) & (ids // page_size < table_width)
        logical = torch.where(valid, ids // page_size, 0)
        page = table[row_request.clamp(0, requests - 1), logical]
        valid = valid & (page >= 0) & (page < pages)
        page, offset = torch.where(valid, page, 0), torch.where(valid, ids % page_size, 0)
        return read(k_cache, page, offset), read(v_cache, page, offset), valid

    factor = (head_dim**-0.5 if scale is None else scale) * k_scale
    out, lse = _attend(q, indices[:, :width], kv_heads, factor, dtype, gather)
    out = out * v_scale
    if gate is None:
        return out
    gated = out.to(q.dtype).to(dtype) * torch.sigmoid(gate.to(dtype))
    return torch.where((lse > float("-inf"))[..., None], gated, 0)
