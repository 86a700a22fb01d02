"""The host cost of a launch, against a bare cuLaunchKernel through cuda.bindings in the same process."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

from qsa_cute.runtime.launch import Kernel, Packer

_BATCH = 200  # launches between synchronisations: fewer than the driver queues before it blocks the host


def bench_launch(
    kernel: Kernel,
    params: Any,
    grid: tuple[int, int, int],
    stream: int,
    run: Callable[[], object] | None = None,
    repeats: int = 30,
) -> dict[str, float]:
    """Median microseconds of host time a launch, ours and the bare call's in turn.

    Args:
        kernel, params, grid, stream: as `Kernel.launch` takes them. Choose a grid and lengths so small that the
            device finishes sooner than the host launches, else the queue is measured.
        run: what to time as "ours", such as a runner's `run`; `kernel.launch` when None.

    Returns:
        {"bare_us", "ours_us", "ratio"}.
    """
    import cuda.bindings.driver as cuda

    packer = Packer(kernel.record)
    buffer = ctypes.create_string_buffer(packer.size)
    packer.layout.pack_into(buffer, 0, *packer.values(params))
    base = ctypes.addressof(buffer)
    addresses = (ctypes.c_void_p * len(packer.offsets))(*(base + offset for offset in packer.offsets))
    array, handle, function = ctypes.addressof(addresses), cuda.CUstream(stream), kernel.function
    block, smem = (kernel.record.threads, 1, 1), kernel.record.smem_bytes

    def bare() -> None:
        cuda.cuLaunchKernel(function, *grid, *block, smem, handle, array, 0)

    def ours() -> None:
        kernel.launch(params, grid, stream)

    timed = {"bare_us": bare, "ours_us": run or ours}
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(repeats):
        for name, call in timed.items():
            cuda.cuStreamSynchronize(handle)
            begin = time.perf_counter_ns()
            for _ in range(_BATCH):
                call()
            samples[name].append((time.perf_counter_ns() - begin) / _BATCH / 1e3)
    cuda.cuStreamSynchronize(handle)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {**medians, "ratio": medians["ours_us"] / medians["bare_us"]}
