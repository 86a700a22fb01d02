"""Which variant of scores and selection the runners pick, and that it is built."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsa_cute import variants
from qsa_cute.runners import indexer_select as selects

SIZES = st.integers(1, 2**31 - 1)


@pytest.mark.parametrize(
    ("rows", "blocks", "kernel", "threads", "held", "ranks"),
    [
        (1, 2048, "select_held", 256, 8, 1),
        (4096, 2048, "select_held", 256, 8, 1),
        (64, 2049, "select_held", 256, 16, 1),
        (4096, 8192, "select_held", 256, 32, 1),
        (256, 16384, "select_held", 512, 32, 1),
        (64, 32768, "select_held", 512, 32, 2),
        (1, 65536, "select_held", 512, 32, 4),
        (32, 65536, "select_held", 512, 32, 4),
        (8, 131072, "select_cluster", 512, 8, 4),
        (16, 131072, "select_cluster", 512, 8, 2),
        (64, 65536, "select", 1024, 8, 1),
        (65, 32768, "select", 1024, 8, 1),
        (4096, 16384, "select", 256, 16, 1),
        (4096, 32768, "select", 256, 16, 1),
    ],
)
def test_selection_on_sm90(rows: int, blocks: int, kernel: str, threads: int, held: int, ranks: int) -> None:
    found, baked, shared = selects.selection_choice(rows, blocks, sm90=True)
    assert (found, shared) == (kernel, ranks)
    assert baked[:2] == (("threads", threads), ("held", held))


@pytest.mark.parametrize(
    ("rows", "blocks", "threads", "held"),
    [
        (1, 2048, 512, 8),
        (64, 16384, 512, 32),
        (8, 65536, 1024, 8),
        (4096, 2048, 256, 8),
        (4096, 8192, 256, 32),
        (4096, 32768, 256, 16),
    ],
)
def test_selection_elsewhere(rows: int, blocks: int, threads: int, held: int) -> None:
    expected = "select", (("threads", threads), ("held", held)), 1
    assert selects.selection_choice(rows, blocks, sm90=False) == expected


@given(
    rows=SIZES,
    blocks=st.one_of(SIZES, st.integers(1, 70000)),
    sm90=st.booleans(),
    ranks=st.sampled_from([None, 1, 2, 4, 8]),
)
def test_every_selection_is_preloaded(rows: int, blocks: int, sm90: bool, ranks: int | None) -> None:
    if not sm90 and ranks is not None and ranks > 1:
        return  # an explicit cluster is the caller's word that the device has them
    kernel, baked, shared = selects.selection_choice(rows, blocks, sm90, ranks)
    assert rows * shared < 2**31
    for listed in (selects.prefill_kernels(sm90), selects.decode_kernels(sm90)):
        assert (kernel, baked) in listed


@given(rows=st.integers(1, 5000), blocks=st.integers(1, 70000))
def test_what_is_held_fits(rows: int, blocks: int) -> None:
    """The kernel would not see the rest."""
    kernel, baked, shared = selects.selection_choice(rows, blocks, sm90=True)
    if kernel == "select_held":
        of = dict(baked)
        assert of["ranks"] == shared
        assert blocks <= of["threads"] * of["held"] * shared


def test_clusters_are_never_taken_without_them() -> None:
    for rows in (1, 8, 16, 64, 4096):
        for blocks in (513, 16384, 65536, 262144):
            assert selects.selection_choice(rows, blocks, sm90=False)[2] == 1
            assert selects.selection_choice(rows, blocks, sm90=True, ranks=1)[2] == 1


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
