"""The indexer: one sequence's prefill, which fills the pool, then a decode step that reads it."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from qsa_cute import geometry
from qsa_cute.runners import (
    IndexerDecodeParams,
    IndexerDecodeRunner,
    IndexerPrefillParams,
    IndexerPrefillRunner,
    QsaIndexerPoolState,
)
from qsa_cute.runners.indexer_select import decode_kernels, prefill_kernels
from qsa_cute.selftest.memory import Check, Memory, need
from qsa_cute.selftest.values import Vector, dot, element_bits, floats, not_the_best, rounded

BAND = 1e-3  # of logits around the 512th, within which a selection may differ
TOKENS = 4 * (geometry.TOP_BLOCKS + 3)  # the last row drops three blocks


def norm_rope(x: Vector, weight: Vector, position: int) -> list[float]:
    """Gemma RMS norm, then rope of NeoX pairs on the first 64 dims."""
    factor = 1 / math.sqrt(dot(x, x) / len(x) + geometry.RMS_EPS)
    y = [value * factor * (1 + w) for value, w in zip(x, weight, strict=True)]
    half = geometry.ROPE_DIM // 2
    for i in range(half):
        angle = position * geometry.ROPE_THETA ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        y[i], y[i + half] = y[i] * cos - y[i + half] * sin, y[i + half] * cos + y[i] * sin
    return y


def prepared(x: Vector, weight: Vector, position: int, dtype: str) -> list[float]:
    """`norm_rope`, rounded at the end."""
    return [rounded(value, dtype) for value in norm_rope(x, weight, position)]


def block_key(raw: Sequence[Vector], weight: Vector, block: int, dtype: str) -> list[float]:
    mean = [rounded(sum(column) / geometry.BLOCK_TOKENS, dtype) for column in zip(*raw, strict=True)]
    return prepared(mean, weight, geometry.BLOCK_TOKENS * block, dtype)


def logits(queries: Sequence[Vector], keys: Sequence[Vector]) -> list[float]:
    """Of one row against each block key: heads' products, ReLU'd and summed."""
    return [sum(max(0.0, dot(q, key)) for q in queries) * geometry.INDEX_HEAD_DIM**-0.5 for key in keys]


def wrong_list(found: Sequence[int], position: int, scores: Vector | None) -> str:
    """What is wrong with a row's list; "" for nothing. `scores` of all blocks it sees, None where it keeps them all."""
    visible = (position + 1) // geometry.BLOCK_TOKENS
    kept = min(visible, geometry.TOP_BLOCKS)
    count = kept * geometry.BLOCK_TOKENS
    tail = list(range(visible * geometry.BLOCK_TOKENS, position + 1))
    blocks = [token // geometry.BLOCK_TOKENS for token in found[: count : geometry.BLOCK_TOKENS]]
    want = [block * geometry.BLOCK_TOKENS + i for block in blocks for i in range(geometry.BLOCK_TOKENS)] + tail
    if list(found) != want + [-1] * (len(found) - len(want)) or len(set(blocks)) < kept:
        return "the list is not whole blocks, then the open block, then -1"
    if any(not 0 <= block < visible for block in blocks):
        return "the list has a block that the row does not see"
    if scores is not None:
        near = BAND * max(1.0, abs(sorted(scores, reverse=True)[kept - 1]))
        if not_the_best(set(blocks), scores, kept, near):
            return "the list is not the best 512 blocks"
    return ""


class IndexerCase:
    """Projections of all tokens, the decode step's last, and the keys of the prefill's blocks."""

    def __init__(self, dtype: str) -> None:
        self.dtype, rng = dtype, random.Random(7)
        self.columns = (geometry.INDEX_HEADS + 1) * geometry.INDEX_HEAD_DIM
        self.qk = element_bits(rng, dtype, (TOKENS + 1) * self.columns)
        self.w_q, self.w_k = (element_bits(rng, dtype, geometry.INDEX_HEAD_DIM) for _ in range(2))
        self.keys = [
            block_key([self._part(4 * g + i, 4) for i in range(4)], floats(self.w_k, dtype), g, dtype)
            for g in range(TOKENS // geometry.BLOCK_TOKENS)
        ]

    def _part(self, token: int, part: int) -> list[float]:
        """One of the heads of a token; part 4 is its raw key."""
        begin = token * self.columns + part * geometry.INDEX_HEAD_DIM
        return floats(self.qk[begin : begin + geometry.INDEX_HEAD_DIM], self.dtype)

    def scores(self, token: int) -> list[float]:
        """Logits of a row that sees every block."""
        weight = floats(self.w_q, self.dtype)
        queries = [prepared(self._part(token, h), weight, token, self.dtype) for h in range(geometry.INDEX_HEADS)]
        return logits(queries, self.keys)

    def cos_sin(self) -> array[float]:
        half = geometry.ROPE_DIM // 2
        angles = [[p * geometry.ROPE_THETA ** (-i / half) for i in range(half)] for p in range(TOKENS + 1)]
        return array("f", (trig(angle) for row in angles for trig in (math.cos, math.sin) for angle in row))


def indexer_case(memory: Memory, dtype: str) -> str:
    case, pages = IndexerCase(dtype), TOKENS // geometry.PAGE_TOKENS + 1
    pool = QsaIndexerPoolState(
        pool_ptr=memory.poisoned(2 * pages * geometry.PAGE_TOKENS * geometry.INDEX_HEAD_DIM * 2),
        page_table=memory.put([*range(pages - 1, -1, -1), *range(2 * pages - 1, pages - 1, -1)]),
        max_pages_per_seq=pages,
        num_pages=pages,
        num_kv_heads=1,
        pool_head_dim=geometry.INDEX_HEAD_DIM,
        head_size=0,
    )
    qk = memory.put(case.qk)
    common: dict[str, Any] = {"w_q_ptr": memory.put(case.w_q), "w_k_ptr": memory.put(case.w_k), "batch_size": 1}
    common |= {"pool_state": pool, "cos_sin_ptr": memory.put(case.cos_sin()), "max_positions": TOKENS + 1}
    out = memory.poisoned(4 * TOKENS * geometry.INDEX_WIDTH)
    size = max(
        IndexerPrefillRunner.workspace_size(1, TOKENS).size, IndexerDecodeRunner.workspace_size(1, TOKENS + 1).size
    )
    common |= {"workspace": memory.poisoned(size), "workspace_bytes": size}
    lengths = memory.put([TOKENS])
    prefill = IndexerPrefillParams(index_qk_ptr=qk, context_lengths=lengths, out_idx_ptr=out, seq_len=TOKENS, **common)
    every = (out, "i", TOKENS * geometry.INDEX_WIDTH)
    (lists,), unsteady = memory.launched(lambda: IndexerPrefillRunner.run(dtype, prefill), every)
    for row in (0, 6, 2047, TOKENS - 1):
        found = lists[row * geometry.INDEX_WIDTH : (row + 1) * geometry.INDEX_WIDTH]
        wrong = wrong_list(found, row, case.scores(row) if row == TOKENS - 1 else None)
        if wrong:
            return f"prefill, row {row}: {wrong}"
    if unsteady:
        return f"prefill: {unsteady}"
    step = IndexerDecodeParams(
        index_qk_ptr=qk + 2 * TOKENS * case.columns,
        context_lengths=memory.put([TOKENS + 1]),
        out_idx_ptr=out,
        max_context_len=TOKENS + 1,
        **common,
    )
    first = (out, "i", geometry.INDEX_WIDTH)
    (found,), unsteady = memory.launched(lambda: IndexerDecodeRunner.run(dtype, step), first)
    wrong = wrong_list(found, TOKENS, case.scores(TOKENS)) or unsteady
    return f"decode step: {wrong}" if wrong else ""


def checks(sm90: bool) -> Iterator[Check]:
    kernels = dict.fromkeys((*prefill_kernels(sm90), *decode_kernels(sm90)))
    needs = tuple(need(name, geometry.INDEX_HEAD_DIM, baked=baked) for name, baked in kernels)
    yield Check("indexer prefill and decode", indexer_case, needs)
