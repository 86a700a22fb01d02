"""Why this Python has no GPU, in words that help: for the bench, the GPU tests and the sanitizers' scripts."""

from __future__ import annotations

import os
import sys

import torch


def missing() -> str | None:
    """What keeps torch from a CUDA device, to follow "needs a CUDA device, and"; None where it has one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            f"this torch is {torch.__version__}, built without CUDA; make -B build TORCH=... installs another, or "
            "GPU_PYTHON=... names a Python that has one"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    said = "not set" if visible is None else repr(visible)
    return f"torch {torch.__version__} sees none; CUDA_VISIBLE_DEVICES is {said}"


def require(what: str) -> None:
    """End the process with one line where there is no device."""
    reason = missing()
    if reason:
        sys.exit(f"{what} needs a CUDA device, and {reason}")
