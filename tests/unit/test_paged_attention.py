"""The paged attention's parameters, choices and errors, its host's signatures, and its reference on the CPU."""

from __future__ import annotations

import gc
import inspect
import math
import struct
import tracemalloc
import weakref
from types import SimpleNamespace

import pytest
import torch
from attention_params import FakeTensor, MiB, floats, ints
from hypothesis import given
from hypothesis import strategies as st

from qsa_cute.errors import ArgumentError
from qsa_cute.hosts import vllm_attention as host
from qsa_cute.kernels.attention import paged_attention, paged_attention_tma
from qsa_cute.reference.paged import sparse_paged_attention
from qsa_cute.runners import paged_attention as runner
from qsa_cute.runners.paged_attention import PagedAttentionParams, PagedAttentionRunner
from qsa_cute.runners.paged_places import divisor
from qsa_cute.runners.tensors import current_stream

PARAMS = {
    "q_ptr": 64 * MiB,
    "k_ptr": 2048 * MiB,
    "v_ptr": 2048 * MiB + 512,
    "indices": 512 * MiB,
    "block_table": 80 * MiB,
    "token_to_req": 90 * MiB,
    "o_ptr": 256 * MiB,
    "gate_ptr": 128 * MiB,
    "rows": 4,
    "num_requests": 3,
    "num_q_heads": 24,
    "num_kv_heads": 2,
    "head_dim": 256,
    "num_pages": 10,
    "page_size": 784,
    "table_width": 6,
    "width": 2051,
    "attention_scale": 0.0625,
    "k_stride_page": 784 * 1024,
    "k_stride_token": 512,
    "k_stride_head": 784 * 512,
    "v_stride_page": 784 * 1024,
    "v_stride_token": 512,
    "v_stride_head": 784 * 512,
}


def params(**changes) -> PagedAttentionParams:
    return PagedAttentionParams(**(PARAMS | changes))


def cache(dtype: str = "torch.bfloat16", pages: int = 10, heads: int = 2, page: int = 784, dim: int = 256, **changes):
    stride = (heads * page * 2 * dim, 2 * dim, page * 2 * dim, 1)
    return FakeTensor(pages, page, heads, dim, dtype=dtype, **({"stride": stride} | changes))


def tensors(**changes) -> dict:
    return {
        "q": FakeTensor(4, 24, 256),
        "k_cache": cache(),
        "v_cache": cache(),
        "indices": ints(4, 2052),
        "block_table": ints(3, 6),
        "token_to_req": ints(4),
        "o": FakeTensor(4, 24, 256),
        "gate": FakeTensor(4, 24, 256),
    } | changes


class MapLoader:
    """Remembers what it was asked to encode, and numbers the words."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def encode_map(self, *asked) -> tuple[int, ...]:
        self.asked.append(asked)
        return tuple(range(16 * len(self.asked), 16 * len(self.asked) + 16))


@pytest.mark.parametrize("kernel", [paged_attention, paged_attention_tma])
def test_there_is_a_packable_value_for_every_kernel_parameter(kernel) -> None:
    codes = {"ptr": "<Q", "i64": "<q", "i32": "<i", "f32": "<f"}
    given = params().with_maps(MapLoader())
    for name, kind in (word for param in kernel.PARAMS for word in param.words()):
        struct.pack(codes[kind], getattr(given, name))


class TestTensorMaps:
    def test_of_the_interleaved_cache(self) -> None:
        loader, given = MapLoader(), params()
        found = given.with_maps(loader)
        sizes, strides = (64, 784, 4, 2, 10), (1024, 128, 784 * 1024, 784 * 2048)
        asked = [(-1, "bf16", address, sizes, strides, (64, 4, 4, 1, 1)) for address in (given.k_ptr, given.v_ptr)]
        assert loader.asked == asked
        assert [getattr(found, f"{name}_{i}") for name in ("k_map", "v_map") for i in range(16)] == [*range(16, 48)]
        assert (found.packed, found.rows, found.grid, found.block_bits) == (None, 4, given.grid, 8)
        assert given.with_maps(loader) is found
        assert given.moved(0, o_ptr=257 * MiB).with_maps(loader) is not found
        assert len(loader.asked) == 2

    def test_of_bytes(self) -> None:
        loader = MapLoader()
        params(cache_dtype="fp8_e4m3").with_maps(loader)
        sizes, strides, box = (128, 784, 2, 2, 10), (512, 128, 784 * 512, 784 * 1024), (128, 4, 2, 1, 1)
        assert [one[1:2] + one[3:] for one in loader.asked] == 2 * [("fp8_e4m3", sizes, strides, box)]

    @pytest.mark.parametrize(
        "cache",
        [
            {"k_stride_head": 0},
            {"v_stride_token": 0},
            {"v_stride_page": 0},
            {"num_pages": 2, "k_stride_page": 1 << 39, "v_ptr": 1 << 50, "o_ptr": 1 << 51},
            {"num_pages": 1 << 14, "page_size": 1 << 20, "v_ptr": 1 << 50, "o_ptr": 1 << 51},  # one over another
        ],
    )
    def test_a_cache_that_has_none(self, cache) -> None:
        found = params(**cache)
        assert found.map_strides is None
        assert found.with_maps(MapLoader()) is None
        with pytest.raises(ArgumentError, match="Algorithm 'tma' takes what lies apart, by less than"):
            params(algorithm="tma", **cache)

    def test_one_head_has_no_stride(self) -> None:
        assert params(num_q_heads=12, num_kv_heads=1, k_stride_head=0, v_stride_head=0).map_strides is not None

    @pytest.mark.parametrize(("rows", "each"), [(1, 1), (3, 1), (6, 2), (8, 2)])
    def test_rows_of_a_request(self, rows, each) -> None:
        assert params(rows=rows).rows_per_request == each


class TestDivisor:
    @pytest.mark.parametrize("size", [16, 48, 400, 784, 800, 1568, 1600, 3200, 7808, 65536, 2**30, 2**31 - 16])
    def test_exact_at_the_edges(self, size) -> None:
        edges = [k * size + d for k in (1, 2, 3, (2**31 - 1) // size) for d in (-1, 0, 1)]
        for n in (0, 1, 2**31 - 1, *edges):
            if n < 2**31:
                self.check(n, size)

    @given(st.integers(0, 2**31 - 1), st.integers(1, 2**27 - 1))
    def test_exact_anywhere(self, n, sixteenth) -> None:
        self.check(n, 16 * sixteenth)

    @staticmethod
    def check(n: int, size: int) -> None:
        magic, shift = divisor(size)
        assert -(2**31) <= magic < 2**31
        assert ((n * (magic % 2**32)) >> 32) >> shift == n // size


class TestDerived:
    def test_the_interleaved_cache(self) -> None:
        found = params()
        assert found.group_size == 12
        assert found.unit == 1024
        assert (found.k_page_units, found.k_token_units) == (found.v_page_units, found.v_token_units) == (1568, 1)
        assert found.k_head_bytes == 784 * 1024
        assert found.grid == (4, found.num_splits, 2)

    def test_fp8_strides_are_bytes(self) -> None:
        found = params(cache_dtype="fp8_e4m3", output_scale=0.5)
        assert (found.unit, found.k_head_bytes, found.output_scale) == (512, 784 * 512, 0.5)

    def test_contiguous_by_default(self) -> None:
        names = [name for name in PARAMS if name.startswith(("k_stride", "v_stride"))]
        found = params(**dict.fromkeys(names), v_ptr=4096 * MiB)
        assert (found.k_stride_page, found.k_stride_token, found.k_stride_head) == (784 * 512, 512, 256)
        assert (found.q_stride_row, found.o_stride_head, found.gate_stride_row) == (24 * 256, 256, 24 * 256)
        assert (found.indices_stride_row, found.table_stride) == (2052, 6)

    def test_a_cache_of_100_gigabytes(self) -> None:
        far = params(num_pages=100_000, v_ptr=2048 * MiB + 512, q_ptr=2**50, o_ptr=2**51, gate_ptr=2**52)
        assert far.num_pages * far.k_page_units < 2**31

    def test_a_cache_out_of_reach(self) -> None:
        with pytest.raises(ArgumentError, match=r"k_cache reaches \d+ bytes far in steps of 16"):
            params(num_pages=100_000, k_stride_token=520, o_ptr=2**50)

    def test_no_rows_need_no_memory(self) -> None:
        none = dict.fromkeys((name for name in PARAMS if name.endswith("_ptr")), 0)
        assert params(rows=0, **none, indices=0, block_table=0, token_to_req=0).grid[0] == 0

    def test_one_block_a_row_where_there_is_no_workspace(self) -> None:
        twin = params(rows=1).as_rows()
        assert (twin.algorithm, twin.num_splits) == ("rows", 1)
        space = {"partial_o": 4096 * MiB, "partial_stats": 5000 * MiB, "split_counters": 5100 * MiB}
        assert params(rows=1, **space).as_rows().num_splits == 17
        assert params(rows=1).with_workspace(space) == params(rows=1, algorithm="rows", **space)

    def test_moved(self) -> None:
        first = params()
        twin = first.moved(7, q_ptr=65 * MiB, o_ptr=257 * MiB)
        assert twin == params(q_ptr=65 * MiB, o_ptr=257 * MiB, stream=7)
        assert first == params()
        for changes, says in (
            ({"q_ptr": 8}, "q_ptr is 0x8; it takes an address that is a multiple of 16"),
            ({"token_to_req": 0}, "token_to_req is null"),
            ({"o_ptr": 64 * MiB + 4096}, "o at .* overlaps q"),
            ({"k_ptr": 255 * MiB}, "o at .* overlaps k_cache"),
        ):
            with pytest.raises(ArgumentError, match=says):
                first.moved(0, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"q_ptr": 0}, "q_ptr is null"),
        ({"k_ptr": 0}, "k_ptr is null"),
        ({"q_ptr": 64 * MiB + 8}, "q_ptr is .* multiple of 16 bytes"),
        ({"gate_ptr": 8}, "gate_ptr is 0x8; it takes an address that is a multiple of 16"),
        ({"token_to_req": 0}, "token_to_req is null"),
        ({"rows": -1}, "rows is -1; it takes an integer from 0"),
        ({"rows": 2**30 + 2**29}, "rows x num_kv_heads make 3221225472 thread blocks"),
        ({"num_q_heads": 25}, "num_q_heads is 25 over num_kv_heads 2; it takes 1 to 16 times those"),
        ({"num_q_heads": 34}, "num_q_heads is 34 over num_kv_heads 2"),
        ({"head_dim": 64}, "head_dim is 64; it takes 256 or 128"),
        ({"page_size": 8}, "page_size is 8; it takes an integer from 16"),
        ({"page_size": 100}, "page_size is 100; it takes a multiple of 16 tokens"),
        ({"page_size": 784.0}, "page_size is 784.0"),
        ({"num_pages": 0}, "num_pages is 0"),
        ({"num_requests": 0}, "num_requests is 0"),
        ({"table_width": 0}, "table_width is 0"),
        ({"width": 0}, "width is 0; it takes an integer from 1 to 8192"),
        ({"width": 8193}, "width is 8193"),
        ({"cache_dtype": "fp16"}, "cache_dtype is 'fp16'; it takes bf16 or fp8_e4m3"),
        ({"attention_scale": math.nan}, "attention_scale is nan"),
        ({"output_scale": math.inf}, "output_scale is inf"),
        ({"output_scale": 2.0}, "output_scale belongs to an fp8 cache"),
        ({"v_scale_ptr": 4}, "output_scale belongs to an fp8 cache"),
        ({"k_scale_ptr": 2}, "k_scale_ptr is 0x2"),
        ({"k_stride_token": 4}, "k_stride_token is 4; it takes a multiple of 8 elements"),
        ({"cache_dtype": "fp8_e4m3", "v_stride_head": 8}, "v_stride_head is 8; it takes a multiple of 16 elements"),
        ({"q_stride_head": 252}, "q_stride_head is 252"),
        ({"table_stride": -1}, "table_stride is -1"),
        ({"algorithm": "union"}, "algorithm is 'union'; it takes 'tma'"),
        ({"num_splits": 2}, "num_splits is 2 without an algorithm"),
        ({"algorithm": "tma", "num_splits": 17}, "num_splits is 17; it takes an integer from 0 to 16"),
        ({"algorithm": "rows", "num_splits": 33}, "num_splits is 33; it takes an integer from 0 to 32"),
        ({"algorithm": "rows", "num_splits": 2}, "partial_o is null"),
        ({"o_ptr": 64 * MiB}, "o at .* overlaps q at"),
        ({"o_ptr": 128 * MiB}, "o at .* overlaps gate"),
        ({"o_ptr": 2048 * MiB + 4096}, "o at .* overlaps k_cache"),
        ({"device": -2}, "device is -2"),
        ({"stream": -1}, "stream is -1"),
    ],
)
def test_a_wrong_value_is_named(changes, says) -> None:
    with pytest.raises(ArgumentError, match=says):
        params(**changes)


class TestFromTensors:
    def test_reads_shapes_and_strides(self) -> None:
        found = PagedAttentionParams.from_tensors(**tensors())
        assert (found.rows, found.num_requests, found.num_q_heads, found.num_kv_heads) == (4, 3, 24, 2)
        assert (found.num_pages, found.page_size, found.table_width, found.width) == (10, 784, 6, 2051)
        assert (found.unit, found.attention_scale, found.output_scale) == (1024, 0.0625, 1.0)
        assert found.cache_dtype == "bf16"

    def test_scales_are_numbers_or_on_the_device(self) -> None:
        kind = "torch.float8_e4m3fn"
        fp8 = tensors(k_cache=cache(kind), v_cache=cache(kind))
        found = PagedAttentionParams.from_tensors(**fp8, k_scale=0.5, v_scale=torch.tensor(0.25))
        assert (found.attention_scale, found.output_scale) == (0.03125, 0.25)
        assert (found.k_scale_ptr, found.v_scale_ptr) == (0, 0)
        scale = floats(1)
        found = PagedAttentionParams.from_tensors(**fp8, k_scale=scale, v_scale=scale)
        assert (found.k_scale_ptr, found.v_scale_ptr) == (scale.data_ptr(), scale.data_ptr())
        assert (found.attention_scale, found.output_scale) == (0.0625, 1.0)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"q": FakeTensor(4, 24)}, "q has shape .* it takes 3 dimensions"),
            ({"q": FakeTensor(4, 24, 256, dtype="torch.float16")}, "q has type fp16; it takes bf16"),
            ({"k_cache": cache("torch.float16")}, "k_cache has type 'torch.float16'; it takes bf16 or fp8_e4m3"),
            ({"k_cache": cache("torch.uint8")}, "k_cache has type 'torch.uint8'; it takes bf16 or fp8_e4m3"),
            ({"v_cache": cache("torch.float8_e4m3fn")}, "v_cache has type fp8_e4m3; it takes bf16"),
            ({"v_cache": cache(page=800)}, "v_cache has shape .* page_size is 784 by k_cache"),
            ({"k_cache": cache(dim=128)}, "head_dim is 256 by q, here 128"),
            ({"k_cache": cache(stride=(784 * 1024, 1024, 784 * 1024, 2))}, "k_cache has strides .* takes stride 1"),
            ({"indices": ints(5, 2052)}, "indices has shape .* rows is 4 by q"),
            ({"indices": ints(4, 1)}, r"indices has shape \[4, 1\]; it takes a list and its count"),
            ({"indices": FakeTensor(4, 9, dtype="torch.int64")}, "indices has type i64; it takes i32"),
            ({"block_table": ints(3)}, "block_table has shape"),
            ({"block_table": ints(3, 0)}, "table_width is 0"),
            ({"token_to_req": ints(3)}, "token_to_req has shape"),
            ({"token_to_req": ints(4, stride=(2,))}, "token_to_req has strides .* takes stride 1"),
            ({"o": FakeTensor(4, 12, 256)}, "o has shape"),
            ({"gate": FakeTensor(4, 24, 128)}, "gate has shape"),
            ({"block_table": ints(3, 6, device="cuda:1")}, "block_table is on device 1"),
            ({"q": FakeTensor(4, 24, 256, device="cpu")}, "q is on .*; it takes a CUDA tensor"),
        ],
    )
    def test_a_wrong_tensor_is_named(self, changes, says) -> None:
        with pytest.raises(ArgumentError, match=says):
            PagedAttentionParams.from_tensors(**tensors(**changes))

    @pytest.mark.parametrize("name", ["k_scale", "v_scale"])
    def test_an_fp8_cache_takes_both_scales(self, name) -> None:
        kind = "torch.float8_e4m3fn"
        given = tensors(k_cache=cache(kind), v_cache=cache(kind)) | {"k_scale": 1.0, "v_scale": 1.0, name: None}
        with pytest.raises(ArgumentError, match=f"{name} is None; an fp8 cache takes both"):
            PagedAttentionParams.from_tensors(**given)


class TestCanImplement:
    @pytest.mark.parametrize(("heads", "kv_heads"), [(24, 2), (12, 1), (6, 1), (3, 1), (16, 1), (8, 8)])
    @pytest.mark.parametrize("page_size", [16, 400, 784, 1568, 7808])
    def test_the_model(self, heads, kv_heads, page_size) -> None:
        for dtype in ("bf16", torch.bfloat16, "fp8_e4m3", torch.float8_e4m3fn):
            assert PagedAttentionRunner.can_implement(heads, kv_heads, 256, page_size, 90, dtype)

    @pytest.mark.parametrize(
        ("asked", "code"),
        [
            ((24, 5, 256, 784, 90, "bf16"), "heads"),
            ((34, 2, 256, 784, 90, "bf16"), "group_size"),
            ((24, 2, 64, 784, 90, "bf16"), "head_dim"),
            ((24, 2, 256, 100, 90, "bf16"), "page_size"),
            ((24, 2, 256, None, 90, "bf16"), "page_size"),
            ((24, 2, 256, 784, 75, "bf16"), "sm"),
            ((24, 2, 256, 784, 90, "fp16"), "dtype"),
            ((24, 2, 256, 784, 80, "fp8_e4m3"), "dtype"),
            ((24, 2, 256, 784, 90, torch.uint8), "dtype"),
            ((None, object(), "x", [], {}, ()), "heads"),
        ],
    )
    def test_says_why_not(self, asked, code) -> None:
        found = PagedAttentionRunner.can_implement(*asked)
        assert not found
        assert found.code.value == code
        assert found.reason

    def test_fp8_from_sm89(self) -> None:
        assert PagedAttentionRunner.can_implement(24, 2, 256, 784, 89, "fp8_e4m3")
        assert PagedAttentionRunner.can_implement(24, 2, 256, 784, 80, "bf16")


class TestChoice:
    @pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
    def test_the_workspace_is_not_needed(self, monkeypatch, capability) -> None:
        monkeypatch.setattr(runner.dispatch, "capability", lambda *_: capability)
        for rows in (1, 4, 64, 128, 4096):
            algorithm, found = runner._pick(None, params(rows=rows, o_ptr=2**50))
            assert algorithm == "rows" or capability == (9, 0)
            assert algorithm != "rows" or found.num_splits == 1

    def test_a_workspace_is_wanted_for_few_rows_that_cannot_be_boxes(self, monkeypatch) -> None:
        for capability, rows, wants in (((9, 0), 1, False), ((8, 0), 1, True), ((8, 0), 66, False), ((12, 0), 4, True)):
            monkeypatch.setattr(runner.dispatch, "capability", lambda *_, found=capability: found)
            monkeypatch.setattr(runner, "default_loader", lambda: None)
            found = PagedAttentionRunner.workspace_wanted(params(rows=rows))
            assert (found is not None) == wants
            if found:
                assert found == PagedAttentionRunner.workspace_size(rows, 2, 256)

    def test_boxes_need_sm90(self, monkeypatch) -> None:
        monkeypatch.setattr(runner.dispatch, "capability", lambda *_: (10, 0))
        with pytest.raises(runner.UnsupportedError, match="'tma' is built for sm_90a only"):
            runner._pick(None, params(algorithm="tma"))


class TestHost:
    def test_signatures_are_vllms(self) -> None:
        names = list(inspect.signature(host.qsa_sparse_paged_attention).parameters.values())
        assert [one.name for one in names] == [
            *("q", "k_cache", "v_cache", "logical_indices", "block_table", "token_to_req", "use_prefill_config"),
            *("out", "k_scale", "v_scale", "output_gate"),
        ]
        assert [one.default for one in names[7:10]] == [None] * 3
        assert names[10].kind is inspect.Parameter.KEYWORD_ONLY
        assert names[10].default is inspect.Parameter.empty
        warm_up = list(inspect.signature(host.warmup_qsa_sparse_paged_attention).parameters.values())
        assert [one.name for one in warm_up] == ["kv_cache", "block_table", "num_query_heads", "selection_width"]
        assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in warm_up[2:])

    @pytest.mark.parametrize("gate", [torch.zeros(4, 24 * 255), torch.zeros(24 * 256, 4).t()])
    def test_the_gate_is_contiguous_and_whole(self, gate) -> None:
        with pytest.raises(ArgumentError, match="output_gate has shape"):
            host._gate(gate, torch.zeros(4, 24, 256))

    def test_the_gate_is_required(self) -> None:
        with pytest.raises(ArgumentError, match="output_gate is None; it takes a CUDA tensor"):
            host._gate(None, torch.zeros(4, 24, 256))


# The reference against one entry at a time in FP64.


def slow(q, k, v, ids, table, requests, gate, k_scale, v_scale):
    rows, heads, dim = q.shape
    pages, page_size, kv_heads, _ = k.shape
    out = torch.zeros(rows, heads, dim, dtype=torch.float64)
    for r in range(rows):
        if not 0 <= requests[r] < len(table):
            continue
        for h in range(heads):
            weights, values = [], []
            for i in range(min(int(ids[r, -1]), ids.shape[1] - 1)):
                token = int(ids[r, i])
                if token < 0 or token // page_size >= table.shape[1]:
                    continue
                page = int(table[requests[r], token // page_size])
                if not 0 <= page < pages:
                    continue
                at = (page, token % page_size, h // (heads // kv_heads))
                dot = sum(float(a) * float(b) for a, b in zip(q[r, h], k[at].float(), strict=True))
                weights.append(math.exp(dot * k_scale * dim**-0.5))
                values.append(v[at].double())
            if weights:
                o = v_scale * sum(w * one for w, one in zip(weights, values, strict=True)) / sum(weights)
                out[r, h] = o.bfloat16().double() / (1 + torch.exp(-gate[r, h].double()))
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_reference(dtype) -> None:
    random = torch.Generator().manual_seed(0)
    q, gate = (torch.randn(6, 4, 8, generator=random).bfloat16() for _ in range(2))
    k, v = (torch.randn(5, 16, 2, 8, generator=random).to(dtype) for _ in range(2))
    ids = torch.randint(-2, 60, (6, 12), generator=random).int()
    ids[:, -1] = torch.tensor([11, 5, 0, -3, 99, 11])
    ids[0, 3] = ids[0, 4] = 7  # twice
    ids[5, 0], ids[5, 1] = 2**31 - 1, -(2**31)
    table = torch.tensor([[3, 1, -1, 4], [0, 5, 2, 2**31 - 1]], dtype=torch.int32)
    requests = torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.int32)
    for changed in (requests, torch.tensor([0, -1, 2, 1, 2**31 - 1, 0], dtype=torch.int32)):
        got = sparse_paged_attention(q, k, v, ids, table, changed, gate=gate, k_scale=0.7, v_scale=1.3)
        want = slow(q, k, v, ids, table, changed, gate, 0.7, 1.3)
        assert torch.allclose(got.double(), want, atol=1e-2, rtol=1e-2)  # a rounding to bf16 may fall either way
        assert (got[want.abs().sum((1, 2)) == 0] == 0).all()


def test_the_reference_reads_nothing_that_is_not_named() -> None:
    q = torch.ones(1, 1, 8)
    k = torch.full((2, 16, 1, 8), torch.nan)
    k[1, 3] = 1.0
    ids = torch.tensor([[3, -1, 40, 5, 2]], dtype=torch.int32)  # the fourth is stale
    table, requests = torch.tensor([[1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    gate = torch.full((1, 1, 8), 50.0)
    assert torch.equal(sparse_paged_attention(q, k, k, ids, table, requests, gate=gate), torch.ones(1, 1, 8))
    ids[0, -1] = 0
    nan = torch.full((1, 1, 8), torch.nan)
    assert (sparse_paged_attention(q, k, k, ids, table, requests, gate=nan) == 0).all()


def test_the_warm_up_and_the_call_name_what_is_no_cuda_tensor() -> None:
    cache = torch.zeros(2, 2, 16, 512, dtype=torch.bfloat16)
    for found, says in ((cache, "kv_cache is on cpu; it takes a CUDA tensor"), (None, "kv_cache is None")):
        with pytest.raises(ArgumentError, match=says):
            host.warmup_qsa_sparse_paged_attention(found, None, num_query_heads=24, selection_width=2051)
    with pytest.raises(ArgumentError, match=r"it takes \[pages, kv_heads, page_size, 2 \* head_dim\]"):
        host.warmup_qsa_sparse_paged_attention(cache[..., :511], None, num_query_heads=24, selection_width=2051)
    with pytest.raises(ArgumentError, match="q is None; it takes a CUDA tensor"):
        host.qsa_sparse_paged_attention(None, cache, cache, cache, cache, cache, False, output_gate=cache)


def test_a_subclass_of_torchs_tensor_runs_on_torchs_stream(monkeypatch) -> None:
    class Mine(torch.Tensor):
        pass

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77 + device))
    assert current_stream(1, torch.zeros(1)) == current_stream(1, torch.zeros(1).as_subclass(Mine)) == 78
    assert current_stream(1, FakeTensor(1)) == 0


def test_preflight_needs_no_more_than_a_run(monkeypatch) -> None:
    """A store may have the kernels of "rows" and "tma" alone: `run` then does without "shared"."""
    loaded = []
    driver = SimpleNamespace(current_context=lambda: 1, current_device=lambda: 0, capability=lambda _: (9, 0))
    loader = SimpleNamespace(
        driver=driver,
        missing_reason=lambda wanted, _: "not built" if "union" in wanted.kernel else None,
        kernel=lambda wanted, *_: loaded.append(wanted.kernel),
    )
    monkeypatch.setattr(runner, "default_loader", lambda: loader)
    monkeypatch.setattr(runner.dispatch, "_capabilities", {})
    PagedAttentionRunner.preflight("bf16", device=0, head_dim=256)
    assert loaded == ["paged_attention_tma", "paged_attention"]
    loader.missing_reason = lambda *_: None
    PagedAttentionRunner.preflight("bf16", device=0, head_dim=256)
    assert len(loaded) == 7


class Kept(FakeTensor):
    """A tensor of a call of the host's function."""

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_contiguous(self) -> bool:
        return True

    def view(self, shape: tuple[int, ...]) -> Kept:
        return Kept(*shape, dtype=self.dtype, pointer=self.data_ptr())  # on the first device, as all here


def calls(rows: int) -> dict[str, FakeTensor]:
    """The tensors of one call, as the host's function takes them."""
    found = tensors(
        q=Kept(rows, 24, 256),
        indices=ints(rows, 2052),
        token_to_req=ints(rows),
        o=Kept(rows, 24, 256),
        gate=Kept(rows, 24, 256),
    )
    for one in found.values():
        one.device = torch.device("cuda:0")  # which has a hash
    return {name: found[name] for name in ("q", "k_cache", "v_cache", "indices", "block_table", "token_to_req")} | {
        "out": found["o"],
        "output_gate": found["gate"],
    }


class TestWhatTheHostRemembers:
    @pytest.fixture
    def launched(self, monkeypatch) -> list[PagedAttentionParams]:
        """Params that were launched, each with what a launch keeps with them; the workspace is memory of torch's."""
        found = []

        def launch(made: PagedAttentionParams) -> None:
            for name in ("packed", "_launches", "_as_rows"):
                object.__setattr__(made, name, bytearray(1 << 16))
            found.append(made)

        driver = SimpleNamespace(current_context=lambda: 1, current_device=lambda: 0, capability=lambda _: (9, 0))
        loader = SimpleNamespace(driver=driver, missing_reason=lambda *_: None)
        monkeypatch.setattr(runner, "default_loader", lambda: loader)
        monkeypatch.setattr(runner.dispatch, "_capabilities", {})
        monkeypatch.setattr(PagedAttentionRunner, "run", staticmethod(launch))
        monkeypatch.setattr(host, "_known", {})
        monkeypatch.setattr(torch, "empty", lambda *_, **__: Kept(1, dtype="torch.uint8"))
        return found

    @staticmethod
    def call(rows: int) -> dict[str, FakeTensor]:
        given = calls(rows)
        out, gate = given["out"], given.pop("output_gate")
        given = {"logical_indices" if name == "indices" else name: one for name, one in given.items()}
        given["use_prefill_config"] = False
        assert host.qsa_sparse_paged_attention(**given, output_gate=gate) is out
        return given

    def test_no_tensor_and_nothing_of_a_launch(self, launched) -> None:
        rows = (4, 300)  # the second brings a workspace
        refs = [weakref.ref(one) for n in rows for one in self.call(n).values() if isinstance(one, FakeTensor)]
        gc.collect()
        assert len(refs) == 14
        assert [ref() for ref in refs if ref() is not None] == []
        assert [made.algorithm for made in launched] == [None, "shared"]
        assert len(host._known) == 2
        for (kept, _), made in zip(host._known.values(), launched, strict=True):
            assert kept is not made
            assert (kept.packed, kept._launches, kept._as_rows) == (None, None, None)

    def test_what_is_remembered_is_the_call(self, launched) -> None:
        for _ in range(2):
            for rows in (4, 300):
                given = self.call(rows)
                made, at = (
                    launched[-1],
                    {"q": "q_ptr", "k_cache": "k_ptr", "out": "o_ptr", "block_table": "block_table"},
                )
                assert all(given[name].data_ptr() == getattr(made, field) for name, field in at.items())
                assert made.rows == rows
        assert len(host._known) == 2
        assert launched[1].workspace != launched[3].workspace

    def test_it_is_bounded(self, launched, monkeypatch) -> None:
        monkeypatch.setattr(host, "MAX_LAYOUTS", 5)
        for rows in range(1, 18):
            self.call(rows)
            assert len(host._known) <= 5

    def test_it_is_small(self, launched) -> None:
        """Of `MAX_LAYOUTS` layouts each is a few kilobytes."""
        self.call(1)
        launched.clear()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for rows in range(2, 52):
                self.call(rows)
                launched.clear()
            gc.collect()
            each = (tracemalloc.get_traced_memory()[0] - before) / 50
        finally:
            tracemalloc.stop()
        assert each < 6 << 10, f"{each} bytes each"


@pytest.mark.parametrize("ask", [PagedAttentionRunner.run, PagedAttentionRunner.workspace_wanted])
def test_what_are_no_params(ask) -> None:
    for wrong in (None, "bf16"):
        with pytest.raises(ArgumentError, match=f"params is {wrong!r}; it takes PagedAttentionParams"):
            ask(wrong)
