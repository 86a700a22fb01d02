"""A kernel's boundary: the one list from which placeholders, manifest and launch packing are made.

Each kernel file declares `PARAMS`, in the order of its `@cute.kernel` signature. A parameter's name is also
the name of the attribute that the runner's params object carries, so packing is one `attrgetter`.
"""

from dataclasses import dataclass

MAP_WORDS = 16  # a CUtensorMap is 128 bytes


@dataclass(frozen=True)
class Param:
    """One kernel argument.

    Attributes:
        name: attribute of the params object that supplies it.
        kind: "ptr" (device address), "i64", "i32", "f32" or "map" (a CUtensorMap's 128 bytes: a tuple of 16 Int64).
        element: what a pointer points to: "elem" (the variant's type), "i32" or "f32"; "" for scalars.
        align: bytes the kernel assumes of a pointer.
    """

    name: str
    kind: str
    element: str = ""
    align: int = 4

    def words(self) -> list[tuple[str, str]]:
        """(name, kind) of each parameter that the compiled kernel takes: a map is 16 of them, `name`_0 to `name`_15."""
        if self.kind != "map":
            return [(self.name, self.kind)]
        return [(f"{self.name}_{i}", "i64") for i in range(MAP_WORDS)]


def ptr(name: str, element: str, align: int = 4) -> Param:
    return Param(name, "ptr", element, align)


def i32(name: str) -> Param:
    return Param(name, "i32")


def i64(name: str) -> Param:
    return Param(name, "i64")


def f32(name: str) -> Param:
    return Param(name, "f32")


def tensor_map(name: str) -> Param:
    return Param(name, "map")
