"""Metrale's operations in plain PyTorch, straight from their formulas: the oracle of their tests.

    block_keys[g] = rope(norm(cast(mean of raw_keys[g ratio .. g ratio + ratio - 1]), w), position g ratio)
    q_out[r, h]   = rope(norm(q_in[r, h], w), position first_pos + r)                        FP32
    score[r, b]   = 1 / sqrt(hd) * sum_h relu(q[r, h] . block_keys[b]),  b < (first_pos + r + 1) // ratio, else -inf
    attn_out[r]   = attention over the tokens of the blocks lists[r] and of the row's open block

norm(x, w) = x / sqrt(mean(x^2) + eps) * (1 + w); rope turns the pairs (i, i + rot / 2) by position * theta^(-2i / rot).
Arithmetic is FP64 unless said otherwise. Runs on any device; what may not be read is replaced before any arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsa_cute.reference import attention

F64 = torch.float64


def rope(x: Tensor, positions: Tensor, rot: int, theta: float) -> Tensor:
    """x [..., hd] in FP64 turned at integer positions, which broadcast to its leading dimensions; angles in FP64."""
    half = rot // 2
    exponents = torch.arange(half, dtype=F64, device=x.device) * (2 / max(rot, 1))
    angles = positions.to(F64)[..., None] * torch.tensor(theta, dtype=F64, device=x.device) ** -exponents
    low, high = x[..., :half], x[..., half:rot]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin, x[..., rot:]), -1)


def norm_rope(x: Tensor, weight: Tensor, positions: Tensor, rot: int, theta: float, eps: float) -> Tensor:
    """FP64 [..., hd]: norm, then `rope`."""
    y = x.to(F64)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * (1 + weight.to(F64))
    return rope(y, positions, rot, theta)


def block_pool(
    raw_keys: Tensor, weight: Tensor, first_block: int, ratio: int, rot: int, theta: float, eps: float
) -> Tensor:
    """Keys [n_new, hd] of the blocks from first_block on, from their own raw keys [n_new * ratio, hd], in their type.

    The mean's sum is FP32, in token order, so that it rounds as the kernel's does.
    """
    blocks = raw_keys.unflatten(0, (-1, ratio)).float()
    total = blocks[:, 0]
    for token in range(1, ratio):
        total = total + blocks[:, token]
    mean = (total / ratio).to(raw_keys.dtype)
    positions = (first_block + torch.arange(len(mean), device=mean.device)) * ratio
    return norm_rope(mean, weight, positions, rot, theta, eps).to(raw_keys.dtype)


def qprep(q_in: Tensor, weight: Tensor, first_pos: int, rot: int, theta: float, eps: float) -> Tensor:
    """FP32 [rows, n_heads, hd] of q_in of the same shape."""
    positions = first_pos + torch.arange(len(q_in), device=q_in.device)
    return norm_rope(q_in, weight, positions[:, None], rot, theta, eps).float()


def complete_blocks(rows: int, first_pos: int, ratio: int, device: torch.device | str = "cpu") -> Tensor:
    """How many blocks each row sees: int64 [rows]."""
    return (first_pos + torch.arange(rows, device=device) + 1) // ratio


def score_rows(q: Tensor, block_keys: Tensor, first_pos: int, ratio: int, dtype: torch.dtype = F64) -> Tensor:
    """Scores [rows, blocks] in `dtype` of q [rows, n_heads, hd] against block_keys [blocks, hd]; -inf where unseen."""
    complete = complete_blocks(len(q), first_pos, ratio, q.device)
    seen = torch.arange(len(block_keys), device=q.device) < complete[:, None]
    keys = torch.where(seen.any(0)[:, None], block_keys, 0).to(dtype)
    heads = torch.einsum("rhd,bd->rhb", q.to(dtype), keys).relu()
    return torch.where(seen, heads.sum(1) * q.shape[-1] ** -0.5, -torch.inf)


def score(q: Tensor, block_keys: Tensor, dtype: torch.dtype = F64) -> Tensor:
    """Scores [blocks] of one query [n_heads, hd]."""
    return score_rows(q[None], block_keys, len(block_keys), 1, dtype)[0]


def gather(cache: Tensor, block_table: Tensor, sel: Tensor, out: Tensor) -> Tensor:
    """`out` [n_sel, nkv, hd] with the rows of the tokens sel [n_sel] of cache [pages, block_size, nkv, hd]; slots of
    negative tokens or pages stay as they are."""
    size = cache.shape[1]
    token = sel.long().clamp(min=0)
    page = torch.where(sel >= 0, block_table.long()[token // size], -1)
    rows = cache[page.clamp(min=0), token % size]
    return torch.where((page >= 0)[:, None, None], rows, out)


def tokens(lists: Tensor, first_pos: int, ratio: int) -> Tensor:
    """Token lists int32 [rows, ratio * (topk + 1)], -1 for none: the open block's, then each listed block's."""
    rows = len(lists)
    complete = complete_blocks(rows, first_pos, ratio, lists.device)[:, None]
    blocks = torch.where((lists >= 0) & (lists < complete), lists.long(), -1)
    blocks = torch.cat((complete, blocks), 1)
    each = blocks[..., None] * ratio + torch.arange(ratio, device=lists.device)
    last = first_pos + torch.arange(rows, device=lists.device)[:, None, None]
    return torch.where((blocks[..., None] >= 0) & (each <= last), each, -1).flatten(1).int()


def prefill_attn(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lists: Tensor,
    first_pos: int,
    ratio: int,
    scale: float,
) -> Tensor:
    """FP32 [rows, nq, hd] of q [rows, nq, hd] over caches [pages, block_size, nkv, hd] and lists int32 [rows, topk]."""
    rows, size, length = len(q), k_cache.shape[1], first_pos + len(q)
    token = torch.arange(length, device=q.device)
    page = block_table.long()[token // size]
    k, v = (cache[page.clamp(min=0), token % size][None] for cache in (k_cache, v_cache))
    ids = tokens(lists, first_pos, ratio)
    ids = torch.where((ids >= 0) & (page[ids.long().clamp(min=0)] >= 0), ids, -1)
    lengths = torch.tensor([length], dtype=torch.int32, device=q.device)
    starts = lengths - rows
    return attention.sparse_prefill(q[None], k, v, ids[None], lengths, scale, starts)[0][0]
