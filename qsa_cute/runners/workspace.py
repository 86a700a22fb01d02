"""What a workspace holds: sizes for hosts that allocate it themselves."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 256  # of a workspace and of every part in it: what cudaMalloc gives


@dataclass(frozen=True, slots=True)
class Part:
    """One array in a workspace.

    Attributes:
        name: the parameter it is passed as.
        dtype: "f32" or "i32".
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

    @staticmethod
    def of(*parts: tuple[str, str, tuple[int, ...]]) -> Workspace:
        """Lay out (name, dtype, shape) in order; every type takes 4 bytes."""
        laid, end = [], 0
        for name, dtype, shape in parts:
            size = 4
            for extent in shape:
                size *= extent
            laid.append(Part(name, dtype, shape, end, size))
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return Workspace(end, ALIGNMENT, tuple(laid))
