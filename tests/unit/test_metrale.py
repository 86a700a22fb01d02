"""Metrale's host functions without a GPU: signatures, bad arguments, nothing to do, what a launch is given, and the
numbers that the host makes for the kernels (angles, divisors)."""

from __future__ import annotations

import inspect
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qsa_cute.errors import ArgumentError, UnsupportedError
from qsa_cute.hosts import metrale as host
from qsa_cute.kernels.metrale import vectors
from qsa_cute.runners import indexer_launch
from qsa_cute.runners import metrale as runners
from qsa_cute.support import SupportCode

# The page's launchers after `gpu` and `kernel`.
PAGE = {
    "qsa_block_pool": "raw_keys k_norm_w block_keys first_block n_new ratio hd rot theta eps stream",
    "qsa_qprep": "q_in q_norm_w q_out n_heads hd rot pos theta eps stream",
    "qsa_score": "q block_keys scores n_blocks n_heads hd stream",
    "qsa_gather": "k_cache v_cache block_table sel k_out v_out n_sel block_size nkv hd stream",
    "qsa_qprep_rows": "qk q_norm_w q_out rows first_pos qkw n_heads hd rot theta eps stream",
    "qsa_score_rows_tc": "q block_keys scores rows n_blocks_max first_pos score_stride ratio stream",
    "qsa_score_rows": "q block_keys scores rows n_blocks_max first_pos score_stride ratio n_heads hd stream",
    "qsa_prefill_attn": (
        "q k_cache v_cache block_table lists attn_out rows first_pos topk ratio block_size nq nkv hd inv_sqrt_d stream"
    ),
}
GIB = 1 << 30
GOOD = {
    "qsa_block_pool": (1 * GIB, 2 * GIB, 3 * GIB, 5, 7, 4, 128, 64, 1e7, 1e-6, 0),
    "qsa_qprep": (1 * GIB, 2 * GIB, 3 * GIB, 4, 128, 64, 9, 1e7, 1e-6, 0),
    "qsa_score": (1 * GIB, 2 * GIB, 3 * GIB, 1000, 4, 128, 0),
    "qsa_gather": (1 * GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB, 6 * GIB, 2051, 16, 2, 256, 0),
    "qsa_qprep_rows": (1 * GIB, 2 * GIB, 3 * GIB, 33, 9, 640, 4, 128, 64, 1e7, 1e-6, 0),
    "qsa_score_rows_tc": (1 * GIB, 2 * GIB, 3 * GIB, 33, 1000, 4000, 1024, 4, 0),
    "qsa_score_rows": (1 * GIB, 2 * GIB, 3 * GIB, 33, 1000, 4000, 1024, 4, 4, 128, 0),
    "qsa_prefill_attn": (
        *(1 * GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB, 6 * GIB),
        *(33, 4000, 512, 4, 16, 24, 2, 256, 0.0625, 0),
    ),
}
POINTERS = "raw_keys k_norm_w block_keys q_in q_norm_w q_out q scores qk k_cache v_cache block_table sel k_out v_out"
POINTERS = [*POINTERS.split(), "lists", "attn_out"]
COUNTS = {
    "qsa_block_pool": ("n_new",),
    "qsa_qprep": ("n_heads",),
    "qsa_score": ("n_blocks",),
    "qsa_gather": ("n_sel",),
    "qsa_qprep_rows": ("rows", "n_heads"),
    "qsa_score_rows_tc": ("rows", "n_blocks_max"),
    "qsa_score_rows": ("rows", "n_blocks_max"),
    "qsa_prefill_attn": ("rows",),
}
EACH = pytest.mark.parametrize("name", PAGE)


class Launches(list):
    """Stands for the loader and its kernels: what was asked for and what was launched."""

    def peek(self, wanted, device, stream):
        return SimpleNamespace(launch=lambda params, grid, stream, **more: self.append((wanted, params, grid, more)))


@pytest.fixture
def launches(monkeypatch) -> Launches:
    made = Launches()
    for module in (runners, indexer_launch):
        monkeypatch.setattr(module, "default_loader", lambda: made)
    monkeypatch.setattr(runners.dispatch, "capability", lambda loader, device: (9, 0) if device == 1 else (12, 0))
    return made


def arguments(name: str, **changes: object) -> dict[str, object]:
    return dict(zip(PAGE[name].split(), GOOD[name], strict=True)) | changes


def call(name: str, **changes: object) -> None:
    getattr(host, name)(**arguments(name, **changes))


@EACH
def test_the_arguments_are_the_pages(name):
    parameters = inspect.signature(getattr(host, name)).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == PAGE[name].split()
    assert [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY] == ["dtype", "device"]


@EACH
def test_a_good_call_launches_once(name, launches):
    getattr(host, name)(*GOOD[name])
    ((wanted, params, grid, _),) = launches
    assert wanted.dtype == "bf16"
    assert math.prod(grid if isinstance(grid, tuple) else (grid,)) > 0
    assert params.device == -1
    call(name, dtype=torch.float16, device=1, stream=77)
    wanted, params, _, _ = launches[1]
    assert wanted.dtype == ("bf16" if name == "qsa_gather" else "fp16")
    assert (params.device, params.stream) == (1, 77)


@EACH
def test_nothing_to_do_launches_nothing(name, launches):
    for count in COUNTS[name]:
        nulls = {pointer: 0 for pointer in POINTERS if pointer in PAGE[name].split()}
        call(name, **nulls, **{count: 0})
    assert not launches


@EACH
def test_a_null_or_misaligned_address_is_named(name, launches):
    for pointer in POINTERS:
        if pointer in PAGE[name].split():
            shown = {"qk": "q_in"}.get(pointer, pointer)
            for bad in (0, -8, 2**64, 1.5, "x", None, GIB + 2):
                with pytest.raises(ArgumentError, match=rf"^{shown}\b"):
                    call(name, **{pointer: bad})
    assert not launches


BAD = [
    ("qsa_block_pool", {"n_new": -1}, "n_new"),
    ("qsa_block_pool", {"n_new": True}, "n_new"),
    ("qsa_block_pool", {"ratio": 0}, "ratio"),
    ("qsa_block_pool", {"first_block": -1}, "first_block"),
    ("qsa_block_pool", {"first_block": 2**31 - 1}, "position"),
    ("qsa_block_pool", {"first_block": 2**29 - 6}, "position"),
    ("qsa_block_pool", {"hd": 126}, "hd"),
    ("qsa_block_pool", {"hd": 0}, "hd"),
    ("qsa_block_pool", {"hd": 1028}, "hd"),
    ("qsa_block_pool", {"rot": 63}, "rot"),
    ("qsa_block_pool", {"rot": 130}, "rot"),
    ("qsa_block_pool", {"rot": -2}, "rot"),
    ("qsa_block_pool", {"theta": 0.5}, "theta"),
    ("qsa_block_pool", {"theta": float("nan")}, "theta"),
    ("qsa_block_pool", {"theta": 1e300}, "theta"),
    ("qsa_block_pool", {"eps": -1e-6}, "eps"),
    ("qsa_block_pool", {"eps": "small"}, "eps"),
    ("qsa_block_pool", {"block_keys": GIB + 5 * 4 * 256}, "overlaps"),
    ("qsa_block_pool", {"stream": -1}, "stream"),
    ("qsa_block_pool", {"device": -2}, "device"),
    ("qsa_qprep", {"pos": -1}, "first_pos"),
    ("qsa_qprep", {"pos": 2**31 - 1}, "first_pos"),
    ("qsa_qprep", {"q_out": GIB}, "overlaps"),
    ("qsa_qprep", {"n_heads": -1}, "n_heads"),
    ("qsa_qprep_rows", {"qkw": 508}, "qkw"),
    ("qsa_qprep_rows", {"qkw": 642}, "qkw"),
    ("qsa_qprep_rows", {"rows": 2**31}, "rows"),
    ("qsa_qprep_rows", {"rows": 2**30, "first_pos": 0}, "rows x n_heads"),
    ("qsa_score", {"n_blocks": -1}, "n_blocks"),
    ("qsa_score", {"n_blocks": 2**31 - 1}, "n_blocks"),
    ("qsa_score", {"n_heads": 0}, "n_heads"),
    ("qsa_score", {"hd": 132}, "hd"),
    ("qsa_score", {"scores": 2 * GIB + 4}, "overlaps"),
    ("qsa_gather", {"n_sel": -1}, "n_sel"),
    ("qsa_gather", {"n_sel": 2**31 - 1}, "n_sel"),
    ("qsa_gather", {"block_size": 0}, "block_size"),
    ("qsa_gather", {"nkv": 0}, "nkv"),
    ("qsa_gather", {"nkv": 1, "hd": 4}, "hd"),
    ("qsa_gather", {"k_out": GIB}, "overlaps"),
    ("qsa_gather", {"v_out": 5 * GIB + 1024}, "overlaps"),
    ("qsa_score_rows", {"score_stride": 999}, "score_stride"),
    ("qsa_score_rows", {"ratio": 0}, "ratio"),
    ("qsa_score_rows", {"rows": -1}, "rows"),
    ("qsa_score_rows", {"first_pos": 2**31 - 1}, "first_pos"),
    ("qsa_score_rows", {"rows": 2**30, "n_blocks_max": 2**30, "score_stride": 2**30, "first_pos": 0}, "tiles"),
    ("qsa_score_rows", {"scores": GIB + 4}, "overlaps"),
    ("qsa_score_rows", {"n_heads": 0}, "n_heads"),
    ("qsa_score_rows_tc", {"score_stride": 999}, "score_stride"),
    ("qsa_score_rows_tc", {"n_blocks_max": -5}, "n_blocks_max"),
    ("qsa_score_rows_tc", {"scores": 2 * GIB}, "overlaps"),
    ("qsa_prefill_attn", {"nq": 25}, "num_q_heads"),
    ("qsa_prefill_attn", {"nq": 34}, "num_q_heads"),
    ("qsa_prefill_attn", {"hd": 192}, "head_dim"),
    ("qsa_prefill_attn", {"topk": -1}, "topk"),
    ("qsa_prefill_attn", {"topk": 2**30}, "topk"),
    ("qsa_prefill_attn", {"ratio": 0}, "ratio"),
    ("qsa_prefill_attn", {"block_size": -16}, "block_size"),
    ("qsa_prefill_attn", {"inv_sqrt_d": float("inf")}, "inv_sqrt_d"),
    ("qsa_prefill_attn", {"attn_out": GIB}, "overlaps"),
    ("qsa_prefill_attn", {"attn_out": 5 * GIB}, "overlaps"),
    ("qsa_prefill_attn", {"rows": 2**30, "first_pos": 0, "nkv": 24}, "rows x nkv"),
]


@pytest.mark.parametrize(("name", "changes", "named"), BAD)
def test_a_bad_argument_is_named_and_nothing_is_launched(name, changes, named, launches):
    with pytest.raises(ArgumentError, match=named):
        call(name, **changes)
    assert not launches


@EACH
def test_an_unknown_type_is_refused(name, launches):
    for dtype in ("fp8_e4m3", torch.float32, None, []):
        with pytest.raises(UnsupportedError, match="built are"):
            call(name, dtype=dtype)
    assert not launches


def test_scores_take_the_kernel_of_the_device(launches):
    for device in (0, 1):
        call("qsa_score_rows_tc", rows=100, device=device)
    (mma, *_), (wgmma, *_) = launches
    assert (mma.kernel, wgmma.kernel) == ("metrale_score_rows_tc", "metrale_score_rows_tc_wgmma")
    assert [grid[0] for _, _, grid, _ in launches] == [4, 2]
    with pytest.raises(ArgumentError, match="algorithm"):
        runners.ScoreRowsTc(**arguments("qsa_score_rows_tc"), algorithm="cuda")


def test_an_index_is_an_address(launches):
    class Pointer:
        def __index__(self):
            return GIB

    call("qsa_score", q=Pointer())
    assert launches[0][1].q == GIB


# What the host makes for the kernels.


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_divisor_divides(divisor, number):
    magic, shift = runners.divisor(divisor)
    assert number * magic < 2**63, "an Int64 product"
    assert number * magic >> shift == number // divisor


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 16, 784, 2**30, 2**31 - 1])
def test_a_divisor_divides_at_its_multiples(divisor):
    magic, shift = runners.divisor(divisor)
    for multiple in {0, 1, 2, (2**31 - 1) // divisor}:
        for number in (multiple * divisor - 1, multiple * divisor, multiple * divisor + 1):
            if 0 <= number < 2**31:
                assert number * magic >> shift == number // divisor


def turn(theta: float, rot: int, pair: int, position: int) -> float:
    """The fraction of a turn that `kernels/metrale/vectors.py` makes, step by step, in its own integers."""
    step, power, left, mask = runners.rope_step(theta, rot) % 2**64, 2**64 - 1, pair, 2**64 - 1
    while left:
        if left % 2:
            power = power * step >> 64
        step, left = step * step >> 64, left // 2
    return ((power * 0x28BE60DB9391054A >> 64) * position & mask) / 2**64


@pytest.mark.parametrize(("theta", "rot"), [(1e7, 64), (1e4, 128), (5e5, 1024), (1.0, 6), (1e30, 64)])
@pytest.mark.parametrize("position", [0, 1, 4095, 262143, 1_048_575, 2**31 - 1])
def test_angles_at_any_position(theta, rot, position):
    for pair in {0, 1, 2, rot // 4, rot // 2 - 1}:
        exact = Fraction(theta) if theta == 1 else None
        frequency = 1.0 if exact else float(torch.tensor(theta)) ** (-2 * pair / rot)
        turns = Fraction(frequency) * position / Fraction(math.tau)
        off = abs(turn(theta, rot, pair, position) - float(turns % 1))
        # math.tau and the power are doubles themselves: 2^-52 of the whole turns.
        assert min(off, 1 - off) < 1e-9 + float(turns) * 2e-15


def test_a_vector_without_rotation_has_no_step():
    assert runners.rope_step(1e7, 0) == 0
    assert runners.rope_step(1.0, 64) == -1, "all but one turn in 2^64"


# Beforehand.


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({}, SupportCode.OK),
        ({"nq": 12, "nkv": 1, "hd": 128, "sm_version": "sm_120a"}, SupportCode.OK),
        ({"n_heads": 8, "index_hd": 256, "tensor_cores": False}, SupportCode.OK),
        ({"n_heads": 8}, SupportCode.HEAD_DIM),
        ({"index_hd": 100}, SupportCode.HEAD_DIM),
        ({"index_hd": None}, SupportCode.HEAD_DIM),
        ({"n_heads": 0}, SupportCode.HEADS),
        ({"nq": 17}, SupportCode.HEADS),
        ({"nq": 34}, SupportCode.GROUP_SIZE),
        ({"hd": 64}, SupportCode.HEAD_DIM),
        ({"sm_version": 75}, SupportCode.SM),
        ({"dtype": "fp8_e4m3"}, SupportCode.DTYPE),
    ],
)
def test_can_implement(asked, code):
    found = host.can_implement(**{"nq": 24, "nkv": 2, "hd": 256, "sm_version": 90, "dtype": "bf16"} | asked)
    assert found.code is code
    assert bool(found.reason) is (code is not SupportCode.OK)


def test_preflight_loads_every_kernel(monkeypatch):
    class Loader(list):
        def kernel(self, wanted, device, stream):
            self.append(wanted)

        def missing_reason(self, wanted, device):
            return None

    loader = Loader()
    monkeypatch.setattr(runners, "default_loader", lambda: loader)
    for capability, scores in (((9, 0), "metrale_score_rows_tc_wgmma"), ((8, 9), "metrale_score_rows_tc")):
        monkeypatch.setattr(runners.dispatch, "capability", lambda loader, device, found=capability: found)
        loader.clear()
        host.preflight("fp16", device=0)
        rest = ["metrale_gather", *["metrale_prefill_attn"] * 2]
        assert [one.kernel for one in loader] == [*runners.KERNELS, scores, *rest]
    assert {one.dtype for one in loader if one.kernel != "metrale_gather"} == {"fp16"}
    with pytest.raises(ArgumentError, match="static"):
        runners.MetraleRunner()


def test_a_question_of_any_number_never_raises():
    assert not host.can_implement(24, 2, 256, 90, "bf16", n_heads=10**5000)


@given(st.integers(1, 256).map(lambda n: 4 * n), st.data())
def test_a_norm_has_the_shared_memory_that_its_kernel_lays_out(hd, data) -> None:
    rot = 2 * data.draw(st.integers(0, hd // 2))
    found = runners.norm_launch(10, hd, rot)
    assert found["smem"] == vectors.frequency_bytes(rot) + vectors.WARPS * hd * 4
    assert found["smem"] <= vectors.VectorNorm(128, "bf16").smem_bytes
    assert found["grid"] == -(-10 // vectors.WARPS)
