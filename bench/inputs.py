"""Inputs of the cases, on the GPU and seeded, and the reference of the rows that are checked.

Every provider of a case gets the same values in the layout that it takes, made by the provider itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cases import TOKEN_BYTES, Case
from qsa_cute.geometry import (
    BLOCK_TOKENS,
    HEAD_DIM,
    INDEX_HEAD_DIM,
    INDEX_HEADS,
    INDEX_WIDTH,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    PAGE_TOKENS,
    POOL_HEAD_DIM,
    TOP_BLOCKS,
)
from qsa_cute.reference import attention, indexer

SCALE = HEAD_DIM**-0.5
# Distinct K and V that one rotation of a decode case touches: far more than an H200's L2 of 60 MB holds.
ROTATION_BYTES = 400_000_000
POOL_SEQUENCES = 128  # at most; more of them repeat, with selections of their own
CHECKED_ROWS = 8
LAYER_RHO = 0.995  # of neighbouring rows' index queries: rows of a layer's prefill select alike, as a model's do
_CHUNK = 256  # rows whose selection is made at once


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def dtype_of(case: Case) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]


def generator(where: torch.device, seed: int = 0) -> torch.Generator:
    return torch.Generator(device=where).manual_seed(seed)


def normal(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Unit normal values, made in pieces so that no FP32 copy of the whole exists."""
    out = torch.empty(shape, dtype=dtype, device=random.device)
    for piece in out.view(-1).split(1 << 28):
        piece.normal_(generator=random)
    return out


def ints(values: list[int], where: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=where)


def ar1(rows: int, width: int, rho: float, random: torch.Generator) -> Iterator[Tensor]:
    """FP32 [up to 256, width] at a time of the process z_t = rho z_(t-1) + sqrt(1 - rho^2) e_t, unit normal each."""
    where = random.device
    # A chunk at once: z = rho^(i+1) z_before + sum_j rho^(i-j) sqrt(1 - rho^2) e_j, the sum a triangular matrix.
    steps = torch.arange(_CHUNK, device=where)
    lag = steps[:, None] - steps
    weights = torch.where(lag >= 0, rho ** lag.clamp(min=0).double(), 0).float() * (1 - rho * rho) ** 0.5
    decay = (rho ** (steps + 1).double()).float()[:, None]
    z = torch.randn(width, generator=random, device=where)
    for begin in range(0, rows, _CHUNK):
        noise = torch.randn(_CHUNK, width, generator=random, device=where)
        values = decay * z + weights @ noise
        z = values[-1]
        yield values[: rows - begin]


def correlated_blocks(first: int, rows: int, rho: float, random: torch.Generator) -> Tensor:
    """Blocks that rows at positions first, first + 1, ... select where a block's score is an AR(1) process over them:
    int32 [rows, 512], best first, -1 where fewer are visible."""
    where, blocks = random.device, (first + rows) // BLOCK_TOKENS
    chosen = torch.full((rows, TOP_BLOCKS), -1, dtype=torch.int32, device=where)
    for out, scores in zip(chosen.split(_CHUNK), ar1(rows, blocks, rho, random), strict=True):
        visible = torch.arange(first + 1, first + 1 + len(out), device=where) // BLOCK_TOKENS
        scores = scores.masked_fill(torch.arange(blocks, device=where) >= visible[:, None], float("-inf"))
        top = scores.topk(min(TOP_BLOCKS, blocks))
        out[:, : top.indices.shape[1]] = torch.where(top.values > float("-inf"), top.indices, -1)
        first += len(out)
    return chosen


@dataclass(frozen=True)
class Prefill:
    """The last `rows` rows of one sequence. q [1, rows, 24, 256], k and v [1, ctx, 2, 256], blocks int32 [rows, 512],
    ids int32 [1, rows, 2051] and what they hold, int32 [rows]; `checked` are row numbers."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: Tensor
    ids: Tensor
    counts: Tensor
    context_lengths: Tensor
    query_starts: Tensor
    checked: Tensor

    def _reference(self, ids: Callable[[int], Tensor]) -> Tensor:
        start, outs = int(self.query_starts), []
        for row in self.checked.tolist():
            at = ints([start + row], self.q.device)
            one = self.q[:, row : row + 1]
            out, _ = attention.sparse_prefill(one, self.k, self.v, ids(row), self.context_lengths, SCALE, at)
            outs.append(out[0])
        return torch.cat(outs)

    @functools.cached_property
    def sparse_reference(self) -> Tensor:
        """FP32 [checked, 24, 256]."""
        return self._reference(lambda row: self.ids[:, row : row + 1])

    @functools.cached_property
    def dense_reference(self) -> Tensor:
        """FP32 [checked, 24, 256] of causal attention to everything."""
        start, where = int(self.query_starts), self.q.device
        return self._reference(lambda row: torch.arange(start + row + 1, dtype=torch.int32, device=where)[None, None])


def prefill(case: Case) -> Prefill:
    where, first = device(), case.ctx - case.rows
    random = generator(where)
    dtype = dtype_of(case)
    blocks = correlated_blocks(first, case.rows, case.rho, random)
    positions = torch.arange(first, case.ctx, device=where)
    ids = torch.cat([indexer.expand(b, p) for b, p in zip(blocks.split(4096), positions.split(4096), strict=True)])
    return Prefill(
        q=normal((1, case.rows, NUM_Q_HEADS, HEAD_DIM), dtype, random),
        k=normal((1, case.ctx, NUM_KV_HEADS, HEAD_DIM), dtype, random),
        v=normal((1, case.ctx, NUM_KV_HEADS, HEAD_DIM), dtype, random),
        blocks=blocks,
        ids=ids[None],
        counts=(ids >= 0).sum(1).int(),
        context_lengths=ints([case.ctx], where),
        query_starts=ints([first], where),
        checked=torch.linspace(0, case.rows - 1, min(CHECKED_ROWS, case.rows)).long(),
    )


@dataclass(frozen=True)
class DecodeSet:
    """One launch of a rotation: its sequences' numbers [batch], ids int32 [batch, 1, 2051], counts int32 [batch]."""

    sequences: Tensor
    ids: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Decode:
    """q [batch, 1, 24, 256], the paged pool [2 * pages, 128, 2, 384] with a permuted table [sequences, 2, pages of
    one], and the sets of a rotation, which touch K and V far beyond the L2."""

    q: Tensor
    pool: Tensor
    page_table: Tensor
    context_lengths: Tensor
    sets: list[DecodeSet]

    def reference(self, number: int) -> Tensor:
        """FP32 [batch, 24, 256] of a set."""
        one = self.sets[number]
        table = self.page_table[one.sequences]
        out, _ = attention.sparse_decode(self.q, self.pool, table, one.ids, self.context_lengths, SCALE)
        return out[:, 0]


def paged_pool(sequences: int, ctx: int, dtype: torch.dtype, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """(pool, page table) of that many sequences, pages in random order."""
    per_sequence = -(-ctx // PAGE_TOKENS)
    pages = sequences * per_sequence
    pool = normal((2 * pages, PAGE_TOKENS, NUM_KV_HEADS, POOL_HEAD_DIM), dtype, random)
    order = torch.randperm(pages, generator=random, device=random.device).int().view(sequences, per_sequence)
    return pool, torch.stack([order, order + pages], 1).contiguous()


def rotations(batch: int, bytes_each: int) -> tuple[int, int]:
    """(sets of a rotation, sequences in the pool) for launches that touch `bytes_each` a sequence."""
    sets = max(2, -(-ROTATION_BYTES // (batch * bytes_each)))
    return sets, max(batch, min(POOL_SEQUENCES, sets * batch))


def decode(case: Case) -> Decode:
    where = device()
    random = generator(where)
    sets, sequences = rotations(case.batch, INDEX_WIDTH * TOKEN_BYTES)
    pool, table = paged_pool(sequences, case.ctx, dtype_of(case), random)
    # Every third sequence lacks a token, so that open blocks of different lengths occur.
    lengths = [case.ctx - (b % 3 == 2) for b in range(case.batch)]
    positions = ints(lengths, where).long() - 1
    visible = (positions + 1) // BLOCK_TOKENS
    made = []
    for number in range(sets):
        scores = torch.rand(case.batch, case.ctx // BLOCK_TOKENS + 1, generator=random, device=where)
        scores.masked_fill_(torch.arange(scores.shape[1], device=where) >= visible[:, None], -1)
        ids = indexer.expand(scores.topk(min(TOP_BLOCKS, scores.shape[1])).indices, positions)
        chosen = (number * case.batch + torch.arange(case.batch, device=where)) % sequences
        made.append(DecodeSet(chosen, ids[:, None].contiguous(), (ids >= 0).sum(1).int()))
    q = normal((case.batch, 1, NUM_Q_HEADS, HEAD_DIM), dtype_of(case), random)
    return Decode(q, pool, table, ints(lengths, where), made)


@dataclass(frozen=True)
class Scores:
    """q_normed [rows, 4, 128], kbar [1, blocks, 128] of one sequence whose last rows these are."""

    q_normed: Tensor
    kbar: Tensor
    context_lengths: Tensor
    query_starts: Tensor
    visible: Tensor
    checked: Tensor

    @functools.cached_property
    def reference(self) -> Tensor:
        """FP32 [checked, blocks], NaN where a row does not see."""
        start, parts = int(self.query_starts), []
        for row in self.checked.tolist():
            at = ints([start + row], self.kbar.device)
            parts.append(indexer.scores(self.q_normed[None, row : row + 1], self.kbar, self.context_lengths, at)[0])
        return _unseen_to_nan(torch.cat(parts))


def _unseen_to_nan(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits == indexer.MASKED, float("nan"))


def scores_prefill(case: Case) -> Scores:
    where, first = device(), case.ctx - case.rows
    random = generator(where)
    return Scores(
        q_normed=normal((case.rows, INDEX_HEADS, INDEX_HEAD_DIM), dtype_of(case), random),
        kbar=normal((1, case.ctx // BLOCK_TOKENS, INDEX_HEAD_DIM), dtype_of(case), random),
        context_lengths=ints([case.ctx], where),
        query_starts=ints([first], where),
        visible=(torch.arange(first + 1, case.ctx + 1, device=where) // BLOCK_TOKENS).int(),
        checked=torch.linspace(0, case.rows - 1, min(CHECKED_ROWS, case.rows)).long(),
    )


@dataclass(frozen=True)
class ScoresDecode:
    """q_normed [batch, 4, 128] against the block keys in the pool; each set is its sequences' numbers."""

    q_normed: Tensor
    pool: Tensor
    page_table: Tensor
    context_lengths: Tensor
    num_blocks: int
    sets: list[Tensor]

    def reference(self, number: int) -> Tensor:
        """FP32 [batch, blocks] of a set."""
        pool = indexer.Pool(self.pool, self.page_table[self.sets[number]])
        logits = indexer.scores_decode(self.q_normed[:, None], self.context_lengths, pool, self.num_blocks)
        return _unseen_to_nan(logits[:, 0])


def scores_decode(case: Case) -> ScoresDecode:
    where = device()
    random = generator(where)
    blocks = case.ctx // BLOCK_TOKENS
    sets, sequences = rotations(case.batch, case.bytes // case.batch)
    pool, table = paged_pool(sequences, case.ctx, dtype_of(case), random)
    return ScoresDecode(
        normal((case.batch, INDEX_HEADS, INDEX_HEAD_DIM), dtype_of(case), random),
        pool,
        table,
        ints([case.ctx] * case.batch, where),
        blocks,
        [(number * case.batch + torch.arange(case.batch, device=where)) % sequences for number in range(sets)],
    )


@dataclass(frozen=True)
class TopK:
    """logits FP32 [rows, columns], all visible, as scores of random keys look: not negative, some zero."""

    logits: Tensor
    visible: Tensor

    @functools.cached_property
    def reference(self) -> Tensor:
        """Values of the 512 best, descending: FP32 [rows, 512]. Ids of equal values may differ between providers."""
        return self.logits.topk(TOP_BLOCKS).values


def topk(case: Case) -> TopK:
    where = device()
    shape = (case.rows, case.columns)
    logits = torch.randn(shape, generator=generator(where), device=where).add_(1).relu_()
    return TopK(logits, torch.full((case.rows,), case.columns, dtype=torch.int32, device=where))


def vllm_select(case: Case) -> object:
    """See `bench.vllm_select`, which needs this module."""
    from bench.vllm_select import given

    return given(case)


@dataclass(frozen=True)
class Layer:
    """A layer after its projections: the attention's own inputs, the indexer's projections index_qk [batch, rows, 640],
    its norms' weights and rope table, and the pool, with earlier tokens' block keys, that it reads and writes."""

    attention: Prefill | Decode
    index_qk: Tensor
    w_q: Tensor
    w_k: Tensor
    cos_sin: Tensor
    pool: Tensor
    page_table: Tensor


def _layer(case: Case, inner: Prefill | Decode, rows: int, pool: Tensor, table: Tensor) -> Layer:
    random, dtype = generator(pool.device, seed=1), dtype_of(case)
    w_q, w_k = (normal((INDEX_HEAD_DIM,), dtype, random) * 0.1 for _ in range(2))
    index_qk = normal((case.batch, rows, (INDEX_HEADS + 1) * INDEX_HEAD_DIM), dtype, random)
    if rows > 1:
        queries = torch.cat(list(ar1(rows, INDEX_HEADS * INDEX_HEAD_DIM, LAYER_RHO, random)))
        index_qk[0, :, : queries.shape[1]] = queries
    return Layer(inner, index_qk, w_q, w_k, indexer.rope_table(case.ctx, pool.device), pool, table)


def layer_prefill(case: Case) -> Layer:
    pool, table = paged_pool(1, case.ctx, dtype_of(case), generator(device(), seed=2))
    return _layer(case, prefill(case), case.rows, pool, table)


def layer_decode(case: Case) -> Layer:
    inner = decode(case)
    return _layer(case, inner, 1, inner.pool, inner.page_table)


def vllm_attention(case: Case) -> object:
    """See `bench.vllm_attention`, which needs this module."""
    from bench.vllm_attention import given

    return given(case)


MAKERS = {
    "vllm_attention": vllm_attention,
    "prefill": prefill,
    "prefill_full": prefill,
    "decode": decode,
    "scores_prefill": scores_prefill,
    "scores_decode": scores_decode,
    "topk": topk,
    "vllm_select": vllm_select,
    "layer_prefill": layer_prefill,
    "layer_decode": layer_decode,
}
