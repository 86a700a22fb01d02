"""The union over pages, on the host: how rows are cut, what is launched, with which maps, and what does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_union_runner import BASE, FakeLoader

from qsa_cute import paged_union_layout, union_layout
from qsa_cute.runners import union_paged

# vLLM's cache of TP1: [pages, kv_heads, 1568, K then V] seen as [pages, 1568, kv_heads, 256].
STRIDES = {"page": 2 * 1568 * 512, "token": 512, "head": 1568 * 512}


def params(**changes):
    given = {
        **{f"{name}_ptr": number << 40 for number, name in enumerate(("q", "k", "v", "o", "gate"), 1)},
        **{name: number << 50 for number, name in enumerate(("indices", "block_table", "token_to_req"), 1)},
        **{f"{plane}_stride_{dim}": step for plane in "kv" for dim, step in STRIDES.items()},
        **{f"{name}_stride_row": 24 * 256 for name in ("q", "o", "gate")},
        **{f"{name}_stride_head": 256 for name in ("q", "o", "gate")},
        **{"rows": 4096, "num_requests": 3, "num_q_heads": 24, "num_kv_heads": 2, "group_size": 12, "head_dim": 256},
        **{"num_pages": 700, "page_size": 1568, "table_width": 168, "width": 2051, "attention_scale": 0.0625},
        **{"k_scale_ptr": 0, "v_scale_ptr": 0, "output_scale": 1.0},
        **{"indices_stride_row": 2052, "table_stride": 168, "stream": 7, "device": 0},
    }
    return SimpleNamespace(**given | changes)


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
def test_launches_in_order(dtype) -> None:
    loader, p = FakeLoader(), params()
    launches = union_paged.PagedLaunches(p, dtype, loader, BASE)
    launches.run(p, loader)
    prepare, main, rows = loader.log
    assert tuple((one.kernel, one.dtype) for one in loader.log) == union_paged.kernels(dtype)
    assert (prepare.grid, main.grid, rows.grid) == (4096 * 12 // 128, 132, 264)
    assert {one.stream for one in loader.log} == {7}
    assert prepare.smem == union_paged.shape(p).shared_memory
    # 392 blocks of a page take 9 bits.
    given = prepare.params
    assert (given.page_blocks, given.entry_shift, rows.params.token_shift) == (392, 9, 11)
    assert (given.index_kind, given.top_k, given.seq_len, given.kv_seq_len) == (1, 2051, 4096, 168 * 1568)
    assert main.params.gate_ptr == p.gate_ptr


def test_maps_reach_over_all_pages() -> None:
    loader, p = FakeLoader(), params()
    union_paged.PagedLaunches(p, "bf16", loader, BASE)
    for (dtype, address, sizes, strides, box), pointer, tokens in zip(
        loader.driver.maps, (p.k_ptr, p.v_ptr, p.v_ptr), (4, 4, 1), strict=True
    ):
        assert (dtype, address, sizes) == ("bf16", pointer, (256, 1568, 2, 700))
        assert strides == (1024, 1568 * 1024, 2 * 1568 * 1024)
        assert box == (64, tokens, 1, 1)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"num_q_heads": 3, "num_kv_heads": 1, "group_size": 3, "page_size": 400, "table_width": 656}, True),
        ({"page_size": 16, "table_width": 16_384, "num_pages": 1 << 20}, True),
        ({"table_width": 1300}, False),  # 2 million tokens
        ({"num_pages": 1 << 19}, False),  # past what an entry says
        ({"k_stride_page": 0}, False),
        ({"v_stride_token": 0}, False),
        ({"page_size": 1570}, False),
    ],
)
def test_what_fits(changes, fits) -> None:
    assert union_paged.fits(params(**changes)) is fits


@pytest.mark.parametrize(
    ("rows", "requests", "pays"),
    [(127, 1, False), (128, 1, True), (1024, 128, False), (2304, 257, True), (4096, 64, True)],
)
def test_when_it_pays(rows, requests, pays) -> None:
    """Not for decode, at 8 rows a request either."""
    assert union_paged.pays(params(rows=rows, num_requests=requests)) is pays


def test_no_launch_asks_for_more_than_an_sm_has() -> None:
    for group in range(1, 17):
        for rows in (128, 1000, 4096, 20_000):
            for width in (1, 168, 600):
                p = params(rows=rows, group_size=group, num_q_heads=2 * group, table_width=width)
                size = union_paged.shape(p).shared_memory
                tiles = union_paged.shape(p).sizes()["num_tiles"]
                each = min(3, -(-tiles // 132))
                assert size <= union_layout.MAX_SMEM_BYTES
                # As many blocks an SM as there are turns to take, unless one row's bitmap needs more.
                least = paged_union_layout.fixed_smem_bytes(group) + 16 * paged_union_layout.bitmap_words(width * 1568)
                assert (size + 1024) * each <= paged_union_layout.SM_SMEM_BYTES or size == least


def test_a_workspace_holds_fewer_rows_too() -> None:
    sizes = [union_paged.workspace(params(rows=rows)).size for rows in range(128, 3000, 7)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("rows", "pairs"), [(4096, 128), (1024, 96), (512, 96), (256, 48), (1, 32)]
)  # of 24 query heads, 2 KV heads
def test_few_rows_are_cut_in_small_tiles(rows, pairs) -> None:
    assert union_layout.tile_pairs(rows, 1, 12, 2, 132) == pairs


@pytest.mark.parametrize("group", range(1, 17))
def test_tiles_are_never_more_rounds_and_never_too_wide(group) -> None:
    for rows in (1, 7, 64, 500, 4097):
        pairs = union_layout.tile_pairs(rows, 2, group, 2, 132)
        most = union_layout.most_pairs(group)
        assert union_layout.LEAST_PAIRS <= pairs <= most
        rounds = [union_layout.rounds(rows, 2, group, 2, n, 132) for n in (pairs, most)]
        assert rounds[0] <= rounds[1]
        # Every tile's rows have a mask word, and `find_requests` sees 64 of them.
        for start in range(0, rows * group, pairs):
            touched = (min(start + pairs, rows * group) - 1) // group - start // group + 1
            assert touched <= min(64, union_layout.mask_rows(group), paged_union_layout.tile_rows(group, pairs))
