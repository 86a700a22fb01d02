"""Numbers as the device has them, on Python floats: bf16, fp16 and e4m3, their rounding, and sums over them."""

from __future__ import annotations

import math
import operator
import random
import struct
from array import array
from collections.abc import Sequence

Vector = Sequence[float]

FP8 = "fp8_e4m3"
NAN_BITS = {"bf16": 0x7FFF, "fp16": 0x7FFF, FP8: 0x7F}
KINDS = {"bf16": "H", "fp16": "H", FP8: "B"}  # of arrays of their bits
FP8_MAX = 448.0


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if not exponent else math.ldexp(8 + mantissa, exponent - 10))


_E4M3 = [_e4m3(byte) for byte in range(256)]


def element_bits(rng: random.Random, dtype: str, count: int) -> array[int]:
    """`count` values of random sign and magnitude 0.5 to 2, as patterns of 16 or 8 bits."""
    if dtype == FP8:
        return array("B", (byte & 0x8F | 0x30 for byte in rng.randbytes(count)))
    keep, exponent = (0x80FF, 0x3F00) if dtype == "bf16" else (0x87FF, 0x3800)
    mask, base = (int.from_bytes(struct.pack("<H", word) * count, "little") for word in (keep, exponent))
    drawn = int.from_bytes(rng.randbytes(2 * count), "little")
    return array("H", ((drawn & mask) | base).to_bytes(2 * count, "little"))


def floats(bits: Sequence[int], dtype: str) -> list[float]:
    """Values of patterns of 16 or 8 bits."""
    if dtype == FP8:
        return [_E4M3[byte] for byte in bits]
    if dtype == "fp16":
        return list(struct.unpack(f"<{len(bits)}e", struct.pack(f"<{len(bits)}H", *bits)))
    return list(array("f", array("I", (word << 16 for word in bits)).tobytes()))


def rounded(value: float, dtype: str) -> float:
    """To the nearest value of the type, ties to even; e4m3 ends at +-448."""
    if dtype == "fp16":
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    if dtype == FP8:
        value = max(-FP8_MAX, min(FP8_MAX, value))
        step = math.ldexp(1, max(math.frexp(value)[1], -5) - 4)  # of the value's binade, or of the subnormal ones
        return round(value / step) * step
    word = struct.unpack("<I", struct.pack("<f", value))[0]
    word = (word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def single(value: float) -> float:
    """To the nearest FP32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def dot(a: Vector, b: Vector) -> float:
    return float(sum(map(operator.mul, a, b)))


def attend(q: Vector, keys: Sequence[Vector], values: Sequence[Vector], scale: float) -> list[float]:
    """One head of one row over its valid entries; zeros where there is none."""
    if not keys:
        return [0.0] * len(q)
    scores = [scale * dot(q, key) for key in keys]
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    total = sum(weights)
    return [dot(weights, column) / total for column in zip(*values, strict=True)]


def wrong_values(found: Vector, want: Vector, atol: float, rtol: float = 0.0) -> str:
    """Which of these is furthest beyond the tolerance; "" where none is. Infinities are to be equal."""

    def beyond(a: float, b: float) -> float:
        error = 0.0 if a == b else abs(a - b) - (atol + rtol * abs(b) if math.isfinite(b) else 0.0)
        return math.inf if math.isnan(error) else error

    worst, at = max(((beyond(a, b), i) for i, (a, b) in enumerate(zip(found, want, strict=True))), default=(0.0, 0))
    return f"element {at} is {found[at]}, expected {want[at]:.5f}" if worst > 0 else ""


def not_the_best(chosen: set[int], scores: Vector, kept: int, near: float) -> bool:
    """Whether others than the `kept` of the highest scores were chosen; within `near` of the last one any may be."""
    kth = sorted(scores, reverse=True)[kept - 1]
    best = {i for i, score in enumerate(scores) if score > kth + near}
    return not best <= chosen or any(scores[i] < kth - near for i in chosen)


def wrong_ids(found: Sequence[int], scores: Vector, near: float) -> str:
    """What is wrong with a row of ascending ids, then -1, of the best of these scores; "" for nothing."""
    kept = min(len(scores), len(found))
    ids = list(found[:kept])
    if any(i != -1 for i in found[kept:]) or ids != sorted(set(ids)) or not all(0 <= i < len(scores) for i in ids):
        return f"the ids are not {kept} of those that the row sees, ascending, then -1"
    return "the ids are not the best" if kept and not_the_best(set(ids), scores, kept, near) else ""
