"""Selections of the union's tests: rows that share much, little or nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from qsa_cute.geometry import BLOCK_TOKENS


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
