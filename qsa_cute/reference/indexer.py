"""The indexer in plain PyTorch, straight from its formulas: the oracle of every indexer test.

    q[b, t, h]   = rope(norm(x, w_q), position p)                               p = query_starts[b] + t
    kbar[b, g]   = rope(norm(cast(mean of the raw keys of tokens 4g .. 4g + 3), w_k), position 4g)
    logit[r, g]  = 1 / sqrt(128) * sum_h relu(q[r, h] . kbar[b, g])             g < (p + 1) // 4
    list[r]      = tokens of the 512 best blocks (value descending, lower id first), then the open block's tokens

norm(x, w) = x / sqrt(mean(x^2) + eps) * (1 + w). Runs on any device; what may not be read is replaced before any
arithmetic, so that NaN there cannot arrive as 0 x NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qsa_cute.geometry import (
    BLOCK_TOKENS,
    HEAD_DIM,
    INDEX_HEAD_DIM,
    INDEX_HEADS,
    INDEX_WIDTH,
    PAGE_TOKENS,
    RMS_EPS,
    ROPE_DIM,
    ROPE_THETA,
    TOP_BLOCKS,
)

RAW_KEY = INDEX_HEADS * INDEX_HEAD_DIM  # first column of the raw key in a row of index_qk
MASKED = torch.finfo(torch.float32).min  # logit of a block that a row may not see
K_PLANE, V_PLANE = 0, 1


def rope_table(max_positions: int, device: torch.device | str = "cpu") -> Tensor:
    """FP32 [max_positions, 64]: cos in columns [0, 32), sin in [32, 64), from angles in FP64."""
    exponents = torch.arange(ROPE_DIM // 2, dtype=torch.float64, device=device) / (ROPE_DIM // 2)
    angles = torch.arange(max_positions, dtype=torch.float64, device=device)[:, None] * ROPE_THETA**-exponents
    return torch.cat((angles.cos(), angles.sin()), 1).float()


def norm_rope(
    x: Tensor, weight: Tensor, cos_sin: Tensor, positions: Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Gemma RMS norm and rope (NeoX pairs, first 64 dims) of vectors of 128, cast to their own type at the end.

    Args:
        x: [..., 128].
        weight: [128], as stored: 1 is added here.
        cos_sin: [max_positions, 64].
        positions: integer, of x's leading dimensions or broadcasting to them.
        dtype: type of all arithmetic.
    """
    y = x.to(dtype)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * (1 + weight.to(dtype))
    cos, sin = cos_sin[positions].to(dtype).chunk(2, -1)
    low, high = y[..., : ROPE_DIM // 2], y[..., ROPE_DIM // 2 : ROPE_DIM]
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin, y[..., ROPE_DIM:]), -1)
    return rotated.to(x.dtype)


def positions_of(context_lengths: Tensor, rows: int, query_starts: Tensor | None) -> Tensor:
    """Position [batch, rows] of every query row; -1 where it is padding: at or past the context length, or negative."""
    starts = torch.zeros_like(context_lengths) if query_starts is None else query_starts
    positions = starts.long()[:, None] + torch.arange(rows, device=starts.device)
    return torch.where((positions >= 0) & (positions < context_lengths.long()[:, None]), positions, -1)


def decode_starts(context_lengths: Tensor, query_len: int) -> Tensor:
    """`query_starts` of a decode step: the new tokens are a sequence's last."""
    return context_lengths - query_len


def prepare_queries(
    index_qk: Tensor,
    cos_sin: Tensor,
    context_lengths: Tensor,
    w_q: Tensor,
    eps: float = RMS_EPS,
    query_starts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Norm and rope of the query heads.

    Args:
        index_qk: [batch, rows, 640]: 4 query heads of 128, then the raw key.
        cos_sin: FP32 [max_positions, 64].
        context_lengths: int32 [batch], these rows included.
        w_q: [128].
        query_starts: int32 [batch], position of row 0; zeros when None.

    Returns: [batch, rows, 4, 128] in index_qk's type; padded rows are zeros.
    """
    positions = positions_of(context_lengths, index_qk.shape[1], query_starts)
    live = (positions >= 0)[..., None, None]
    heads = index_qk[..., :RAW_KEY].unflatten(-1, (INDEX_HEADS, INDEX_HEAD_DIM))
    found = norm_rope(torch.where(live, heads, 0), w_q, cos_sin, positions.clamp(min=0)[..., None], eps, dtype)
    return torch.where(live, found, 0)


@dataclass(frozen=True)
class Pool:
    """The indexer's state in the widened pool.

    Attributes:
        kv_pool: [flat_pages, 128, kv_heads, pool_head_dim].
        page_table: int32 [batch, 2, max_pages]; an entry outside [0, flat_pages) is unused.
        head_size: column where the tail begins; raw keys lie in the K plane, block keys in the V plane.
    """

    kv_pool: Tensor
    page_table: Tensor
    head_size: int = HEAD_DIM

    def find(self, plane: int, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(page, row, whether mapped) of tokens [batch, n]; page and row are 0 where they are not."""
        tokens = tokens.long()
        slot = tokens // PAGE_TOKENS
        mapped = (tokens >= 0) & (slot < self.page_table.shape[2])
        page = self.page_table[:, plane].long().gather(1, torch.where(mapped, slot, 0))
        mapped = mapped & (page >= 0) & (page < self.kv_pool.shape[0])
        return torch.where(mapped, page, 0), torch.where(mapped, tokens % PAGE_TOKENS, 0), mapped

    def tails(self, plane: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(tail [batch, n, 128], whether mapped [batch, n]); zeros where not."""
        page, row, mapped = self.find(plane, tokens)
        found = self.kv_pool[page, row, 0, self.head_size : self.head_size + INDEX_HEAD_DIM]
        return torch.where(mapped[..., None], found, 0), mapped

    def write(self, plane: int, tokens: Tensor, values: Tensor, wanted: Tensor) -> None:
        """Store values [batch, n, 128] where wanted [batch, n] and mapped."""
        page, row, mapped = self.find(plane, tokens)
        at = mapped & wanted
        self.kv_pool[page[at], row[at], 0, self.head_size : self.head_size + INDEX_HEAD_DIM] = values[at]


def block_keys(
    raw: Tensor, w_k: Tensor, cos_sin: Tensor, blocks: Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Keys of blocks from their raw keys [..., 4, 128]: mean in order, cast, norm, rope at 4 * block, cast."""
    k = raw.to(dtype)
    mean = (((k[..., 0, :] + k[..., 1, :]) + k[..., 2, :]) + k[..., 3, :]) * 0.25
    return norm_rope(mean.to(raw.dtype), w_k, cos_sin, BLOCK_TOKENS * blocks, eps, dtype)


def compress_keys(
    index_qk: Tensor,
    cos_sin: Tensor,
    context_lengths: Tensor,
    w_k: Tensor,
    num_blocks: int,
    eps: float = RMS_EPS,
    query_starts: Tensor | None = None,
    pool: Pool | None = None,
    read_pool: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Keys of the blocks that are complete and lie in the given rows.

    Args:
        index_qk, cos_sin, context_lengths, query_starts: as for `prepare_queries`.
        w_k: [128].
        pool: where computed keys are stored, too, in the V-tail of the block's first token.
        read_pool: blocks before the rows are copied from the pool, and those that the rows complete take the raw
            keys of earlier tokens from it.

    Returns: [batch, num_blocks, 128] in index_qk's type; other blocks are zeros.
    """
    batch, rows = index_qk.shape[:2]
    starts = torch.zeros_like(context_lengths) if query_starts is None else query_starts
    starts, lengths = starts.long()[:, None, None], context_lengths.long()[:, None]
    blocks = torch.arange(num_blocks, device=index_qk.device).expand(batch, -1)
    tokens = BLOCK_TOKENS * blocks[..., None] + torch.arange(BLOCK_TOKENS, device=index_qk.device)
    fresh = (tokens >= starts) & (tokens < starts + rows)
    local = torch.where(fresh, tokens - starts, 0).flatten(1)
    raw = index_qk[..., RAW_KEY:].gather(1, local[..., None].expand(-1, -1, INDEX_HEAD_DIM))
    raw = torch.where(fresh[..., None], raw.unflatten(1, (num_blocks, BLOCK_TOKENS)), 0)
    known = fresh
    if read_pool:
        assert pool is not None
        stored, mapped = pool.tails(K_PLANE, tokens.flatten(1))
        stored, mapped = (found.unflatten(1, (num_blocks, BLOCK_TOKENS)) for found in (stored, mapped))
        stored_too = mapped & (tokens < starts)
        raw = torch.where(stored_too[..., None], stored, raw)
        known = fresh | stored_too
    complete = (tokens[..., -1] < lengths) & known.all(-1) & fresh.any(-1)
    keys = block_keys(torch.where(complete[..., None, None], raw, 0), w_k, cos_sin, blocks, eps, dtype)
    keys = torch.where(complete[..., None], keys, 0)
    if pool is not None:
        pool.write(V_PLANE, BLOCK_TOKENS * blocks, keys, complete)
        if read_pool:
            earlier, mapped = pool.tails(V_PLANE, BLOCK_TOKENS * blocks)
            past = mapped & (tokens[..., -1] < starts[..., 0]) & (tokens[..., -1] < lengths)
            keys = torch.where(past[..., None], earlier, keys)
    return keys


def write_raw_tails(index_qk: Tensor, context_lengths: Tensor, pool: Pool, query_starts: Tensor | None = None) -> None:
    """Store the raw keys of the open block's tokens, as far as they are among the rows, in their K-tails."""
    batch, rows = index_qk.shape[:2]
    starts = torch.zeros_like(context_lengths) if query_starts is None else query_starts
    lengths = context_lengths.long()[:, None]
    tokens = lengths // BLOCK_TOKENS * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS - 1, device=index_qk.device)
    local = tokens - starts.long()[:, None]
    wanted = (tokens < lengths) & (local >= 0) & (local < rows)
    rows_of = torch.arange(batch, device=index_qk.device)[:, None]
    if rows:
        raw = index_qk[rows_of, local.clamp(0, rows - 1), RAW_KEY:]
        pool.write(K_PLANE, tokens, raw, wanted)


def pre_decode(
    index_qk: Tensor,
    cos_sin: Tensor,
    context_lengths: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    pool: Pool,
    eps: float = RMS_EPS,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Queries of each sequence's new tokens [batch, query_len, 640]; stores the keys of the blocks that they complete,
    and every raw key but a block's last: should later tokens of the step be rejected, its block is open again.
    """
    starts = decode_starts(context_lengths, index_qk.shape[1])
    tokens = starts.long()[:, None] + torch.arange(index_qk.shape[1], device=starts.device)
    pool.write(K_PLANE, tokens, index_qk[..., RAW_KEY:], tokens % BLOCK_TOKENS != BLOCK_TOKENS - 1)
    num_blocks = int(context_lengths.clamp(min=0).max()) // BLOCK_TOKENS if len(context_lengths) else 0
    compress_keys(index_qk, cos_sin, context_lengths, w_k, num_blocks, eps, starts, pool, read_pool=True, dtype=dtype)
    return prepare_queries(index_qk, cos_sin, context_lengths, w_q, eps, starts, dtype)


def scores(
    q_normed: Tensor,
    kbar: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Logits [batch, rows, num_blocks] in `dtype`: heads ReLU'd each, summed in ascending order, scaled after the sum.

    Args:
        q_normed: [batch, rows, 4, 128].
        kbar: [batch, num_blocks, 128].
        context_lengths, query_starts: as for `prepare_queries`.

    Returns: -FLT_MAX for blocks that a row does not see, and for padded rows.
    """
    positions = positions_of(context_lengths, q_normed.shape[1], query_starts)
    visible = (positions + 1) // BLOCK_TOKENS
    blocks = torch.arange(kbar.shape[1], device=kbar.device)
    q = torch.where((visible > 0)[..., None, None], q_normed, 0).to(dtype)
    k = torch.where((blocks < visible.amax(1, keepdim=True))[..., None], kbar, 0).to(dtype)
    total = torch.zeros(*q.shape[:2], len(blocks), dtype=dtype, device=q.device)
    for head in range(INDEX_HEADS):
        total += (q[:, :, head] @ k.mT).relu()
    return torch.where(blocks < visible[..., None], total * INDEX_HEAD_DIM**-0.5, MASKED)


def scores_decode(
    q_normed: Tensor, context_lengths: Tensor, pool: Pool, num_blocks: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`scores` of the last q_normed.shape[1] tokens of each sequence, block keys from the pool's V-tails."""
    first = BLOCK_TOKENS * torch.arange(num_blocks, device=q_normed.device).expand(len(context_lengths), -1)
    kbar, _ = pool.tails(V_PLANE, first)
    return scores(q_normed, kbar, context_lengths, decode_starts(context_lengths, q_normed.shape[1]), dtype)


def orderable(values: Tensor) -> Tensor:
    """int64 that orders FP32 as the selection does: NaN lowest, -0 equal to +0."""
    bits = (values.float() + 0.0).view(torch.int32).long()
    return torch.where(values.isnan(), -(2**40), torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF)))


def select(logits: Tensor, visible: Tensor, top: int = TOP_BLOCKS) -> Tensor:
    """The best blocks of each row: value descending, ties to the lower id.

    Args:
        logits: FP32 [..., num_blocks]; what lies past a row's visible prefix is not looked at.
        visible: integer [...], at most num_blocks.

    Returns: int64 [..., top] in that order, then -1.
    """
    blocks = torch.arange(logits.shape[-1], device=logits.device)
    seen = blocks < visible[..., None]
    keys = torch.where(seen, orderable(torch.where(seen, logits, 0)), -(2**41))
    ids = torch.sort(keys, dim=-1, descending=True, stable=True).indices[..., :top]
    if ids.shape[-1] < top:
        ids = torch.nn.functional.pad(ids, (0, top - ids.shape[-1]), value=-1)
    return torch.where(torch.arange(top, device=ids.device) < visible[..., None], ids, -1)


def expand(block_ids: Tensor, positions: Tensor) -> Tensor:
    """Lists of tokens: four of each chosen block, then the open block's up to the row's own, then -1.

    Args:
        block_ids: integer [..., 512 or more]; only the first min(512, visible) are read.
        positions: integer [...]; negative for padding, whose list is all -1.

    Returns: int32 [..., 2051].
    """
    positions = positions[..., None]
    visible, tail = (positions + 1) // BLOCK_TOKENS, (positions + 1) % BLOCK_TOKENS
    chosen = visible.clamp(max=TOP_BLOCKS)
    at = torch.arange(INDEX_WIDTH, device=positions.device)
    slots = (at // BLOCK_TOKENS).clamp(max=block_ids.shape[-1] - 1).expand(*block_ids.shape[:-1], -1)
    tokens = BLOCK_TOKENS * block_ids.long().gather(-1, slots) + at % BLOCK_TOKENS
    open_block = BLOCK_TOKENS * visible + at - BLOCK_TOKENS * chosen
    found = torch.where(at < BLOCK_TOKENS * chosen, tokens, open_block)
    return torch.where((at < BLOCK_TOKENS * chosen + tail) & (positions >= 0), found, -1).int()


def select_tokens(logits: Tensor, positions: Tensor) -> Tensor:
    """`expand` of `select`: int32 [..., 2051] from logits [..., num_blocks] and positions [...]."""
    visible = torch.where(positions >= 0, (positions + 1) // BLOCK_TOKENS, 0)
    return expand(select(logits, visible), positions)
