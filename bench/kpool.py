"""kpool's cases: inputs, our launches, and vLLM's Triton functions, which take the same tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import inputs as made
from bench.cases import Case
from bench.ours import poisoned
from bench.peers import vllm_module
from bench.work import Work
from qsa_cute.geometry import INDEX_HEAD_DIM, KPOOL_HEADS, TOP_BLOCKS
from qsa_cute.reference import kpool as reference
from qsa_cute.runners.kpool import CompressWrite, DecodeUpdate, HadamardQuant
from qsa_cute.runners.kpool_expand import ExpandTail
from qsa_cute.runners.kpool_scores import WIDTH, PoolScores

POOL, RING, PAGE = 4, 8, 64
DECODE_CACHE_PAGES = 4096
DECODE_SETS = 16
CHECKED_ROWS = 64
E4M3_STEP = {"atol": 2.0**-9, "rtol": 0.13}  # one step: an ulp of the softmax may cross a boundary


def _keeping(launch: Callable[[], object], *alive: Any) -> Callable[[], object]:
    return functools.partial(lambda _: launch(), alive)


def _sets(bytes_each: int) -> int:
    """Sets of a rotation that touches far more than the L2 holds."""
    return max(2, -(-made.ROTATION_BYTES // bytes_each))


def _cache(pages: int, where: torch.device) -> Tensor:
    return torch.zeros(pages, PAGE, reference.ENTRY_BYTES, dtype=torch.uint8, device=where)


# Hadamard.


@dataclass(frozen=True)
class Hadamard:
    """q bf16 [rows, 128] of each set."""

    sets: list[Tensor]

    def reference(self, number: int) -> Tensor:
        key, scale = reference.hadamard_quant(self.sets[number][:CHECKED_ROWS])
        return torch.cat((key.float(), scale), 1)


def hadamard(case: Case) -> Hadamard:
    random = made.generator(made.device())
    shape = (case.rows, INDEX_HEAD_DIM)
    return Hadamard([made.normal(shape, torch.bfloat16, random) for _ in range(_sets(case.rows * 2 * INDEX_HEAD_DIM))])


def ours_hadamard(case: Case, given: Hadamard) -> Work:
    q = given.sets[0]
    out = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    scale = poisoned(case.rows, 1, like=q, dtype=torch.float32)
    launches = [HadamardQuant.from_tensors(one, out, scale).run for one in given.sets]

    def got(_: int) -> Tensor:
        return torch.cat((out[:CHECKED_ROWS].float(), scale[:CHECKED_ROWS]), 1)

    return Work(launches, got, given.reference, atol=0.0, rtol=0.0)


def vllm_hadamard(case: Case, given: Hadamard) -> Work:
    module, kept = vllm_module("kpool"), []

    def launch(q: Tensor) -> None:
        kept[:] = module.fwht128_quant_fp8(q)

    def got(_: int) -> Tensor:
        return torch.cat((kept[0][:CHECKED_ROWS].float(), kept[1][:CHECKED_ROWS]), 1)

    launches = [functools.partial(launch, q) for q in given.sets]
    return Work(launches, got, given.reference, atol=0.0, rtol=0.0)


# Compression.


@dataclass(frozen=True)
class Compress:
    """(keys, gate scores) bf16 [pools, 4, 128] of each set, to permuted slots of one cache."""

    sets: list[tuple[Tensor, Tensor]]
    ape: Tensor
    loc: Tensor
    cache: Tensor

    def reference(self, number: int) -> Tensor:
        k, score = self.sets[number]
        key, scale = reference.compress(k[:CHECKED_ROWS], score[:CHECKED_ROWS], self.ape)
        return torch.cat((key.float(), scale[:, None]), 1)

    def got(self, _: int) -> Tensor:
        key, scale = reference.read_cache(self.cache, self.loc[:CHECKED_ROWS])
        return torch.cat((key.float(), scale[:, None]), 1)


def compress(case: Case) -> Compress:
    where = made.device()
    random = made.generator(where)
    shape = (case.rows, POOL, INDEX_HEAD_DIM)
    each = [
        (made.normal(shape, torch.bfloat16, random), made.normal(shape, torch.bfloat16, random))
        for _ in range(_sets(case.rows * POOL * INDEX_HEAD_DIM * 4))
    ]
    loc = torch.randperm(case.rows, generator=random, device=where)
    return Compress(each, made.normal(shape[1:], torch.float32, random), loc, _cache(-(-case.rows // PAGE), where))


def ours_compress(case: Case, given: Compress) -> Work:
    launches = [CompressWrite.from_tensors(given.cache, *one, given.ape, given.loc).run for one in given.sets]
    return Work(launches, given.got, given.reference, **E4M3_STEP)


def vllm_compress(case: Case, given: Compress) -> Work:
    run = vllm_module("kpool").kpool_compress_and_write_cache
    launches = [functools.partial(run, given.cache, *one, given.ape, given.loc, POOL) for one in given.sets]
    return Work(launches, given.got, given.reference, **E4M3_STEP)


# Decode updates.


@dataclass(frozen=True)
class Decode:
    """(tail slots, keys, gate scores, ape, slots, positions) of each set; a quarter of the tokens completes a pool."""

    sets: list[tuple[Tensor, ...]]
    cache: Tensor
    tail: Tensor

    def got(self, number: int) -> Tensor:
        """What the step stashed: the tail's keys at the newest tokens."""
        tail_slots = self.sets[number][0][:, -1].long()
        return self.tail[tail_slots // RING, 0, tail_slots % RING].float()

    def reference(self, number: int) -> Tensor:
        return self.sets[number][1][:, -1].float()


def decode(case: Case) -> Decode:
    where = made.device()
    random = made.generator(where)
    tail = made.normal((case.batch, 2, RING, INDEX_HEAD_DIM), torch.bfloat16, random)
    slots_in_all = DECODE_CACHE_PAGES * PAGE
    each = []
    for _ in range(DECODE_SETS):
        first = torch.randint(1000, 2000, (case.batch, 1), generator=random, device=where)
        positions = first + torch.arange(case.next_n, device=where)
        blocks = torch.arange(case.batch, device=where)[:, None]
        order = torch.randperm(slots_in_all, generator=random, device=where)[: positions.numel()]
        slots = torch.where(positions % POOL == POOL - 1, order.view(positions.shape), -1)
        shape = (case.batch, case.next_n, INDEX_HEAD_DIM)
        key, score = (made.normal(shape, torch.bfloat16, random) for _ in range(2))
        ape = made.normal((POOL, INDEX_HEAD_DIM), torch.float32, random)
        each.append(((blocks * RING + positions % RING).int(), key, score, ape, slots.int(), positions.int()))
    return Decode(each, _cache(DECODE_CACHE_PAGES, where), tail)


def ours_decode(case: Case, given: Decode) -> Work:
    launches = [DecodeUpdate.from_tensors(given.cache, given.tail, *one).run for one in given.sets]
    return Work(launches, given.got, given.reference, atol=0.0, rtol=0.0)


def vllm_decode(case: Case, given: Decode) -> Work:
    run = vllm_module("kpool").kpool_decode_update_and_maybe_write_cache_batched
    launches = [functools.partial(run, given.cache, given.tail, *one, POOL) for one in given.sets]
    return Work(launches, given.got, given.reference, atol=0.0, rtol=0.0)


# Expansion.


@dataclass(frozen=True)
class Expand:
    """Pool ids int32 [rows, 512] of each set, and the rows' lengths."""

    sets: list[Tensor]
    lengths: Tensor

    def reference(self, number: int) -> Tensor:
        return reference.expand_and_append_tail(self.sets[number], self.lengths, POOL).float()


def expand(case: Case) -> Expand:
    where = made.device()
    random = made.generator(where)
    shape = (case.rows, TOP_BLOCKS)
    each = [
        torch.randint(-1, 30000, shape, generator=random, device=where).int()
        for _ in range(_sets(4 * case.rows * 2563))
    ]
    return Expand(each, torch.randint(0, 130000, (case.rows,), generator=random, device=where).int())


def ours_expand(case: Case, given: Expand) -> Work:
    outs = [torch.empty(case.rows, WIDTH, dtype=torch.int32, device=given.lengths.device) for _ in given.sets]
    launches = [
        ExpandTail.from_tensors(out, ids, POOL, seq_lens=given.lengths).run
        for out, ids in zip(outs, given.sets, strict=True)
    ]
    return Work(launches, lambda number: outs[number], given.reference, atol=0.0, rtol=0.0)


def vllm_expand(case: Case, given: Expand) -> Work:
    module, kept = vllm_module("kpool"), []

    def launch(ids: Tensor) -> None:
        kept[:] = [module.expand_pools_and_append_tail(ids, given.lengths, POOL)]

    launches = [functools.partial(launch, ids) for ids in given.sets]
    return Work(launches, lambda _: kept[0], given.reference, atol=0.0, rtol=0.0)


# Scores.


@dataclass(frozen=True)
class Scores:
    """q e4m3 [rows, 32, 128] and weights of rows that see `columns` pools each; each set is a block table."""

    q: Tensor
    weights: Tensor
    cache: Tensor
    lengths: Tensor
    tables: list[Tensor]
    checked: Tensor

    def reference(self, number: int) -> Tensor:
        rows, table = self.checked, self.tables[number]
        owners = rows // max(1, len(self.q) // len(table))
        given = (self.q[rows], self.weights[rows], self.cache, table, self.lengths[rows], owners)
        return reference.scores(*given, int(self.lengths[0]) // POOL, torch.float32)


def scores(case: Case) -> Scores:
    where = made.device()
    random = made.generator(where)
    rows = case.rows if case.family == "kpool_scores" else case.batch * case.next_n
    per_request = -(-case.columns // PAGE)
    sets, requests = (1, 1) if case.family == "kpool_scores" else made.rotations(case.batch, case.columns * 132)
    cache = _cache(requests * per_request, where)
    pages = cache.view(len(cache), -1)
    keys = made.normal((len(cache), PAGE * INDEX_HEAD_DIM), torch.bfloat16, random)
    pages[:, : PAGE * INDEX_HEAD_DIM] = (keys * 64).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.full((len(cache), PAGE), 2.0**-14, device=where)
    pages[:, PAGE * INDEX_HEAD_DIM :] = scales.view(torch.uint8)
    q = (made.normal((rows, KPOOL_HEADS, INDEX_HEAD_DIM), torch.bfloat16, random) * 64).to(torch.float8_e4m3fn)
    weights = made.normal((rows, KPOOL_HEADS), torch.float32, random) * 2.0**-6
    order = torch.randperm(len(cache), generator=random, device=where).int().view(requests, per_request)
    tables = [
        order[(number * case.batch + torch.arange(case.batch, device=where)) % requests].contiguous()
        for number in range(sets)
    ]
    lengths = torch.full((rows,), POOL * case.columns, dtype=torch.int32, device=where)
    checked = torch.linspace(0, rows - 1, min(made.CHECKED_ROWS, rows)).long().to(where)
    return Scores(q, weights, cache, lengths, tables, checked)


def ours_scores(case: Case, given: Scores) -> Work:
    logits = poisoned(len(given.q), case.columns, like=given.weights)
    next_n = 0 if case.family == "kpool_scores" else case.next_n
    launches = [
        _keeping(
            PoolScores.from_tensors(
                given.q, given.weights, given.cache, table, given.lengths, logits, next_n=next_n
            ).run,
            table,
        )
        for table in given.tables
    ]
    # e4m3 products are added with fewer bits than FP32's: values here are of unit scale and more.
    return Work(launches, lambda _: logits[given.checked], given.reference, atol=2e-2, rtol=1e-2)
