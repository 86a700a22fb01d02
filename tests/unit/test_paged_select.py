"""What the launches over vLLM's caches and its host functions derive and refuse, and the reference, without a GPU."""

from __future__ import annotations

import importlib
import struct
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qsa_cute import variants
from qsa_cute.errors import ArgumentError, UnsupportedError
from qsa_cute.hosts import vllm_select as host
from qsa_cute.reference import paged_select as reference
from qsa_cute.runners import paged_select as launches
from qsa_cute.runners.paged_select import (
    ExpandCounted,
    PagedScores,
    PagedScoresDecode,
    PagedSelectDecode,
    PagedSelectRunner,
    select_ids,
)
from qsa_cute.support import SupportCode

GiB = 1 << 30
COMMON = {
    "q_ptr": GiB,
    "k_cache_ptr": 2 * GiB,
    "page_table": 40 * GiB,
    "visible_blocks": 41 * GiB,
    "logits_ptr": 42 * GiB,
    "lengths_ptr": 60 * GiB,
    "num_pages": 1000,
    "page_size": 392,
    "table_width": 20,
}
PREFILL = COMMON | {"query_start_loc": 61 * GiB, "num_requests": 3, "total_rows": 1000}
DECODE = COMMON | {"num_requests": 16, "query_len": 2}
ONE_LAUNCH = {name: value for name, value in DECODE.items() if name not in ("logits_ptr", "lengths_ptr")} | {
    "out_ptr": 42 * GiB
}
EXPAND = {
    "out_ptr": GiB,
    "block_indices": 2 * GiB,
    "query_positions": 3 * GiB,
    "visible_blocks": 4 * GiB,
    "num_rows": 100,
}


class TestCanImplement:
    YES = (4, 128, 392, 2048, 4, 90, "bf16")

    def test_yes(self):
        assert PagedSelectRunner.can_implement(*self.YES)
        for page in (4, 196, 400, 800, 1952):
            assert PagedSelectRunner.can_implement(4, 128, page, 2048, 4, "sm_90a", torch.float8_e4m3fn, 8)
        for heads in (1, 2, 3):
            assert PagedSelectRunner.can_implement(heads, 128, 392, 2048, 4, 80, "fp16")

    @pytest.mark.parametrize(
        ("at", "value", "code"),
        [
            (0, 5, SupportCode.HEADS),
            (0, 0, SupportCode.HEADS),
            (0, None, SupportCode.HEADS),
            (1, 64, SupportCode.HEAD_DIM),
            (2, 394, SupportCode.PAGE_SIZE),
            (2, 0, SupportCode.PAGE_SIZE),
            (2, "many", SupportCode.PAGE_SIZE),
            (3, 1024, SupportCode.TOP_K),
            (4, 8, SupportCode.TOP_K),
            (5, 75, SupportCode.SM),
            (6, "f32", SupportCode.DTYPE),
            (7, 9, SupportCode.QUERY_LEN),
            (7, 0, SupportCode.QUERY_LEN),
        ],
    )
    def test_no(self, at, value, code):
        given = [*self.YES, 1]
        given[at] = value
        found = PagedSelectRunner.can_implement(*given)
        assert not found
        assert found.code is code
        assert found.reason

    @pytest.mark.parametrize(
        ("sm", "yes"), [(80, False), (86, False), (87, False), (89, True), (90, True), (120, True)]
    )
    def test_fp8_needs_its_tensor_cores(self, sm, yes):
        assert bool(PagedSelectRunner.can_implement(4, 128, 392, 2048, 4, sm, "fp8_e4m3")) is yes


@pytest.mark.parametrize(
    ("module", "launch"),
    [
        ("paged_scores_prefill", PagedScores(**PREFILL)),
        ("paged_scores_wgmma", PagedScores(**PREFILL)),
        ("paged_scores_decode", PagedScoresDecode(**DECODE)),
        ("paged_select_decode", PagedSelectDecode(**ONE_LAUNCH)),
        ("expand_counted", ExpandCounted(**EXPAND)),
    ],
)
def test_there_is_a_packable_value_for_every_kernel_parameter(module, launch):
    codes = {"ptr": "<Q", "i64": "<q", "i32": "<i", "f32": "<f"}
    for param in importlib.import_module(f"qsa_cute.kernels.indexer.{module}").PARAMS:
        struct.pack(codes[param.kind], getattr(launch, param.name))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8_e4m3"])
@pytest.mark.parametrize(("sm", "sm90"), [("sm_90a", True), ("sm_89", False), ("sm_120a", False)])
def test_preflight_asks_for_what_is_built_once(dtype, sm, sm90):
    for wanted in launches.paged_kernels(sm90, dtype):
        matching = [
            one
            for one in variants.variants([sm], wanted.kernel, dtypes=[wanted.dtype])
            if set(wanted.baked) <= set(one.baked)
        ]
        assert len(matching) == 1, (wanted, sm, matching)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "f32"}, "dtype is 'f32'; it takes bf16, fp16, fp8_e4m3"),
        ({"num_heads": 5}, "num_heads is 5; it takes an integer from 1 to 4"),
        ({"page_size": 390}, "page_size is 390; it takes a multiple of 4"),
        ({"q_ptr": GiB + 8}, "q_ptr is .*multiple of 16"),
        ({"k_cache_ptr": 0}, "k_cache_ptr is null"),
        ({"logits_ptr": 42 * GiB + 4}, "logits_ptr .*multiple of 16"),
        ({"q_stride_row": 500}, "q_stride_row is 500; it takes a multiple of 8"),
        ({"dtype": "fp8_e4m3", "cache_stride_token": 136}, "cache_stride_token is 136; it takes a multiple of 16"),
        ({"cache_stride_page": -128}, "cache_stride_page"),
        ({"num_columns": 20 * 392 + 1}, "num_columns is 7841"),
        ({"table_width": 2**23}, "num_columns"),
        ({"logits_ptr": GiB}, "logits .*overlaps q"),
        ({"lengths_ptr": 2 * GiB}, "lengths .*overlaps k_cache"),
        ({"logits_stride_row": 7842}, "logits_stride_row is 7842; it takes a multiple of 4"),
    ],
)
@pytest.mark.parametrize(("make", "fields"), [(PagedScores, PREFILL), (PagedScoresDecode, DECODE)])
def test_scores_refuse(make, fields, changes, words):
    with pytest.raises(ArgumentError, match=words):
        make(**(fields | changes))


@pytest.mark.parametrize(
    ("make", "fields", "words"),
    [
        (PagedScoresDecode, DECODE | {"query_len": 9}, "query_len is 9; it takes an integer from 1 to 8"),
        (PagedScoresDecode, DECODE | {"num_requests": 65536}, "num_requests is 65536"),
        (PagedScores, PREFILL | {"num_rows": 1001}, "num_rows is 1001"),
        (PagedScores, PREFILL | {"row_start": 1001}, "row_start is 1001"),
        (PagedScores, PREFILL | {"algorithm": "simt"}, "'wgmma', 'mma' or None"),
        (PagedScores, PREFILL | {"query_start_loc": 2}, "query_start_loc .*multiple of 4"),
        (PagedSelectDecode, ONE_LAUNCH | {"query_len": 3}, "query_len is 3; it takes an integer from 1 to 2"),
        (
            PagedSelectDecode,
            ONE_LAUNCH | {"table_width": 48},
            "num_columns is 18816; it takes an integer from 0 to 18432",
        ),
        (PagedSelectDecode, ONE_LAUNCH | {"num_columns": 0}, "num_columns is 0 with 32 rows; one launch takes at"),
        (PagedSelectDecode, ONE_LAUNCH | {"ranks": 17}, "ranks is 17; it takes an integer from 2 to 16"),
        (PagedSelectDecode, ONE_LAUNCH | {"ranks": 1}, "ranks is 1"),
        (PagedSelectDecode, ONE_LAUNCH | {"out_ptr": 2}, "out_ptr .*multiple of 4"),
        (PagedSelectDecode, ONE_LAUNCH | {"out_ptr": GiB}, "out .*overlaps q"),
        (ExpandCounted, EXPAND | {"out_ptr": 2}, "out_ptr .*multiple of 4"),
        (ExpandCounted, EXPAND | {"positions_step": 3}, "positions_step is 3"),
        (ExpandCounted, EXPAND | {"top_blocks": 0}, "top_blocks is 0"),
        (ExpandCounted, EXPAND | {"block_indices": GiB}, "out .*overlaps block_indices"),
        (ExpandCounted, EXPAND | {"num_rows": -1}, "num_rows is -1"),
    ],
)
def test_each_refuses(make, fields, words):
    with pytest.raises(ArgumentError, match=words):
        make(**fields)


def test_nothing_to_do_is_no_launch():
    for launch in (
        PagedScores(**(PREFILL | {"total_rows": 0, "q_ptr": 0})),
        PagedScores(**(PREFILL | {"table_width": 0})),
        PagedScoresDecode(**(DECODE | {"num_requests": 0})),
        PagedSelectDecode(**(ONE_LAUNCH | {"num_requests": 0})),
        ExpandCounted(**(EXPAND | {"num_rows": 0})),
    ):
        assert not launch.grid
        launch.run()


def test_the_selection_reads_what_the_scores_wrote():
    scores = PagedScoresDecode(**DECODE)
    found = select_ids(scores, 32, 80 * GiB, 512)
    assert (found.logits_ptr, found.context_lengths) == (scores.logits_ptr, scores.lengths_ptr)
    assert (found.num_blocks, found.logits_stride_row, found.seq_len, found.from_end) == (7840, 7840, 1, 1)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=40), st.sampled_from([32, 128]), st.booleans())
def test_there_is_a_slot_for_every_tile(lengths, tile, known):
    rows = sum(lengths)
    longest = max(lengths) if known else rows
    slots, splits, _ = launches.prefill_grid(tile, len(lengths), longest, rows, 30000)
    assert slots >= sum(-(-n // tile) for n in lengths)
    assert slots >= -(-rows // tile)
    assert 1 <= splits <= -(-30000 // 64)


@pytest.mark.parametrize(
    ("query_len", "requests", "columns", "rows", "warps", "shares"),
    [
        (1, 1, 16400, 2, 2, 256),
        (2, 64, 16400, 2, 2, 128),
        (3, 128, 16400, 4, 2, 64),
        (8, 1, 16400, 8, 4, 129),
        (1, 64, 2048, 2, 2, 32),
        (1, 4096, 65600, 2, 2, 16),
        (1, 3, 4, 2, 2, 1),
        (1, 3, 0, 2, 2, 0),
    ],
)
def test_decode_grids(query_len, requests, columns, rows, warps, shares):
    assert launches.decode_choice(query_len, requests, columns) == ((("rows", rows), ("warps", warps)), shares)


@pytest.mark.parametrize(
    ("requests", "columns", "bf16", "fp8"),
    [
        (1, 2400, 16, 16),
        (16, 2400, 8, 8),
        (64, 2400, 3, 3),
        (256, 2400, 2, 2),
        (8, 16400, 9, 9),
        (16, 16400, 6, 6),
        (64, 16400, 4, 2),
        (128, 16400, 4, 2),
    ],
)
def test_ranks_of_one_launch(requests, columns, bf16, fp8):
    assert launches.one_launch_pays(1, requests, columns)
    assert launches.one_launch_ranks(requests, columns, "bf16") == bf16
    assert launches.one_launch_ranks(requests, columns, "fp8_e4m3") == fp8


@pytest.mark.parametrize(
    ("query_len", "requests", "columns"),
    [
        (3, 16, 2400),
        (1, 257, 2400),
        (1, 7, 16400),
        (1, 64, 8192),
        (1, 64, 18436),
        (1, 64, 2**31),
        (1, 16, 0),
        (1, 0, 2400),
    ],
)
def test_two_launches_where_one_does_not_pay(query_len, requests, columns):
    assert not launches.one_launch_pays(query_len, requests, columns)


@given(
    query_len=st.integers(1, 2),
    requests=st.integers(1, 65535),
    columns=st.integers(1, 18432 // 4).map(lambda quads: 4 * quads),
    dtype=st.sampled_from(["bf16", "fp16", "fp8_e4m3"]),
)
def test_any_one_launch_fits_what_is_loaded(query_len, requests, columns, dtype):
    """The row has its place in shared memory, every row its rank, and the variant is preloaded."""
    baked, unused = launches.one_launch(columns, dtype)
    of = dict(baked)
    row = 4 * of["threads"] * of["held"] - unused
    assert 4 * columns <= row <= 4 * of["threads"] * of["held"]
    assert row % 16 == 0
    assert query_len <= of["rows"] <= launches.one_launch_ranks(requests, columns, dtype) <= 16
    loaded = [one for one in launches.paged_kernels(True, dtype) if one.kernel == "paged_select_decode"]
    assert baked in [one.baked for one in loaded]


@given(st.integers(1, 4096), st.integers(0, 300_000), st.integers(1, 1 << 30))
def test_chunks_fit_the_budget(rows, columns, budget):
    step = host.chunk_rows(rows, columns, budget)
    assert 1 <= step <= rows
    assert step == 1 or 4 * step * columns <= budget


@given(st.integers(1, 8), st.integers(1, 600), st.integers(1, 4000), st.integers(1, 70_000))
def test_warmup_profiles_are_the_first_of_each_grouping(length, requests, tokens, columns):
    """Against a walk over all numbers of requests."""

    def grouping(count: int) -> int:
        programs = count * -(-columns // 64)
        return sum(programs >= least for least in (16384, 32768, 131072))

    want = []
    for each in range(1, length + 1):
        seen = set()
        for count in range(1, min(requests, tokens // each) + 1):
            if grouping(count) not in seen:
                seen.add(grouping(count))
                want.append((each, count))
    assert host.warmup_profiles(length, requests, tokens, columns) == tuple(want)


# The host's arguments, by tensors that are only looked at.


class Fake:
    """A CUDA tensor of this shape that holds nothing."""

    def __init__(self, *shape: int, dtype=torch.bfloat16, strides=None, at=GiB, device="cuda"):
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device(device, 0)
        strides = strides or torch.empty(shape, device="meta").stride()
        self._strides, self._at = strides, at

    def stride(self, dim=None):
        return self._strides if dim is None else self._strides[dim]

    def data_ptr(self):
        return self._at

    def dim(self):
        return len(self.shape)


def int32(*shape, **more):
    return Fake(*shape, **({"dtype": torch.int32} | more))


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(host, "_sm", lambda device: "90")
    monkeypatch.setattr(host, "_stream", lambda device: 0)
    monkeypatch.setattr(host, "_load", lambda *args: None)
    host._calls.clear()


def decode_arguments(**changes):
    found = {
        "q": Fake(8, 4, 128, at=GiB),
        "k_cache": Fake(100, 392, 1, 128, at=2 * GiB),
        "page_table": int32(4, 20, at=3 * GiB),
        "visible_blocks": int32(8, at=4 * GiB),
        "token_topk": 2048,
        "compress_ratio": 4,
        "decode_query_len": 2,
        "block_indices": int32(8, 512, at=5 * GiB),
    }
    return found | changes


def prefill_arguments(**changes):
    found = decode_arguments()
    del found["decode_query_len"]
    more = {"query_start_loc": int32(5, at=6 * GiB), "max_query_len": 8, "max_seq_len": 4000}
    return found | more | changes


FP8 = torch.float8_e4m3fn
BAD = [
    ({"q": Fake(8, 4, 64), "k_cache": Fake(100, 392, 1, 64)}, UnsupportedError, "head dim 64"),
    ({"q": Fake(8, 8, 128)}, UnsupportedError, "8 indexer heads"),
    ({"k_cache": Fake(100, 390, 1, 128)}, UnsupportedError, "pages of 390"),
    ({"token_topk": 1024}, UnsupportedError, "top 1024 tokens"),
    ({"compress_ratio": 2}, UnsupportedError, "blocks of 2"),
    ({"q": Fake(8, 4, 128, dtype=FP8)}, ArgumentError, "k_cache has type bf16; it takes fp8_e4m3"),
    ({"q": Fake(8, 4, 128, dtype=torch.float32)}, ArgumentError, "q has type f32"),
    ({"q": Fake(8, 4, 128, device="cpu")}, ArgumentError, "q is on cpu"),
    ({"k_cache": Fake(100, 392, 128)}, ArgumentError, "k_cache has shape .* 4 dimensions"),
    ({"k_cache": Fake(100, 392, 2, 128)}, ArgumentError, "k_cache has shape"),
    ({"k_cache": Fake(100, 392, 1, 128, strides=(1, 100, 1, 39200))}, ArgumentError, "inner dimension takes stride 1"),
    ({"q": Fake(8, 4, 128, at=GiB + 2)}, ArgumentError, "q_ptr"),
    ({"k_cache": Fake(100, 392, 1, 128, strides=(50200, 132, 128, 1))}, ArgumentError, "cache_stride_token is 132"),
    ({"visible_blocks": int32(7)}, ArgumentError, "visible_blocks has shape"),
    ({"visible_blocks": Fake(8, dtype=torch.int64)}, ArgumentError, "visible_blocks has type i64"),
    ({"visible_blocks": int32(8, strides=(2,))}, ArgumentError, "must be contiguous|takes stride 1"),
    ({"page_table": Fake(4, 20, dtype=torch.int64)}, ArgumentError, "page_table has type i64"),
    ({"block_indices": int32(8, 500)}, ArgumentError, "block_indices has shape"),
    ({"block_indices": Fake(8, 512, dtype=torch.int64)}, ArgumentError, "block_indices has type"),
]


def call(function, arguments):
    """As the function does up to its first allocation, then its launches at a made-up scratch."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_run", lambda call, like: made.append(call))
        function(**arguments)
    return made[0].at(100 * GiB)


@pytest.mark.parametrize(("changes", "error", "words"), BAD)
@pytest.mark.parametrize(
    ("function", "arguments"),
    [(host.qsa_select_paged_decode, decode_arguments), (host.qsa_select_paged_prefill, prefill_arguments)],
)
def test_selection_refuses(function, arguments, changes, error, words):
    call(function, arguments())
    with pytest.raises(error, match=words):
        call(function, arguments(**changes))


@pytest.mark.parametrize(
    ("function", "arguments", "error", "words"),
    [
        (host.qsa_select_paged_decode, decode_arguments(decode_query_len=9), UnsupportedError, "9 query tokens"),
        (
            host.qsa_select_paged_decode,
            decode_arguments(page_table=int32(4, 5_500_000, at=8 << 30 << 10)),
            ArgumentError,
            "num_columns is 2156000000",
        ),
        (host.qsa_select_paged_decode, decode_arguments(decode_query_len=3), ArgumentError, "q has 8 rows .* takes 12"),
        (host.qsa_select_paged_prefill, prefill_arguments(query_start_loc=int32(4)), ArgumentError, "takes 5"),
        (host.qsa_select_paged_prefill, prefill_arguments(max_seq_len=-1), ArgumentError, "max_seq_len is -1"),
        (host.qsa_select_paged_prefill, prefill_arguments(max_query_len=-1), ArgumentError, "max_query_len is -1"),
    ],
)
def test_selection_refuses_its_own(function, arguments, error, words):
    with pytest.raises(error, match=words):
        call(function, arguments)


@pytest.mark.parametrize("value", ["", "much", "0", "-3", "1.5"])
def test_the_budget_is_a_number(monkeypatch, value):
    monkeypatch.setenv(host.MAX_LOGITS_MB, value)
    with pytest.raises(ArgumentError, match=host.MAX_LOGITS_MB):
        call(host.qsa_select_paged_prefill, prefill_arguments())


def test_prefill_is_chunked(monkeypatch):
    rows, columns = 3000, 262144 // 4
    arguments = prefill_arguments(
        q=Fake(rows, 4, 128, at=GiB),
        page_table=int32(4, 200, at=3 * GiB),
        visible_blocks=int32(rows, at=4 * GiB),
        block_indices=int32(rows, 512, at=5 * GiB),
        max_seq_len=262144,
    )
    found = call(host.qsa_select_paged_prefill, arguments)
    step = (512 << 20) // (4 * columns) // 128 * 128
    assert [(one.row_start, one.num_rows) for one in found[::2]] == [
        (start, min(step, rows - start)) for start in range(0, rows, step)
    ]
    assert [one.out_ptr for one in found[1::2]] == [5 * GiB + 4 * 512 * start for start in range(0, rows, step)]
    assert all(one.num_columns == columns and one.lengths_ptr == 100 * GiB + 4 * step * columns for one in found[::2])
    monkeypatch.setenv(host.MAX_LOGITS_MB, "1024")
    assert len(call(host.qsa_select_paged_prefill, arguments)) < len(found)


@pytest.mark.parametrize(("longest", "columns"), [(0, 64), (1, 64), (256, 64), (257, 128), (10**6, 20 * 392)])
def test_logits_are_as_wide_as_the_longest_context(longest, columns):
    assert call(host.qsa_select_paged_prefill, prefill_arguments(max_seq_len=longest))[0].num_columns == columns


def test_an_equal_call_makes_nothing_new():
    arguments = decode_arguments()
    first = call(host.qsa_select_paged_decode, arguments)
    assert call(host.qsa_select_paged_decode, arguments) is first
    moved = decode_arguments(q=Fake(8, 4, 128, at=7 * GiB))
    assert call(host.qsa_select_paged_decode, moved)[0].q_ptr == 7 * GiB


def expand_arguments(**changes):
    found = {
        "block_indices": int32(8, 512, at=GiB),
        "query_positions": Fake(8, dtype=torch.int64, at=2 * GiB),
        "visible_blocks": int32(8, at=3 * GiB),
        "compress_ratio": 4,
        "token_topk": 2048,
        "out": int32(8, 2052, at=4 * GiB),
    }
    return found | changes


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"compress_ratio": 8}, UnsupportedError, "blocks of 8 tokens"),
        ({"token_topk": 2046}, ArgumentError, "token_topk is 2046; it takes a multiple"),
        ({"token_topk": 0}, ArgumentError, "token_topk is 0"),
        ({"out": int32(8, 2051)}, ArgumentError, "out has shape .*2052"),
        ({"out": int32(8, 2052, strides=(1, 8))}, ArgumentError, "stride 1"),
        ({"block_indices": int32(8, 511)}, ArgumentError, "block_indices has shape"),
        ({"query_positions": Fake(7, dtype=torch.int64)}, ArgumentError, r"query_positions has shape \[7\]"),
        ({"query_positions": Fake(8, dtype=torch.float32)}, ArgumentError, "query_positions has type f32"),
        ({"visible_blocks": Fake(8, dtype=torch.int64)}, ArgumentError, "visible_blocks has type i64"),
    ],
)
def test_expansion_refuses(changes, error, words):
    assert call(host.expand_qsa_block_indices, expand_arguments())[0].positions_step == 2
    with pytest.raises(error, match=words):
        call(host.expand_qsa_block_indices, expand_arguments(**changes))


def test_warmup_checks_and_loads(monkeypatch):
    loaded = []
    monkeypatch.setattr(host, "_load", lambda *args: loaded.append(args))
    limits = {"max_num_reqs": 256, "max_num_batched_tokens": 8192}
    shape = {"num_heads": 4, "head_dim": 128}
    cache, table = Fake(100, 392, 1, 128, dtype=FP8), int32(256, 170)
    found = host.warmup_qsa_mqa_paged_decode(cache, table, **shape, max_decode_query_len=2, **limits)
    assert found == ((1, 1), (1, 16), (1, 32), (1, 126), (2, 1), (2, 16), (2, 32), (2, 126))
    assert loaded == [(0, "fp8_e4m3", 0)]
    assert host.warmup_qsa_mqa_paged_decode(cache, table, **shape, max_decode_query_len=0, **limits) == ()
    with pytest.raises(UnsupportedError, match="9 query tokens"):
        host.warmup_qsa_mqa_paged_decode(cache, table, **shape, max_decode_query_len=9, **limits)
    shape["num_heads"] = 6
    with pytest.raises(UnsupportedError, match="6 indexer heads"):
        host.warmup_qsa_mqa_paged_decode(cache, table, **shape, max_decode_query_len=1, **limits)


# The reference, against loops.


def small_case():
    torch.manual_seed(0)
    q, cache = torch.randn(6, 4, 128), torch.randn(5, 8, 1, 128)
    table = torch.tensor([[4, 1, 0], [2, -1, 3]], dtype=torch.int32)
    starts = torch.tensor([10, 12, 15], dtype=torch.int32)  # the last row has no request
    visible = torch.tensor([20, 3, 24, 0, 30, 5], dtype=torch.int32)
    return SimpleNamespace(q=q, cache=cache, table=table, starts=starts, visible=visible, request=[0, 0, 1, 1, 1, -1])


def test_reference_scores_are_the_formula():
    case = small_case()
    assert reference.request_of_rows(6, case.starts).tolist() == case.request
    found = reference.scores(case.q, case.cache, case.table, torch.tensor(case.request), case.visible)
    for row, request in enumerate(case.request):
        for column in range(24):
            if request < 0 or column >= case.visible[row]:
                assert found[row, column].isnan()
                continue
            page = int(case.table[request, column // 8])
            want = 0.0
            for head in range(4):
                if page >= 0:
                    want += max(0.0, float(case.q[row, head].double() @ case.cache[page, column % 8, 0].double()))
            assert float(found[row, column]) == pytest.approx(want)


def test_reference_lists_are_the_formula():
    blocks = torch.stack([torch.randperm(600)[:512] for _ in range(4)]).int()
    blocks[1, 3] = -1
    positions = torch.tensor([2402, 4 * 700 + 1, 5, -1])
    visible = ((positions + 1) // 4).int()
    found = reference.expand_counted(blocks, positions, visible)
    for row in range(4):
        want = []
        for block in blocks[row, : int(visible[row])].tolist():
            want += [4 * block + i if block >= 0 else -1 for i in range(4)]
        length = int(positions[row]) + 1
        want += range(length // 4 * 4, length)
        assert found[row].tolist() == want + [-1] * (2051 - len(want)) + [len(want)]


def test_what_is_no_tensor_or_no_number_is_refused_as_an_argument():
    q, rows, table = torch.zeros(2, 4, 128), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    out = torch.zeros(2, 512, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="None is given where a CUDA tensor belongs"):
        host.qsa_select_paged_decode(q, None, table, rows, 2048, 4, 1, out)
    with pytest.raises(ArgumentError, match=r"\[0, 1\] is given"):
        host.expand_qsa_block_indices(out, [0, 1], rows, 4, 2048, torch.zeros(2, 2052, dtype=torch.int32))
    with pytest.raises(ArgumentError, match=r"token_topk is \[2048\]"):
        host.expand_qsa_block_indices(out, rows, rows, 4, [2048], torch.zeros(2, 2052, dtype=torch.int32))
