"""Tensor maps over pages of K and V, by which decode kernels copy a whole 4-token block of a KV head as one box."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from qsa_cute import geometry
from qsa_cute.runners import checks
from qsa_cute.runtime import Loader

MAX_STRIDE = 1 << 40  # bytes; the driver takes less
_LINE = 128  # bytes of a part of a row: what the swizzle spans

Sizes = tuple[int, int, int]  # tokens of a page, KV heads, pages
Strides = tuple[int, int, int]  # of the same, in bytes


def strides(sizes: Sizes, elements: Sizes, head_dim: int, item: int = checks.ELEM_BYTES) -> Strides | None:
    """A map's strides from those in elements of `item` bytes; None where no map has them: pages must be there, and what
    there are several of must lie apart, by less than 2^40 bytes."""
    # A dimension of one has no stride of its own, and the driver wants one.
    tokens, heads, pages = (item * (step if size > 1 else head_dim) for size, step in zip(sizes, elements, strict=True))
    fits = min(sizes) > 0 and all(0 < step < MAX_STRIDE for step in (tokens, heads, pages))
    return (tokens, heads, pages) if fits else None


class Taken:
    """What kernels may take of params of a class, beside tensor maps."""

    def __init__(self, kind: type) -> None:
        names = (one.name for one in dataclasses.fields(kind))
        self._names = tuple(name for name in names if name[0] != "_" and name != "packed")
        self._values = operator.attrgetter(*self._names)

    def beside(self, params: Any, words: dict[str, int]) -> SimpleNamespace:
        """These parameters and a map's words, for the launch to pack."""
        return SimpleNamespace(**dict(zip(self._names, self._values(params), strict=True)), **words, packed=None)


def named(name: str, words: Iterable[int]) -> dict[str, int]:
    """The words of a map by the kernel's parameters."""
    return {f"{name}_{i}": word for i, word in enumerate(words)}


@functools.lru_cache(maxsize=256)  # a model's layers, each with its pages, come again with every step
def encode(
    loader: Loader,
    device: int,
    name: str,
    dtype: str,
    address: int,
    head_dim: int,
    sizes: Sizes,
    steps: Strides,
) -> dict[str, int]:
    """The words of a map of (128 bytes of columns, tokens, parts of a row, KV heads, pages), its boxes a block of a
    head, by the parameters of the map called `name`; not to be changed.

    Args:
        dtype: "bf16" for any 16-bit type: which, a copy does not ask; or "fp8_e4m3".
    """
    item = 1 if dtype == "fp8_e4m3" else checks.ELEM_BYTES
    columns = _LINE // item
    parts = head_dim // columns
    words = loader.encode_map(
        device,
        dtype,
        address,
        (columns, sizes[0], parts, *sizes[1:]),
        (steps[0], _LINE, *steps[1:]),
        (columns, geometry.BLOCK_TOKENS, parts, 1, 1),
    )
    return named(name, words)
