"""Sparse attention over vLLM's pages: counted lists with holes and stale entries, unmapped pages, a gate."""

from __future__ import annotations

import functools
import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from qsa_cute import geometry
from qsa_cute.runners import union_paged
from qsa_cute.runners.paged_attention import PagedAttentionParams, PagedAttentionRunner
from qsa_cute.selftest.attention import vector, wrong_output
from qsa_cute.selftest.memory import Case, Check, Memory, need
from qsa_cute.selftest.values import FP8, NAN_BITS, attend, element_bits, rounded

Q_HEADS, KV_HEADS = 6, 2
PAGE, PAGES = 16, 8
TABLE = ((5, 0, 7, -1), (2, PAGES, 1, 6))  # of two requests; -1 and PAGES are none
SCALES = {"bf16": (1.0, 1.0), FP8: (0.5, 1.5)}  # of K and V

Inputs = tuple["array[int]", "array[int]", "array[int]", "array[int]", list[float]]


@dataclass(frozen=True)
class Rows:
    """Each row's request, and its list: entries, then their count."""

    requests: tuple[int, ...]
    lists: tuple[tuple[int, ...], ...]

    def cells(self, row: int) -> list[int]:
        """Places in the cache of a row's valid entries, in order."""
        *entries, count = self.lists[row]
        if not 0 <= self.requests[row] < len(TABLE):
            return []
        table = TABLE[self.requests[row]]
        inside = [token for token in entries[: max(0, count)] if 0 <= token < PAGE * len(table)]
        return [table[t // PAGE] * PAGE + t % PAGE for t in inside if 0 <= table[t // PAGE] < PAGES]


def blocks(*ids: int) -> tuple[int, ...]:
    """Their tokens."""
    return tuple(geometry.BLOCK_TOKENS * block + i for block in ids for i in range(geometry.BLOCK_TOKENS))


# There is no request 2. Holes, unmapped pages, a token past the table, duplicates, stale entries.
ANY = Rows(
    (0, 1, 0, 2, 1),
    (
        (44, 3, -1, 17, 60, 0, 1, 2, -(2**31), 64, 33, 9, 9, 12, 8),
        (31, 62, 20, 5, 7, 2**31 - 1, 40, 41, 42, 43, -1, 6, 4, 63, 14),
        (8, 9, 10, 11, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 4),
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14),
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, -1),
    ),
)
# What a union can say, or the main kernel would leave all to the row kernel: rows of two requests, one after another,
# and no entry that counts twice. Of more blocks than a chunk of D = 256 has, whole ones and parts.
SHARED = Rows(
    (0, 0, 0, 1, 1, 1),
    (
        (*blocks(0, 1, 2, 3, 4, 5), 44, -1, 34, 33, 28),
        (*blocks(3, 4, 5, 6, 7, 12), 41, -(2**31), 64, 42, 28),  # block 12's page is not mapped
        (*blocks(8, 9, 0), -1, 46, -1, -1, *blocks(1), *blocks(0, 0), 20),
        (*blocks(0, 1, 2, 3, 8, 4), 2**31 - 1, 63, 62, -1, 28),  # nor is block 4's
        (*blocks(15, 3, 2, 8, 9, 10), 45, 1, 0, 60, 24),
        (*blocks(0, 1, 2, 3, 8, 9), 40, 41, 42, 43, -1),
    ),
)


def rows_of(algorithm: str) -> Rows:
    return SHARED if algorithm == "shared" else ANY


@functools.cache
def inputs(dtype: str, dim: int, given: Rows) -> Inputs:
    """q and gate [rows, heads, dim], k and v [pages, page, kv heads, dim], NaN where unnamed, and the output."""
    rng, rows = random.Random(dim), len(given.lists)
    q, gate = (element_bits(rng, "bf16", rows * Q_HEADS * dim) for _ in range(2))
    k, v = (element_bits(rng, dtype, PAGES * PAGE * KV_HEADS * dim) for _ in range(2))
    named = {cell for row in range(rows) for cell in given.cells(row)}
    for cell in set(range(PAGES * PAGE)) - named:
        for plane in (k, v):
            unnamed = array(plane.typecode, [NAN_BITS[dtype]]) * (KV_HEADS * dim)
            plane[cell * KV_HEADS * dim : (cell + 1) * KV_HEADS * dim] = unnamed
    k_scale, v_scale = SCALES[dtype]
    want: list[float] = []
    for row in range(rows):
        for head in range(Q_HEADS):
            kv_head = head // (Q_HEADS // KV_HEADS)
            keys, values = ([vector(p, c * KV_HEADS + kv_head, dim, dtype) for c in given.cells(row)] for p in (k, v))
            at = row * Q_HEADS + head
            out = attend(vector(q, at, dim, "bf16"), keys, values, k_scale * dim**-0.5)
            gates = vector(gate, at, dim, "bf16")
            want += [rounded(v_scale * o, "bf16") / (1 + math.exp(-g)) for o, g in zip(out, gates, strict=True)]
    return q, gate, k, v, want


def attention_case(dim: int, algorithm: str) -> Case:
    def case(memory: Memory, dtype: str) -> str:
        given = rows_of(algorithm)
        q, gate, k, v, want = inputs(dtype, dim, given)
        k_scale, v_scale = SCALES[dtype]
        rows, out = len(given.lists), memory.poisoned(2 * len(want))
        splits, space = 0 if algorithm == "shared" else 2, {}
        if algorithm == "rows":
            layout = PagedAttentionRunner.workspace_size(rows, KV_HEADS, dim)
            space = layout.addresses(memory.poisoned(layout.size))
        params = PagedAttentionParams(
            q_ptr=memory.put(q),
            k_ptr=memory.put(k),
            v_ptr=memory.put(v),
            indices=memory.put([entry for row in given.lists for entry in row]),
            block_table=memory.put([page for pages in TABLE for page in pages]),
            token_to_req=memory.put(given.requests),
            o_ptr=out,
            gate_ptr=memory.put(gate),
            rows=rows,
            num_requests=len(TABLE),
            num_q_heads=Q_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=dim,
            num_pages=PAGES,
            page_size=PAGE,
            table_width=len(TABLE[0]),
            width=len(given.lists[0]) - 1,
            cache_dtype=dtype,
            attention_scale=k_scale * dim**-0.5,
            output_scale=v_scale,
            algorithm=None if algorithm == "shared" else algorithm,
            num_splits=splits,
            **space,
        )
        if algorithm == "shared":
            params = params.with_workspace({"workspace": memory.poisoned(union_paged.workspace(params).size)})
        return wrong_output(memory, lambda: PagedAttentionRunner.run(params), out, "bf16", want)

    return case


def checks(_sm90: bool) -> Iterator[Check]:
    for dim in geometry.SUPPORTED_HEAD_DIMS:
        for algorithm, kernel in (("tma", "paged_attention_tma"), ("rows", "paged_attention")):
            case = attention_case(dim, algorithm)
            yield Check(f"paged attention d{dim} {algorithm}", case, (need(kernel, dim),), tuple(SCALES))
        for dtype in SCALES:
            needs = tuple(need(kernel, dim, own) for kernel, own in union_paged.kernels(dtype))
            yield Check(f"paged attention d{dim} shared", attention_case(dim, "shared"), needs, (dtype,))
