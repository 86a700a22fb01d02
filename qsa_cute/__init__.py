"""Sparse attention with a learned indexer: prebuilt CUDA kernels and the runners that dispatch them.

Importing this package loads neither torch, nor the CuTe DSL, nor a driver; each name below is imported when used.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

logging.getLogger("qsa_cute").addHandler(logging.NullHandler())

# Public name -> the module that has it.
_HOMES = {
    "SparsePrefillRunner": "qsa_cute.runners",
    "SparsePrefillParams": "qsa_cute.runners",
    "SparseDecodeRunner": "qsa_cute.runners",
    "SparseDecodeParams": "qsa_cute.runners",
    "IndexerPrefillRunner": "qsa_cute.runners",
    "IndexerPrefillParams": "qsa_cute.runners",
    "IndexerDecodeRunner": "qsa_cute.runners",
    "IndexerDecodeParams": "qsa_cute.runners",
    "QsaIndexerPoolState": "qsa_cute.runners",
    "QsaLayer": "qsa_cute.runners",
    "QsaLayerPrefillParams": "qsa_cute.runners",
    "QsaLayerDecodeParams": "qsa_cute.runners",
    "PagedAttentionRunner": "qsa_cute.runners.paged_attention",
    "PagedAttentionParams": "qsa_cute.runners.paged_attention",
    "PagedSelectRunner": "qsa_cute.runners.paged_select",
    "KpoolRunner": "qsa_cute.runners.kpool",
    "PoolSelectRunner": "qsa_cute.runners.kpool_scores",
    "PoolSelectParams": "qsa_cute.runners.kpool_scores",
    "Support": "qsa_cute.support",
    "SupportCode": "qsa_cute.support",
    "QsaError": "qsa_cute.errors",
    "OverlapError": "qsa_cute.errors",
    "ArgumentError": "qsa_cute.errors",
    "ArtifactError": "qsa_cute.errors",
    "CaptureError": "qsa_cute.errors",
    "DriverError": "qsa_cute.errors",
    "UnsupportedError": "qsa_cute.errors",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qsa_cute' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
