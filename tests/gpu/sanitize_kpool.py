"""A small case of each of kpool's launches, checked, for compute-sanitizer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # so that the tools see each tensor's own bounds

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # this folder is there already
import test_kpool as launches
import test_kpool_scores as scores

from bench.device import require


def main() -> None:
    for kind in ("normal", "edges", "broken"):
        launches.test_hadamard(kind, 33, None)
    launches.test_compress_and_write(4, 64, 4, True, None)
    launches.test_compress_and_write(2, 32, 0, False, None)
    launches.test_compress_takes_views_and_fp32_scores()
    launches.test_seed_tail(None)
    launches.test_decode_update(5, 4, 8, None)
    launches.test_decode_writes_what_prefill_writes()
    launches.test_bad_indices_touch_nothing()
    launches.test_expand_and_append_tail(9, 512, 4, torch.int64, None)
    for way in ("identity", "table", "offsets"):
        launches.test_expand_and_append_through_a_table_or_offsets(4, way, None)
    scores.test_prefill_scores(32, 0, True)
    for next_n in (1, 8):
        scores.test_decode_scores_are_prefill_scores(next_n)
    # The selection reads ahead of a row's length, into logits that nobody wrote and it then ignores: for initcheck,
    # torch fills what it allocates.
    torch.use_deterministic_algorithms(True, warn_only=True)
    scores.test_selection(3, 1 << 30)
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    print("every launch of kpool ran and agrees with the reference")


if __name__ == "__main__":
    require("sanitize_kpool.py")
    main()
