"""GLM-5.3-Flash's kpool indexer in plain PyTorch, straight from its formulas: the oracle of every kpool test.

    x     = bf16(sum_j k_j softmax_j(gate_j + ape_j))       per dimension, over a pool's tokens j
    y     = bf16(H_128 x / sqrt(128))                        FP32, butterflies from stride 1 to 64
    scale = 2^ceil(log2(max(absmax(y), 1e-4) / 448)), or max(absmax(y), 1e-4) / 448 without round_scale
    key   = e4m3(clamp(y / scale, +-448))
    logit = (sum_h weight_h relu(q_h . key)) scale           heads ascending

Runs on any device. What may not be read is replaced before any arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsa_cute.geometry import INDEX_HEAD_DIM
from qsa_cute.reference import indexer

FP8_MAX = 448.0
LEAST_ABSMAX = 1e-4
ENTRY_BYTES = INDEX_HEAD_DIM + 4
POOL_SIZE = 4  # the model's


def hadamard(x: Tensor) -> Tensor:
    """Hadamard-128 / sqrt(128) along the last dimension, FP32, pairs at distance 1, 2, 4, ... 64 in turn."""
    y, step = x.float(), 1
    while step < INDEX_HEAD_DIM:
        pairs = y.view(*y.shape[:-1], INDEX_HEAD_DIM // (2 * step), 2, step)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((low + high, low - high), -2).view(x.shape)
        step *= 2
    return y * torch.tensor(INDEX_HEAD_DIM**-0.5, dtype=torch.float32, device=x.device)


def power_scale(absmax: Tensor) -> Tensor:
    """2^ceil(log2(absmax / 448)), exactly: 448 is 0.875 x 2^9. Infinity for infinity."""
    mantissa, exponent = torch.frexp(absmax)
    scale = torch.ldexp(torch.ones_like(absmax), exponent - torch.where(mantissa <= 0.875, 9, 8))
    return torch.where(absmax.isinf(), absmax, scale)


def quantise(y: Tensor, round_scale: bool = True) -> tuple[Tensor, Tensor]:
    """(e4m3 [..., 128], FP32 scale [...]) of FP32 vectors; NaN is no magnitude, and stays NaN."""
    absmax = y.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1).clamp(min=LEAST_ABSMAX)
    inverse = torch.tensor(1.0 / FP8_MAX, dtype=torch.float32, device=y.device)
    scale = power_scale(absmax) if round_scale else absmax * inverse
    return (y / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def hadamard_quant(q: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 [rows, 128] -> (e4m3 [rows, 128], FP32 [rows, 1])."""
    key, scale = quantise(hadamard(q).bfloat16().float())
    return key, scale[:, None]


def pool_mean(slot_k: Tensor, slot_score: Tensor, ape: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """bf16 [pools, 128]: the softmax-weighted sum of a pool's tokens, all arithmetic but the bias's sum in `dtype`."""
    biased = (slot_score.float() + ape.float()).to(dtype)
    return (slot_k.to(dtype) * torch.softmax(biased, 1)).sum(1).bfloat16()


def compress(slot_k: Tensor, slot_score: Tensor, ape: Tensor, round_scale: bool = True) -> tuple[Tensor, Tensor]:
    """bf16 keys [pools, pool, 128] and their gate scores -> (e4m3 [pools, 128], FP32 [pools])."""
    return quantise(hadamard(pool_mean(slot_k, slot_score, ape)).bfloat16().float(), round_scale)


# The paged cache: uint8 [pages, page_size, 132], a page page_size x 128 key bytes, then page_size FP32 scales.


def _pages(kv_cache: Tensor) -> Tensor:
    """uint8 [pages, bytes of one], a view."""
    return kv_cache.as_strided((kv_cache.shape[0], kv_cache.shape[1] * ENTRY_BYTES), (kv_cache.stride(0), 1))


def _byte_columns(kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(page [n, 1], columns of the key [n, 128], columns of the scale [n, 4]) of flat slots."""
    size, slots = kv_cache.shape[1], slots.long()[:, None]
    page, place = slots // size, slots % size
    key = place * INDEX_HEAD_DIM + torch.arange(INDEX_HEAD_DIM, device=slots.device)
    return page, key, size * INDEX_HEAD_DIM + place * 4 + torch.arange(4, device=slots.device)


def write_cache(kv_cache: Tensor, loc: Tensor, key: Tensor, scale: Tensor, write_mask: Tensor | None = None) -> None:
    """Store e4m3 [n, 128] and FP32 [n] at flat slots [n]; those outside the cache, and masked ones, are left out."""
    wanted = (loc >= 0) & (loc < kv_cache.shape[0] * kv_cache.shape[1])
    if write_mask is not None:
        wanted &= write_mask
    page, key_at, scale_at = _byte_columns(kv_cache, loc[wanted])
    _pages(kv_cache)[page, key_at] = key[wanted].view(torch.uint8)
    _pages(kv_cache)[page, scale_at] = scale[wanted].contiguous().view(torch.uint8).view(-1, 4)


def read_cache(kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [n, 128], FP32 [n]) at flat slots [n]; zeros where a slot is negative."""
    page, key_at, scale_at = _byte_columns(kv_cache, slots.clamp(min=0))
    key, scale = _pages(kv_cache)[page, key_at], _pages(kv_cache)[page, scale_at]
    key, scale = (torch.where(slots[:, None] >= 0, found, 0) for found in (key, scale))
    return key.view(torch.float8_e4m3fn), scale.contiguous().view(torch.float32).view(-1)


# The tail cache: bf16 [blocks, 2, ring, 128], keys in half 0, gate scores in half 1.


def seed_tail(tail: Tensor, key: Tensor, gate_score: Tensor, tail_slots: Tensor, pool_size: int) -> None:
    """Each request's last `pool_size` tokens of the batch: those whose token `pool_size` ahead is not their block's."""
    ring, slots = tail.shape[2], tail_slots.tolist()
    for i, slot in enumerate(slots):
        block = slot // ring
        ahead = slots[i + pool_size] if i + pool_size < len(slots) else -1
        if 0 <= block < tail.shape[0] and (ahead < 0 or ahead // ring != block):
            tail[block, 0, slot % ring] = key[i]
            tail[block, 1, slot % ring] = gate_score[i]


def decode_update(
    kv_cache: Tensor,
    tail: Tensor,
    tail_slots: Tensor,
    key: Tensor,
    slot_score: Tensor,
    ape: Tensor,
    slots: Tensor,
    positions: Tensor,
    round_scale: bool = True,
) -> None:
    """Requests' new tokens [requests, next_n] in order: a completed pool is compressed, then the token stashed."""
    pool, ring = ape.shape[0], tail.shape[2]
    columns = torch.arange(pool, device=tail.device)
    for b in range(key.shape[0]):
        for t in range(key.shape[1]):
            slot, position, tail_slot = (int(tensor[b, t]) for tensor in (slots, positions, tail_slots))
            block = max(tail_slot, 0) // ring
            if position < 0 or block >= tail.shape[0]:
                continue
            if slot >= 0 and position % pool == pool - 1:
                places = (position - pool + 1 + columns) % ring
                keys, scores = tail[block, 0, places].clone(), tail[block, 1, places].clone()
                keys[-1], scores[-1] = key[b, t], slot_score[b, t]
                found = compress(keys[None], scores[None], ape, round_scale)
                write_cache(kv_cache, torch.tensor([slot], device=tail.device), *found)
            if tail_slot >= 0:
                tail[block, 0, position % ring] = key[b, t]
                tail[block, 1, position % ring] = slot_score[b, t]


# Selected pools to tokens.


def _place(tokens: Tensor, page_table: Tensor | None, offsets: Tensor | None) -> Tensor:
    """int32 of tokens [rows, n]: through a table [rows, width], clamped to it, or shifted by a row's offset."""
    if page_table is not None:
        return page_table.gather(1, tokens.clamp(0, page_table.shape[1] - 1)).int()
    return (tokens if offsets is None else tokens + offsets.reshape(-1, 1).long()).int()


def expand(
    group_ids: Tensor,
    valid: Tensor,
    pool_size: int,
    page_table: Tensor | None = None,
    topk_offsets: Tensor | None = None,
) -> Tensor:
    """int32 [rows, groups * pool_size]: a valid pool's tokens in order, -1 for the others."""
    tokens = group_ids.long()[..., None] * pool_size + torch.arange(pool_size, device=group_ids.device)
    placed = _place(tokens.flatten(1), page_table, topk_offsets)
    return placed.masked_fill(~valid.repeat_interleave(pool_size, 1), -1)


def append_tail(
    topk: Tensor,
    seq_lens: Tensor,
    pool_lens: Tensor,
    pool_size: int,
    page_table: Tensor | None = None,
    topk_offsets: Tensor | None = None,
) -> Tensor:
    """int32 [rows, columns + pool_size - 1]: a row's own history, then tokens pool_lens * pool_size up to seq_lens."""
    i = torch.arange(pool_size - 1, device=topk.device)
    start = pool_lens.long()[:, None] * pool_size
    tokens = _place(start + i, page_table, topk_offsets)
    return torch.cat((topk, tokens.masked_fill(i >= seq_lens.long()[:, None] - start, -1)), 1)


def expand_and_append_tail(pool_ids: Tensor, seq_lens: Tensor, pool_size: int) -> Tensor:
    """int32 [rows, groups * pool_size + pool_size - 1]; a pool below 0 is not valid, a length below 0 is 0."""
    seq_lens = seq_lens.clamp(min=0)
    return append_tail(expand(pool_ids, pool_ids >= 0, pool_size), seq_lens, seq_lens // pool_size, pool_size)


# Scores and selection of pools.


def scores(
    q: Tensor,
    weights: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    row_requests: Tensor,
    num_pools: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """[rows, num_pools] logits; NaN where a row does not see: pools from seq_lens // 4 on.

    Args:
        q: e4m3 [rows, heads, 128]. weights: FP32 [rows, heads], with q's scale folded in.
        block_table: int32 [requests, max_pages]; pages outside the cache count as zeros.
        seq_lens: int32 [rows], tokens that a row sees, its own included. row_requests: int32 [rows].
    """
    page_size, logits = kv_cache.shape[1], torch.full((q.shape[0], num_pools), torch.nan, dtype=dtype, device=q.device)
    for request in row_requests.unique().tolist():
        rows = (row_requests == request).nonzero()[:, 0]
        visible = (seq_lens[rows].long() // POOL_SIZE).clamp(0, num_pools)
        pools = torch.arange(int(visible.max()), device=q.device)
        if not len(pools):
            continue
        page = block_table[request].long()[pools // page_size]
        slots = torch.where((page >= 0) & (page < kv_cache.shape[0]), page * page_size + pools % page_size, -1)
        key, scale = read_cache(kv_cache, slots)
        dots = torch.einsum("rhd,pd->rhp", q[rows].to(dtype), key.to(dtype)).relu()
        found = torch.einsum("rhp,rh->rp", dots, weights[rows].to(dtype)) * scale.to(dtype)
        logits[rows, : len(pools)] = found.masked_fill(pools >= visible[:, None], torch.nan)
    return logits


def select(logits: Tensor, seq_lens: Tensor) -> Tensor:
    """int32 [rows, 512]: each row's best visible pools, ascending, then -1; ordered as `indexer.select`."""
    visible = (seq_lens.long() // POOL_SIZE).clamp(0, logits.shape[1])
    best = indexer.select(logits, visible)
    return torch.where(best < 0, logits.shape[1], best).sort(1).values.where(best.sort(1, True).values >= 0, -1).int()
