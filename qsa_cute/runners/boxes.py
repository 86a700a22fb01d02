"""Tensor maps over pages of K and V, by which decode kernels copy a whole 4-token block of a KV head as one box."""

from __future__ import annotations

import functools

from qsa_cute import geometry
from qsa_cute.runners import checks
from qsa_cute.runtime import Loader

MAX_STRIDE = 1 << 40  # bytes; the driver takes less
_COLUMNS = 64  # of a part of a row: the 128 bytes of the swizzle

Sizes = tuple[int, int, int]  # tokens of a page, KV heads, pages
Strides = tuple[int, int, int]  # of the same, in bytes


def strides(sizes: Sizes, elements: Sizes, head_dim: int) -> Strides | None:
    """A map's strides from those in elements; None where no map has them: pages must be there, and what there are
    several of must lie apart, by less than 2^40 bytes."""
    # A dimension of one has no stride of its own, and the driver wants one.
    tokens, heads, pages = (
        checks.ELEM_BYTES * (step if size > 1 else head_dim) for size, step in zip(sizes, elements, strict=True)
    )
    fits = min(sizes) > 0 and all(0 < step < MAX_STRIDE for step in (tokens, heads, pages))
    return (tokens, heads, pages) if fits else None


@functools.lru_cache(maxsize=256)  # a model's layers, each with its pages, come again with every step
def encode(loader: Loader, device: int, address: int, head_dim: int, sizes: Sizes, steps: Strides) -> tuple[int, ...]:
    """The words of a map of (64 columns, tokens, head_dim / 64 parts of a row, KV heads, pages), its boxes a block of a
    head, of 16-bit elements: which, a copy does not ask."""
    parts = head_dim // _COLUMNS
    return loader.encode_map(
        device,
        "bf16",
        address,
        (_COLUMNS, sizes[0], parts, *sizes[1:]),
        (steps[0], _COLUMNS * checks.ELEM_BYTES, *steps[1:]),
        (_COLUMNS, geometry.BLOCK_TOKENS, parts, 1, 1),
    )
