"""What kpool's launches derive, refuse and ask for, without a GPU."""

from __future__ import annotations

import importlib
import struct
import weakref

import pytest
import torch
from attention_params import FakeTensor
from hypothesis import given
from hypothesis import strategies as st

from qsa_cute import variants
from qsa_cute.errors import ArgumentError
from qsa_cute.hosts import vllm_kpool as host
from qsa_cute.runners import kpool, kpool_scores
from qsa_cute.runners.kpool import CompressWrite, DecodeUpdate, HadamardQuant, KpoolRunner, SeedTail
from qsa_cute.runners.kpool_expand import ExpandTail
from qsa_cute.runners.kpool_scores import PoolScores, PoolSelectParams, PoolSelectRunner
from qsa_cute.support import SupportCode

GiB = 1 << 30
Q, OUT, SCALE, CACHE, K, S, APE, LOC, TAIL, TABLE, LENGTHS, LOGITS, WORK, IDS = (i * GiB for i in range(1, 15))
I32, I64, F32, U8, FP8 = "torch.int32", "torch.int64", "torch.float32", "torch.uint8", "torch.float8_e4m3fn"
PAGED = {"cache_ptr": CACHE, "page_size": 64, "num_pages": 100, "page_stride": 64 * 132}
RING = {"tail_ptr": TAIL, "ring": 8, "num_tail_blocks": 5}
COMPRESS = {
    "slot_k_ptr": K,
    "slot_score_ptr": S,
    "ape_ptr": APE,
    "loc_ptr": LOC,
    "num_pools": 9,
    "pool_size": 4,
    **PAGED,
}
SEED = {"key_ptr": K, "gate_score_ptr": S, "tail_slots_ptr": LOC, "num_tokens": 17, "pool_size": 4, **RING}
INDICES = {"tail_slots_ptr": LOC, "slots_ptr": LOC, "positions_ptr": LOC}
DECODE = {"key_ptr": K, "slot_score_ptr": S, "ape_ptr": APE, "num_requests": 7, "next_n": 3, "pool_size": 4}
EXPAND = {
    "out_ptr": OUT,
    "ids_ptr": IDS,
    "num_rows": 3,
    "topk": 2048,
    "pool_size": 4,
    "tail": 3,
    "seq_lens_ptr": LENGTHS,
}
SCORES = {
    **{"q_ptr": Q, "weights_ptr": S, "block_table_ptr": TABLE, "seq_lens_ptr": LENGTHS, "num_rows": 40},
    **{"num_requests": 2, "max_pages": 30, **PAGED},
}


def one_of_each():
    return {
        "hadamard_quant": HadamardQuant(q_ptr=Q, out_ptr=OUT, scale_ptr=SCALE, num_rows=33),
        "compress_write": CompressWrite(**COMPRESS),
        "seed_tail": SeedTail(**SEED),
        "decode_update": DecodeUpdate(**DECODE, **INDICES, **PAGED, **RING),
        "expand_tail": ExpandTail(**EXPAND),
        "scores": PoolScores(**SCORES, logits_ptr=LOGITS, num_pools=1900),
    }


@pytest.mark.parametrize("name", one_of_each())
def test_a_launch_carries_every_parameter_of_its_kernel(name):
    pytest.importorskip("cutlass", reason="a kernel's parameters are in its module, which imports the DSL")
    module = importlib.import_module(f"qsa_cute.kernels.kpool.{name}")
    launch = one_of_each()[name]
    codes = {"ptr": "<Q", "i64": "<q", "i32": "<i", "f32": "<f"}
    for param in module.PARAMS:
        struct.pack(codes[param.kind], getattr(launch, param.name))


@pytest.mark.parametrize(("name", "launch"), one_of_each().items())
def test_every_launch_names_a_registered_variant(name, launch):
    wanted = variants.variants(["sm_90a"], launch.KERNEL, dtypes=[launch.DTYPE])
    assert any(dict(launch.baked).items() <= dict(variant.baked).items() for variant in wanted)


def test_grids():
    grids = {name: launch.grid for name, launch in one_of_each().items()}
    assert grids == {
        "hadamard_quant": 2,
        "compress_write": 2,
        "seed_tail": 3,
        "decode_update": 7,
        "expand_tail": 3,
        "scores": (3, 30, 1),
    }
    assert HadamardQuant(q_ptr=0, out_ptr=0, scale_ptr=0, num_rows=0).grid == 0
    assert DecodeUpdate(**DECODE | {"next_n": 0}, **INDICES, **PAGED, **RING).grid == 0
    empty = COMPRESS | {"num_pools": 0, "cache_ptr": 0, "dense_k_ptr": 0, "dense_scale_ptr": 0}
    assert CompressWrite(**empty).grid == 0, "empty tensors have no address"
    HadamardQuant(q_ptr=0, out_ptr=0, scale_ptr=0, num_rows=0).run()  # an empty grid asks for no driver


REFUSED = [
    (CompressWrite, COMPRESS, {"pool_size": 3}, "pool_size is 3; built are 2, 4, 8"),
    (CompressWrite, COMPRESS, {"cache_ptr": 0}, "neither cache_ptr nor dense_k_ptr"),
    (CompressWrite, COMPRESS, {"dense_k_ptr": OUT}, "go together"),
    (CompressWrite, COMPRESS, {"slot_k_ptr": K + 8}, "slot_k_ptr is .* multiple of 16"),
    (CompressWrite, COMPRESS, {"page_stride": 64 * 132 - 4}, "page_stride is 8444 bytes"),
    (CompressWrite, COMPRESS, {"page_stride": 64 * 132 + 2}, "multiple of 4"),
    (CompressWrite, COMPRESS, {"num_pages": 1 << 27}, "entries at most"),
    (CompressWrite, COMPRESS, {"score_words": 3}, "score_words is 3"),
    (CompressWrite, COMPRESS, {"k_stride_token": 132}, "k_stride_token is 132"),
    (CompressWrite, COMPRESS, {"dense_k_ptr": K, "dense_scale_ptr": SCALE}, "overlaps slot_k"),
    (SeedTail, SEED, {"ring": 3}, "ring is 3 for pools of 4"),
    (SeedTail, SEED, {"tail_ptr": TAIL + 4}, "tail_ptr"),
    (SeedTail, SEED, {"tail_stride_half": 1026}, "tail_stride_half is 1026"),
    (DecodeUpdate, {**DECODE, **INDICES, **PAGED, **RING}, {"ring": 6}, "ring is 6 for pools of 4; .* multiple"),
    (DecodeUpdate, {**DECODE, **INDICES, **PAGED, **RING}, {"positions_ptr": 0}, "positions_ptr is null"),
    (ExpandTail, EXPAND, {"topk": 2047}, "multiple of pool_size 4"),
    (ExpandTail, EXPAND, {"page_table_ptr": TABLE, "table_width": 9, "offsets_ptr": LOC}, "both given"),
    (ExpandTail, EXPAND, {"page_table_ptr": TABLE}, "table_width is 0"),
    (ExpandTail, EXPAND, {"seq_lens_ptr": 0}, "seq_lens_ptr is null"),
    (ExpandTail, EXPAND, {"ids_ptr": OUT + 64}, "overlaps ids"),
    (PoolScores, {**SCORES, "logits_ptr": LOGITS, "num_pools": 9}, {"page_size": 12}, "multiple of 8"),
    (PoolScores, {**SCORES, "logits_ptr": LOGITS, "num_pools": 9}, {"next_n": 9}, "next_n is 9"),
    (PoolScores, {**SCORES, "logits_ptr": LOGITS, "num_pools": 9}, {"next_n": 3}, "num_rows is 40; 2 requests"),
    (PoolScores, {**SCORES, "logits_ptr": LOGITS, "num_pools": 9}, {"page_stride": 64 * 132 + 8}, "multiple of 16"),
    (
        PoolScores,
        {**SCORES, "logits_ptr": LOGITS, "num_pools": 9},
        {"logits_stride_row": 11},
        "logits_stride_row is 11",
    ),
]


@pytest.mark.parametrize(("cls", "base", "change", "message"), REFUSED)
def test_what_no_launch_could_take_is_refused(cls, base, change, message):
    cls(**base)
    with pytest.raises(ArgumentError, match=message):
        cls(**base | change)


@pytest.mark.parametrize(
    ("next_n", "tile", "baked"),
    [(0, 16, (8, 2)), (1, 1, (4, 1)), (4, 4, (4, 1)), (5, 5, (4, 2)), (8, 8, (4, 2))],
)
def test_scores_take_a_kernel_by_the_tokens_of_a_step(next_n, tile, baked):
    rows = {"num_rows": next_n * 2 or 40}
    launch = PoolScores(**SCORES | rows, next_n=next_n, logits_ptr=LOGITS, num_pools=900)
    found = dict(launch.baked)
    assert (found["rows"], found["groups"]) == baked
    assert (launch.tile_rows, launch.by_tile) == (tile, next_n > 0)


# Selection.

SELECT = {**SCORES, "pool_ids_ptr": OUT, "max_seq_len": 7000, "workspace": WORK}


@pytest.mark.parametrize("next_n", [0, 2])
def test_a_selection_is_chunked_by_its_scratch(next_n):
    scratch = 4 * 1752 * 20
    rows = 64
    base = SELECT | {"num_rows": rows, "num_requests": rows // (next_n or 1), "tokens_ptr": IDS}
    params = PoolSelectParams(**base, next_n=next_n, scratch_bytes=scratch)
    scores, selects = params.launches[:-1:2], params.launches[1:-1:2]
    assert sum(launch.num_rows for launch in scores) == rows
    at = 0
    for one, other in zip(scores, selects, strict=True):
        assert one.num_rows == other.num_rows <= 20
        assert one.q_ptr == Q + at * 32 * 128
        assert one.weights_ptr == S + at * 32 * 4
        assert (one.seq_lens_ptr, other.context_lengths) == (LENGTHS + 4 * at,) * 2
        assert other.out_ptr == OUT + at * 512 * 4
        assert one.block_table_ptr == TABLE + (at // next_n * 30 * 4 if next_n else 0)
        assert one.logits_ptr == other.logits_ptr == WORK
        at += one.num_rows
    assert params.launches[-1].KERNEL == "kpool_expand"
    assert PoolSelectRunner.workspace_size(rows, 7000, next_n, scratch).size <= scratch + 256


def test_short_contexts_are_not_scored():
    params = PoolSelectParams(**SELECT | {"max_seq_len": 2051, "workspace": 0})
    assert [launch.KERNEL for launch in params.launches] == ["select"]
    assert PoolSelectRunner.workspace_size(40, 2051).size == 0
    assert PoolSelectRunner.workspace_size(40, 2052).size > 0


def test_a_selection_refuses_what_does_not_fit():
    with pytest.raises(ArgumentError, match=r"workspace has 99 bytes"):
        PoolSelectParams(**SELECT, workspace_bytes=99)
    with pytest.raises(ArgumentError, match=r"block_table has 30 pages a request, which hold 7680 tokens"):
        PoolSelectParams(**SELECT | {"max_seq_len": 7684})
    few = SELECT | {"num_rows": 64, "num_requests": 4, "next_n": 1}
    with pytest.raises(ArgumentError, match=r"block_table has 4 requests, which have 4 rows at next_n 1; .* 64 rows"):
        PoolSelectParams(**few)
    with pytest.raises(ArgumentError, match=r"block_table has 4 requests"):
        PoolSelectParams(**few | {"max_seq_len": 2000, "workspace": 0})
    assert PoolSelectParams(**few | {"num_rows": 3}).launches, "a longer table is a padded batch's"
    assert PoolSelectParams(**SELECT | {"num_rows": 0}).launches == ()


# Questions.


def test_old_sms_are_refused_with_the_reason():
    for operation in ("hadamard", "compress", "decode"):
        answer = KpoolRunner.can_implement(operation, 128, 4, "sm_80")
        assert answer.code is SupportCode.SM
        assert "e4m3 conversion of SM89" in answer.reason
        assert all(KpoolRunner.can_implement(operation, 128, 4, sm) for sm in (89, 90, "sm_100a", "sm_121"))
    for operation in ("seed_tail", "expand"):
        assert all(KpoolRunner.can_implement(operation, 128, 4, sm) for sm in variants.SMS)
    answer = KpoolRunner.can_implement("scores", 128, 4, "sm_100a", "fp8_e4m3")
    assert answer.code is SupportCode.SM
    assert "SM90's fp8 tensor cores" in answer.reason
    assert KpoolRunner.can_implement("scores", 128, 4, 90, torch.float8_e4m3fn)


def test_other_questions():
    assert KpoolRunner.can_implement("compress", 64, 4, 90).code is SupportCode.HEAD_DIM
    assert KpoolRunner.can_implement("compress", 128, 3, 90).code is SupportCode.GROUP_SIZE
    assert KpoolRunner.can_implement("compress", 128, 4, 90, "fp16").code is SupportCode.DTYPE
    assert KpoolRunner.can_implement("nothing", 128, 4, 90).code is SupportCode.OPERATION
    assert KpoolRunner.canImplement("compress", 128, 8, 90)


anything = st.one_of(
    st.none(), st.integers(), st.text(max_size=6), st.floats(), st.sampled_from(list(kpool.OPERATIONS))
)


@given(anything, anything, anything, anything, anything)
def test_a_question_never_raises(operation, head_dim, pool, sm, dtype):
    answer = KpoolRunner.can_implement(operation, head_dim, pool, sm, dtype)
    assert bool(answer) == (answer.code is SupportCode.OK)


# Tensors.


def cache(pages=5, size=64):
    return FakeTensor(pages, size, 132, dtype=U8)


def test_tensors_become_addresses_and_strides():
    k, score = FakeTensor(9, 4, 128, stride=(1024, 256, 1)), FakeTensor(9, 4, 128, dtype=F32)
    launch = CompressWrite.from_tensors(
        cache(), k, score, FakeTensor(4, 128, dtype=F32), FakeTensor(9, dtype=I32), stream=7
    )
    assert (launch.k_stride_pool, launch.k_stride_token, launch.score_words, launch.loc_words) == (1024, 256, 2, 1)
    assert (launch.page_size, launch.num_pages, launch.page_stride, launch.stream) == (64, 5, 64 * 132, 7)
    tail = FakeTensor(6, 2, 8, 128, stride=(5000, 2048, 128, 1))
    seed = SeedTail.from_tensors(tail, FakeTensor(3, 128), FakeTensor(3, 128), FakeTensor(3, dtype=I64), 4)
    assert (seed.tail_stride_block, seed.tail_stride_half, seed.ring, seed.slot_words) == (5000, 2048, 8, 2)


def test_tensors_that_do_not_fit_are_named():
    ape, loc = FakeTensor(4, 128, dtype=F32), FakeTensor(9, dtype=I64)
    k = FakeTensor(9, 4, 128)
    with pytest.raises(ArgumentError, match="slot_score has type fp16; it takes bf16 or f32"):
        CompressWrite.from_tensors(cache(), k, FakeTensor(9, 4, 128, dtype="torch.float16"), ape, loc)
    with pytest.raises(ArgumentError, match="loc has type f32"):
        CompressWrite.from_tensors(cache(), k, k, ape, FakeTensor(9, dtype=F32))
    sliced = FakeTensor(5, 64, 132, dtype=U8, stride=(64 * 140, 140, 1))
    with pytest.raises(ArgumentError, match="kv_cache has strides"):
        CompressWrite.from_tensors(sliced, k, k, ape, loc)
    with pytest.raises(ArgumentError, match="ape has shape"):
        CompressWrite.from_tensors(cache(), k, k, FakeTensor(8, 128, dtype=F32), loc)
    q = FakeTensor(4, 32, 128, dtype=FP8, stride=(9000, 256, 1))
    weights, lengths = FakeTensor(4, 32, dtype=F32), FakeTensor(4, dtype=I32)
    table, logits = FakeTensor(1, 3, dtype=I32), FakeTensor(4, 9, dtype=F32)
    with pytest.raises(ArgumentError, match="q has strides"):
        PoolScores.from_tensors(q, weights, cache(), table, lengths, logits)


def test_the_hosts_functions_refuse_before_they_launch():
    on_cpu = torch.zeros(3, 128, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="q is on cpu"):
        host.fwht128_quant_fp8(on_cpu)
    with pytest.raises(ArgumentError, match="two dimensions"):
        host.fwht128_quant_fp8(on_cpu[0])
    pools = torch.zeros(2, 4, 128, dtype=torch.bfloat16)
    ape, loc = torch.zeros(4, 128), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="both False"):
        host.kpool_compress_and_write_cache(ape, pools, pools, ape, loc, 4, write_cache=False)
    with pytest.raises(ArgumentError, match="write_mask is given with return_compressed"):
        host.kpool_compress_and_write_cache(ape, pools, pools, ape, loc, 4, write_mask=loc, return_compressed=True)
    with pytest.raises(ArgumentError, match="head_dim is 64"):
        host.kpool_compress_and_write_cache(ape, pools, pools, ape, loc, 4, head_dim=64)
    with pytest.raises(ArgumentError, match=r"slot_k has shape \[2, 4, 128\]"):
        host.kpool_compress_and_write_cache(ape, pools, pools, ape, loc, 8)
    with pytest.raises(ArgumentError, match="topk is 2047"):
        host.history_group_budget_for_topk(2047, 4)
    assert host.history_group_budget_for_topk(2048, 4) == 512
    lists = torch.zeros(2, 8, dtype=torch.int32)
    assert host.append_tail_to_topk(lists, loc, loc, 1) is lists
    with pytest.raises(ArgumentError, match=r"group_ids has shape \[2, 8\]; it takes \[rows, 4\]"):
        host.expand_pools_to_tokens(lists, lists, 16, 4)


def test_all_of_the_selections_constants_agree():
    assert kpool_scores.WIDTH == 2051
    assert kpool.POOL_SIZES == (2, 4, 8)


@pytest.mark.parametrize("name", ["compress", "seed", "decode"])
def test_copies_of_strided_tensors_live_until_the_launch(monkeypatch, name):
    """What is freed before the launch may be another's when the kernel reads it."""
    alive = []

    class Stub:
        def __init__(self, tensors):
            self.given = [weakref.ref(one) for one in tensors if isinstance(one, torch.Tensor)]

        @classmethod
        def from_tensors(cls, *tensors, **more):
            return cls((*tensors, *more.values()))

        def run(self):
            alive.extend(one() is not None for one in self.given)

    for launch in ("CompressWrite", "SeedTail", "DecodeUpdate"):
        monkeypatch.setattr(host, launch, Stub)
    strided = torch.zeros(3, 4, 128, 2, dtype=torch.bfloat16)[..., 0]
    numbers = torch.zeros(3, 4, 2, dtype=torch.int32)[..., 0]
    ape = torch.zeros(128, 4).t()
    cache, tail = torch.zeros(2, 64, 132, dtype=torch.uint8), torch.zeros(5, 2, 4, 128, dtype=torch.bfloat16)
    if name == "compress":
        mask = torch.zeros(3, 2, dtype=torch.bool)[:, 0]
        host.kpool_compress_and_write_cache(cache, strided, strided, ape, numbers[:, 0], 4, write_mask=mask)
    elif name == "seed":
        host.kpool_seed_tail_cache(tail, strided[0], strided[0], numbers[0], 4)
    else:
        host.kpool_decode_update_and_maybe_write_cache_batched(
            cache, tail, numbers, strided, strided, ape, numbers, numbers, 4
        )
    assert alive
    assert all(alive)


@pytest.mark.parametrize("pool_size", [0, -9, None])
def test_a_pool_that_is_none_is_named(pool_size):
    ids, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="pool_size is"):
        host.expand_pools_and_append_tail(ids, lengths, pool_size)
    with pytest.raises(ArgumentError, match="pool_size is"):
        host.append_tail_to_topk(ids, lengths, lengths, pool_size)
    with pytest.raises(ArgumentError, match="multiple of pool_size"):
        host.expand_pools_to_tokens(ids, ids, 16, pool_size)


@pytest.mark.parametrize("wrong", [None, "bf16"])
def test_what_are_no_params(wrong):
    with pytest.raises(ArgumentError, match=f"params is {wrong!r}; it takes PoolSelectParams"):
        PoolSelectRunner.run(wrong)
