"""Checks of a caller's values. What is wrong becomes an ArgumentError that names the argument, what it got and
what it takes; what is only asked about (`can_implement`) is read without ever raising.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError, OverlapError
from qsa_cute.runtime import sm as sm_rules
from qsa_cute.variants import SMS

INT32_MAX = 2**31 - 1
MAX_GRID_YZ = 65535
MAX_FLAT_PAGES = INT32_MAX // geometry.PAGE_TOKENS  # the kernels number the pool's tokens in int32
ALIGNMENT = 16  # bytes of one cp.async piece: of every element pointer and of every stride of elements
ELEM_BYTES = 2  # bf16 and fp16

_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"), "fp8_e4m3"),
    **dict.fromkeys(("f32", "float32", "torch.float32"), "f32"),
    **dict.fromkeys(("i32", "int32", "torch.int32"), "i32"),
    **dict.fromkeys(("i64", "int64", "torch.int64"), "i64"),
    **dict.fromkeys(("u8", "uint8", "torch.uint8"), "u8"),
    **dict.fromkeys(("bool", "torch.bool"), "bool"),
}
_SM = re.compile(r"(?:sm_?)?(\d{1,3})\.?(\d)[af]?")
SM_FORMS = '90, "90", "9.0", (9, 0) or "sm_90a"'  # what an SM is given as


# Questions: never raise.


def show(value: object) -> str:
    """`repr`, shortened, of anything: a repr that fails gives the type's name."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."


def whole(value: object) -> int | None:
    """An integer of any integer type; None for everything else, bool too."""
    if type(value) is int:  # the usual case, in a third of the time
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except Exception:
        return None


def dtype_name(dtype: object) -> str | None:
    """The house's name ("bf16", "fp16", ...) of a name or a torch or numpy-like dtype; None for an unknown one."""
    try:
        return _DTYPES.get(dtype if isinstance(dtype, str) else str(dtype))
    except Exception:
        return None


def capability_of(sm_version: object) -> tuple[int, int] | None:
    """The compute capability that `SM_FORMS` name, 90 and (9, 0) as (9, 0); None for anything else."""
    try:
        if isinstance(sm_version, tuple):
            major, minor = map(whole, sm_version)
            return None if major is None or minor is None else (major, minor)
        match = _SM.fullmatch(sm_version if isinstance(sm_version, str) else str(whole(sm_version)))
        return (int(match[1]), int(match[2])) if match else None
    except Exception:
        return None


def build_target(sm_version: object) -> str | None:
    """The build's best target for an SM as `capability_of` takes it; None where no target runs there."""
    capability = capability_of(sm_version)
    return next(iter(sm_rules.preference(SMS, capability)), None) if capability else None


# Arguments: raise ArgumentError.


def instance(name: str, value: object, kind: type) -> None:
    """An object of a class, such as a runner's params."""
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} is {show(value)}; it takes {kind.__name__}")


def element(name: str, value: object) -> str:
    """Bf16 or fp16 by any of its names, as the house's; "" where it is not said."""
    found = "" if value in (None, "") else dtype_name(value)
    if found not in ("", "bf16", "fp16"):
        raise ArgumentError(f"{name} is {show(value)}; it takes 'bf16', 'fp16' or ''")
    return found


def other_dtype(dtype: object, element: str) -> ArgumentError:
    """That a launch is asked for in another type than the one its params are of."""
    return ArgumentError(f"dtype is {show(dtype)}; params are of {element} tensors and take {element!r}")


def integer(name: str, value: object, low: int, high: int = INT32_MAX) -> int:
    """An integer in [low, high]."""
    number = whole(value)
    if number is None or not low <= number <= high:
        raise ArgumentError(f"{name} is {show(value)}; it takes an integer from {low} to {high}")
    return number


def scalar(name: str, value: object) -> float:
    """A finite number."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:
        number = math.nan
    if not math.isfinite(number):
        raise ArgumentError(f"{name} is {show(value)}; it takes a finite number")
    return number


def address(name: str, value: object, align: int, required: bool = True) -> int:
    """A device address, a multiple of `align`; 0 only where it is not required."""
    number = whole(value)
    if number is None or not 0 <= number < 2**64:
        raise ArgumentError(f"{name} is {show(value)}; it takes a device address")
    if required and not number:
        raise ArgumentError(f"{name} is null; it takes a device address")
    if number % align:
        raise ArgumentError(f"{name} is {number:#x}; it takes an address that is a multiple of {align} bytes")
    return number


def stride(name: str, value: object, contiguous: int, step: int = ALIGNMENT // ELEM_BYTES) -> int:
    """A stride in elements, a multiple of `step`, by default so that rows are aligned; None is `contiguous`."""
    if value is None:
        return contiguous
    number = whole(value)
    if number is None or not 0 <= number < 2**63 or number % step:
        raise ArgumentError(f"{name} is {show(value)}; it takes a multiple of {step} elements, not negative")
    return number


def grid(name: str, blocks: int) -> int:
    """A grid's extent along x."""
    if blocks > INT32_MAX:
        raise ArgumentError(f"{name} make {blocks} thread blocks; one launch takes at most {INT32_MAX}")
    return blocks


class Extent(NamedTuple):
    """The bytes [begin, end) between a tensor's first and last element."""

    name: str
    begin: int
    end: int


def extent(name: str, pointer: int, dims: Iterable[tuple[int, int]], inner: int, itemsize: int) -> Extent:
    """Of a tensor with (size, stride in elements) per outer dimension and `inner` contiguous elements."""
    last = inner
    for size, step in dims:
        if not size:
            return Extent(name, pointer, pointer)
        last += (size - 1) * step
    return Extent(name, pointer, pointer + last * itemsize)


def disjoint(outputs: Iterable[Extent], others: Iterable[Extent]) -> None:
    """No output shares bytes with another tensor. Null tensors (address 0) are not there."""
    outputs = [out for out in outputs if out.begin]
    for number, out in enumerate(outputs):
        for other in (*others, *outputs[number + 1 :]):
            if other.begin and out.begin < other.end and other.begin < out.end:
                raise OverlapError(
                    f"{out.name} at [{out.begin:#x}, {out.end:#x}) overlaps {other.name} at [{other.begin:#x}, "
                    f"{other.end:#x}); an output takes memory of its own"
                )


def heads(num_q_heads: object, num_kv_heads: object) -> tuple[int, int]:
    """Query and KV heads of a group that fits."""
    q_heads, kv_heads = integer("num_q_heads", num_q_heads, 1), integer("num_kv_heads", num_kv_heads, 1)
    if q_heads % kv_heads or q_heads // kv_heads > geometry.MAX_GROUP_SIZE:
        most = geometry.MAX_GROUP_SIZE
        raise ArgumentError(f"num_q_heads is {q_heads} over num_kv_heads {kv_heads}; it takes 1 to {most} times those")
    return q_heads, kv_heads


def reach(max_pages: int, longest: int) -> None:
    """A page table of so many pages a sequence maps contexts of up to `longest` tokens."""
    if longest > max_pages * geometry.PAGE_TOKENS:
        raise ArgumentError(
            f"page_table has {max_pages} pages a sequence, which hold {max_pages * geometry.PAGE_TOKENS} tokens, for "
            f"contexts of {longest}; widen it to {-(-longest // geometry.PAGE_TOKENS)}"
        )


def head_dim(value: object) -> int:
    """A head dim that is built."""
    number = whole(value)
    if number not in geometry.SUPPORTED_HEAD_DIMS:
        raise ArgumentError(
            f"head_dim is {show(value)}; it takes {' or '.join(map(str, geometry.SUPPORTED_HEAD_DIMS))}"
        )
    return number


def settle(params: Any, checked: Mapping[str, Any]) -> None:
    """Set the fields of a frozen params object to what the checks made of them."""
    for name, value in checked.items():
        object.__setattr__(params, name, value)
