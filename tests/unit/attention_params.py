"""Parameters and tensors of the attention runners, for tests without a GPU."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from qsa_cute.runners import SparseDecodeParams, SparsePrefillParams

MiB = 1 << 20
PREFILL = {
    "q_ptr": 64 * MiB,
    "k_ptr": 128 * MiB,
    "v_ptr": 192 * MiB,
    "o_ptr": 256 * MiB,
    "indices": 512 * MiB,
    "context_lengths": 1024 * MiB,
    "batch_size": 2,
    "seq_len": 64,
    "num_q_heads": 24,
    "num_kv_heads": 2,
    "head_dim": 256,
    "top_k": 2051,
    "attention_scale": 0.0625,
}
DECODE = {
    "q_ptr": 64 * MiB,
    "kv_pool_ptr": 2048 * MiB,
    "page_table": 80 * MiB,
    "indices": 512 * MiB,
    "context_lengths": 1024 * MiB,
    "o_ptr": 256 * MiB,
    "partial_o": 300 * MiB,
    "partial_stats": 400 * MiB,
    "split_counters": 450 * MiB,
    "batch_size": 4,
    "num_q_heads": 24,
    "num_kv_heads": 2,
    "head_dim": 256,
    "pool_head_dim": 384,
    "num_flat_pages": 64,
    "max_pages_per_seq": 8,
    "top_k": 2051,
    "attention_scale": 0.0625,
}


def prefill(**changes: Any) -> SparsePrefillParams:
    return SparsePrefillParams(**(PREFILL | changes))


def decode(**changes: Any) -> SparseDecodeParams:
    return SparseDecodeParams(**(DECODE | changes))


class FakeTensor:
    """A CUDA tensor as far as `runners.tensors` looks; every one gets memory of its own."""

    _next = 1 << 32

    def __init__(self, *shape: int, dtype: str = "torch.bfloat16", device: str = "cuda:0", **changes: Any) -> None:
        self.shape = shape
        self._stride = changes.get("stride", tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))))
        kind, _, index = device.partition(":")
        self.device = SimpleNamespace(type=kind, index=int(index) if index else None)
        self.dtype = dtype
        if "pointer" in changes:
            self._pointer = changes["pointer"]
        else:
            self._pointer = FakeTensor._next
            FakeTensor._next += 1 << 32

    def data_ptr(self) -> int:
        return self._pointer

    def stride(self) -> tuple[int, ...]:
        return self._stride


def ints(*shape: int, **changes: Any) -> FakeTensor:
    return FakeTensor(*shape, dtype="torch.int32", **changes)


def floats(*shape: int, **changes: Any) -> FakeTensor:
    return FakeTensor(*shape, dtype="torch.float32", **changes)
