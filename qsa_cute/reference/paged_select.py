"""vLLM's index selection in plain PyTorch, straight from its formulas: the oracle of `tests/gpu/test_paged_select.py`.

    logits[r, c] = sum_h relu(q[r, h] . key[b, c])             c < min(visible[r], columns), b the row's request
    ids[r]       = the 512 best columns (value descending, lower first), then -1
    list[r]      = their tokens, the open block's, -1; the count in the last column

Runs on any device; what may not be read is replaced before any arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsa_cute.geometry import BLOCK_TOKENS, TOP_BLOCKS
from qsa_cute.reference import indexer


def request_of_rows(rows: int, query_start_loc: Tensor) -> Tensor:
    """int64 [rows]: which request each packed row belongs to; -1 for none. Offsets count from the first one."""
    offsets = (query_start_loc - query_start_loc[0]).long()
    at = torch.arange(rows, device=offsets.device)
    found = torch.searchsorted(offsets, at, right=True) - 1
    return torch.where(at < offsets[-1], found, -1)


def keys_of(k_cache: Tensor, table: Tensor, columns: int, seen: int) -> Tensor:
    """FP64 [columns, 128] of one request; zeros for columns from `seen` on and for pages outside the cache."""
    pages, page_size = k_cache.shape[:2]
    at = torch.arange(columns, device=k_cache.device)
    page = table[(at // page_size).clamp(max=len(table) - 1)].long()
    live = (at < seen) & (page >= 0) & (page < pages)
    found = torch.zeros(columns, k_cache.shape[3], dtype=torch.float64, device=k_cache.device)
    found[live] = k_cache[page[live], at[live] % page_size, 0].double()
    return found


def scores(
    q: Tensor, k_cache: Tensor, page_table: Tensor, requests: Tensor, visible: Tensor, columns: int | None = None
) -> Tensor:
    """FP64 logits [rows, columns], NaN for what a row does not see.

    Args:
        q: [rows, heads, 128]; k_cache: [pages, page_size, 1, 128]; page_table: [num_requests, max_pages].
        requests, visible: integer [rows]; a row of request -1 sees nothing.
        columns: all that the table has when None.
    """
    columns = page_table.shape[1] * k_cache.shape[1] if columns is None else columns
    limits = torch.where(requests >= 0, visible.long(), 0).clamp(0, columns)
    out = torch.full((len(q), columns), torch.nan, dtype=torch.float64, device=q.device)
    for request in requests[limits > 0].unique().tolist():
        rows = ((requests == request) & (limits > 0)).nonzero()[:, 0]
        keys = keys_of(k_cache, page_table[request], columns, int(limits[rows].max()))
        total = torch.zeros(len(rows), columns, dtype=torch.float64, device=q.device)
        for head in range(q.shape[1]):
            total += (q[rows, head].double() @ keys.T).relu()
        out[rows] = total
    return out.masked_fill_(torch.arange(columns, device=q.device) >= limits[:, None], torch.nan)


def select(logits: Tensor, visible: Tensor) -> Tensor:
    """int64 [rows, 512] from logits [rows, columns], best first, then -1."""
    return indexer.select(logits, visible.long().clamp(0, logits.shape[1]))


def expand_counted(
    block_indices: Tensor, query_positions: Tensor, visible_blocks: Tensor, token_topk: int = BLOCK_TOKENS * TOP_BLOCKS
) -> Tensor:
    """int32 [rows, token_topk + 4]: counted lists.

    Args:
        block_indices: integer [rows, token_topk / 4], of which min(visible_blocks, width) a row are looked at.
        query_positions, visible_blocks: integer [rows].
    """
    length = query_positions.long()[:, None] + 1
    chosen = BLOCK_TOKENS * visible_blocks.long()[:, None].clamp(max=token_topk // BLOCK_TOKENS)
    tail = length % BLOCK_TOKENS
    at = torch.arange(token_topk + BLOCK_TOKENS - 1, device=length.device)[None]
    slots = (at // BLOCK_TOKENS).clamp(max=block_indices.shape[1] - 1).expand(len(length), -1)
    blocks = torch.where(at < chosen, block_indices.long().gather(1, slots), 0)
    tokens = torch.where(at < chosen, BLOCK_TOKENS * blocks + at % BLOCK_TOKENS, length - tail + at - chosen)
    tokens = torch.where(at < chosen + tail, tokens, -1).clamp(min=-1)
    return torch.cat((tokens, chosen + tail), 1).int()
