"""One kernel, ready in one context: packs its parameters and launches it.

The whole host cost of a run is spent here, so the path of `Kernel.launch` allocates nothing it can keep: the
parameters of a frozen object are packed once and kept with it, a launch copies them into a buffer at the offsets
the cubin reports, and the CUlaunchConfig lies in a second buffer of which only the fields that change are written.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable
from typing import Any

from qsa_cute.abi import KINDS
from qsa_cute.errors import ArgumentError, DriverError
from qsa_cute.runtime.artifacts import VariantRecord
from qsa_cute.runtime.driver import Driver, Handle

# CUlaunchConfig (56 bytes) followed by two CUlaunchAttribute, as cuda.h lays them out on 64-bit hosts.
_CONFIG = struct.Struct("<7I4xQQI4x")  # grid x y z, block x y z, shared memory, stream, attributes, their number
_ATTRIBUTE = struct.Struct("<I4x3I52x")  # id, value: up to three words
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: x y z
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: 1
# Indices of the fields that a launch writes, in words of 4 and of 8 bytes.
_GRID_X, _GRID_Y, _GRID_Z, _SMEM, _NUM_ATTRIBUTES = 0, 1, 2, 6, 12
_ONE_BLOCK = (1, 1, 1)
_STREAM = 4

_NO_EXTRA = 0

# CPython packs the native size types in two thirds of the time of the 8-byte integers that they equal.
_NATIVE = {"Q": "N", "q": "n"}


def _code(kind: str) -> str:
    return _NATIVE.get(KINDS[kind], KINDS[kind])


class Packer:
    """Takes an object's attributes and lays them out where a kernel's parameters lie.

    Attributes:
        size: bytes of the parameters.
        offsets: where each begins.
        values: params object -> tuple of the parameters' values, in order.
        layout: the `struct.Struct` of that tuple.
    """

    def __init__(self, record: VariantRecord) -> None:
        self.record = record
        self.size = record.param_bytes
        self.offsets = tuple(param.offset for param in record.params)
        self.values = _getter([param.name for param in record.params])
        code, end = ["@"], 0
        for param in record.params:
            code.append(f"{param.offset - end}x{_code(param.kind)}")
            end = param.offset + param.size
        self.layout = struct.Struct("".join(code))

    def image(self, params: Any) -> bytes:
        """The parameters as the kernel takes them.

        Raises:
            ArgumentError: one is missing or does not fit its kind.
        """
        image = bytearray(self.size)
        try:
            self.layout.pack_into(image, 0, *self.values(params))
        except (AttributeError, struct.error, TypeError, OverflowError) as error:
            raise self.explain(params) from error
        return bytes(image)

    def explain(self, params: Any) -> ArgumentError:
        """Why `params` could not be packed: the parameter at fault, its kind and its value."""
        for param in self.record.params:
            value = getattr(params, param.name, None)
            try:
                struct.pack(_code(param.kind), value)
            except (struct.error, TypeError, OverflowError):
                where = f"parameter {param.name} of {self.record.kernel}"
                return ArgumentError(f"{where} takes a value of kind {param.kind}, got {value!r}")
        return ArgumentError(f"the parameters of {self.record.kernel} cannot be packed from {type(params).__name__}")


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    getter = operator.attrgetter(*names)
    return getter if len(names) > 1 else lambda params: (getter(params),)


class _Slot:
    """Buffers of one launch under way: parameters, the array of their addresses, and the launch configuration."""

    def __init__(self, driver: Driver, packer: Packer, record: VariantRecord) -> None:
        self._params = ctypes.create_string_buffer(packer.size)
        self.params = memoryview(self._params).cast("B")
        base = ctypes.addressof(self._params)
        self._array = (ctypes.c_void_p * len(packer.offsets))(*(base + offset for offset in packer.offsets))
        self.array = ctypes.addressof(self._array)
        self._memory = ctypes.create_string_buffer(_CONFIG.size + 2 * _ATTRIBUTE.size)
        address = ctypes.addressof(self._memory)
        attribute = address + _CONFIG.size
        _CONFIG.pack_into(self._memory, 0, 1, 1, 1, record.threads, 1, 1, record.smem_bytes, 0, attribute, 0)
        ids = [_PROGRAMMATIC] * record.early_launch + [_CLUSTER_DIMENSION]
        for i, attribute_id in enumerate(ids):
            _ATTRIBUTE.pack_into(self._memory, _CONFIG.size + i * _ATTRIBUTE.size, attribute_id, 1, 1, 1)
        self.always = len(ids) - 1  # attributes of every launch; the cluster's comes last
        self.cluster = (_CONFIG.size + self.always * _ATTRIBUTE.size) // 4 + 2
        view = memoryview(self._memory).cast("B")
        self.words = view.cast("I")
        self.quads = view.cast("Q")
        self.config = driver.launch_config(address)


class Kernel:
    """A loaded kernel in one context.

    Attributes:
        record: what the manifest says of it.
        device: ordinal of the device it runs on.
        function: the CUfunction in its context.
    """

    def __init__(self, driver: Driver, record: VariantRecord, function: Handle, device: int) -> None:
        self.record = record
        self.device = device
        self._driver = driver
        self._launch = driver.launch
        self.function = function
        self._packer = Packer(record)
        self._smem = record.smem_bytes
        self._slots: list[_Slot] = []

    def launch(
        self,
        params: Any,
        grid: int | tuple[int, int, int],
        stream: int,
        cluster: int | tuple[int, int, int] = 1,
        smem: int | None = None,
    ) -> None:
        """Launch on `stream` of the current context. Any number of threads may launch at once.

        Args:
            params: an object with an attribute for every parameter of the manifest. If it has an attribute
                `packed`, None at first, it must not change: what was packed is kept there for the next launch.
            grid: blocks along x, or (x, y, z).
            stream: CUstream as an integer; 0 is the legacy default stream.
            cluster: blocks of a cluster along x, or (x, y, z); `grid` must be a multiple.
            smem: bytes of dynamic shared memory, for a kernel whose manifest gives the most it may take.

        Raises:
            ArgumentError: a parameter is missing or does not fit its kind; nothing was launched.
            DriverError: the driver refused the launch.
        """
        packed = getattr(params, "packed", None)
        if packed is None or packed[0] is not self._packer:
            packed = self._pack(params)
        try:
            slot = self._slots.pop()
        except IndexError:
            slot = _Slot(self._driver, self._packer, self.record)
        try:
            slot.params[:] = packed[1]
            words = slot.words
            if isinstance(grid, tuple):
                words[_GRID_X], words[_GRID_Y], words[_GRID_Z] = grid
            else:
                words[_GRID_X] = grid
                words[_GRID_Y] = words[_GRID_Z] = 1
            slot.quads[_STREAM] = stream
            words[_SMEM] = self._smem if smem is None else smem
            if cluster in (1, _ONE_BLOCK):
                words[_NUM_ATTRIBUTES] = slot.always
            else:
                words[_NUM_ATTRIBUTES] = slot.always + 1
                at = slot.cluster
                words[at], words[at + 1], words[at + 2] = cluster if isinstance(cluster, tuple) else (cluster, 1, 1)
            # The driver copies the parameters before it returns, so the slot is free for the next launch.
            status = self._launch(slot.config, self.function, slot.array, _NO_EXTRA)[0]
        finally:
            self._slots.append(slot)
        if status:
            raise self._refused(status, grid, cluster)

    def _pack(self, params: Any) -> tuple[Packer, bytes]:
        packed = (self._packer, self._packer.image(params))
        if hasattr(params, "packed"):
            object.__setattr__(params, "packed", packed)
        return packed

    def zero(self, address: int, words: int, stream: int) -> None:
        """Set `words` 32-bit words at `address` to zero on `stream` of the kernel's context; may be captured.

        Raises:
            DriverError: the driver refused.
        """
        self._driver.zero(address, words, stream)

    def _refused(
        self, error: Any, grid: int | tuple[int, int, int], cluster: int | tuple[int, int, int]
    ) -> DriverError:
        shape = f"grid {grid}, cluster {cluster}, {self.record.threads} threads, {self.record.smem_bytes} bytes"
        return DriverError(f"launch of {self.record.name} ({shape}) failed: {self._driver.error_text(error)}")


class ForeignKernel(Kernel):
    """A kernel whose context is not the caller's: it is made current for each launch."""

    def __init__(self, kernel: Kernel, context: Handle) -> None:
        super().__init__(kernel._driver, kernel.record, kernel.function, kernel.device)
        self._context = context

    def launch(
        self,
        params: Any,
        grid: int | tuple[int, int, int],
        stream: int,
        cluster: int | tuple[int, int, int] = 1,
        smem: int | None = None,
    ) -> None:
        with self._driver.pushed(self._context):
            super().launch(params, grid, stream, cluster, smem)

    def zero(self, address: int, words: int, stream: int) -> None:
        with self._driver.pushed(self._context):
            super().zero(address, words, stream)
