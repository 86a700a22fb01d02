"""Which variant of scores and selection the runners pick, and that it is built."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsa_cute import variants
from qsa_cute.runners import indexer_select as selects

SIZES = st.integers(1, 2**31 - 1)


@pytest.mark.parametrize(
    ("rows", "blocks", "threads", "held", "ranks"),
    [
        (1, 2048, 512, 8, 1),
        (64, 16384, 512, 32, 1),
        (1, 65536, 512, 8, 4),
        (16, 65536, 512, 8, 2),
        (64, 65536, 1024, 8, 1),
        (4096, 2048, 256, 8, 1),
        (4096, 8192, 256, 32, 1),
        (4096, 32768, 256, 16, 1),
    ],
)
def test_selection(rows: int, blocks: int, threads: int, held: int, ranks: int) -> None:
    expected = (("threads", threads), ("held", held)), ranks
    assert selects.selection_choice(rows, blocks, clusters=True) == expected


@given(rows=SIZES, blocks=SIZES, clusters=st.booleans(), ranks=st.sampled_from([None, 1, 2, 4, 8]))
def test_every_selection_is_preloaded(rows: int, blocks: int, clusters: bool, ranks: int | None) -> None:
    if not clusters and ranks is not None and ranks > 1:
        return  # an explicit cluster is the caller's word that the device has them
    baked, shared = selects.selection_choice(rows, blocks, clusters, ranks)
    kernel = "select" if shared == 1 else "select_cluster"
    assert rows * shared < 2**31
    for listed in (selects.prefill_kernels(clusters), selects.decode_kernels(clusters)):
        assert (kernel, baked) in listed


def test_clusters_are_never_taken_without_them() -> None:
    for rows in (1, 8, 16, 64, 4096):
        for blocks in (513, 16384, 65536, 262144):
            assert selects.selection_choice(rows, blocks, clusters=False)[1] == 1


@pytest.mark.parametrize(
    ("query_len", "batch", "rows", "warps", "shares"),
    [
        (1, 1, 4, 1, 256),
        (1, 4, 4, 2, 128),
        (4, 64, 4, 2, 64),
        (1, 128, 4, 2, 32),
        (1, 60000, 4, 2, 16),
        (5, 4, 8, 4, 64),
    ],
)
def test_decode_scores(query_len: int, batch: int, rows: int, warps: int, shares: int) -> None:
    found = selects.decode_choice(query_len, batch, 16384)
    assert found == ((("rows", rows), ("warps", warps)), shares)


def test_short_sequences_have_few_shares() -> None:
    assert selects.decode_choice(1, 1, 64)[1] == 2
    assert selects.decode_choice(1, 8, 1)[1] == 1


@given(query_len=st.integers(1, selects.MAX_QUERY_LEN), batch=st.integers(1, 65535), blocks=SIZES)
def test_decode_scores_are_preloaded(query_len: int, batch: int, blocks: int) -> None:
    baked, shares = selects.decode_choice(query_len, batch, blocks)
    assert shares >= 1
    assert dict(baked)["rows"] >= query_len
    assert ("scores_decode", baked) in selects.decode_kernels(True)


@pytest.mark.parametrize("sm", variants.SMS)
@pytest.mark.parametrize("kernels", [selects.prefill_kernels, selects.decode_kernels])
def test_what_is_preloaded_is_built_once(sm: str, kernels) -> None:
    """An ambiguous or missing variant would fail every first use."""
    for kernel, baked in kernels(sm == "sm_90a"):
        matching = [v for v in variants.variants([sm], kernel, dtypes=["bf16"]) if set(baked) <= set(v.baked)]
        assert len(matching) == 1, (kernel, baked, matching)
