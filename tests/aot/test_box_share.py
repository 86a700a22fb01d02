"""The division by multiplication with which decode shares a list among the blocks of a cluster."""

from __future__ import annotations

import pytest

from qsa_cute.geometry import BLOCK_TOKENS, MAX_CLUSTER, MAX_TOP_K
from qsa_cute.kernels.attention import box_products
from qsa_cute.kernels.attention.box_products import DIVIDED, BoxProducts, BoxShare


@pytest.mark.parametrize("blocks", range(1, MAX_CLUSTER + 1))
def test_divides_all_that_it_says(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_products.ops, "forget", lambda value: value)
    share = BoxShare.of(0, blocks, 1)
    assert [share.divide(number) for number in range(DIVIDED + 1)] == [
        number // blocks for number in range(DIVIDED + 1)
    ]


def test_it_says_enough_for_the_longest_list() -> None:
    """Its groups of four entries, and those by which a block's share is rounded up."""
    assert MAX_TOP_K // BLOCK_TOKENS + 128 <= DIVIDED


def test_a_ring_too_small_for_the_last_step_is_refused() -> None:
    """Gather warps would wait for stages that nobody frees."""
    with pytest.raises(ValueError, match="9 stages"):
        BoxProducts(256, "bf16", stages=9)
