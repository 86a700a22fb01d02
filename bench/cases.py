"""What is measured: every case by its id, with its shape, its useful work and its target. Imports no framework.

An id is `family/dimensions[/fp16]`, such as `decode/ctx65536/b32`. The registry is what `--all` runs; any other id of
a family parses as well. Useful work is what the operation asks for, whatever a provider spends on it: a dense kernel
is credited with the sparse operation's operations only.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from qsa_cute.errors import ArgumentError
from qsa_cute.geometry import (
    BLOCK_TOKENS,
    HEAD_DIM,
    INDEX_HEAD_DIM,
    INDEX_HEADS,
    INDEX_WIDTH,
    KPOOL_HEADS,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    TOP_BLOCKS,
)

OURS = "ours"
PROVIDER_NAMES = (
    *(OURS, "ours_lists", "ours_rows", "ours_indexer", "ours_attention", "ours_mma"),
    *("ours_scores", "vllm_scores"),  # without the top 512
    *("vllm", "sglang", "torch", "fa4"),
    *("bare", "triton"),  # of the host's cost
)
DENSE = ("torch", "fa4")  # providers that compute the dense operation

ELEM_BYTES = 2  # bf16 and fp16
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * ELEM_BYTES  # K and V of one token
ROW_BYTES = 2 * NUM_Q_HEADS * HEAD_DIM * ELEM_BYTES  # Q and O of one row
FLOPS_PER_ENTRY = 4 * NUM_Q_HEADS * HEAD_DIM  # QK^T and PV of one row and one selected token
KEY_BYTES = INDEX_HEAD_DIM * ELEM_BYTES
_ENTRY_BYTES = INDEX_HEAD_DIM + 4  # of kpool's cache: an e4m3 key and its scale
FLOPS_PER_SCORE = 2 * INDEX_HEADS * INDEX_HEAD_DIM


@dataclass(frozen=True, slots=True)
class Target:
    """What ours is to reach: at most `us`, and `ratio` times as fast as every one of `peers`; 0 is no demand."""

    us: float = 0.0
    ratio: float = 0.0
    peers: tuple[str, ...] = ("vllm",)

    def __str__(self) -> str:
        demands = [f"<= {self.us:g} us"] if self.us else []
        demands += [f">= {self.ratio:.3g}x {' and '.join(self.peers)}"] if self.ratio else []
        return ", ".join(demands)

    def met(self, times: Mapping[str, float]) -> bool | None:
        """Of each provider's microseconds; None where what is needed was not measured."""
        if OURS not in times:
            return None
        ours, peers = times[OURS], [times[peer] for peer in self.peers if peer in times]
        if self.ratio and not peers:
            return None
        fast_enough = not self.ratio or min(peers) >= self.ratio * ours
        return fast_enough and (not self.us or ours <= self.us)


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        id, family: as above.
        dtype: "bf16", "fp16" or, of a cache, "fp8".
        ctx: tokens of each sequence; of a `topk` case 0.
        rows: query rows (the last of the context), or rows of logits.
        columns: logits a row.
        batch: sequences, each with next_n new tokens.
        tp: tensor-parallel ranks, of which the case is one.
        rho: how alike neighbouring rows select: the correlation of their block scores.
        flops, bytes: useful work of one launch; 0 where it has none of the kind.
        target: None where there is none.
    """

    id: str
    family: str
    dtype: str
    flops: int
    bytes: int
    target: Target | None
    ctx: int = 0
    rows: int = 0
    columns: int = 0
    batch: int = 1
    next_n: int = 1
    rho: float = 0.0
    tp: int = 1

    def tflops(self, us: float) -> float | None:
        """Useful TFLOP/s at `us` microseconds a launch."""
        return self.flops / us / 1e6 if self.flops else None

    def tbps(self, us: float) -> float | None:
        """Useful TB/s at `us` microseconds a launch."""
        return self.bytes / us / 1e6 if self.bytes else None


def entries(first: int, rows: int) -> int:
    """Selected tokens of `rows` rows from position `first` on: all of a short row, else the full width of the list."""
    short = max(0, min(rows, INDEX_WIDTH - 1 - first))
    return short * first + short * (short + 1) // 2 + (rows - short) * INDEX_WIDTH


PREPARED_BYTES = INDEX_HEADS * INDEX_HEAD_DIM * 4  # one row of Metrale's prepared queries


# Useful (FLOPs, bytes) of a family, from the dimensions of an id.
Work = Callable[[Mapping[str, int]], tuple[int, int]]


def _attention_rows(ctx: int, rows: int) -> tuple[int, int]:
    # Bytes that must move whatever the algorithm: Q, O and the lists once, the context's K and V once.
    return entries(ctx - rows, rows) * FLOPS_PER_ENTRY, rows * (ROW_BYTES + 4 * INDEX_WIDTH) + ctx * TOKEN_BYTES


def _vllm_select(n: Mapping[str, int]) -> tuple[int, int]:
    blocks = n["ctx"] // BLOCK_TOKENS
    if "rows" in n:
        return n["rows"] * blocks * FLOPS_PER_SCORE, 0
    return n["batch"] * blocks * FLOPS_PER_SCORE, n["batch"] * blocks * INDEX_HEAD_DIM * n["item"]


def _decode(n: Mapping[str, int]) -> tuple[int, int]:
    count = n["batch"] * entries(n["ctx"] - 1, 1)
    return count * FLOPS_PER_ENTRY, count * TOKEN_BYTES


def _scores(rows: int, columns: int, keys: int) -> tuple[int, int]:
    return rows * columns * FLOPS_PER_SCORE, keys * KEY_BYTES


def _decode_scores(n: Mapping[str, int]) -> tuple[int, int]:
    blocks = n["ctx"] // BLOCK_TOKENS
    return _scores(n["batch"], blocks, n["batch"] * blocks)


def _vllm_attention(n: Mapping[str, int]) -> tuple[int, int]:
    heads, kv_heads, item = NUM_Q_HEADS // n["tp"], max(1, NUM_KV_HEADS // n["tp"]), n["item"]
    token, entry = 2 * kv_heads * HEAD_DIM * item, 4 * heads * HEAD_DIM
    if "rows" in n:
        count = entries(n["ctx"] - n["rows"], n["rows"])
        rows = n["rows"] * (3 * heads * HEAD_DIM * ELEM_BYTES + 4 * (INDEX_WIDTH + 1))
        return count * entry, rows + n["ctx"] * token
    count = n["batch"] * INDEX_WIDTH
    return count * entry, count * token


def _metrale_rows(n: Mapping[str, int]) -> tuple[int, int]:
    flops, moved = _scores(n["rows"], n["ctx"] // BLOCK_TOKENS, n["ctx"] // BLOCK_TOKENS)
    return flops, moved + n["rows"] * (PREPARED_BYTES + 4 * (n["ctx"] // BLOCK_TOKENS))


def _sum(*parts: tuple[int, int]) -> tuple[int, int]:
    flops, moved = zip(*parts, strict=True)
    return sum(flops), sum(moved)


@dataclass(frozen=True, slots=True)
class Family:
    """Cases of one operation.

    Attributes:
        pattern: of the id after the family's name; groups are the fields of `Case`.
        work: see `Work`.
        targets: the registry's ids after the family's name, with their targets.
        dtypes: what an id may end in; bf16 is what it means without.
    """

    pattern: str
    work: Work
    targets: Mapping[str, Target | None] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bf16", "fp16")


def _grid(pattern: str, values: Iterable[object], targets: Mapping[object, Target]) -> dict[str, Target | None]:
    return {pattern.format(value): targets.get(value) for value in values}


_RHOS = ("0", "0.97", "0.995", "0.999")
_VLLM_11 = Target(ratio=1.1)

FAMILIES: Mapping[str, Family] = {
    "prefill": Family(
        r"ctx(?P<ctx>\d+)/rows(?P<rows>\d+)/rho(?P<rho>[01](\.\d+)?)",
        lambda n: _attention_rows(n["ctx"], n["rows"]),
        {
            **_grid("ctx8192/rows4096/rho{}", _RHOS, {"0": Target(ratio=1), "0.995": Target(ratio=5.5)}),
            **_grid(
                "ctx32768/rows4096/rho{}",
                _RHOS,
                {"0": _VLLM_11, "0.97": Target(ratio=3), "0.995": Target(ratio=5.5), "0.999": Target(ratio=6.2)},
            ),
            **_grid("ctx131072/rows4096/rho{}", _RHOS, {"0": _VLLM_11, "0.995": Target(ratio=5)}),
            **_grid("ctx32768/rows{}/rho0.995", (512, 1024), dict.fromkeys((512, 1024), Target(ratio=4.5))),
        },
    ),
    "prefill_full": Family(
        r"ctx(?P<ctx>\d+)/rho(?P<rho>[01](\.\d+)?)",
        lambda n: _attention_rows(n["ctx"], n["ctx"]),
        {
            "ctx8192/rho0.995": Target(ratio=1, peers=DENSE),
            "ctx32768/rho0.995": Target(ratio=5, peers=DENSE),
            "ctx131072/rho0.995": Target(ratio=1, peers=DENSE),
        },
    ),
    "decode": Family(
        r"ctx(?P<ctx>\d+)/b(?P<batch>\d+)",
        _decode,
        _grid(
            "ctx65536/b{}",
            (1, 4, 16, 32, 64, 128),
            {b: Target(us=us) for b, us in {1: 5.5, 4: 7.5, 16: 20, 32: 37, 64: 70, 128: 138}.items()},
        ),
    ),
    "scores_prefill": Family(
        r"ctx(?P<ctx>\d+)/rows(?P<rows>\d+)",
        lambda n: _scores(n["rows"], n["ctx"] // BLOCK_TOKENS, 0),
        _grid("ctx{}/rows4096", (8192, 32768, 131072), {32768: Target(ratio=2.2), 131072: Target(ratio=2.2)}),
    ),
    "scores_decode": Family(
        r"ctx(?P<ctx>\d+)/b(?P<batch>\d+)",
        _decode_scores,
        _grid(
            "ctx65536/b{}",
            (1, 16, 64, 128),
            {1: Target(us=2.5, ratio=1), **dict.fromkeys((16, 64, 128), Target(ratio=1))},
        ),
    ),
    "topk": Family(
        r"(?P<rows>\d+)x(?P<columns>\d+)",
        lambda n: (0, 4 * n["rows"] * (n["columns"] + TOP_BLOCKS)),
        {
            "4096x2048": Target(us=45),
            "4096x8192": Target(us=70),
            "4096x32768": Target(us=190),
            # The peer's figures, which is what "equal or better" means where its compiled top-k is not at hand.
            "1x16384": Target(us=6.6),
            "1x65536": Target(us=10.2),
            "4x16384": Target(us=6.9),
            "64x2048": Target(us=3.9),
            "64x16384": Target(us=7.4),
            "64x65536": Target(us=17.0),
        },
    ),
    # vLLM's selection as a host calls it: scores, top 512 and expansion.
    "vllm_select": Family(
        r"ctx(?P<ctx>\d+)/(b(?P<batch>\d+)|rows(?P<rows>\d+))",
        _vllm_select,
        {
            f"ctx{ctx}/{size}{dtype}": Target(ratio=2 if size == "rows4096" else 1.3)
            for dtype in ("", "/fp8")
            for ctx, size in (
                *((8192, f"b{batch}") for batch in (1, 16, 64)),
                *((65536, f"b{batch}") for batch in (1, 16, 64, 128)),
                *((ctx, "rows4096") for ctx in (8192, 32768, 131072)),
            )
        },
        ("bf16", "fp8"),
    ),
    "layer_prefill": Family(
        r"ctx(?P<ctx>\d+)/rows(?P<rows>\d+)",
        lambda n: _sum(_attention_rows(n["ctx"], n["rows"]), _scores(n["rows"], n["ctx"] // BLOCK_TOKENS, 0)),
        {"ctx131072/rows4096": None},
    ),
    "layer_decode": Family(
        r"ctx(?P<ctx>\d+)/b(?P<batch>\d+)",
        lambda n: _sum(_decode(n), _decode_scores(n)),
        {"ctx65536/b1": Target(us=16), "ctx65536/b32": Target(us=90)},
    ),
    "vllm_attention": Family(
        r"tp(?P<tp>[1248])/ctx(?P<ctx>\d+)/(b(?P<batch>\d+)|rows(?P<rows>\d+))",
        _vllm_attention,
        {
            f"tp{tp}/ctx65536/{size}{dtype}": Target(ratio=1)
            for tp in (1, 2, 4, 8)
            for dtype in ("", "/fp8")
            for size in (*(f"b{b}" for b in (1, 4, 16, 32, 64, 128)), "rows4096")
        },
        ("bf16", "fp8"),
    ),
    # Metrale's operations; their floors are the GPU's own.
    "metrale_pool": Family(
        r"ctx(?P<ctx>\d+)", lambda n: (0, n["ctx"] * KEY_BYTES * (BLOCK_TOKENS + 1) // BLOCK_TOKENS), {"ctx32768": None}
    ),
    "metrale_qprep": Family(
        r"rows(?P<rows>\d+)",
        lambda n: (0, n["rows"] * (INDEX_HEADS * KEY_BYTES + PREPARED_BYTES)),
        {"rows1": None, "rows4096": None},
    ),
    "metrale_score": Family(
        r"ctx(?P<ctx>\d+)",
        lambda n: _sum(_scores(1, n["ctx"] // BLOCK_TOKENS, n["ctx"] // BLOCK_TOKENS), (0, n["ctx"])),
        dict.fromkeys(("ctx16384", "ctx65536", "ctx262144", "ctx1048576")),
    ),
    "metrale_score_rows": Family(
        r"ctx(?P<ctx>\d+)/rows(?P<rows>\d+)", _metrale_rows, dict.fromkeys(("ctx8192/rows4096", "ctx32768/rows4096"))
    ),
    "metrale_score_rows_tc": Family(
        r"ctx(?P<ctx>\d+)/rows(?P<rows>\d+)",
        _metrale_rows,
        dict.fromkeys(("ctx8192/rows4096", "ctx32768/rows4096", "ctx131072/rows4096")),
    ),
    "metrale_gather": Family(
        r"ctx(?P<ctx>\d+)/rows(?P<rows>\d+)", lambda n: (0, 2 * n["rows"] * TOKEN_BYTES), {"ctx32768/rows2051": None}
    ),
    "metrale_prefill": Family(
        r"ctx(?P<ctx>\d+)/rows(?P<rows>\d+)/rho(?P<rho>[01](\.\d+)?)",
        lambda n: _attention_rows(n["ctx"], n["rows"]),
        dict.fromkeys(("ctx32768/rows4096/rho0", "ctx32768/rows4096/rho0.995", "ctx131072/rows4096/rho0.995")),
    ),
    "kpool_hadamard": Family(
        r"(?P<rows>\d+)",
        lambda n: (0, n["rows"] * (3 * INDEX_HEAD_DIM + 4)),
        {"131072": Target(ratio=2.3), "1048576": Target(ratio=2.3)},
    ),
    # A pool: 4 keys and gate scores and a slot in, a key and a scale out.
    "kpool_compress": Family(
        r"(?P<rows>\d+)",
        lambda n: (0, n["rows"] * (16 * INDEX_HEAD_DIM + 8 + _ENTRY_BYTES)),
        {"32768": Target(ratio=2.2), "262144": Target(ratio=2.2)},
    ),
    "kpool_decode": Family(
        r"b(?P<batch>\d+)n(?P<next_n>\d+)",
        lambda n: (0, 0),
        {"b128n1": Target(ratio=1), "b128n4": Target(ratio=1), "b128n8": Target(ratio=1)},
    ),
    "kpool_expand": Family(
        r"(?P<rows>\d+)",
        lambda n: (0, 4 * n["rows"] * (TOP_BLOCKS + INDEX_WIDTH)),
        {"4096": Target(ratio=2.5), "128": Target(ratio=1)},
    ),
    "kpool_scores": Family(
        r"(?P<rows>\d+)x(?P<columns>\d+)",
        lambda n: (n["rows"] * n["columns"] * 2 * KPOOL_HEADS * INDEX_HEAD_DIM, n["columns"] * _ENTRY_BYTES),
        {"4096x8192": None, "4096x32768": None},
    ),
    "kpool_scores_decode": Family(
        r"pools(?P<columns>\d+)/b(?P<batch>\d+)n(?P<next_n>\d+)",
        lambda n: (
            n["batch"] * n["next_n"] * n["columns"] * 2 * KPOOL_HEADS * INDEX_HEAD_DIM,
            n["batch"] * n["columns"] * _ENTRY_BYTES,
        ),
        dict.fromkeys((f"pools16384/b{b}n{n}" for b, n in ((1, 1), (16, 1), (64, 1), (128, 1), (64, 4), (64, 8)))),
    ),
    # A run costs the host at most 1.5 bare launches.
    "host": Family(r"launch", lambda n: (0, 0), {"launch": Target(ratio=1 / 1.5, peers=("bare",))}),
}

ATTENTION = ("prefill/*", "prefill_full/*", "decode/*")


def parse(case_id: str) -> Case:
    """The case of an id, in the registry or not.

    Raises:
        ArgumentError: no family has such an id.
    """
    name, _, rest = case_id.partition("/")
    dimensions, slash, dtype = rest.rpartition("/")
    family = FAMILIES.get(name)
    if not slash or dtype not in (family.dtypes if family else ()):
        dimensions, dtype = rest, "bf16"
    match = re.fullmatch(family.pattern, dimensions) if family else None
    if family is None or match is None:
        forms = f"{name}/{family.pattern}" if family else f"one of the families {', '.join(FAMILIES)}"
        raise ArgumentError(f"case {case_id!r} is none; it takes {forms}, see --list")
    found = {key: value for key, value in match.groupdict().items() if key != "rho" and value is not None}
    numbers = {"batch": 1} | {key: int(value) for key, value in found.items()}
    rho = float(match.groupdict().get("rho") or 0)
    if name == "prefill_full":
        numbers["rows"] = numbers["ctx"]
    ctx, rows = numbers.get("ctx", 1), numbers.get("rows", 1)
    if ctx < 1 or rows < 1 or (numbers.get("ctx") and rows > ctx) or numbers["batch"] < 1 or rho > 1:
        raise ArgumentError(f"case {case_id!r} has no work: ctx, rows and batch are at least 1, rows at most ctx")
    flops, moved = family.work(numbers | {"item": 1 if dtype == "fp8" else ELEM_BYTES})
    # A target speaks of bf16, unless its id says otherwise.
    target = family.targets.get(dimensions if dtype == "bf16" else f"{dimensions}/{dtype}")
    return Case(case_id, name, dtype, flops, moved, target, rho=rho, **numbers)


def registry() -> list[Case]:
    """The cases that `--all` runs, in order."""
    return [parse(f"{name}/{dimensions}") for name, family in FAMILIES.items() for dimensions in family.targets]


def select(patterns: Sequence[str]) -> list[Case]:
    """The registry's cases that a pattern matches, and cases outside of it that one names in full.

    Raises:
        ArgumentError: a pattern matches nothing.
    """
    known = {case.id: case for case in registry()}
    chosen: dict[str, Case] = {}
    for pattern in patterns:
        matching = fnmatch.filter(known, pattern)
        chosen |= {name: known[name] for name in matching} if matching else {pattern: parse(pattern)}
    return list(chosen.values())
