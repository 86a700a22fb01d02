"""vLLM's own Triton functions, where `python -m bench.fetch_peers` has put them."""

from __future__ import annotations

from typing import Any

import pytest

from bench.fetch_peers import PEERS

THERE = (PEERS / "peers.py").exists()
needs_vllm = pytest.mark.skipif(not THERE, reason="vLLM's kernels are not in .peers/: python -m bench.fetch_peers")


def vllm(module: str) -> Any:
    """vLLM's module: attention, indexer or kpool."""
    from bench.peers import vllm_module  # which imports triton

    return vllm_module(module)
