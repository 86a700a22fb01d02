"""A store of artifacts and a CUDA driver for tests that have neither compiler nor GPU."""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qsa_cute.errors import DriverError

PARAMS = [
    {"name": "q_ptr", "kind": "ptr", "offset": 0, "size": 8},
    {"name": "top_k", "kind": "i32", "offset": 8, "size": 4},
    {"name": "stride", "kind": "i64", "offset": 16, "size": 8},
    {"name": "scale", "kind": "f32", "offset": 24, "size": 4},
]


def variant_record(folder: Path, name: str, cubin: bytes, **changes: Any) -> dict[str, Any]:
    """Write a cubin and return its manifest entry."""
    (folder / f"{name}.cubin").write_bytes(cubin)
    return {
        "kernel": "sparse_decode",
        "head_dim": 256,
        "dtype": "bf16",
        "baked": {"max_splits": 8},
        "file": f"{name}.cubin",
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "size": len(cubin),
        "symbol": name,
        "threads": 128,
        "smem_bytes": 100_000,
        "static_smem_bytes": 0,
        "early_launch": False,
        "params": PARAMS,
        "param_bytes": 28,
        **changes,
    }


def write_set(root: Path, sm: str = "sm_90a", variants: dict[str, dict[str, Any]] | None = None, **changes: Any) -> str:
    """A folder of artifacts with its manifest; returns the name of its first variant."""
    folder = root / sm
    folder.mkdir(parents=True, exist_ok=True)
    variants = variants or {f"qsa_sparse_decode_d256_bf16_s8_{sm.replace('_', '')}": {}}
    manifest = {
        "schema": 1,
        "abi": 1,
        "sm": sm,
        "dsl_version": "4.8.1",
        "ptxas_version": "13.4.59",
        "source_digest": "0" * 64,
        "variants": {
            name: variant_record(folder, name, f"cubin of {name}".encode(), **record)
            for name, record in variants.items()
        },
        **changes,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return next(iter(variants))


class FakeDriver:
    """Stands for `runtime.driver.Driver`. What it was asked is in `calls`; `fail` names calls that raise once.

    Contexts are (handle = id): a thread's current one is `current`, kept per thread.
    """

    def __init__(self, capability: tuple[int, int] = (9, 0), devices: int = 2) -> None:
        self._capability = capability
        self._devices = devices
        self._thread = threading.local()
        self.calls: list[tuple[Any, ...]] = []
        self.fail: set[str] = set()
        self.capturing: set[int] = set()
        self.cubin_version = 13010
        self.smem_limit = 227 * 1024
        self.threads_limit = 1024
        self.param_table = [(param["offset"], param["size"]) for param in PARAMS]
        self.launches: list[SimpleNamespace] = []
        self.context_device = {1: 0, 2: 0, 100: 0, 101: 1}
        self.status = 0

    def _record(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name in self.fail:
            self.fail.discard(name)
            raise DriverError(f"{name} failed: CUDA_ERROR_FAKE (as the test asked)")

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)

    def set_current(self, context: int) -> None:
        self._thread.current = context

    def context_id(self, _: None) -> tuple[int, int]:
        current = getattr(self._thread, "current", 1)
        return (0, current) if current else (201, 0)

    def current_context(self) -> int:
        return self.context_id(None)[1]

    def current_device(self) -> int:
        return self.context_device[self.current_context()]

    def retain_primary(self, device: int) -> int:
        self._record("retain_primary", device)
        return 100 + device

    @contextmanager
    def pushed(self, context: int):
        before = self.current_context()
        self.set_current(context)
        try:
            yield
        finally:
            self.set_current(before)

    def version(self) -> int:
        return self.cubin_version

    def device_count(self) -> int:
        return self._devices

    def device_name(self, device: int) -> str:
        return f"fake {device}"

    def capability(self, device: int) -> tuple[int, int]:
        return self._capability

    def smem_optin(self, device: int) -> int:
        return self.smem_limit

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    @contextmanager
    def capture_relaxed(self):
        yield

    def load_library(self, cubin: bytes) -> bytes:
        time.sleep(0.01)  # long enough for other threads to arrive
        self._record("load_library", cubin)
        return cubin

    def unload_library(self, library: bytes) -> None:
        self._record("unload_library", library)

    def get_kernel(self, library: bytes, symbol: str) -> str:
        self._record("get_kernel", symbol)
        return symbol

    def get_function(self, kernel: str) -> tuple[str, int]:
        self._record("get_function", kernel, self.current_context())
        return (kernel, self.current_context())

    def params(self, kernel: str) -> list[tuple[int, int]]:
        return self.param_table

    def max_threads(self, kernel: str, device: int) -> int:
        return self.threads_limit

    def allow_smem(self, kernel: str, device: int, size: int) -> None:
        self._record("allow_smem", device, size)

    def prefer_smem(self, kernel: str, device: int) -> None:
        self._record("prefer_smem", device)

    def zero(self, address: int, words: int, stream: int) -> None:
        self._record("zero", address, words, stream)

    def encode_map(self, *asked: Any) -> tuple[int, ...]:
        self._record("encode_map", *asked)
        return tuple(range(-1, 15))

    def allow_large_clusters(self, kernel: str, device: int) -> None:
        self._record("allow_large_clusters", device)

    def error_text(self, error: int) -> str:
        return f"CUDA_ERROR_{error}"

    def launch_config(self, address: int) -> int:
        return address

    def launch(self, config: int, function: Any, array: int, extra: int) -> tuple[int]:
        """Reads back what was packed, as the driver would."""
        fields = struct.unpack("<7I4xQQI4x", ctypes.string_at(config, 56))
        attributes = {}
        for i in range(fields[9]):
            attribute, *value = struct.unpack("<I4x3I", ctypes.string_at(fields[8] + 72 * i, 20))
            attributes[attribute] = tuple(value)
        addresses = (ctypes.c_void_p * len(PARAMS)).from_address(array)
        codes = {"ptr": "<Q", "i64": "<q", "i32": "<i", "f32": "<f"}
        values = {
            param["name"]: struct.unpack(codes[param["kind"]], ctypes.string_at(address, param["size"]))[0]
            for param, address in zip(PARAMS, addresses, strict=True)
        }
        self.launches.append(
            SimpleNamespace(
                function=function,
                grid=fields[:3],
                block=fields[3:6],
                smem=fields[6],
                stream=fields[7],
                cluster=attributes.pop(4, (1, 1, 1)),
                early=attributes.pop(6, (0, 0, 0))[0] == 1,
                attributes=attributes,
                values=values,
                context=self.current_context(),
            )
        )
        return (self.status,)
