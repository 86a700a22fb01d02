"""One small case of each kernel, checked, for compute-sanitizer: `make gpu-sanitize`.

initcheck: what the kernels may not read stays uninitialised where it can, instead of NaN.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # so that the tools see each tensor's own bounds

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # this folder is there already
import test_union as union
from attention_cases import BLOCK_KINDS, DTYPES, KINDS, Decode, Output, Prefill, decode, prefill

from bench.device import require

LENGTHS = (0, 5, 300)
SPLITS = {"tma": (1, 3, 16), "split_kv": (1, 3, 8)}


def fresh(case: Prefill | Decode) -> None:
    """Replace K and V by memory in which only what may be read was ever written."""
    for name in ("k", "v", "kv_pool"):
        whole = getattr(case, name, None)
        if whole is not None:
            partial = torch.empty_like(whole)
            partial[~whole.isnan()] = whole[~whole.isnan()]
            setattr(case, name, partial)


def main() -> None:
    for dtype in DTYPES:
        for head_dim in (256, 128):
            case = prefill(dtype, head_dim, lengths=LENGTHS, rows=4, width=200)
            want = case.reference()
            fresh(case)
            case.run().check(*want)
            for kinds, query_len in ((KINDS, 2), (BLOCK_KINDS, 6)):
                paged = decode(dtype, head_dim, lengths=LENGTHS, query_len=query_len, width=200, kinds=kinds)
                want = paged.reference()
                fresh(paged)
                for algorithm, counts in SPLITS.items():
                    for splits in counts:
                        out: Output = paged.run(algorithm, paged.workspace(), num_splits=splits)
                        out.check(*want)
        union.check_shared(union.shared(lengths=(300, 40), rows=24, top=16, dtype=dtype))
    union.test_many_holes_take_the_row_path()
    torch.cuda.synchronize()
    print("every kernel ran and agrees with the reference")


if __name__ == "__main__":
    require("sanitize.py")
    main()
