"""GLM's kpool: Hadamard and e4m3, a pool's key by prefill and by decode, expansion, and selection of pools."""

from __future__ import annotations

import functools
import math
import random
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from qsa_cute import geometry
from qsa_cute.runners.dispatch import Baked
from qsa_cute.runners.indexer_select import selection_choice
from qsa_cute.runners.kpool import ENTRY_BYTES, CompressWrite, DecodeUpdate, HadamardQuant, SeedTail
from qsa_cute.runners.kpool_expand import ExpandTail
from qsa_cute.runners.kpool_scores import DECODE, PREFILL, WIDTH, PoolSelectParams, PoolSelectRunner
from qsa_cute.runtime import Wanted
from qsa_cute.selftest.memory import POISON, Check, Memory, need
from qsa_cute.selftest.values import (
    FP8,
    FP8_MAX,
    NAN_BITS,
    Vector,
    dot,
    element_bits,
    floats,
    rounded,
    single,
    wrong_ids,
    wrong_values,
)

DIM, HEADS, TOP, POOL = geometry.INDEX_HEAD_DIM, geometry.KPOOL_HEADS, geometry.TOP_BLOCKS, geometry.BLOCK_TOKENS
LEAST_ABSMAX = 1e-4
ROWS = 40  # of the Hadamard
SIZE, PAGES = 8, 3  # pools of a page, pages of the cache
LOC = (5, 23, -1, 0, SIZE * PAGES, 9)  # slots that six pools are written to; two are none
RING, BLOCKS = 4, 3
SEEN = (4 * (TOP + 4) + 2, 4 * 9 + 3)  # tokens that the rows of the selection see
BAND = 2e-3  # of logits around the 512th, of the largest of them: e4m3 products are added in registers of fewer bits


def hadamard(x: Vector) -> list[float]:
    """Hadamard-128 / sqrt(128), rounded to bf16 as the kernels do: sums of values of these magnitudes are exact."""
    y, step = list(x), 1
    while step < DIM:
        for i in range(DIM):
            if not i & step:
                y[i], y[i + step] = y[i] + y[i + step], y[i] - y[i + step]
        step *= 2
    return [rounded(single(value * single(DIM**-0.5)), "bf16") for value in y]


def scale_of(y: Vector) -> float:
    """2^ceil(log2(absmax / 448)), exactly: 448 is 0.875 x 2^9."""
    mantissa, exponent = math.frexp(max(LEAST_ABSMAX, *map(abs, y)))
    return math.ldexp(1, exponent - (9 if mantissa <= FP8_MAX / 512 else 8))


def pooled(keys: Sequence[Vector], scores: Sequence[Vector], ape: Sequence[Vector]) -> list[float]:
    """A pool's key before it is quantised: the softmax-weighted sum of its tokens, a dim at a time, rotated."""
    mean = []
    for d in range(DIM):
        weights = [math.exp(score[d] + bias[d]) for score, bias in zip(scores, ape, strict=True)]
        mean.append(rounded(dot(weights, [key[d] for key in keys]) / sum(weights), "bf16"))
    return hadamard(mean)


def vectors(bits: array[int], dtype: str = "bf16") -> list[list[float]]:
    return [floats(bits[i : i + DIM], dtype) for i in range(0, len(bits), DIM)]


def hadamard_case(memory: Memory, dtype: str) -> str:
    q = element_bits(random.Random(1), dtype, ROWS * DIM)
    out, scales = memory.poisoned(ROWS * DIM), memory.poisoned(4 * ROWS)
    launch = HadamardQuant(q_ptr=memory.put(q), out_ptr=out, scale_ptr=scales, num_rows=ROWS)
    (keys, found), unsteady = memory.launched(launch.run, (out, "B", ROWS * DIM), (scales, "f", ROWS))
    for row, x in enumerate(vectors(q, dtype)):
        y = hadamard(x)
        scale = scale_of(y)
        wrong = wrong_values([found[row]], [scale], 0.0) and f"the scale is {found[row]}, expected {scale}"
        want = [rounded(value / scale, FP8) for value in y]
        wrong = wrong or wrong_values(floats(keys[row * DIM : (row + 1) * DIM], FP8), want, 0.0)
        if wrong:
            return f"row {row}: {wrong}"
    return unsteady


class Pools:
    """Six pools of tokens, and the cache that they go to: (key bits, score bits, ape) and what is expected of each."""

    def __init__(self) -> None:
        rng = random.Random(2)
        self.k, self.score = (element_bits(rng, "bf16", len(LOC) * POOL * DIM) for _ in range(2))
        self.ape = array("f", floats(element_bits(rng, "bf16", POOL * DIM), "bf16"))
        keys, scores = vectors(self.k), vectors(self.score)
        ape = [list(self.ape[i : i + DIM]) for i in range(0, POOL * DIM, DIM)]
        self.want = [
            pooled(keys[i * POOL : (i + 1) * POOL], scores[i * POOL : (i + 1) * POOL], ape) for i in range(len(LOC))
        ]

    def wrong(self, cache: bytes, slots: Sequence[int]) -> str:
        """What is wrong with a cache that has pool i at slots[i] and nothing else; "" for nothing."""
        at = {slot: i for i, slot in enumerate(slots) if 0 <= slot < SIZE * PAGES}
        for slot in range(SIZE * PAGES):
            page, place = SIZE * ENTRY_BYTES * (slot // SIZE), slot % SIZE
            key = cache[page + place * DIM : page + (place + 1) * DIM]
            raw = cache[page + SIZE * DIM + 4 * place : page + SIZE * DIM + 4 * place + 4]
            if slot not in at:
                if set(key + raw) != {POISON}:
                    return f"slot {slot} was written, which is nobody's"
                continue
            scale = struct.unpack("<f", raw)[0]
            found = [scale * value for value in floats(key, FP8)]
            # Half a step of e4m3 is 1/16 of a value; a mean may round to the next bf16.
            wrong = wrong_values(found, self.want[at[slot]], atol=4e-3, rtol=1 / 14)
            if wrong:
                return f"slot {slot}: {wrong}"
        return ""


def compress_case(memory: Memory, dtype: str) -> str:
    """Pools written at once; then pool 0 again by seeding two of its tokens and decoding the other two: the same bytes.
    The second request of the decode step completes nothing."""
    pools, size = Pools(), PAGES * SIZE * ENTRY_BYTES
    cache, stepped = memory.poisoned(size), memory.poisoned(size)
    k, score, ape = memory.put(pools.k), memory.put(pools.score), memory.put(pools.ape)
    paging: dict[str, Any] = {"page_size": SIZE, "num_pages": PAGES, "page_stride": SIZE * ENTRY_BYTES}
    tokens: dict[str, Any] = {"slot_k_ptr": k, "slot_score_ptr": score, "ape_ptr": ape}
    tokens |= {"num_pools": len(LOC), "pool_size": POOL}
    write = CompressWrite(loc_ptr=memory.put(LOC), loc_words=1, cache_ptr=cache, **tokens, **paging)
    tail = memory.poisoned(2 * BLOCKS * 2 * RING * DIM)
    half = POOL // 2 * DIM * 2  # bytes of two tokens
    ring: dict[str, Any] = {"tail_ptr": tail, "ring": RING, "num_tail_blocks": BLOCKS, "pool_size": POOL}
    slots = memory.put([2 * RING, 2 * RING + 1])
    seed = SeedTail(key_ptr=k, gate_score_ptr=score, tail_slots_ptr=slots, num_tokens=2, **ring)
    update = DecodeUpdate(
        cache_ptr=stepped,
        tail_slots_ptr=memory.put([2 * RING + 2, 2 * RING + 3, RING, RING + 1]),
        key_ptr=k + half,
        slot_score_ptr=score + half,
        ape_ptr=ape,
        slots_ptr=memory.put([-1, LOC[0], -1, -1]),
        positions_ptr=memory.put([2, 3, 4, 5]),
        num_requests=2,
        next_n=2,
        **ring,
        **paging,
    )

    def launch() -> None:
        for one in (write, seed, update):
            one.run()

    tail_size = BLOCKS * 2 * RING * DIM
    outputs = (cache, "B", size), (stepped, "B", size), (tail, "H", tail_size)
    (whole, single_pool, ringed), unsteady = memory.launched(launch, *outputs)
    wrong = pools.wrong(whole.tobytes(), LOC)
    if wrong:
        return f"compress: {wrong}"
    wrong = pools.wrong(single_pool.tobytes(), LOC[:1])
    if wrong:
        return f"decode: {wrong}"
    want = array("H", [0xFFFF]) * tail_size
    for plane, source in enumerate((pools.k, pools.score)):
        for block, places, first in ((2, range(4), 0), (1, range(2), 4)):
            for i, place in enumerate(places):
                at = ((block * 2 + plane) * RING + place) * DIM
                want[at : at + DIM] = source[(first + i) * DIM : (first + i + 1) * DIM]
    return "the tail has not its tokens" if ringed != want else unsteady


def expand_case(memory: Memory, dtype: str) -> str:
    ids, lengths, groups = (7, -1, 0, 2**20, 3, 3), (14, 15), 3
    columns = groups * POOL + POOL - 1
    out = memory.poisoned(4 * len(lengths) * columns)
    lists: dict[str, Any] = {"ids_ptr": memory.put(ids), "seq_lens_ptr": memory.put(lengths), "num_rows": len(lengths)}
    launch = ExpandTail(out_ptr=out, topk=groups * POOL, pool_size=POOL, tail=POOL - 1, **lists)
    (found,), unsteady = memory.launched(launch.run, (out, "i", len(lengths) * columns))
    want: list[int] = []
    for row, length in enumerate(lengths):
        for pool in ids[row * groups : (row + 1) * groups]:
            want += [POOL * pool + i if pool >= 0 else -1 for i in range(POOL)]
        want += [token if token < length else -1 for token in range(12, 15)]
    return "the lists are not the pools' tokens and the open pool's" if list(found) != want else unsteady


PAGE = 64  # pools of a page of the selection
TABLE = tuple(reversed(range(-(-(TOP + 4) // PAGE))))


@functools.cache
def selection_inputs() -> tuple[array[int], array[float], bytes, list[list[float]]]:
    """q [rows, heads, 128], weights [rows, heads], the cache with NaN in what no row sees, and all rows' scores."""
    rng, most = random.Random(3), max(SEEN) // POOL
    q, keys = element_bits(rng, FP8, len(SEEN) * HEADS * DIM), element_bits(rng, FP8, most * DIM)
    weights = array("f", (rng.choice((-1, 1)) * rng.uniform(0.25, 1) for _ in range(len(SEEN) * HEADS)))
    scales = [math.ldexp(1, rng.randint(-2, 0)) for _ in range(most)]
    cache = bytearray([NAN_BITS[FP8]]) * (len(TABLE) * PAGE * ENTRY_BYTES)
    for pool in range(most):
        page, place = TABLE[pool // PAGE] * PAGE * ENTRY_BYTES, pool % PAGE
        cache[page + place * DIM : page + (place + 1) * DIM] = keys[pool * DIM : (pool + 1) * DIM].tobytes()
        at = page + PAGE * DIM + 4 * place
        cache[at : at + 4] = struct.pack("<f", scales[pool])
    queries, values = vectors(q, FP8), vectors(keys, FP8)
    scores = []
    for row, seen in enumerate(SEEN):
        own = range(row * HEADS, (row + 1) * HEADS)
        pools = range(seen // POOL)
        scores.append([scales[p] * sum(weights[i] * max(0.0, dot(queries[i], values[p])) for i in own) for p in pools])
    return q, weights, bytes(cache), scores


def selection_case(memory: Memory, dtype: str) -> str:
    """Two rows of one request, as a prefill and as a decode step of two tokens."""
    q, weights, cache, scores = selection_inputs()
    rows, longest = len(SEEN), max(SEEN)
    size = max(PoolSelectRunner.workspace_size(rows, longest, next_n).size for next_n in (0, rows))
    given: dict[str, Any] = {"q_ptr": memory.put(q), "weights_ptr": memory.put(weights), "cache_ptr": memory.put(cache)}
    given |= {"block_table_ptr": memory.put(TABLE), "seq_lens_ptr": memory.put(SEEN), "max_pages": len(TABLE)}
    given |= {"page_size": PAGE, "num_pages": len(TABLE), "page_stride": PAGE * ENTRY_BYTES}
    given |= {"num_rows": rows, "num_requests": 1, "max_seq_len": longest, "workspace": memory.poisoned(size)}
    for next_n in (0, rows):
        ids, tokens = memory.poisoned(4 * rows * TOP), memory.poisoned(4 * rows * WIDTH)
        params = PoolSelectParams(pool_ids_ptr=ids, tokens_ptr=tokens, next_n=next_n, **given)
        outputs = (ids, "i", rows * TOP), (tokens, "i", rows * WIDTH)
        (chosen, listed), wrong = memory.launched(functools.partial(PoolSelectRunner.run, params), *outputs)
        for row in range(rows):
            found = list(chosen[row * TOP : (row + 1) * TOP])
            near = BAND * max(map(abs, scores[row]))
            closed = SEEN[row] // POOL * POOL
            want = [POOL * pool + i if pool >= 0 else -1 for pool in found for i in range(POOL)]
            want += [token if token < SEEN[row] else -1 for token in range(closed, closed + POOL - 1)]
            wrong = wrong_ids(found, scores[row], near) or wrong
            if not wrong and list(listed[row * WIDTH : (row + 1) * WIDTH]) != want:
                wrong = "the list is not the tokens of its pools and the open pool's"
            if wrong:
                return f"{'decode' if next_n else 'prefill'}, row {row}: {wrong}"
    return ""


def checks(sm90: bool) -> Iterator[Check]:
    def needs(*kernels: str, baked: Baked = ()) -> tuple[Wanted, ...]:
        return tuple(need(kernel, DIM, "bf16", baked) for kernel in kernels)

    yield Check("kpool hadamard", hadamard_case, needs("kpool_hadamard"), ("bf16",))
    pooled = needs("kpool_compress", "kpool_decode", baked=(("pool", POOL),))
    yield Check("kpool compress and decode", compress_case, (*pooled, *needs("kpool_seed_tail")), ("bf16",))
    yield Check("kpool expand", expand_case, needs("kpool_expand"), ("bf16",))
    select, baked, _ = selection_choice(len(SEEN), max(SEEN) // POOL, sm90)
    scores = [need("kpool_scores", DIM, FP8, each) for each in (PREFILL[1], DECODE[0][1])]
    rest = (*needs(select, baked=baked), *needs("kpool_expand"))
    yield Check("kpool scores and selection", selection_case, (*scores, *rest), (FP8,))
