"""One runner an operation: can_implement, preflight, run. Importing it loads neither torch nor a driver."""

from qsa_cute.runners.indexer import (
    IndexerDecodeParams,
    IndexerDecodeRunner,
    IndexerPrefillParams,
    IndexerPrefillRunner,
)
from qsa_cute.runners.indexer_state import QsaIndexerPoolState
from qsa_cute.runners.layer import QsaLayer, QsaLayerDecodeParams, QsaLayerPrefillParams
from qsa_cute.runners.sparse_decode import SparseDecodeParams, SparseDecodeRunner
from qsa_cute.runners.sparse_prefill import SparsePrefillParams, SparsePrefillRunner

__all__ = [
    "IndexerDecodeParams",
    "IndexerDecodeRunner",
    "IndexerPrefillParams",
    "IndexerPrefillRunner",
    "QsaIndexerPoolState",
    "QsaLayer",
    "QsaLayerDecodeParams",
    "QsaLayerPrefillParams",
    "SparseDecodeParams",
    "SparseDecodeRunner",
    "SparsePrefillParams",
    "SparsePrefillRunner",
]
