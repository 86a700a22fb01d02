"""One runner an operation: can_implement, preflight, run. Importing it loads neither torch nor a driver."""

from qsa_cute.runners.sparse_decode import SparseDecodeParams, SparseDecodeRunner
from qsa_cute.runners.sparse_prefill import SparsePrefillParams, SparsePrefillRunner

__all__ = ["SparseDecodeParams", "SparseDecodeRunner", "SparsePrefillParams", "SparsePrefillRunner"]
