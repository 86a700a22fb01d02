"""What a case is, and the device's memory: by the driver alone."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from qsa_cute.runners.dispatch import Baked
from qsa_cute.runtime import Wanted
from qsa_cute.runtime.driver import Driver

POISON = 0xFF  # bytes of memory that nothing wrote; NaN as bf16, fp16, e4m3 and FP32


class Memory:
    """Allocations of the current context, freed together."""

    def __init__(self, driver: Driver, stack: ExitStack) -> None:
        self._driver = driver
        self._stack = stack

    def put(self, data: array[Any] | Sequence[int] | bytes) -> int:
        """Copy to the device; a list of integers goes as int32."""
        if not isinstance(data, (array, bytes)):
            data = array("i", data)
        raw = data if isinstance(data, bytes) else data.tobytes()
        address = self._driver.allocate(len(raw))
        self._stack.callback(self._driver.free, address)
        self._driver.upload(address, raw)
        return address

    def poisoned(self, size: int) -> int:
        return self.put(bytes([POISON]) * max(1, size))

    def get(self, address: int, kind: str, count: int) -> array[Any]:
        found = array(kind)
        found.frombytes(self._driver.download(address, count * found.itemsize))
        return found

    def launched(self, launch: Callable[[], object], *outputs: tuple[int, str, int]) -> tuple[list[array[Any]], str]:
        """Launch twice: these outputs (address, kind, count), and what is wrong with the second; "" for nothing.

        They hold the same before both: a second launch that leaves something out does not pass by the first one's.
        """
        before = [self.get(*one).tobytes() for one in outputs]
        launch()
        first = [self.get(*one) for one in outputs]
        for (address, _, _), raw in zip(outputs, before, strict=True):
            self._driver.upload(address, raw)
        launch()
        same = all(self.get(*one).tobytes() == found.tobytes() for one, found in zip(outputs, first, strict=True))
        return first, "" if same else "two launches gave different bits"


Case = Callable[[Memory, str], str]  # of a type: what is wrong, "" for nothing


def need(kernel: str, head_dim: int, dtype: str = "", baked: Baked = ()) -> Wanted:
    """An artifact; type "" is the one that the case is run in."""
    return Wanted.of((kernel, head_dim, dtype, baked))


@dataclass(frozen=True)
class Check:
    """A case and what it takes.

    Attributes:
        needs: the artifacts that it launches, of `need`.
        dtypes: types to run it in.
    """

    name: str
    case: Case
    needs: tuple[Wanted, ...]
    dtypes: tuple[str, ...] = ("bf16", "fp16")
