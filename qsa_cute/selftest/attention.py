"""Sparse prefill and decode: six query heads over two KV heads, lists unsorted and with bad ids between."""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Iterator
from typing import Any

from qsa_cute import geometry
from qsa_cute.runners import SparseDecodeParams, SparseDecodeRunner, SparsePrefillParams, SparsePrefillRunner
from qsa_cute.runners.union import KERNELS_TAKEN as UNION
from qsa_cute.selftest.memory import Case, Check, Memory, need
from qsa_cute.selftest.values import NAN_BITS, attend, element_bits, floats, wrong_values

TOLERANCE = 2e-2  # of outputs, inputs of magnitude up to 2
Q_HEADS, KV_HEADS, ROWS, KV_ROWS = 6, 2, 3, 200
BLOCKS = (49, 0, 32, 14)  # whole blocks of tokens that each list has
BAD_IDS = (-1, 2**31 - 1, -(2**31), 200)
TWICE = 57  # listed once more: it counts twice. Not for the union, which would leave such rows to the row kernel
CONTEXT = 200

Inputs = tuple["array[int]", "array[int]", "array[int]", list[float]]


def wrong_output(memory: Memory, launch: Any, out: int, dtype: str, want: list[float]) -> str:
    """What is wrong with an output of attention that `launch` writes; "" for nothing."""
    (found,), wrong = memory.launched(launch, (out, "H", len(want)))
    return wrong_values(floats(found, dtype), want, TOLERANCE) or wrong


def vector(plane: array[int], row: int, dim: int, dtype: str) -> list[float]:
    return floats(plane[row * dim : (row + 1) * dim], dtype)


def ids(twice: bool) -> list[int]:
    """A row's list, unsorted, bad ids between."""
    blocks = [geometry.BLOCK_TOKENS * block + i for i in (2, 0, 3, 1) for block in BLOCKS]
    return [*blocks[:7], *BAD_IDS, *blocks[7:], TWICE if twice else -1]


def lists(twice: bool) -> list[int]:
    """Of all rows; the first is empty: exact zeros."""
    return [-1] * len(ids(twice)) + ids(twice) * (ROWS - 1)


@functools.cache
def inputs(dtype: str, dim: int, twice: bool) -> Inputs:
    """q [rows, heads, dim], k and v [kv rows, kv heads, dim] with NaN where no list names a token, and the output."""
    rng = random.Random(dim)
    q, k, v = (element_bits(rng, dtype, n * dim) for n in (ROWS * Q_HEADS, KV_ROWS * KV_HEADS, KV_ROWS * KV_HEADS))
    valid = [token for token in ids(twice) if 0 <= token < CONTEXT]
    for token in set(range(KV_ROWS)) - set(valid):
        for plane in (k, v):
            unnamed = array("H", [NAN_BITS[dtype]]) * (KV_HEADS * dim)
            plane[token * KV_HEADS * dim : (token + 1) * KV_HEADS * dim] = unnamed
    want: list[float] = []
    for row in range(ROWS):
        listed = valid if row else []
        for head in range(Q_HEADS):
            kv_head = head // (Q_HEADS // KV_HEADS)
            keys, values = ([vector(p, token * KV_HEADS + kv_head, dim, dtype) for token in listed] for p in (k, v))
            want += attend(vector(q, row * Q_HEADS + head, dim, dtype), keys, values, dim**-0.5)
    return q, k, v, want


def prefill_case(dim: int, algorithm: str) -> Case:
    def case(memory: Memory, dtype: str) -> str:
        twice = algorithm == "rows"
        q, k, v, want = inputs(dtype, dim, twice)
        sizes: dict[str, Any] = {"batch_size": 1, "seq_len": ROWS, "kv_seq_len": KV_ROWS, "num_q_heads": Q_HEADS}
        sizes |= {"num_kv_heads": KV_HEADS, "head_dim": dim, "top_k": len(ids(twice))}
        out = memory.poisoned(2 * len(want))
        space = SparsePrefillRunner.workspace_size(**sizes).size if algorithm == "union" else 0
        params = SparsePrefillParams(
            q_ptr=memory.put(q),
            k_ptr=memory.put(k),
            v_ptr=memory.put(v),
            o_ptr=out,
            indices=memory.put(lists(twice)),
            context_lengths=memory.put([CONTEXT]),
            query_starts=memory.put([CONTEXT - ROWS]),
            attention_scale=dim**-0.5,
            algorithm=algorithm,
            workspace=memory.poisoned(space) if space else 0,
            **sizes,
        )
        return wrong_output(memory, lambda: SparsePrefillRunner.run(dtype, params), out, dtype, want)

    return case


def decode_case(dim: int, algorithm: str) -> Case:
    """The same rows as the new tokens of one sequence, K and V in a pool whose pages are out of order."""

    def case(memory: Memory, dtype: str) -> str:
        q, k, v, want = inputs(dtype, dim, twice=True)
        pages = -(-KV_ROWS // geometry.PAGE_TOKENS)
        k_pages, v_pages = [pages - 1 - i for i in range(pages)], [2 * pages - 1 - i for i in range(pages)]
        page = geometry.PAGE_TOKENS * KV_HEADS * dim
        pool = array("H", [NAN_BITS[dtype]]) * (2 * pages * page)
        for plane, numbers in ((k, k_pages), (v, v_pages)):
            for i, number in enumerate(numbers):
                part = plane[i * page : (i + 1) * page]
                pool[number * page : number * page + len(part)] = part
        out = memory.poisoned(2 * len(want))
        layout = SparseDecodeRunner.workspace_size(1, KV_HEADS, dim, ROWS)
        params = SparseDecodeParams(
            q_ptr=memory.put(q),
            kv_pool_ptr=memory.put(pool),
            page_table=memory.put([*k_pages, *v_pages]),
            indices=memory.put(lists(twice=True)),
            context_lengths=memory.put([CONTEXT]),
            o_ptr=out,
            batch_size=1,
            query_len=ROWS,
            num_q_heads=Q_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=dim,
            pool_head_dim=dim,
            num_flat_pages=2 * pages,
            max_pages_per_seq=pages,
            top_k=len(ids(twice=True)),
            attention_scale=dim**-0.5,
            algorithm=algorithm,
            num_splits=3,
            dtype=dtype,
            **layout.addresses(memory.poisoned(layout.size)),
        )
        return wrong_output(memory, lambda: SparseDecodeRunner.run(dtype, params), out, dtype, want)

    return case


def checks(_sm90: bool) -> Iterator[Check]:
    prefill = {"rows": (("sparse_prefill", ()),), "union": UNION}
    decode = {"tma": ("sparse_decode_tma",), "split_kv": ("sparse_decode",)}
    for dim in geometry.SUPPORTED_HEAD_DIMS:
        for algorithm, variants in prefill.items():
            needs = tuple(need(kernel, dim, baked=baked) for kernel, baked in variants)
            yield Check(f"sparse_prefill d{dim} {algorithm}", prefill_case(dim, algorithm), needs)
        for algorithm, kernels in decode.items():
            needs = tuple(need(kernel, dim) for kernel in kernels)
            yield Check(f"sparse_decode d{dim} {algorithm}", decode_case(dim, algorithm), needs)
