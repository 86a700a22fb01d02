"""Loads variants into contexts, once each, and finds them again with one look-up.

A cubin is read and checked once a process and kept, so that artifacts replaced on disk do not disturb it; its
library is loaded once and serves every device; its function is taken once in every context.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from qsa_cute.abi import build_command
from qsa_cute.errors import ArgumentError, ArtifactError, DriverError, QsaError
from qsa_cute.runtime.artifacts import ArtifactSet, Store, VariantRecord, Wanted
from qsa_cute.runtime.capture import refuse_under_capture
from qsa_cute.runtime.driver import Driver, Handle, default_driver
from qsa_cute.runtime.launch import ForeignKernel, Kernel

_log = logging.getLogger("qsa_cute")

CURRENT = -1  # as a device ordinal: the device of the current context
_DEFAULT_SMEM = 48 * 1024  # dynamic shared memory that needs no opt-in


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one device can use.

    Attributes:
        device, name, capability: ordinal, the driver's name, compute capability (major, minor).
        usable: names of the variants that would load, sorted.
        refused: why each other variant, SM folder or store would not, by its name.
    """

    device: int
    name: str
    capability: tuple[int, int]
    usable: tuple[str, ...]
    refused: dict[str, str]


@dataclass(slots=True)
class _Library:
    """A variant's cubin in the driver, good for every context."""

    cubin: bytes
    library: Handle
    kernel: Handle
    record: VariantRecord
    prepared: set[int]  # devices whose limits were checked and attributes set


@dataclass(frozen=True, slots=True)
class _Place:
    """A context to load into: its id and device, and its handle where it must be pushed."""

    context: int
    device: int
    push: Handle | None


def _no_context(_: None) -> tuple[int, int]:
    """Stands for `Driver.context_id` until there is a driver."""
    return 0, 0


class Loader:
    """Kernels of one artifact store, on every device. All methods may be called from any thread.

    Args:
        path: artifact folder; None looks where `artifacts.find_root` says, at the first load.
        driver: stands in for the CUDA driver in tests.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, driver: Driver | None = None) -> None:
        self._path = path
        self._driver = driver
        self._context_id: Callable[[None], tuple[Any, int]] = _no_context
        self._store: Store | None = None
        self._lock = threading.RLock()
        self._libraries: dict[tuple[str, str], _Library] = {}
        self._kernels: dict[tuple[Wanted, int], Kernel] = {}
        self._primaries: dict[int, Handle] = {}
        # (wanted, current context, asked device) -> what launches there; grows only, so reading needs no lock.
        self._ready: dict[tuple[Wanted, int, int], Kernel] = {}
        # The same by the identity of `wanted`, which is kept here so that no other object gets its id.
        self._peeked: dict[tuple[int, int, int], tuple[Kernel, Wanted]] = {}

    def kernel(self, wanted: Any, device: int | None = None, stream: int = 0) -> Kernel:
        """The kernel in the context where it will run, loaded if it is not yet.

        Args:
            wanted: (kernel, head_dim, dtype[, baked]), as `Wanted.of` takes it.
            device: ordinal; None or -1 is the current context's device. Where it is not the current context's,
                or none is current, the kernel runs in the device's primary context.
            stream: CUstream as an integer, asked whether it is being captured.

        Raises:
            ArtifactError: no sound artifact that this device and driver take; the message says what mends it.
            CaptureError: a first load while `stream` is being captured.
            DriverError: no driver, or a failing call. Nothing stays half loaded: try again.
            ArgumentError: `wanted` or `device` is none.
        """
        wanted = Wanted.of(wanted)
        asked = CURRENT if device is None else device
        if asked < CURRENT:
            raise ArgumentError(f"device is an ordinal, or -1 for the current context's, got {device}")
        driver = self.driver
        key = (wanted, driver.current_context(), asked)
        found = self._ready.get(key)
        if found is not None:
            return found
        with self._lock:
            place = self._place(asked)
            kernel = self._kernels.get((wanted, place.context))
            if kernel is None:
                with nullcontext() if place.push is None else driver.pushed(place.push):
                    refuse_under_capture(driver, stream, str(wanted))
                    kernel = self._load(wanted, place)
                self._kernels[wanted, place.context] = kernel
            ready = kernel if place.push is None else ForeignKernel(kernel, place.push)
            return self._ready.setdefault(key, ready)

    def peek(self, wanted: Wanted, device: int = CURRENT, stream: int = 0) -> Kernel:
        """`kernel` for the launch path: one look-up when it is loaded, else all of `kernel`.

        Args as `kernel`, but `wanted` is a `Wanted`, made once and kept: it is looked up by its identity.
        """
        error, context = self._context_id(None)
        key = (id(wanted), 0 if error else context, device)
        found = self._peeked.get(key)
        if found is None:
            found = (self.kernel(wanted, device, stream), wanted)
            error, context = self._context_id(None)  # the first time of all it was not asked yet
            self._peeked[id(wanted), 0 if error else context, device] = found
        return found[0]

    def encode_map(
        self,
        device: int,
        dtype: str,
        address: int,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
    ) -> tuple[int, ...]:
        """`Driver.encode_map`, which wants a current context: where none is, or another device's, within `device`'s
        primary one."""
        driver = self.driver
        with self._lock:
            place = self._place(device)
        with nullcontext() if place.push is None else driver.pushed(place.push):
            return driver.encode_map(dtype, address, sizes, strides, box)

    @property
    def driver(self) -> Driver:
        """The CUDA driver, initialised at first use. Raises DriverError where there is none."""
        if self._driver is None:
            self._driver = default_driver()
        self._context_id = self._driver.context_id
        return self._driver

    @property
    def store(self) -> Store:
        """The artifacts, found at first use. Raises ArtifactError where there are none."""
        if self._store is None:
            self._store = Store(self._path)
        return self._store

    def missing_reason(self, wanted: Any, device: int = 0) -> str | None:
        """Why `device` could not load this, as one sentence; None when it could. Loads nothing."""
        try:
            self._select(Wanted.of(wanted), device)
        except QsaError as error:
            return str(error)
        return None

    def available(self) -> list[DeviceReport]:
        """What each device can use, and why not the rest. Loads nothing.

        Raises:
            DriverError: there is no driver.
            ArtifactError: there is no store.
        """
        return [self.report(device) for device in range(self.driver.device_count())]

    # The slow path, under the lock.

    def _place(self, asked: int) -> _Place:
        driver = self.driver
        current = driver.current_context()
        if current and asked in (CURRENT, driver.current_device()):
            return _Place(current, driver.current_device(), push=None)
        device = max(asked, 0)
        if device not in self._primaries:
            self._primaries[device] = driver.retain_primary(device)
        with driver.pushed(self._primaries[device]):
            return _Place(driver.current_context(), device, push=self._primaries[device])

    def _load(self, wanted: Wanted, place: _Place) -> Kernel:
        with self.driver.capture_relaxed():
            artifacts, record = self._select(wanted, place.device)
            library = self._library(artifacts, record)
            self._prepare(library, place.device)
            function = self.driver.get_function(library.kernel)
        _log.info("loaded %s on device %d from %s", library.record.name, place.device, artifacts.folder)
        return Kernel(self.driver, library.record, function, place.device)

    def _select(self, wanted: Wanted, device: int) -> tuple[ArtifactSet, VariantRecord]:
        """The best variant that this device takes; the first one's refusal when it takes none."""
        capability = self.driver.capability(device)
        refusals = []
        for artifacts, record in self.store.candidates(wanted, capability):
            reason = self._refusal(artifacts, record, device)
            if reason is None:
                return artifacts, record
            _log.debug("refused %s on device %d: %s", record.name, device, reason)
            refusals.append(f"{record.name}: {reason}")
        raise ArtifactError(f"no usable artifact for {wanted} on device {device}: {'; '.join(refusals)}")

    def _refusal(self, artifacts: ArtifactSet, record: VariantRecord, device: int) -> str | None:
        driver_version = self.driver.version()
        if driver_version < artifacts.min_driver:
            return (
                f"built by ptxas {artifacts.ptxas_version}, which needs a driver for CUDA "
                f"{artifacts.min_driver // 1000}, and this one is for {driver_version // 1000}."
                f"{driver_version % 1000 // 10}; update the driver"
            )
        needed, limit = record.smem_bytes + record.static_smem_bytes, self.driver.smem_optin(device)
        if needed > limit:
            mend = build_command(artifacts.sm, artifacts.folder.parent)
            return f"needs {needed} bytes of shared memory a block, the device allows {limit}; {mend}"
        return None

    def _library(self, artifacts: ArtifactSet, record: VariantRecord) -> _Library:
        key = (artifacts.sm, record.name)
        if key not in self._libraries:
            try:
                cubin = artifacts.cubin(record)
            except ArtifactError:
                self.store.forget(artifacts.sm)  # it may be repaired, or be in the middle of a rebuild
                raise
            library = self.driver.load_library(cubin)
            try:
                kernel = self.driver.get_kernel(library, record.symbol)
                self._check_params(artifacts, record, kernel)
            except QsaError:
                self.driver.unload_library(library)
                self.store.forget(artifacts.sm)
                raise
            self._libraries[key] = _Library(cubin, library, kernel, record, set())
        return self._libraries[key]

    def _check_params(self, artifacts: ArtifactSet, record: VariantRecord, kernel: Handle) -> None:
        """The manifest's parameter table against the cubin's own."""
        found = self.driver.params(kernel)
        said = [(param.offset, param.size) for param in record.params]
        if found != said:
            at = next((i for i, pair in enumerate(zip(found, said, strict=False)) if pair[0] != pair[1]), None)
            detail = (
                f"{len(found)} parameters against {len(said)}"
                if at is None
                else f"parameter {record.params[at].name} at (offset, size) {found[at]} against {said[at]}"
            )
            raise ArtifactError(
                f"{record.name}: the cubin has {detail} of its manifest; rebuild it: "
                f"{build_command(artifacts.sm, artifacts.folder.parent, force=True)}"
            )

    def _prepare(self, library: _Library, device: int) -> None:
        """Check the kernel against the device, and set what its launches need; once a device."""
        if device in library.prepared:
            return
        driver, record = self.driver, library.record
        threads = driver.max_threads(library.kernel, device)
        if record.threads > threads:
            raise ArtifactError(f"{record.name} launches {record.threads} threads, its registers allow {threads}")
        if record.smem_bytes > _DEFAULT_SMEM:
            driver.allow_smem(library.kernel, device, record.smem_bytes)
            driver.prefer_smem(library.kernel, device)
        if driver.capability(device) >= (9, 0):
            driver.allow_large_clusters(library.kernel, device)
        library.prepared.add(device)

    def report(self, device: int) -> DeviceReport:
        """`available` of one device."""
        capability = self.driver.capability(device)
        usable, refused = set(), {}
        for sm in self.store.sms():
            try:
                artifacts = self.store.read(sm)
            except ArtifactError as error:
                refused[sm] = str(error)
                continue
            for record in artifacts.variants.values():
                wanted = Wanted.of(record)
                try:
                    chosen = self._select(wanted, device)[1].name
                except QsaError as error:
                    refused[record.name] = str(error)
                    continue
                if chosen == record.name:
                    usable.add(chosen)
                else:
                    refused[record.name] = f"{chosen} is preferred on compute capability {capability}"
        return DeviceReport(device, self.driver.device_name(device), capability, tuple(sorted(usable)), refused)


@functools.cache
def default_loader() -> Loader:
    """The process's loader, over the artifacts that `artifacts.find_root` finds. Made at the first call."""
    return Loader()


def missing_reason(wanted: Any, device: int = 0) -> str | None:
    """`Loader.missing_reason` of the default loader, where no driver is a reason too."""
    try:
        return default_loader().missing_reason(wanted, device)
    except DriverError as error:
        return str(error)


def available() -> list[DeviceReport]:
    """`Loader.available` of the default loader."""
    return default_loader().available()
