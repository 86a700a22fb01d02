"""A small case of each of Metrale's operations, checked, for compute-sanitizer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # so that the tools see each tensor's own bounds

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # this folder is there already
import test_metrale as operations

from bench.device import require


def main() -> None:
    for dtype in ("bf16", "fp16"):
        operations.test_block_pool(dtype, 4, 128, 64, 1e7, 11)
        operations.test_block_pool(dtype, 5, 20, 6, 1.0, 0)
        operations.test_qprep_rows(dtype, 4, 132, 132, 1e4, 9)
        operations.test_score(dtype, 33)
        for tc in ("", "mma", "wgmma"):
            operations.test_score_rows(tc, dtype, 17, 1000, 4, 254, 260)
            operations.test_score_rows(tc, dtype, 33, 997, 4, 300, 301)
        operations.test_gather(dtype, 48, 1, 128)
        for hd in (256, 128):
            found, want = operations.attend(dtype, hd, 3, 2, rows=3, first_pos=700, topk=64)
            operations.check_attention(found, want)
    operations.test_score_rows_of_other_shapes(6, 136)
    torch.cuda.synchronize()
    print("every operation of Metrale's ran and agrees with the reference")


if __name__ == "__main__":
    require("sanitize_metrale.py")
    main()
