"""Tensors into addresses and sizes, without importing any framework at import.

A tensor is whatever has `data_ptr`, `shape`, `stride`, `dtype` and `device` as torch's do, or
`__cuda_array_interface__` (CuPy, Numba; it has no bf16), or `__dlpack__` (through torch, which is imported then).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from qsa_cute.errors import ArgumentError
from qsa_cute.runners.checks import dtype_name, show

_TYPESTR = {"<f2": "fp16", "<f4": "f32", "<i4": "i32"}


@dataclass(frozen=True, slots=True)
class TensorView:
    """Where a tensor lies. Strides are in elements; a dimension of fewer than two entries has stride 0."""

    name: str
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int

    @property
    def is_contiguous(self) -> bool:
        if 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    def row_stride(self) -> int:
        """Stride of dimensions 0 and 1 taken as one, row = i * shape[1] + j.

        Raises:
            ArgumentError: they cannot be.
        """
        (outer, inner), (step, inner_step) = self.shape[:2], self.strides[:2]
        if inner == 1:
            return step
        if outer > 1 and step != inner * inner_step:
            raise ArgumentError(
                f"{self.name} has strides {self.strides[:2]} over its sequences and their tokens; they must be one "
                f"dimension: a sequence's stride {inner} times a token's"
            )
        return inner_step


def view(name: str, tensor: Any) -> TensorView:
    """Read a tensor's address, shape, strides, type and device.

    Raises:
        ArgumentError: it is no tensor, or is not on a CUDA device.
    """
    if not hasattr(tensor, "data_ptr"):
        if hasattr(tensor, "__cuda_array_interface__"):
            return _from_interface(name, tensor)
        if not hasattr(tensor, "__dlpack__"):
            raise ArgumentError(f"{name} is {show(tensor)}; it takes a CUDA tensor")
        import torch

        tensor = torch.from_dlpack(tensor)
    device = tensor.device
    if device.type != "cuda":
        raise ArgumentError(f"{name} is on {device}; it takes a CUDA tensor")
    return _make(
        name, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype), device.index or 0
    )


def _from_interface(name: str, tensor: Any) -> TensorView:
    interface = tensor.__cuda_array_interface__
    shape, typestr = tuple(interface["shape"]), interface["typestr"]
    itemsize = int(typestr[2:])
    strides = interface.get("strides")
    if strides is None:
        strides = tuple(math.prod(shape[i + 1 :]) * itemsize for i in range(len(shape)))
    elements = tuple(stride // itemsize for stride in strides)
    device = getattr(getattr(tensor, "device", None), "id", 0)
    return _make(name, interface["data"][0], shape, elements, _TYPESTR.get(typestr, typestr), device)


def _make(
    name: str, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: int
) -> TensorView:
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))
    return TensorView(name, pointer, shape, strides, dtype_name(dtype) or dtype, device)


class Binder:
    """Reads a call's tensors one after another and holds each to what the earlier ones fixed.

    Attributes:
        sizes: dimension's name -> its size, and which tensor fixed it.
        dtype: the element type, fixed by the first tensor of elements.
        device: ordinal, fixed by the first tensor.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, tuple[int, str]] = {}
        self.dtype = ""
        self.device = -1
        self._first = ""

    def size(self, dim: str) -> int:
        return self.sizes[dim][0]

    def take(self, name: str, tensor: Any, dims: str, element: str, contiguous: bool = False) -> TensorView:
        """One tensor.

        Args:
            dims: names of its dimensions; a number is a size that it must have.
            element: "elem" for the call's bf16 or fp16, else the type.
            contiguous: whether it must be; the inner stride must be 1 in any case.

        Raises:
            ArgumentError: rank, size, type, device or strides do not fit; the message has what was found.
        """
        found = view(name, tensor)
        self._check_type(found, element)
        if self._first and found.device != self.device:
            raise ArgumentError(f"{name} is on device {found.device}, {self._first} on {self.device}; one is needed")
        self._first, self.device = self._first or name, found.device
        self._check_shape(found, dims.split())
        if found.strides and found.shape[-1] > 1 and found.strides[-1] != 1:
            raise ArgumentError(f"{name} has strides {found.strides}; its inner dimension takes stride 1")
        if contiguous and not found.is_contiguous:
            raise ArgumentError(f"{name} has shape {found.shape} and strides {found.strides}; it must be contiguous")
        return found

    def pointer(self, name: str, tensor: Any, dims: str, element: str) -> int:
        """Address of an optional contiguous tensor; 0 for None."""
        return 0 if tensor is None else self.take(name, tensor, dims, element, contiguous=True).pointer

    def page_table(self, tensor: Any) -> TensorView:
        """Int32 [batch, 2, max_pages], V's pages right after K's.

        Raises:
            ArgumentError: as `take`, or V's pages lie elsewhere.
        """
        found = self.take("page_table", tensor, "batch 2 max_pages", "i32")
        if found.strides[1] != self.size("max_pages"):
            raise ArgumentError(f"page_table has strides {found.strides}; V's pages must follow K's: stride 1 of its 2")
        return found

    def _check_type(self, found: TensorView, element: str) -> None:
        allowed = (element,) if element != "elem" else (self.dtype,) if self.dtype else ("bf16", "fp16")
        if found.dtype not in allowed:
            raise ArgumentError(f"{found.name} has type {found.dtype}; it takes {' or '.join(allowed)}")
        if element == "elem":
            self.dtype = found.dtype

    def _check_shape(self, found: TensorView, dims: list[str]) -> None:
        shape = list(found.shape)
        if len(shape) != len(dims):
            raise ArgumentError(f"{found.name} has shape {shape}; it takes {len(dims)} dimensions [{', '.join(dims)}]")
        for dim, size in zip(dims, shape, strict=True):
            wanted, by = (int(dim), "the layout") if dim.isdigit() else self.sizes.setdefault(dim, (size, found.name))
            if size != wanted:
                raise ArgumentError(
                    f"{found.name} has shape {shape} for [{', '.join(dims)}]; {dim} is {wanted} by {by}, here {size}"
                )


def current_stream(device: int, *tensors: Any) -> int:
    """Torch's current stream on the device where the tensors are torch's, else the legacy default stream (0)."""
    kinds = (base for tensor in tensors for base in type(tensor).__mro__)  # a subclass may be somebody else's
    if not any(kind.__module__.partition(".")[0] == "torch" for kind in kinds):
        return 0
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)
