"""A small case of each of the indexer's launches, checked, for compute-sanitizer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # so that the tools see each tensor's own bounds

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # this folder is there already
import test_indexer as launches
import test_indexer_layer as runners
import test_paged_select as paged

from bench.device import require


def main() -> None:
    for dtype in ("bf16", "fp16"):
        launches.test_query_prepare(dtype, (9, 0, 4))
        launches.test_paged_compress_is_dense_compress(dtype, (130, 5, 8))
        launches.test_raw_key_tail_write(dtype, (129, 2, 8))
        launches.test_pre_decode(dtype, 5)
        launches.test_expand(dtype)
        for algorithm in ("mma", "wgmma"):
            launches.test_scores(algorithm, dtype, (33, 20), (30, 0), 40, 12)
        launches.test_decode_scores_are_prefill_scores(dtype, 3)
    launches.test_unmapped_pages()
    launches.test_ids_fill(3, 1025)
    for cluster in (1, 8):
        launches.test_selection(cluster, 513)
    runners.test_decode_reproduces_prefill((2069, 17), runners.PLANS["speculative"])
    runners.test_a_layer_decodes_as_it_prefills((33, 20), 12, "bf16")
    for dtype in ("bf16", "fp8"):
        paged.test_scores_decode(dtype, 12, 3)
        paged.test_scores_decode(dtype, 196, 1)
        for algorithm in ("mma", "wgmma"):
            paged.test_scores_prefill(dtype, algorithm, 196)
        paged.test_one_launch_selects_what_two_do(dtype, 2, 2400)
    paged.test_expansion_is_exact(5, torch.int64, 1)
    torch.cuda.synchronize()
    print("every launch of the indexer ran and agrees with the reference")


if __name__ == "__main__":
    require("sanitize_indexer.py")
    main()
