"""One small case of each paged attention kernel, checked, for compute-sanitizer: `make gpu-sanitize`.

initcheck: cells of the cache that no list names were never written.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # so that the tools see each tensor's own bounds

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # this folder is there already
import test_union_paged as union
from attention_cases import BLOCK_KINDS
from paged_cases import CACHE_DTYPES, KINDS, Paged, paged
from test_paged_attention import call, check, run

from bench.device import require

PATHS = (("tma", 1), ("tma", 3), ("tma", 16), ("rows", 1), ("rows", 3), ("rows", 32))


def fresh(case: Paged) -> Paged:
    """K and V in memory of their own in which only what may be read was ever written."""

    def copy(cache: torch.Tensor) -> torch.Tensor:
        named = ~cache.float().isnan().any(-1)
        out = torch.empty(cache.shape, dtype=cache.dtype, device=cache.device)
        item = torch.uint8 if cache.element_size() == 1 else torch.int16
        out.view(item)[named] = cache.contiguous().view(item)[named]
        return out

    return replace(case, k_cache=copy(case.k_cache), v_cache=copy(case.v_cache))


def main() -> None:
    for cache_dtype in CACHE_DTYPES:
        for head_dim in (256, 128):
            kinds = (*KINDS, *BLOCK_KINDS, "cut")
            case = paged(cache_dtype, head_dim, lengths=(300, 5, 0), rows=15, width=200, page_size=48, kinds=kinds)
            want = case.reference()
            checked = fresh(case)
            checked.reference = lambda want=want: want  # the reference would read what was never written
            for algorithm, splits in PATHS:
                check(checked, run(checked, algorithm, splits))
            call(checked)
    for dtype in ("bf16", "fp8_e4m3"):
        for head_dim in (256, 128):
            union.check_shared(union.paged(dtype, head_dim, lengths=(300, 41), rows=(16, 9), top=16, page_size=48))
    torch.cuda.synchronize()
    print("every paged kernel ran and agrees with the reference")


if __name__ == "__main__":
    require("sanitize_paged.py")
    main()
