"""Inputs of the indexer's tests: projections with NaN in padded rows, a permuted pool full of NaN with unused and
foreign pages, and checks of what was written where.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attention_cases import DTYPES, ints, normal, seeded
from torch import Tensor

from qsa_cute.geometry import BLOCK_TOKENS, INDEX_WIDTH, PAGE_TOKENS, TOP_BLOCKS
from qsa_cute.reference import indexer as reference
from qsa_cute.reference.indexer import K_PLANE, V_PLANE, Pool
from qsa_cute.runners.indexer_state import QsaIndexerPoolState

DEVICE = "cuda"
KEY_RTOL, KEY_ATOL = 1e-2, 1e-3  # of prepared queries and block keys
LOGIT_RTOL, LOGIT_ATOL = 1e-3, 5e-3
BAND = 1e-3  # of logits around the 512th, within which a selection may differ
WIDTH = 704  # columns of the buffer that index_qk is a view of: rows are strided


@dataclass
class Indexer:
    """The whole history of a batch: projections of every token, weights, and an empty pool."""

    index_qk: Tensor  # [batch, tokens, 640], NaN past each length
    lengths: Tensor  # int32 [batch]
    w_q: Tensor
    w_k: Tensor
    cos_sin: Tensor
    page_table: Tensor
    flat_pages: int

    @property
    def batch(self) -> int:
        return self.index_qk.shape[0]

    @property
    def tokens(self) -> int:
        return self.index_qk.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.index_qk.dtype

    @property
    def addresses(self) -> dict[str, int]:
        tensors = {"index_qk_ptr": self.index_qk, "cos_sin_ptr": self.cos_sin, "w_q_ptr": self.w_q, "w_k_ptr": self.w_k}
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    @property
    def rows(self) -> dict[str, int]:
        """Fields of a launch over all tokens at once."""
        batch, tokens = self.index_qk.shape[:2]
        strides = {"index_stride_batch": self.index_qk.stride(0), "index_stride_row": self.index_qk.stride(1)}
        lengths = {"context_lengths": self.lengths.data_ptr(), "max_positions": len(self.cos_sin)}
        return {"batch_size": batch, "seq_len": tokens, "index_qk_ptr": self.index_qk.data_ptr(), **strides, **lengths}

    def pool(self) -> Pool:
        """Of NaN."""
        shape = (self.flat_pages, PAGE_TOKENS, 2, 384)
        return Pool(torch.full(shape, torch.nan, dtype=self.dtype, device=DEVICE), self.page_table)

    def chunk(self, starts: Tensor, ends: Tensor) -> Tensor:
        """Rows [starts, ends) of each sequence, left-aligned, NaN past them, strided."""
        rows = int((ends - starts).max())
        out = torch.full((self.batch, rows, WIDTH), torch.nan, dtype=self.dtype, device=DEVICE)
        for b, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            out[b, : end - start, :640] = self.index_qk[b, start:end]
        return out[..., :640]


def indexer(lengths: tuple[int, ...], dtype: str = "bf16", tokens: int = 0, seed: int = 0) -> Indexer:
    """A batch of these lengths. A page past a sequence's context is unused (-1) or foreign."""
    generator, kind = seeded(seed), DTYPES[dtype]
    batch, tokens = len(lengths), max(*lengths, tokens, 1)
    qk = normal(generator, kind, batch, tokens, WIDTH)[..., :640]
    for b, length in enumerate(lengths):
        qk[b, length:] = torch.nan
    max_pages = tokens // PAGE_TOKENS + 2
    pages = batch * max_pages
    order = torch.randperm(pages, generator=generator, device=DEVICE).int().view(batch, max_pages)
    table = torch.stack([order, order + pages], 1).contiguous()
    unused = torch.arange(max_pages, device=DEVICE) * PAGE_TOKENS >= ints(lengths)[:, None]
    foreign = ints([-1, 2 * pages, 2**31 - 1, -(2**31)]).repeat(max_pages)[:max_pages]
    table = torch.where(unused[:, None], foreign, table).contiguous()
    weights = [0.1 * normal(generator, kind, 128) for _ in range(2)]
    cos_sin = reference.rope_table(max_pages * PAGE_TOKENS, DEVICE)
    return Indexer(qk, ints(lengths), *weights, cos_sin, table, 2 * pages)


def state(pool: Pool) -> QsaIndexerPoolState:
    return QsaIndexerPoolState.from_tensors(pool.kv_pool, pool.page_table)


def close_keys(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=KEY_RTOL, atol=KEY_ATOL, equal_nan=True)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def check_pool(found: Pool, before: Pool, want: Pool) -> None:
    """Block keys within tolerance of `want`, raw keys equal, and every other cell's bits as before."""
    written = bits(want.kv_pool) != bits(before.kv_pool)
    assert torch.equal(bits(found.kv_pool)[~written], bits(before.kv_pool)[~written]), "another cell was written"
    close_keys(found.kv_pool[written], want.kv_pool[written])
    raw_pages = found.page_table[:, K_PLANE].long()
    raw_pages = raw_pages[(raw_pages >= 0) & (raw_pages < len(found.kv_pool))]
    assert torch.equal(bits(found.kv_pool[raw_pages]), bits(want.kv_pool[raw_pages])), "raw keys must be bit-equal"


def first_tokens(case: Indexer, blocks: int) -> Tensor:
    return (BLOCK_TOKENS * torch.arange(blocks, device=DEVICE)).expand(case.batch, -1)


def stored_keys(case: Indexer, pool: Pool) -> Tensor:
    """Bits of all block keys that the lengths make complete; zeros elsewhere."""
    blocks = case.tokens // BLOCK_TOKENS
    keys, mapped = pool.tails(V_PLANE, first_tokens(case, blocks))
    complete = torch.arange(blocks, device=DEVICE) < case.lengths[:, None] // BLOCK_TOKENS
    assert mapped[complete].all()
    return torch.where(complete[..., None], bits(keys), 0)


def open_keys(case: Indexer, pool: Pool) -> Tensor:
    """Bits of the raw keys of the open blocks' tokens; zeros elsewhere."""
    tokens = case.lengths[:, None] // BLOCK_TOKENS * BLOCK_TOKENS + torch.arange(3, device=DEVICE)
    keys, _ = pool.tails(K_PLANE, tokens)
    return torch.where((tokens < case.lengths[:, None])[..., None], bits(keys), 0)


def check_lists(lists: Tensor, logits: Tensor, positions: Tensor) -> None:
    """Lists int32 [rows, 2051] against the reference's choice from FP64 logits [rows, blocks]."""
    seen = torch.where(positions >= 0, positions + 1, 0)
    visible, chosen = seen // BLOCK_TOKENS, (seen // BLOCK_TOKENS).clamp(max=TOP_BLOCKS)
    at = torch.arange(INDEX_WIDTH, device=DEVICE)
    filled = at < (BLOCK_TOKENS * chosen + seen % BLOCK_TOKENS)[:, None]
    assert torch.equal(lists >= 0, filled), "a list has the wrong number of entries"
    tail = filled & (at >= BLOCK_TOKENS * chosen[:, None])
    want_tail = BLOCK_TOKENS * visible[:, None] + at - BLOCK_TOKENS * chosen[:, None]
    assert torch.equal(lists[tail], want_tail[tail].int()), "the open block's tokens"
    blocks = lists[:, : INDEX_WIDTH - 3 : BLOCK_TOKENS] // BLOCK_TOKENS
    slots = torch.arange(TOP_BLOCKS, device=DEVICE) < chosen[:, None]
    tokens = BLOCK_TOKENS * blocks[..., None] + torch.arange(BLOCK_TOKENS, device=DEVICE)
    whole = slots.repeat_interleave(BLOCK_TOKENS, 1)
    assert torch.equal(lists[:, : BLOCK_TOKENS * TOP_BLOCKS][whole], tokens.flatten(1)[whole].int())
    assert (blocks < visible[:, None])[slots].all(), "a block that the row does not see"
    assert (blocks.diff(dim=1) > 0)[slots[:, 1:]].all(), "blocks ascend, each once"
    if logits.shape[1]:
        _check_choice(torch.where(slots, blocks, -1), logits.float(), visible)


def _check_choice(blocks: Tensor, logits: Tensor, visible: Tensor) -> None:
    want = reference.select(logits, visible)
    width = logits.shape[1]

    def members(ids: Tensor) -> Tensor:
        found = torch.zeros(len(ids), width + 1, dtype=torch.bool, device=DEVICE)
        return found.scatter_(1, torch.where(ids >= 0, ids, width).long(), True)[:, :width]

    different = members(blocks) != members(want)
    last = want[:, -1].clamp(min=0)
    kth = logits.gather(1, last[:, None])
    near = (logits - kth).abs() <= BAND * kth.abs().clamp(min=1)
    assert (~different | near)[visible > TOP_BLOCKS].all(), "a selection differs outside the tie band"
    assert not different[visible <= TOP_BLOCKS].any()
