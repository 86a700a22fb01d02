"""The host's cost of a launch: the runner, a bare driver call and Triton's launcher, on kernels that do nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bench import inputs as made
from bench.timing import Timing
from qsa_cute.geometry import HEAD_DIM, HOST_MAX_SPLITS, NUM_KV_HEADS, NUM_Q_HEADS, PAGE_TOKENS, POOL_HEAD_DIM
from qsa_cute.runners import SparseDecodeParams, SparseDecodeRunner
from qsa_cute.runners.sparse_decode import SPLIT_KV, TMA, algorithm_for
from qsa_cute.runtime import default_loader
from qsa_cute.runtime.overhead import bench_launch

_BATCH = 200  # launches between synchronisations
_REPEATS = 20
_KERNELS = {TMA: ("sparse_decode_tma", None), SPLIT_KV: ("sparse_decode", {"max_splits": HOST_MAX_SPLITS})}


def _empty_decode() -> SparseDecodeParams:
    """One sequence without a token: the kernel stores zeros and is done sooner than the host launches again."""
    where = made.device()
    q = torch.zeros(1, 1, NUM_Q_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=where)
    pool = torch.zeros(2, PAGE_TOKENS, NUM_KV_HEADS, POOL_HEAD_DIM, dtype=q.dtype, device=where)
    ids = torch.full((1, 1, 8), -1, dtype=torch.int32, device=where)
    tensors = (q, pool, made.ints([0, 1], where).view(1, 2, 1), ids, made.ints([0], where), torch.empty_like(q))
    params = SparseDecodeParams.from_tensors(
        *tensors, attention_scale=made.SCALE, algorithm=algorithm_for(), num_splits=1
    )
    _alive.append(tensors)
    return params


_alive: list[object] = []  # tensors behind the addresses


def launch_costs() -> dict[str, Timing]:
    """Host microseconds a launch of "ours", "bare" and, where Triton imports, "triton"."""
    params = _empty_decode()
    kernel_name, baked = _KERNELS[algorithm_for()]
    SparseDecodeRunner.run("bf16", params)
    loader = default_loader()
    kernel = loader.kernel((kernel_name, HEAD_DIM, "bf16", baked))
    packed = params.with_map(loader) if algorithm_for() == TMA else params
    samples: dict[str, list[float]] = {"ours": [], "bare": []}
    triton_launch = _triton_launch()
    if triton_launch is not None:
        samples["triton"] = []
    for _ in range(_REPEATS):
        found = bench_launch(
            kernel, packed, params.grid, params.stream, lambda: SparseDecodeRunner.run("bf16", params), repeats=3
        )
        samples["ours"].append(found["ours_us"])
        samples["bare"].append(found["bare_us"])
        if triton_launch is not None:
            samples["triton"].append(_host_us(triton_launch))
    return {name: Timing.of(values) for name, values in samples.items()}


def _triton_launch() -> Callable[[], object] | None:
    try:
        from bench.triton_empty import launcher
    except ImportError:
        return None
    return launcher()


def _host_us(launch: Callable[[], object]) -> float:
    launch()
    torch.cuda.current_stream().synchronize()
    begin = time.perf_counter_ns()
    for _ in range(_BATCH):
        launch()
    return (time.perf_counter_ns() - begin) / _BATCH / 1e3
