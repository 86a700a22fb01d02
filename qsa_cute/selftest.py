"""Small cases of every runner on one GPU, against values computed by plain host arithmetic: `doctor --check`.

Needs the driver and the artifacts, and neither torch nor numpy: memory comes from the driver, tensors are `array`s,
and the expected values are sums over Python floats. Each case is launched twice, and both must give the same bits.
"""

from __future__ import annotations

import math
import operator
import random
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from qsa_cute import geometry
from qsa_cute.errors import QsaError
from qsa_cute.runners import (
    IndexerDecodeParams,
    IndexerDecodeRunner,
    IndexerPrefillParams,
    IndexerPrefillRunner,
    QsaIndexerPoolState,
    SparseDecodeParams,
    SparseDecodeRunner,
    SparsePrefillParams,
    SparsePrefillRunner,
)
from qsa_cute.runners.dispatch import SM90
from qsa_cute.runtime.driver import Driver, default_driver

DTYPES = ("bf16", "fp16")
TOLERANCE = 2e-2  # of outputs, inputs of magnitude up to 2
BAND = 1e-3  # of logits around the 512th, within which a selection may differ
POISON = 0xFF  # bytes of memory that nothing wrote; NaN as bf16, fp16 and FP32

Q_HEADS, KV_HEADS, ROWS, KV_ROWS = 6, 2, 3, 200
BLOCKS = (49, 0, 32, 14)  # whole blocks of tokens that each list has
BAD_IDS = (-1, 2**31 - 1, -(2**31), 200)
TWICE = 57  # listed once more: it counts twice. Not for the union, which would leave such rows to the row kernel
CONTEXT = 200
TOKENS = 4 * (geometry.TOP_BLOCKS + 3)  # of the indexer's case: its last row drops three blocks

Vector = Sequence[float]


# Numbers as the device has them.


def half_bits(rng: random.Random, dtype: str, count: int) -> array[int]:
    """`count` values of random sign and magnitude 0.5 to 2, as 16-bit patterns."""
    keep, exponent = (0x80FF, 0x3F00) if dtype == "bf16" else (0x87FF, 0x3800)
    mask, base = (int.from_bytes(struct.pack("<H", word) * count, "little") for word in (keep, exponent))
    drawn = int.from_bytes(rng.randbytes(2 * count), "little")
    return array("H", ((drawn & mask) | base).to_bytes(2 * count, "little"))


def floats(bits: Sequence[int], dtype: str) -> list[float]:
    """Values of 16-bit patterns."""
    if dtype == "fp16":
        return list(struct.unpack(f"<{len(bits)}e", struct.pack(f"<{len(bits)}H", *bits)))
    return list(array("f", array("I", (word << 16 for word in bits)).tobytes()))


def rounded(value: float, dtype: str) -> float:
    """To the nearest bf16 or fp16, ties to even."""
    if dtype == "fp16":
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    word = struct.unpack("<I", struct.pack("<f", value))[0]
    word = (word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def dot(a: Vector, b: Vector) -> float:
    return float(sum(map(operator.mul, a, b)))


# Expected values.


def attend(q: Vector, keys: Sequence[Vector], values: Sequence[Vector], scale: float) -> list[float]:
    """One head of one row over its valid entries; zeros where there is none."""
    if not keys:
        return [0.0] * len(q)
    scores = [scale * dot(q, key) for key in keys]
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    total = sum(weights)
    return [dot(weights, column) / total for column in zip(*values, strict=True)]


def norm_rope(x: Vector, weight: Vector, position: int, dtype: str) -> list[float]:
    """Gemma RMS norm, then rope of NeoX pairs on the first 64 dims, rounded at the end."""
    factor = 1 / math.sqrt(dot(x, x) / len(x) + geometry.RMS_EPS)
    y = [value * factor * (1 + w) for value, w in zip(x, weight, strict=True)]
    half = geometry.ROPE_DIM // 2
    for i in range(half):
        angle = position * geometry.ROPE_THETA ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        y[i], y[i + half] = y[i] * cos - y[i + half] * sin, y[i + half] * cos + y[i] * sin
    return [rounded(value, dtype) for value in y]


def block_key(raw: Sequence[Vector], weight: Vector, block: int, dtype: str) -> list[float]:
    mean = [rounded(sum(column) / geometry.BLOCK_TOKENS, dtype) for column in zip(*raw, strict=True)]
    return norm_rope(mean, weight, geometry.BLOCK_TOKENS * block, dtype)


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
        kth = sorted(scores, reverse=True)[kept - 1]
        near = BAND * max(1.0, abs(kth))
        best = {block for block in range(visible) if scores[block] > kth + near}
        worst = {block for block in range(visible) if scores[block] < kth - near}
        if not best <= set(blocks) or worst & set(blocks):
            return "the list is not the best 512 blocks"
    return ""


# Memory.


class Memory:
    """Allocations of the current context, freed together."""

    def __init__(self, driver: Driver, stack: ExitStack) -> None:
        self._driver = driver
        self._stack = stack

    def put(self, data: array[Any] | Sequence[int] | bytes) -> int:
        """Copy to the device; a list of integers goes as int32."""
        if not isinstance(data, (array, bytes)):
            data = array("i", data)
        raw = data if isinstance(data, bytes) else data.tobytes()
        address = self._driver.allocate(len(raw))
        self._stack.callback(self._driver.free, address)
        self._driver.upload(address, raw)
        return address

    def poisoned(self, size: int) -> int:
        return self.put(bytes([POISON]) * max(1, size))

    def get(self, address: int, kind: str, count: int) -> array[Any]:
        found = array(kind)
        found.frombytes(self._driver.download(address, count * found.itemsize))
        return found


# Cases. Each returns what is wrong, "" for nothing.

Case = Callable[[Memory, str], str]


def _wrong_output(memory: Memory, out: int, dtype: str, want: Sequence[float], again: Callable[[], None]) -> str:
    """Compare an output that was launched once, launch once more, and compare the bits."""
    first = memory.get(out, "H", len(want))
    found = floats(first, dtype)
    errors = [abs(a - b) for a, b in zip(found, want, strict=True)]
    worst = max(range(len(want)), key=lambda i: math.inf if math.isnan(errors[i]) else errors[i])
    if not errors[worst] <= TOLERANCE:
        return f"element {worst} is {found[worst]}, expected {want[worst]:.5f}"
    again()
    return "" if memory.get(out, "H", len(want)) == first else "two launches gave different bits"


def _ids(twice: bool) -> list[int]:
    """A row's list, unsorted, bad ids between."""
    blocks = [geometry.BLOCK_TOKENS * block + i for i in (2, 0, 3, 1) for block in BLOCKS]
    return [*blocks[:7], *BAD_IDS, *blocks[7:], TWICE if twice else -1]


def _lists(twice: bool) -> list[int]:
    """Of all rows; the first is empty: exact zeros."""
    ids = _ids(twice)
    return [-1] * len(ids) + ids * (ROWS - 1)


def _attention_inputs(dtype: str, dim: int, twice: bool) -> tuple[array[int], array[int], array[int], list[float]]:
    """q [rows, heads, dim], k and v [kv rows, kv heads, dim] with NaN where no list names a token, and the output."""
    rng = random.Random(dim)
    q, k, v = (half_bits(rng, dtype, n * dim) for n in (ROWS * Q_HEADS, KV_ROWS * KV_HEADS, KV_ROWS * KV_HEADS))
    valid = [token for token in _ids(twice) if 0 <= token < CONTEXT]
    for token in set(range(KV_ROWS)) - set(valid):
        for plane in (k, v):
            plane[token * KV_HEADS * dim : (token + 1) * KV_HEADS * dim] = array("H", [0x7FFF]) * (KV_HEADS * dim)

    def vector(plane: array[int], row: int) -> list[float]:
        return floats(plane[row * dim : (row + 1) * dim], dtype)

    want: list[float] = []
    for row in range(ROWS):
        listed = valid if row else []
        for head in range(Q_HEADS):
            kv_head = head // (Q_HEADS // KV_HEADS)
            keys, values = ([vector(p, token * KV_HEADS + kv_head) for token in listed] for p in (k, v))
            want += attend(vector(q, row * Q_HEADS + head), keys, values, dim**-0.5)
    return q, k, v, want


def prefill_case(dim: int, algorithm: str) -> Case:
    def case(memory: Memory, dtype: str) -> str:
        twice = algorithm == "rows"
        q, k, v, want = _attention_inputs(dtype, dim, twice)
        sizes: dict[str, Any] = {"batch_size": 1, "seq_len": ROWS, "kv_seq_len": KV_ROWS, "num_q_heads": Q_HEADS}
        sizes |= {"num_kv_heads": KV_HEADS, "head_dim": dim, "top_k": len(_ids(twice))}
        out = memory.poisoned(2 * len(want))
        space = SparsePrefillRunner.workspace_size(**sizes).size if algorithm == "union" else 0
        params = SparsePrefillParams(
            q_ptr=memory.put(q),
            k_ptr=memory.put(k),
            v_ptr=memory.put(v),
            o_ptr=out,
            indices=memory.put(_lists(twice)),
            context_lengths=memory.put([CONTEXT]),
            query_starts=memory.put([CONTEXT - ROWS]),
            attention_scale=dim**-0.5,
            algorithm=algorithm,
            workspace=memory.poisoned(space) if space else 0,
            **sizes,
        )
        SparsePrefillRunner.run(dtype, params)
        return _wrong_output(memory, out, dtype, want, lambda: SparsePrefillRunner.run(dtype, params))

    return case


def decode_case(dim: int, algorithm: str) -> Case:
    """The same rows as the new tokens of one sequence, K and V in a pool whose pages are out of order."""

    def case(memory: Memory, dtype: str) -> str:
        q, k, v, want = _attention_inputs(dtype, dim, twice=True)
        pages = -(-KV_ROWS // geometry.PAGE_TOKENS)
        k_pages, v_pages = [pages - 1 - i for i in range(pages)], [2 * pages - 1 - i for i in range(pages)]
        page = geometry.PAGE_TOKENS * KV_HEADS * dim
        pool = array("H", [0x7FFF]) * (2 * pages * page)
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
            indices=memory.put(_lists(twice=True)),
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
            top_k=len(_ids(twice=True)),
            attention_scale=dim**-0.5,
            algorithm=algorithm,
            num_splits=3,
            **layout.addresses(memory.poisoned(layout.size)),
        )
        SparseDecodeRunner.run(dtype, params)
        return _wrong_output(memory, out, dtype, want, lambda: SparseDecodeRunner.run(dtype, params))

    return case


class IndexerCase:
    """One sequence: a prefill that fills the pool, then a decode step that reads it."""

    def __init__(self, dtype: str) -> None:
        self.dtype, rng = dtype, random.Random(7)
        self.columns = (geometry.INDEX_HEADS + 1) * geometry.INDEX_HEAD_DIM
        self.qk = half_bits(rng, dtype, (TOKENS + 1) * self.columns)  # the last row is the decode step's
        self.w_q, self.w_k = (half_bits(rng, dtype, geometry.INDEX_HEAD_DIM) for _ in range(2))
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
        queries = [norm_rope(self._part(token, h), weight, token, self.dtype) for h in range(geometry.INDEX_HEADS)]
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
    IndexerPrefillRunner.run(dtype, prefill)
    lists = memory.get(out, "i", TOKENS * geometry.INDEX_WIDTH)
    for row in (0, 6, 2047, TOKENS - 1):
        found = lists[row * geometry.INDEX_WIDTH : (row + 1) * geometry.INDEX_WIDTH]
        wrong = wrong_list(found, row, case.scores(row) if row == TOKENS - 1 else None)
        if wrong:
            return f"prefill, row {row}: {wrong}"
    IndexerPrefillRunner.run(dtype, prefill)
    if memory.get(out, "i", TOKENS * geometry.INDEX_WIDTH) != lists:
        return "two prefills gave different lists"
    step = IndexerDecodeParams(
        index_qk_ptr=qk + 2 * TOKENS * case.columns,
        context_lengths=memory.put([TOKENS + 1]),
        out_idx_ptr=out,
        max_context_len=TOKENS + 1,
        **common,
    )
    IndexerDecodeRunner.run(dtype, step)
    wrong = wrong_list(memory.get(out, "i", geometry.INDEX_WIDTH), TOKENS, case.scores(TOKENS))
    return f"decode step: {wrong}" if wrong else ""


def cases(capability: tuple[int, int]) -> Iterator[tuple[str, Case]]:
    """Name and case of everything that a device of this compute capability runs."""
    sm90 = capability == SM90
    for dim in geometry.SUPPORTED_HEAD_DIMS:
        for algorithm in ("rows", "union") if sm90 else ("rows",):
            yield f"sparse_prefill d{dim} {algorithm}", prefill_case(dim, algorithm)
        for algorithm in ("cluster", "split_kv") if sm90 else ("split_kv",):
            yield f"sparse_decode d{dim} {algorithm}", decode_case(dim, algorithm)
    yield "indexer prefill and decode", indexer_case


def run(device: int = 0, driver: Driver | None = None) -> list[dict[str, Any]]:
    """Run every case in every type in the device's primary context.

    Returns: {"name", "ok", "detail", "seconds"} of each; a case that raises is one that failed.

    Raises:
        DriverError: the device's context cannot be had.
    """
    driver = driver or default_driver()
    found = []
    with driver.pushed(driver.retain_primary(device)):
        for name, case in cases(driver.capability(device)):
            for dtype in DTYPES:
                begin = time.perf_counter()
                try:
                    with ExitStack() as stack:
                        detail = case(Memory(driver, stack), dtype)
                except QsaError as error:
                    detail = str(error)
                seconds = time.perf_counter() - begin
                found.append({"name": f"{name} {dtype}", "ok": not detail, "detail": detail, "seconds": seconds})
    return found
