"""What a workspace holds: sizes for hosts that allocate it themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

ALIGNMENT = 256  # of a workspace and of every part in it: what cudaMalloc gives

# (name, "elem", "f32" or "i32", shape) of one array; "elem" is the call's bf16 or fp16.
PartSpec = tuple[str, str, tuple[int, ...]]

_ITEM_BYTES = {"elem": 2, "f32": 4, "i32": 4}


@dataclass(frozen=True, slots=True)
class Part:
    """One array in a workspace.

    Attributes:
        name: the parameter it is passed as.
        dtype: "elem" (the call's bf16 or fp16), "f32" or "i32".
        shape: contiguous.
        offset, size: bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that a launch needs beside its tensors; it may hold anything at entry.

    Attributes:
        size: bytes in all.
        alignment: bytes.
        parts: what lies where.
    """

    size: int
    alignment: int
    parts: tuple[Part, ...]

    def addresses(self, base: int) -> dict[str, int]:
        """Parameter's name -> address, for a workspace at `base`."""
        return {part.name: base + part.offset for part in self.parts}

    def tensor(self, memory: Any, name: str) -> Any:
        """A part of a torch uint8 tensor laid out so, as a tensor of its own type ("f32" or "i32") and shape."""
        import torch

        part = next(part for part in self.parts if part.name == name)
        dtype = {"f32": torch.float32, "i32": torch.int32}[part.dtype]
        return memory[part.offset : part.offset + part.size].view(dtype).view(part.shape)

    @staticmethod
    def of(*parts: PartSpec) -> Workspace:
        """Lay out these arrays in order, each aligned."""
        laid, end = [], 0
        for name, dtype, shape in parts:
            size = _ITEM_BYTES[dtype] * math.prod(shape)
            laid.append(Part(name, dtype, shape, end, size))
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return Workspace(end, ALIGNMENT, tuple(laid))
