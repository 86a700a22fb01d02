"""A Triton kernel that does nothing with as many parameters as a decode launch has, for its launcher's host cost."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit
def _empty(p0, p1, p2, p3, p4, p5, p6, p7, n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, scale):  # type: ignore[no-untyped-def]
    if n0 < 0:
        tl.store(p0, scale)


def launcher() -> Callable[[], object]:
    """Launches it once on the current stream."""
    tensors = [torch.zeros(16, device="cuda") for _ in range(8)]
    return functools.partial(_empty[(1,)], *tensors, *range(2, 14), 0.0625)
