"""Of the union's tests: selections of which rows share much, little or nothing, and runs of them over dense K and V."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from attention_cases import DTYPES, Guarded, Output, Prefill, ints, normal, seeded
from torch import Tensor

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.runners import SparsePrefillRunner

LSE_ATOL = 1e-4  # one token of 2051 too many or too few moves the LSE by 5e-4
GAIN = 2.0  # of queries: scores that differ enough for a wrong token to show


def drifting(rows: int, start: int, tokens: int, top: int, rho: float, generator: torch.Generator) -> Tensor:
    """int32 [rows, top]: each row's best complete blocks, by scores of which rho remains from row to row."""
    blocks = torch.full((rows, top), -1, dtype=torch.int32, device=generator.device)
    score = torch.randn(max(1, tokens // BLOCK_TOKENS), generator=generator, device=generator.device)
    for row in range(rows):
        seen = score[: (min(start + row, tokens - 1) + 1) // BLOCK_TOKENS]
        best = seen.topk(min(top, len(seen))).indices
        blocks[row, : len(best)] = best.int()
        noise = torch.randn(score.shape, generator=generator, device=generator.device)
        score = rho * score + (1 - rho * rho) ** 0.5 * noise
    return blocks


def token_lists(blocks: Tensor, starts: Tensor) -> Tensor:
    """Block ids [batch, rows, top] and each row's open block as padded lists int32 [batch, rows, 4 * top + 3]."""
    inside = torch.arange(BLOCK_TOKENS, device=blocks.device)
    tokens = torch.where(blocks[..., None] < 0, -1, blocks.long()[..., None] * BLOCK_TOKENS + inside).flatten(2)
    position = starts.long()[:, None] + torch.arange(blocks.shape[1], device=blocks.device)
    tail = ((position + 1) // BLOCK_TOKENS * BLOCK_TOKENS)[..., None] + inside[:-1]
    tokens = torch.cat([tokens, torch.where(tail <= position[..., None], tail, -1)], -1)
    order = (tokens < 0).to(torch.uint8).argsort(dim=-1, stable=True)
    return tokens.gather(-1, order).clamp(max=2**31 - 1).int()


# Cases: what each row selects, as block ids and as the list of tokens that these and the open block stand for.


@dataclass
class Shared(Prefill):
    """A prefill whose `indices` are padded token lists; `blocks` [batch, rows, top] says the same as block ids."""

    blocks: Tensor

    def selection(self, kind: str) -> Tensor:
        """The tensor of indices of a kind; in a counted list, any token past the count."""
        if kind == "blocks":
            return self.blocks
        if kind == "padded":
            return self.indices
        count = (self.indices >= 0).sum(-1, keepdim=True, dtype=torch.int32)
        place = torch.arange(self.indices.shape[-1], device=count.device)
        stale = ((place * 37) % self.k.shape[1]).int()
        return torch.cat([torch.where(place < count, self.indices, stale), count], -1)


@dataclass
class Space:
    """A workspace between guard bands, and what it says of the tiles after a run."""

    bytes: Guarded
    layout: object

    @staticmethod
    def of(case: Shared, kind: str) -> Space:
        layout = SparsePrefillRunner.workspace_size(
            batch_size=case.q.shape[0],
            seq_len=case.q.shape[1],
            kv_seq_len=case.k.shape[1],
            num_q_heads=case.q.shape[2],
            num_kv_heads=case.k.shape[2],
            head_dim=case.q.shape[3],
            top_k=case.selection(kind).shape[-1] - (kind == "counted"),
            index_kind=kind,
        )
        return Space(Guarded(layout.size, dtype=torch.uint8), layout)

    def part(self, name: str) -> Tensor:
        found = next(part for part in self.layout.parts if part.name == name)
        cells = self.bytes.tensor[found.offset : found.offset + found.size]
        return cells.view(torch.int32).view(found.shape)

    def rows_path(self) -> Tensor:
        """bool [tiles]: whether a tile went to the row path, for any KV head."""
        return (self.part("row_path") != 0).any(1)


def shared(
    dtype: str = "bf16",
    head_dim: int = 256,
    group: int = 12,
    kv_heads: int = 2,
    lengths: tuple[int, ...] = (2048,),
    rows: int = 100,
    top: int = 64,
    rho: float = 0.95,
    past: int = 0,
    seed: int = 0,
) -> Shared:
    """The last rows of each sequence, `past` of them past its end (more where it is short)."""
    generator, kind = seeded(seed), DTYPES[dtype]
    batch, tokens = len(lengths), max(lengths)
    starts = [max(0, length - rows + past) for length in lengths]
    q = normal(generator, kind, batch, rows, kv_heads * group, head_dim) * GAIN
    k, v = (normal(generator, kind, batch, tokens, kv_heads, head_dim) for _ in range(2))
    each = zip(starts, lengths, strict=True)
    blocks = torch.stack([drifting(rows, start, length, top, rho, generator) for start, length in each])
    case = Shared(q, k, v, blocks, ints(lengths), ints(starts), head_dim**-0.5, blocks)
    return with_blocks(case, blocks)


def with_blocks(case: Shared, blocks: Tensor) -> Shared:
    return replace(case, blocks=blocks, indices=token_lists(blocks, case.query_starts))


def listed(case: Shared) -> Tensor:
    """How many live rows list each token, int64 [batch, kv_rows]; a row that lists one twice is two."""
    batch, rows, _ = case.indices.shape
    live = case.query_starts[:, None] + torch.arange(rows, device=case.q.device) < case.context_lengths[:, None]
    valid = (case.indices >= 0) & (case.indices < case.context_lengths[:, None, None]) & live[..., None]
    hits = torch.zeros(batch, case.k.shape[1] + 1, dtype=torch.int64, device=case.q.device)
    places = torch.where(valid, case.indices, case.k.shape[1]).long().flatten(1)
    return hits.scatter_add_(1, places, torch.ones_like(places))[:, :-1]


# Runs.


def attend(
    case: Shared, kind: str = "padded", out: Output | None = None, space: Space | None = None, **changes: object
) -> tuple[Output, Space]:
    """Through the union, from a workspace of 0xFF and outputs of NaN."""
    out, space = out or Output.like(case.q), space or Space.of(case, kind)
    given = replace(case, indices=case.selection(kind))
    changes = {"algorithm": "union", "index_kind": kind, "workspace": space.bytes.tensor, **changes}
    SparsePrefillRunner.run(case.q.dtype, given.params(out, **changes))
    return out, space


def check(case: Shared, out: Output, space: Space) -> None:
    want, want_lse = case.reference()
    out.check(want, want_lse)
    some = want_lse.isfinite()
    error = (out.lse.tensor - want_lse)[some].abs().max().item() if some.any() else 0.0
    assert error <= LSE_ATOL, f"LSE off by {error}: other tokens than the list's"
    space.bytes.check()


def check_shared(case: Shared, kind: str = "padded") -> None:
    """Right, and every tile a union."""
    out, space = attend(case, kind)
    check(case, out, space)
    assert not space.rows_path().any(), "took the row path"


def check_odd(case: Shared, kind: str = "padded") -> None:
    """Right, by the row path for some tiles and by the union for others."""
    out, space = attend(case, kind)
    check(case, out, space)
    assert space.rows_path().any(), "no tile took the row path"
    assert not space.rows_path().all(), "all tiles took the row path"
