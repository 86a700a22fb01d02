"""What the paged kernels take in place of pages, strides and scales: numbers that spare divisions and reach far."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks
from qsa_cute.runners.tensors import Binder

_MAX_UNIT = 1 << 30  # bytes, an int32
_TOKEN_BITS = 31  # tokens are non-negative int32


class Divisor(NamedTuple):
    """n // d = (n * magic >> 32) >> shift, exact for 0 <= n < 2^31; `magic` as a signed word."""

    magic: int
    shift: int


def divisor(number: int) -> Divisor:
    """Of a number from 2 to 2^31 - 1.

    With 2^s >= d > 2^(s-1) and m = ceil(2^(31+s) / d), m d exceeds 2^(31+s) by less than 2^s: n m / 2^(31+s) exceeds
    n / d by less than n / (2^31 d) < 1 / d, which never reaches the next integer. m has 32 bits.
    """
    bits = (number - 1).bit_length()
    magic = -(-(1 << (_TOKEN_BITS + bits)) // number)
    return Divisor(magic - (1 << 32) if magic >= 1 << 31 else magic, bits - 1)


def units(strides: dict[str, int], num_pages: int, page_size: int, item: int) -> dict[str, int]:
    """Places in the caches in the largest unit that divides them all, so that 31 bits reach far."""
    names = [(plane, dim) for plane in "kv" for dim in ("page", "token")]
    steps = {f"{plane}_{dim}_units": strides[f"{plane}_stride_{dim}"] * item for plane, dim in names}
    unit = math.gcd(*steps.values()) or checks.ALIGNMENT
    if unit > _MAX_UNIT:
        unit = math.gcd(unit, _MAX_UNIT)
    found = {name: step // unit for name, step in steps.items()}
    for plane in "kv":
        last = (num_pages - 1) * found[f"{plane}_page_units"]
        last += (page_size - 1) * found[f"{plane}_token_units"]
        if last > checks.INT32_MAX:
            raise ArgumentError(
                f"{plane}_cache reaches {last * unit} bytes far in steps of {unit}; the kernels number 2^31 places: "
                f"align the strides to larger powers of two, or split the cache"
            )
        for dim in ("page", "token"):  # a stride that is never taken need not fit
            name = f"{plane}_{dim}_units"
            found[name] = min(found[name], checks.INT32_MAX)
    return found | {"unit": unit}


class Scale(NamedTuple):
    number: float
    pointer: int


def scales(binder: Binder, kind: str, k_scale: Any, v_scale: Any) -> tuple[Scale, Scale]:
    given = {"k_scale": k_scale, "v_scale": v_scale}
    if kind == "bf16":
        return Scale(1.0, 0), Scale(1.0, 0)
    for name, value in given.items():
        if value is None:
            raise ArgumentError(f"{name} is None; an fp8 cache takes both k_scale and v_scale")
    first, second = (_scale(binder, name, value) for name, value in given.items())
    return first, second


def _scale(binder: Binder, name: str, value: Any) -> Scale:
    """A number, or the address of one on the device: never read here."""
    if getattr(getattr(value, "device", None), "type", "cpu") == "cpu":
        return Scale(checks.scalar(name, value), 0)
    dims = "" if not len(value.shape) else "1"
    return Scale(1.0, binder.take(name, value, dims, "f32").pointer)
