"""The example on a machine without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_what_is_missing_and_what_is_covered() -> None:
    command = [sys.executable, "examples/attention.py"]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "python build_cutedsl.py build --gpu-arch sm_90a" in done.stdout
    assert "24/2   256   sm_90a  bf16  yes" in done.stdout
    assert "no: 32 query heads a KV head" in done.stdout
