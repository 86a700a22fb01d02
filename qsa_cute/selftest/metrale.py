"""Metrale's operations on one sequence: keys of new blocks, prepared queries, scores, gather and prefill attention."""

from __future__ import annotations

import functools
import math
import random
from array import array
from collections.abc import Iterator
from typing import Any

from qsa_cute import geometry
from qsa_cute.runners import metrale as launches
from qsa_cute.runtime import Wanted
from qsa_cute.selftest.attention import vector, wrong_output
from qsa_cute.selftest.indexer import block_key, norm_rope
from qsa_cute.selftest.memory import Case, Check, Memory, need
from qsa_cute.selftest.values import NAN_BITS, attend, dot, element_bits, floats, wrong_values

DIM, HEADS, RATIO = geometry.INDEX_HEAD_DIM, geometry.INDEX_HEADS, geometry.BLOCK_TOKENS
KEY_RTOL, KEY_ATOL = 1e-2, 1e-3
QUERY_ATOL = 1e-3
EXACT_RTOL, SPLIT_ATOL = 1e-5, 1e-3  # of scores in FP32, and of those by two terms of the keys' type
NORM: dict[str, Any] = {"hd": DIM, "rot": geometry.ROPE_DIM, "theta": geometry.ROPE_THETA, "eps": geometry.RMS_EPS}
FIRST_BLOCK, NEW = 900, 5
ROWS, FIRST_POS, PITCH = 5, 270, HEADS * DIM + 8
BLOCKS, STRIDE = 70, 72  # columns of the scores, and of their rows
# Of the cache: a page table with a hole, tokens to gather.
PAGE, TABLE, PAGES = 16, (4, -1, 0, 5, 2, 6, 1), 7
SELECTED = (100, 0, -1, 17, 3, 3, -(2**31), 64, 111)
KV_HEADS, Q_HEADS = 2, 6
# Of the attention: the rows' first position, and their lists with holes, an id that is not complete, duplicates.
LISTED_POS = 101
LISTS = ((3, -1, 24, 20, 0, 25), (2**31 - 1, 8, 8, 9, -(2**31), 17), (-1, -1, -1, -1, -1, -1))


def norms_case(memory: Memory, dtype: str) -> str:
    rng = random.Random(21)
    raw = element_bits(rng, dtype, NEW * RATIO * DIM)
    weight, qk = element_bits(rng, dtype, DIM), element_bits(rng, dtype, ROWS * PITCH)
    unread = array("H", [NAN_BITS[dtype]]) * (FIRST_BLOCK * RATIO * DIM)
    keys, queries = memory.poisoned(2 * (FIRST_BLOCK + NEW) * DIM), memory.poisoned(4 * ROWS * HEADS * DIM)
    w = memory.put(weight)
    pool = launches.BlockPool(
        raw_keys=memory.put(unread + raw), k_norm_w=w, block_keys=keys, first_block=FIRST_BLOCK, n_new=NEW, **NORM
    )
    prep = launches.QueryPrep(
        q_in=memory.put(qk), q_norm_w=w, q_out=queries, rows=ROWS, first_pos=FIRST_POS, pitch=PITCH, **NORM
    )

    def launch() -> None:
        for one in (pool, prep):
            one.run(dtype)

    outputs = (keys + 2 * FIRST_BLOCK * DIM, "H", NEW * DIM), (queries, "f", ROWS * HEADS * DIM)
    (found, prepared), unsteady = memory.launched(launch, *outputs)
    values = floats(weight, dtype)
    want: list[float] = []
    for block in range(NEW):
        tokens = [vector(raw, block * RATIO + i, DIM, dtype) for i in range(RATIO)]
        want += block_key(tokens, values, FIRST_BLOCK + block, dtype)
    wrong = wrong_values(floats(found, dtype), want, KEY_ATOL, KEY_RTOL)
    if wrong:
        return f"block_pool: {wrong}"
    want = []
    for row in range(ROWS):
        for head in range(HEADS):
            begin = row * PITCH + head * DIM
            want += norm_rope(floats(qk[begin : begin + DIM], dtype), values, FIRST_POS + row)
    wrong = wrong_values(prepared, want, QUERY_ATOL)
    return f"qprep: {wrong}" if wrong else unsteady


def scores_case(memory: Memory, dtype: str) -> str:
    rng = random.Random(22)
    q = array("f", (rng.uniform(-2, 2) for _ in range(ROWS * HEADS * DIM)))
    keys = element_bits(rng, dtype, BLOCKS * DIM)
    seen = [(FIRST_POS + row + 1) // RATIO for row in range(ROWS)]
    keys[seen[-1] * DIM :] = array("H", [NAN_BITS[dtype]]) * ((BLOCKS - seen[-1]) * DIM)
    q_ptr, keys_ptr = memory.put(q), memory.put(keys)
    exact, split, one = (memory.poisoned(4 * count) for count in (ROWS * STRIDE, ROWS * STRIDE, seen[0]))
    rows: dict[str, Any] = {"rows": ROWS, "n_blocks_max": BLOCKS, "first_pos": FIRST_POS, "score_stride": STRIDE}
    each = (
        launches.ScoreRows(q=q_ptr, block_keys=keys_ptr, scores=exact, **rows),
        launches.ScoreRowsTc(q=q_ptr, block_keys=keys_ptr, scores=split, **rows),
        launches.Score(q=q_ptr, block_keys=keys_ptr, scores=one, n_blocks=seen[0]),
    )

    def launch() -> None:
        for each_launch in each:
            each_launch.run(dtype)

    found, unsteady = memory.launched(launch, *((at, "f", ROWS * STRIDE) for at in (exact, split)), (one, "f", seen[0]))
    for row in range(ROWS):
        queries = [q[i : i + DIM] for i in range(row * HEADS * DIM, (row + 1) * HEADS * DIM, DIM)]
        blocks = [vector(keys, block, DIM, dtype) for block in range(seen[row])]
        want = [DIM**-0.5 * sum(max(0.0, dot(query, block)) for query in queries) for block in blocks]
        want += [-math.inf] * (BLOCKS - seen[row])
        for name, scores, atol in (("score_rows", found[0], 1e-4), ("score_rows_tc", found[1], SPLIT_ATOL)):
            wrong = wrong_values(scores[row * STRIDE : row * STRIDE + BLOCKS], want, atol, EXACT_RTOL)
            if not wrong and not all(map(math.isnan, scores[row * STRIDE + BLOCKS : (row + 1) * STRIDE])):
                wrong = "columns past the last block were written"
            if wrong:
                return f"{name}, row {row}: {wrong}"
    return "score: not the bits of score_rows" if found[2] != found[0][: seen[0]] else unsteady


@functools.cache
def cache(dtype: str, dim: int) -> tuple[array[int], array[int]]:
    """K and V [pages, page, kv heads, dim]."""
    rng = random.Random(dim)
    k, v = (element_bits(rng, dtype, PAGES * PAGE * KV_HEADS * dim) for _ in range(2))
    return k, v


def gather_case(memory: Memory, dtype: str) -> str:
    width = KV_HEADS * DIM
    planes = cache(dtype, DIM)
    outs = [memory.poisoned(2 * len(SELECTED) * width) for _ in planes]
    gather = launches.Gather(
        k_cache=memory.put(planes[0]),
        v_cache=memory.put(planes[1]),
        block_table=memory.put(TABLE),
        sel=memory.put(SELECTED),
        k_out=outs[0],
        v_out=outs[1],
        n_sel=len(SELECTED),
        block_size=PAGE,
        nkv=KV_HEADS,
        hd=DIM,
    )
    outputs = ((out, "H", len(SELECTED) * width) for out in outs)
    found, unsteady = memory.launched(lambda: gather.run(dtype), *outputs)
    for plane, rows in zip(planes, found, strict=True):
        want = array("H")
        for token in SELECTED:
            page = TABLE[token // PAGE] if token >= 0 else -1
            at = (page * PAGE + token % PAGE) * width
            want += plane[at : at + width] if page >= 0 else array("H", [0xFFFF]) * width
        if rows != want:
            return "the rows are not those of the tokens, or a slot without one was written"
    return unsteady


@functools.cache
def attention_inputs(dtype: str, dim: int) -> tuple[array[int], list[float]]:
    """q [rows, heads, dim], and the output."""
    k, v = cache(dtype, dim)
    q = element_bits(random.Random(dim + 1), dtype, len(LISTS) * Q_HEADS * dim)
    want: list[float] = []
    for row, blocks in enumerate(LISTS):
        position = LISTED_POS + row
        complete = (position + 1) // RATIO
        tokens = [RATIO * block + i for block in blocks if 0 <= block < complete for i in range(RATIO)]
        tokens += range(complete * RATIO, position + 1)
        cells = [TABLE[t // PAGE] * PAGE + t % PAGE for t in tokens if TABLE[t // PAGE] >= 0]
        for head in range(Q_HEADS):
            kv_head = head // (Q_HEADS // KV_HEADS)
            keys, values = ([vector(p, cell * KV_HEADS + kv_head, dim, dtype) for cell in cells] for p in (k, v))
            want += attend(vector(q, row * Q_HEADS + head, dim, dtype), keys, values, dim**-0.5)
    return q, want


def attention_case(dim: int) -> Case:
    def case(memory: Memory, dtype: str) -> str:
        q, want = attention_inputs(dtype, dim)
        k, v = cache(dtype, dim)
        out = memory.poisoned(2 * len(want))
        sizes: dict[str, Any] = {"rows": len(LISTS), "first_pos": LISTED_POS, "topk": len(LISTS[0]), "hd": dim}
        sizes |= {"block_size": PAGE, "nq": Q_HEADS, "nkv": KV_HEADS, "inv_sqrt_d": dim**-0.5}
        attention = launches.PrefillAttention(
            q=memory.put(q),
            k_cache=memory.put(k),
            v_cache=memory.put(v),
            block_table=memory.put(TABLE),
            lists=memory.put([block for blocks in LISTS for block in blocks]),
            attn_out=out,
            **sizes,
        )
        return wrong_output(memory, lambda: attention.run(dtype), out, dtype, want)

    return case


def checks(sm90: bool) -> Iterator[Check]:
    def needs(*kernels: str) -> tuple[Wanted, ...]:
        return tuple(need(kernel, DIM) for kernel in kernels)

    yield Check("metrale norms", norms_case, needs("metrale_block_pool", "metrale_qprep"))
    scores = ("metrale_score", "metrale_score_rows", launches.WGMMA if sm90 else launches.MMA)
    yield Check("metrale scores", scores_case, needs(*scores))
    yield Check("metrale gather", gather_case, (need(launches.GATHER, DIM, "bf16"),))
    for dim in geometry.SUPPORTED_HEAD_DIMS:
        yield Check(f"metrale attention d{dim}", attention_case(dim), (need(launches.ATTENTION, dim),))
