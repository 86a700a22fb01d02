"""What the parameters of the attention runners derive, refuse, and read from tensors."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from attention_params import DECODE, PREFILL, FakeTensor, MiB, decode, floats, ints, prefill
from test_runners_attention import FakeLoader

from qsa_cute.errors import ArgumentError
from qsa_cute.kernels.attention import sparse_decode, sparse_decode_tma, sparse_prefill
from qsa_cute.runners import SparseDecodeParams, SparseDecodeRunner, SparsePrefillParams

BUILDS = {"prefill": prefill, "decode": decode}


@pytest.mark.parametrize(
    ("kernel", "params"),
    [
        (sparse_prefill, prefill()),
        (sparse_decode, decode()),
        (sparse_decode_tma, decode().with_map(FakeLoader())),
    ],
    ids=["prefill", "decode", "tma"],
)
def test_there_is_a_packable_value_for_every_kernel_parameter(kernel, params) -> None:
    codes = {"ptr": "<Q", "i64": "<q", "i32": "<i", "f32": "<f"}
    for name, kind in (word for param in kernel.PARAMS for word in param.words()):
        struct.pack(codes[kind], getattr(params, name))


class TestDerived:
    def test_prefill(self) -> None:
        params = prefill()
        assert params.group_size == 12
        assert params.num_blocks == 2 * 64 * 2
        assert params.kv_seq_len == 64
        assert (params.q_stride_batch, params.q_stride_row, params.q_stride_head) == (64 * 24 * 256, 24 * 256, 256)
        assert (params.k_stride_batch, params.k_stride_row, params.k_stride_head) == (64 * 2 * 256, 2 * 256, 256)
        assert (params.indices_stride_batch, params.indices_stride_row) == (64 * 2051, 2051)

    def test_decode(self) -> None:
        params = decode()
        assert params.group_size == 12
        assert params.k_pool_ptr == params.v_pool_ptr == DECODE["kv_pool_ptr"]
        assert params.v_page_table - params.k_page_table == 8 * 4
        assert params.page_table_stride == 16
        assert (params.page_stride, params.token_stride, params.head_stride) == (128 * 2 * 384, 2 * 384, 384)
        assert params.grid == (4, params.num_splits, 2)

    def test_query_tokens_are_rows(self) -> None:
        assert decode(query_len=3).grid == (12, 4, 2)

    @pytest.mark.parametrize(
        ("batch", "algorithm", "splits"),
        [
            (1, None, 16),
            (1, "split_kv", 7),
            (4, None, 9),
            (8, "tma", 6),
            (16, None, 3),
            (16, "split_kv", 4),
            (33, None, 2),
            (34, None, 1),
            (64, None, 1),
        ],
    )
    def test_splits_fill_the_device_and_no_more(self, batch, algorithm, splits) -> None:
        assert decode(batch_size=batch, algorithm=algorithm).num_splits == splits

    def test_the_portable_twin(self) -> None:
        params = decode(batch_size=1)
        twin = params.as_split_kv()
        assert (twin.algorithm, twin.num_splits, twin.partial_o) == ("split_kv", 7, params.partial_o)
        assert params.as_split_kv() is twin

    def test_the_portable_twin_needs_the_workspace(self) -> None:
        with pytest.raises(ArgumentError, match="partial_o is null"):
            decode(partial_o=0).as_split_kv()

    def test_the_portable_twin_of_an_empty_pool_has_nothing_to_merge(self) -> None:
        assert decode(num_flat_pages=0, kv_pool_ptr=0, partial_o=0).as_split_kv().num_splits == 1

    def test_strides_of_the_tensor_map(self) -> None:
        assert decode().map_strides == (2 * 768, 2 * 384, 2 * 128 * 768)
        assert decode(token_stride=384, head_stride=128 * 384).map_strides == (768, 128 * 768, 2 * 128 * 768)
        assert decode(num_q_heads=8, num_kv_heads=1, head_stride=0).map_strides == (768, 512, 128 * 768)
        assert decode(num_flat_pages=1, page_stride=0).map_strides == (2 * 768, 2 * 384, 512)

    @pytest.mark.parametrize(
        "pool", [{"num_flat_pages": 0}, {"page_stride": 0}, {"head_stride": 0}, {"page_stride": 2**39}]
    )
    def test_a_pool_that_has_no_tensor_map(self, pool) -> None:
        assert decode(**pool).map_strides is None
        assert decode(**pool, batch_size=0, algorithm="tma").map_strides is None
        with pytest.raises(ArgumentError, match=r"pool has \d+ pages .* Algorithm 'tma' takes at least one page"):
            decode(**pool, algorithm="tma")

    def test_an_empty_batch_needs_no_memory(self) -> None:
        none = dict.fromkeys((name for name in PREFILL if name.endswith("_ptr")), 0)
        assert prefill(batch_size=0, indices=0, context_lengths=0, **none).num_blocks == 0
        assert decode(batch_size=0, q_ptr=0, o_ptr=0, page_table=0).grid[0] == 0

    @pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
    def test_parameters_do_not_change(self, build) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            build().top_k = 1


REFUSED = [
    ("q_ptr", 0, "q_ptr is null"),
    ("q_ptr", 64 * MiB + 8, "multiple of 16 bytes"),
    ("q_ptr", -16, "takes a device address"),
    ("q_ptr", None, "q_ptr is None"),
    ("o_ptr", 0, "o_ptr is null"),
    ("indices", 2, "indices is 0x2; it takes an address that is a multiple of 4 bytes"),
    ("indices", 0, "indices is null"),
    ("context_lengths", 0, "context_lengths is null"),
    ("lse_ptr", 2, "lse_ptr"),
    ("batch_size", -1, "batch_size is -1; it takes an integer from 0"),
    ("batch_size", 2**31, "batch_size"),
    ("num_q_heads", 25, "num_q_heads is 25 over num_kv_heads 2; it takes 1 to 16 times those"),
    ("num_q_heads", 34, "num_q_heads is 34 over num_kv_heads 2"),
    ("num_q_heads", 1, "num_q_heads is 1 over num_kv_heads 2"),
    ("num_kv_heads", 0, "num_kv_heads is 0"),
    ("head_dim", 64, "head_dim is 64; it takes 256 or 128"),
    ("head_dim", 256.0, "head_dim is 256.0"),
    ("top_k", 0, "top_k is 0; it takes an integer from 1 to 8192"),
    ("top_k", 8193, "top_k is 8193"),
    ("top_k", True, "top_k is True"),
    ("attention_scale", float("nan"), "attention_scale is nan; it takes a finite number"),
    ("attention_scale", "x", "attention_scale is 'x'"),
    ("device", -2, "device is -2"),
    ("stream", -1, "stream is -1"),
    ("indices_stride_row", -1, "indices_stride_row is -1"),
    ("q_stride_head", 252, "q_stride_head is 252; it takes a multiple of 8 elements"),
    ("o_ptr", 64 * MiB, r"o at \[0x4000000, .* overlaps q at"),
    ("lse_ptr", 512 * MiB + 4, "lse at .* overlaps indices"),
]


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize(("name", "value", "says"), REFUSED, ids=lambda value: str(value)[:24])
def test_a_wrong_value_is_named(build, name, value, says) -> None:
    with pytest.raises(ArgumentError, match=says):
        build(**{name: value})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": 65536, "seq_len": 65536}, "batch_size x seq_len x num_kv_heads make 8589934592 thread blocks"),
        ({"k_ptr": 0}, "k_ptr is null"),
        ({"kv_seq_len": -1}, "kv_seq_len is -1"),
        ({"query_starts": 1}, "query_starts"),
        ({"v_stride_row": 4}, "v_stride_row is 4"),
        ({"o_ptr": 192 * MiB + 256}, "overlaps v"),
        ({"lse_ptr": 256 * MiB}, "o at .* overlaps lse"),
    ],
)
def test_prefill_refuses(changes, says) -> None:
    with pytest.raises(ArgumentError, match=says):
        prefill(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pool_head_dim": 255}, "pool_head_dim is 255; it takes an integer from 256"),
        ({"pool_head_dim": 260}, "pool_head_dim is 260; it takes a multiple of 8"),
        ({"num_flat_pages": 2**24}, "num_flat_pages is 16777216"),
        ({"max_pages_per_seq": 0}, "max_pages_per_seq is 0"),
        ({"query_len": 0}, "query_len is 0"),
        ({"kv_pool_ptr": 0}, "kv_pool_ptr is null"),
        ({"page_table": 0}, "page_table is null"),
        ({"algorithm": "tree"}, "algorithm is 'tree'; it takes 'tma', 'split_kv' or None"),
        ({"num_splits": 4}, "num_splits is 4 without an algorithm"),
        ({"num_splits": 17, "algorithm": "tma"}, "num_splits is 17; it takes an integer from 0 to 16"),
        ({"num_splits": 9, "algorithm": "split_kv"}, "num_splits is 9; it takes an integer from 0 to 8"),
        ({"partial_o": 0, "algorithm": "split_kv"}, "partial_o is null"),
        ({"partial_stats": 0, "algorithm": "split_kv"}, "partial_stats is null"),
        ({"split_counters": 0, "algorithm": "split_kv"}, "split_counters is null"),
        ({"partial_o": 2048 * MiB + 65536}, "partial_o at .* overlaps kv_pool"),
        ({"partial_stats": 300 * MiB + 4096}, "partial_o at .* overlaps partial_stats"),
        ({"batch_size": 2**30}, "batch_size x query_len x num_kv_heads make 2147483648 thread blocks"),
    ],
)
def test_decode_refuses(changes, says) -> None:
    with pytest.raises(ArgumentError, match=says):
        decode(**changes)


def prefill_tensors(**changes):
    return {
        "q": FakeTensor(2, 5, 12, 256),
        "k": FakeTensor(2, 9, 2, 256),
        "v": FakeTensor(2, 9, 2, 256),
        "o": FakeTensor(2, 5, 12, 256),
        "indices": ints(2, 5, 7),
        "context_lengths": ints(2),
        "attention_scale": 0.1,
    } | changes


def decode_tensors(**changes):
    return {
        "q": FakeTensor(3, 2, 12, 128),
        "kv_pool": FakeTensor(20, 128, 2, 192),
        "page_table": ints(3, 2, 4),
        "indices": ints(3, 2, 7),
        "context_lengths": ints(3),
        "o": FakeTensor(3, 2, 12, 128),
        "attention_scale": 0.1,
    } | changes


class TestFromTensors:
    @pytest.mark.parametrize("name", ["bf16", "fp16"])
    def test_the_type_is_kept(self, name) -> None:
        kind = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[name]
        elements = {"prefill": "qkvo", "decode": ("q", "kv_pool", "o")}
        for make, tensors, build in (
            ("prefill", prefill_tensors(), SparsePrefillParams.from_tensors),
            ("decode", decode_tensors(), SparseDecodeParams.from_tensors),
        ):
            typed = {one: FakeTensor(*tensors[one].shape, dtype=kind) for one in elements[make]}
            assert build(**tensors | typed).dtype == name
        workspace = {"partial_o": 1 << 50, "partial_stats": 1 << 51, "split_counters": 1 << 52}
        assert decode(dtype=kind, **workspace).as_split_kv().dtype == name

    def test_raw_addresses_have_none(self) -> None:
        assert prefill().dtype == decode().dtype == ""
        for build in (prefill, decode):
            with pytest.raises(ArgumentError, match="dtype is 'fp8_e4m3'; it takes 'bf16', 'fp16' or ''"):
                build(dtype="fp8_e4m3")

    def test_prefill(self) -> None:
        given = prefill_tensors(lse=floats(2, 5, 12), query_starts=ints(2))
        params = SparsePrefillParams.from_tensors(**given)
        sizes = (params.batch_size, params.seq_len, params.kv_seq_len, params.num_q_heads, params.num_kv_heads)
        assert sizes == (2, 5, 9, 12, 2)
        assert (params.head_dim, params.top_k, params.device, params.stream) == (256, 7, 0, 0)
        assert params.k_ptr == given["k"].data_ptr()
        assert (params.k_stride_batch, params.k_stride_row, params.k_stride_head) == (9 * 512, 512, 256)
        assert params.lse_ptr == given["lse"].data_ptr()
        assert params.query_starts == given["query_starts"].data_ptr()

    def test_decode(self) -> None:
        workspace = {"partial_o": floats(96, 16, 128), "partial_stats": floats(96, 2, 16), "split_counters": ints(12)}
        params = SparseDecodeParams.from_tensors(**decode_tensors(**workspace))
        assert (params.batch_size, params.query_len, params.grid[0]) == (3, 2, 6)
        assert (params.head_dim, params.pool_head_dim, params.num_flat_pages) == (128, 192, 20)
        assert (params.q_stride_row, params.indices_stride_row, params.page_table_stride) == (12 * 128, 7, 8)
        assert params.split_counters == workspace["split_counters"].data_ptr()

    def test_strided_views(self) -> None:
        """Q as a slice of a fused projection, K and V interleaved in one tensor."""
        q = FakeTensor(2, 5, 12, 256, stride=(5 * 8192, 8192, 256, 1))
        k = FakeTensor(2, 9, 2, 256, stride=(9 * 1024, 1024, 512, 1))
        params = SparsePrefillParams.from_tensors(**prefill_tensors(q=q, k=k))
        assert (params.q_stride_row, params.k_stride_row, params.k_stride_head) == (8192, 1024, 512)

    def test_a_dimension_of_one_has_no_stride(self) -> None:
        q = FakeTensor(1, 5, 12, 256, stride=(3, 3072, 256, 1))
        changes = {"k": FakeTensor(1, 9, 2, 256), "v": FakeTensor(1, 9, 2, 256), "o": FakeTensor(1, 5, 12, 256)}
        given = prefill_tensors(q=q, indices=ints(1, 5, 7), context_lengths=ints(1), **changes)
        assert SparsePrefillParams.from_tensors(**given).q_stride_batch == 0

    def test_no_rows(self) -> None:
        given = prefill_tensors(q=FakeTensor(2, 0, 12, 256), o=FakeTensor(2, 0, 12, 256), indices=ints(2, 0, 7))
        assert SparsePrefillParams.from_tensors(**given, lse=floats(2, 0, 12)).num_blocks == 0

    def test_the_array_interface(self) -> None:
        class Array:
            def __init__(self, shape, typestr, pointer):
                self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (pointer, False)}

        given = {
            name: Array(tensor.shape, "<i4" if tensor.dtype == "torch.int32" else "<f2", tensor.data_ptr())
            for name, tensor in prefill_tensors().items()
            if name != "attention_scale"
        }
        params = SparsePrefillParams.from_tensors(**given, attention_scale=0.1)
        assert (params.q_stride_row, params.device) == (12 * 256, 0)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"q": 7}, "q is 7; it takes a CUDA tensor"),
            ({"q": FakeTensor(2, 5, 12, 256, device="cpu")}, "q is on .*cpu.*; it takes a CUDA tensor"),
            ({"q": FakeTensor(2, 5, 12, 256, dtype="torch.float32")}, "q has type f32; it takes bf16 or fp16"),
            ({"k": FakeTensor(2, 9, 2, 256, dtype="torch.float16")}, "k has type fp16; it takes bf16"),
            ({"k": FakeTensor(2, 9, 2, 256, device="cuda:1")}, "k is on device 1, q on 0"),
            ({"k": FakeTensor(2, 9, 256)}, r"k has shape \[2, 9, 256\]; it takes 4 dimensions"),
            ({"v": FakeTensor(2, 8, 2, 256)}, r"v has shape .*kv_rows is 9 by k, here 8"),
            ({"o": FakeTensor(2, 5, 24, 256)}, "q_heads is 12 by q, here 24"),
            ({"o": FakeTensor(2, 5, 12, 256, stride=(15360, 3072, 1, 12))}, "its inner dimension takes stride 1"),
            ({"indices": FakeTensor(2, 5, 7, dtype="torch.int64")}, "indices has type i64; it takes i32"),
            ({"indices": ints(2, 5, 7, stride=(70, 14, 2))}, "inner dimension takes stride 1"),
            ({"context_lengths": ints(2, stride=(2,))}, "inner dimension takes stride 1"),
            ({"lse": floats(2, 12, 5)}, "lse has shape"),
            ({"q": FakeTensor(2, 5, 12, 256, pointer=(1 << 40) + 2)}, "q_ptr is .* multiple of 16"),
            ({"q": FakeTensor(2, 5, 12, 256, stride=(20000, 3076, 256, 1))}, "q_stride_row is 3076"),
        ],
    )
    def test_prefill_refuses(self, changes, says) -> None:
        with pytest.raises(ArgumentError, match=says):
            SparsePrefillParams.from_tensors(**prefill_tensors(**changes))

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"kv_pool": FakeTensor(20, 64, 2, 192)}, "128 is 128 by the layout, here 64"),
            ({"page_table": ints(3, 1, 4)}, "2 is 2 by the layout, here 1"),
            ({"page_table": ints(3, 2, 4, stride=(16, 8, 1))}, "V's pages must follow K's"),
            ({"q": FakeTensor(3, 2, 12, 128, stride=(9216, 1536, 128, 1))}, "they must be one dimension"),
            ({"max_context_len": 513}, "which hold 512 tokens, for contexts of 513; widen it to 5"),
            ({"partial_o": floats(95, 16, 128)}, "96 is 96 by the layout, here 95"),
            ({"split_counters": ints(11)}, "12 is 12 by the layout, here 11"),
            ({"partial_o": floats(96, 16, 128, stride=(4096, 128, 1))}, "must be contiguous"),
        ],
    )
    def test_decode_refuses(self, changes, says) -> None:
        with pytest.raises(ArgumentError, match=says):
            SparseDecodeParams.from_tensors(**decode_tensors(**changes))


def test_the_workspace_is_the_hosts_layout() -> None:
    workspace = SparseDecodeRunner.workspace_size(3, 2, 256)
    o, stats, counters = workspace.parts
    assert (o.name, o.shape, o.offset) == ("partial_o", (48, 16, 256), 0)
    assert (stats.name, stats.shape, stats.offset) == ("partial_stats", (48, 2, 16), o.size)
    assert (counters.name, counters.shape) == ("split_counters", (6,))
    assert all(part.offset % workspace.alignment == 0 for part in workspace.parts)
    assert workspace.size >= counters.offset + counters.size
    assert workspace.addresses(4096)["partial_stats"] == 4096 + stats.offset
    with pytest.raises(ArgumentError, match="head_dim is 64"):
        SparseDecodeRunner.workspace_size(3, 2, 64)
