"""Dispatch of the attention runners: what they can do, what they ask of the loader, what they launch."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from attention_params import decode, prefill
from hypothesis import given
from hypothesis import strategies as st
from runtime_fakes import FakeDriver, write_set

from qsa_cute import Support, SupportCode
from qsa_cute.errors import ArgumentError, ArtifactError, CaptureError, UnsupportedError
from qsa_cute.runners import SparseDecodeRunner, SparsePrefillRunner, dispatch, sparse_decode, sparse_prefill
from qsa_cute.runtime import Loader
from qsa_cute.variants import HALF_DTYPES, SMS

RUNNERS = [SparsePrefillRunner, SparseDecodeRunner]
SHAPE = {"num_q_heads": 24, "num_kv_heads": 2, "head_dim": 256, "sm_version": "sm_90a", "dtype": "bf16"}


def ask(runner, **changes) -> Support:
    asked = SHAPE | changes
    if runner is SparseDecodeRunner:
        asked = {"pool_head_dim": 384, **asked}
    return runner.can_implement(**asked)


class Hostile:
    """Raises at whatever is asked of it."""

    def __getattribute__(self, name):
        if name in ("__class__",):
            return object.__getattribute__(self, name)
        raise RuntimeError(name)

    def __repr__(self):
        raise RuntimeError

    __str__ = __hash__ = __index__ = __int__ = __float__ = __bool__ = __len__ = __repr__

    def __eq__(self, other):
        raise RuntimeError


class Torchlike:
    def __str__(self):
        return "torch.bfloat16"


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 40),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.sampled_from([10**5000, -(10**5000), [], {}, object(), math, 256, 128, "sm_90a", "bf16", 384]),
)


@pytest.mark.parametrize("runner", RUNNERS)
class TestCanImplement:
    @given(values=st.lists(anything, min_size=6, max_size=6))
    def test_never_raises(self, runner, values) -> None:
        found = runner.can_implement(*values[: 5 + (runner is SparseDecodeRunner)])
        assert isinstance(found, Support)
        assert bool(found) is not bool(found.reason)

    @pytest.mark.parametrize("place", range(6))
    def test_never_raises_for_an_object_that_always_does(self, runner, place) -> None:
        values = [24, 2, 256, *([384] if runner is SparseDecodeRunner else []), 90, "bf16"]
        values[min(place, len(values) - 1)] = Hostile()
        assert not runner.can_implement(*values)

    @given(
        kv_heads=st.integers(1, 64),
        group=st.integers(1, 16),
        head_dim=st.sampled_from([128, 256]),
        sm=st.sampled_from(SMS),
        dtype=st.sampled_from(HALF_DTYPES),
    )
    def test_covers_every_group_on_every_target(self, runner, kv_heads, group, head_dim, sm, dtype) -> None:
        shape = {"num_q_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": head_dim}
        assert ask(runner, **shape, sm_version=sm, dtype=dtype)

    @pytest.mark.parametrize(
        "sm",
        [90, "90", "sm_90", "sm_90a", "sm90a", "9.0", "12.1", (9, 0), (12, 1), 80, 86, 88, 89, 100, 103, 120, 121],
    )
    def test_names_of_an_sm(self, runner, sm) -> None:
        assert ask(runner, sm_version=sm)

    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "bfloat16", "half", "torch.float16", Torchlike()])
    def test_names_of_a_type(self, runner, dtype) -> None:
        assert ask(runner, dtype=dtype)

    @pytest.mark.parametrize(
        ("changes", "code", "says"),
        [
            ({"num_q_heads": 25}, SupportCode.HEADS, "25 query heads over 2 KV heads"),
            ({"num_q_heads": 0}, SupportCode.HEADS, "0 query heads"),
            ({"num_kv_heads": -2}, SupportCode.HEADS, "-2 KV heads"),
            ({"num_kv_heads": 2.0}, SupportCode.HEADS, "2.0 KV heads"),
            ({"num_q_heads": 34}, SupportCode.GROUP_SIZE, "17 query heads a KV head"),
            ({"head_dim": 192}, SupportCode.HEAD_DIM, "head dim 192; built are 256, 128"),
            ({"sm_version": 75}, SupportCode.SM, "SM 75; targets of the build are sm_80"),
            ({"sm_version": "hopper"}, SupportCode.SM, "'hopper'"),
            ({"sm_version": "hopper"}, SupportCode.SM, """; an SM is given as 90, "90", "9.0", (9, 0) or "sm_90a\""""),
            ({"sm_version": (9, 0, 0)}, SupportCode.SM, "(9, 0, 0)"),
            ({"sm_version": ("9", "0")}, SupportCode.SM, "('9', '0')"),
            ({"sm_version": (7, 5)}, SupportCode.SM, "sm_121a"),
            ({"sm_version": 9.0}, SupportCode.SM, "9.0"),
            ({"dtype": "fp8_e4m3"}, SupportCode.DTYPE, "'fp8_e4m3'; built for sm_90a are bf16, fp16"),
            ({"dtype": 16}, SupportCode.DTYPE, "type 16"),
        ],
    )
    def test_says_why_not(self, runner, changes, code, says) -> None:
        found = ask(runner, **changes)
        assert not found
        assert found.code is code
        assert says in found.reason

    def test_has_the_hosts_name(self, runner) -> None:
        assert runner.canImplement is runner.can_implement

    def test_there_are_no_instances(self, runner) -> None:
        with pytest.raises(ArgumentError, match="static methods only"):
            runner()


class TestIndexKind:
    @pytest.mark.parametrize("kind", ["padded", "counted", "blocks"])
    def test_sm90_takes_all(self, kind) -> None:
        assert ask(SparsePrefillRunner, index_kind=kind, sm_version=(9, 0))

    @pytest.mark.parametrize("kind", ["counted", "blocks"])
    @pytest.mark.parametrize("sm", ["sm_80", 100, (12, 0)])
    def test_the_others_take_padded_lists(self, kind, sm) -> None:
        """As `run` does, which raises UnsupportedError there."""
        assert ask(SparsePrefillRunner, index_kind="padded", sm_version=sm)
        found = ask(SparsePrefillRunner, index_kind=kind, sm_version=sm)
        assert found.code is SupportCode.SM
        assert f"index_kind {kind!r} on SM" in found.reason
        assert "is built for sm_90a; use 'padded' lists" in found.reason

    @pytest.mark.parametrize("kind", ["list", None, 3, [], b"padded"])
    def test_what_is_none(self, kind) -> None:
        found = ask(SparsePrefillRunner, index_kind=kind)
        assert found.code is SupportCode.INDEX_KIND
        assert "it takes 'padded', 'counted', 'blocks'" in found.reason
        assert not ask(SparsePrefillRunner, index_kind=Hostile())


@pytest.mark.parametrize("wide", [255, 128, 260, -8, None, "384", 2**40])
def test_a_pool_that_does_not_fit(wide) -> None:
    found = ask(SparseDecodeRunner, pool_head_dim=wide)
    assert found.code is SupportCode.POOL_HEAD_DIM


def test_the_hosts_constants() -> None:
    assert SparseDecodeRunner.max_splits == SparseDecodeRunner.kMaxSplits == 8
    assert SparseDecodeRunner.partial_rows == SparseDecodeRunner.kPartialRows == 16


class FakeKernel:
    def __init__(self, log, wanted) -> None:
        self.log, self.wanted = log, wanted

    def launch(self, params, grid, stream, cluster=1) -> None:
        self.log.append(SimpleNamespace(wanted=self.wanted, params=params, grid=grid, stream=stream, cluster=cluster))

    def zero(self, address, words, stream) -> None:
        self.log.append(("zero", address, words, stream))


class FakeLoader:
    """Every kernel is there; `log` has what was launched, in order."""

    def __init__(self, capability=(9, 0)) -> None:
        self.log = []
        self.asked = []
        self.driver = FakeDriver(capability)

    def encode_map(self, device, *asked):
        return self.driver.encode_map(*asked)

    def peek(self, wanted, device=-1, stream=0):
        self.asked.append((wanted, device, stream))
        return FakeKernel(self.log, wanted)


@pytest.fixture
def use(monkeypatch):
    def install(loader):
        monkeypatch.setattr(dispatch, "_capabilities", {})
        for module in (sparse_prefill, sparse_decode):
            monkeypatch.setattr(module, "default_loader", lambda: loader)
        return loader

    return install


class TestRun:
    def test_prefill(self, use) -> None:
        loader, params = use(FakeLoader()), prefill(stream=7, device=1)
        SparsePrefillRunner.run(Torchlike(), params)
        (launch,) = loader.log
        assert launch.wanted == ("sparse_prefill", 256, "bf16", ())
        assert (launch.grid, launch.stream, launch.cluster) == (2 * 64 * 2, 7, 1)
        assert launch.params is params
        assert loader.asked[0][1:] == (1, 7)

    @pytest.mark.parametrize(("batch", "ranks"), [(1, 16), (4, 9), (16, 3), (32, 2), (64, 1), (128, 1)])
    def test_decode_takes_boxes_and_clusters_on_sm90(self, use, batch, ranks) -> None:
        none = dict.fromkeys(("partial_o", "partial_stats", "split_counters"), 0)
        loader, params = use(FakeLoader()), decode(batch_size=batch, stream=7, **none)
        SparseDecodeRunner.run("fp16", params)
        (launch,) = loader.log
        assert launch.wanted == ("sparse_decode_tma", 256, "fp16", ())
        assert (launch.grid, launch.cluster, launch.stream) == ((batch, ranks, 2), (1, ranks, 1), 7)

    def test_a_pool_has_its_tensor_map_encoded_once(self, use) -> None:
        loader, params = use(FakeLoader()), decode()
        for one in (params, params, decode()):
            SparseDecodeRunner.run("bf16", one)
        first, again, other = (launch.params for launch in loader.log)
        assert first is again is not other
        for launched in (first, other):
            assert [getattr(launched, f"kv_map_{i}") for i in range(16)] == list(range(-1, 15))
            assert launched.packed is None
        sizes, strides = (64, 128, 4, 2, 64), (2 * 768, 128, 2 * 384, 2 * 128 * 768)
        box = (64, 4, 4, 1, 1)
        encoded = [call for call in loader.driver.calls if call[0] == "encode_map"]
        assert encoded == [("encode_map", "bf16", params.kv_pool_ptr, sizes, strides, box)]

    @pytest.mark.parametrize("pool", [{"page_stride": 0}, {"num_flat_pages": 0}])
    def test_a_pool_without_a_tensor_map_goes_through_the_workspace(self, use, pool) -> None:
        loader = use(FakeLoader())
        SparseDecodeRunner.run("bf16", decode(**pool))
        assert loader.log[-1].wanted.kernel == "sparse_decode"
        assert not loader.driver.count("encode_map")

    @pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
    def test_decode_takes_the_workspace_elsewhere(self, use, capability) -> None:
        loader, params = use(FakeLoader(capability)), decode(stream=7)
        for _ in range(2):
            SparseDecodeRunner.run("bf16", params)
        zero, launch = loader.log[:2]
        assert zero == ("zero", params.split_counters, 8, 7)
        assert launch.wanted == ("sparse_decode", 256, "bf16", (("max_splits", 8),))
        assert (launch.grid, launch.cluster, launch.params.num_splits) == ((4, 7, 2), 1, 7)
        assert loader.log[3].params is launch.params

    def test_an_algorithm_can_be_named(self, use) -> None:
        loader = use(FakeLoader())
        SparseDecodeRunner.run("bf16", decode(algorithm="split_kv", num_splits=3))
        assert loader.log[1].wanted.kernel == "sparse_decode"
        assert loader.log[1].grid == (4, 3, 2)

    def test_one_split_needs_no_counters(self, use) -> None:
        loader = use(FakeLoader())
        none = dict.fromkeys(("partial_o", "partial_stats", "split_counters"), 0)
        SparseDecodeRunner.run("bf16", decode(algorithm="split_kv", num_splits=1, **none))
        (launch,) = loader.log
        assert launch.grid == (4, 1, 2)

    def test_an_empty_batch_launches_nothing(self, use) -> None:
        loader = use(FakeLoader())
        SparsePrefillRunner.run("bf16", prefill(batch_size=0))
        SparsePrefillRunner.run("bf16", prefill(seq_len=0))
        SparseDecodeRunner.run("bf16", decode(batch_size=0))
        assert not loader.log

    @pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
    def test_tensors_of_another_type(self, use, capability) -> None:
        loader = use(FakeLoader(capability))
        for run, params, fits in (
            (SparsePrefillRunner.run, prefill(dtype="fp16"), prefill(dtype="bf16")),
            (SparseDecodeRunner.run, decode(dtype="torch.float16"), decode(dtype="bfloat16")),
        ):
            with pytest.raises(ArgumentError, match="params are of fp16 tensors and take 'fp16'"):
                run(Torchlike(), params)
            assert not loader.log
            for dtype in ("bf16", Torchlike()):
                run(dtype, fits)
            assert loader.log
            loader.log.clear()

    @pytest.mark.parametrize("wrong", [None, "bf16", 0, {}, [1] * 99])
    def test_what_are_no_params(self, use, wrong) -> None:
        use(FakeLoader())
        with pytest.raises(ArgumentError, match=r"params is .*; it takes SparsePrefillParams"):
            SparsePrefillRunner.run("bf16", wrong)
        with pytest.raises(ArgumentError, match=r"params is .*; it takes SparseDecodeParams"):
            SparseDecodeRunner.run("bf16", wrong)

    def test_swapped_arguments(self, use) -> None:
        use(FakeLoader())
        with pytest.raises(ArgumentError, match="params is 'bf16'; it takes SparseDecodeParams"):
            SparseDecodeRunner.run(decode(), "bf16")
        with pytest.raises(ArgumentError, match=r"params is SparseDecodeParams\(.*; it takes SparsePrefillParams"):
            SparsePrefillRunner.run("bf16", decode())

    @pytest.mark.parametrize("dtype", ["fp8_e4m3", "f32", None, [], {}])
    def test_an_unknown_type(self, use, dtype) -> None:
        use(FakeLoader())
        with pytest.raises(UnsupportedError, match="no sparse_prefill for type"):
            SparsePrefillRunner.run(dtype, prefill())
        with pytest.raises(UnsupportedError, match="no sparse_decode"):
            SparseDecodeRunner.run(dtype, decode())


def store(root, *built: tuple[str, int]):
    baked = {"sparse_decode": {"max_splits": 8}}
    variants = {
        f"qsa_{kernel}_d{dim}_bf16_sm90a": {"kernel": kernel, "head_dim": dim, "baked": baked.get(kernel, {})}
        for kernel, dim in built
    }
    write_set(root, variants=variants)


ALL_DECODE = [(kernel, dim) for kernel in ("sparse_decode", "sparse_decode_tma") for dim in (256, 128)]


class TestPreflight:
    def test_loads_what_run_may_pick_once(self, use, tmp_path) -> None:
        store(tmp_path, *ALL_DECODE)
        loader = use(Loader(tmp_path, FakeDriver()))
        for _ in range(2):
            SparseDecodeRunner.preflight("bf16")
        assert loader.driver.count("load_library") == 4

    def test_loads_one_head_dim(self, use, tmp_path) -> None:
        store(tmp_path, *ALL_DECODE)
        loader = use(Loader(tmp_path, FakeDriver()))
        SparseDecodeRunner.preflight("bf16", head_dim=128)
        assert loader.driver.count("load_library") == 2

    def test_a_store_for_one_head_dim_will_do(self, use, tmp_path) -> None:
        store(tmp_path, ("sparse_prefill", 256))
        loader = use(Loader(tmp_path, FakeDriver()))
        SparsePrefillRunner.preflight("bf16")
        assert loader.driver.count("load_library") == 1
        with pytest.raises(ArtifactError, match="no artifact for sparse_prefill d128 bf16"):
            SparsePrefillRunner.preflight("bf16", head_dim=128)

    def test_an_altered_artifact_is_not_passed_over(self, use, tmp_path) -> None:
        store(tmp_path, ("sparse_prefill", 256), ("sparse_prefill", 128))
        (tmp_path / "sm_90a" / "qsa_sparse_prefill_d128_bf16_sm90a.cubin").write_bytes(b"cut")
        use(Loader(tmp_path, FakeDriver()))
        with pytest.raises(ArtifactError, match="3 bytes where its manifest says"):
            SparsePrefillRunner.preflight("bf16")

    def test_none_at_all(self, use, tmp_path) -> None:
        store(tmp_path, ("sparse_prefill", 256))
        use(Loader(tmp_path, FakeDriver()))
        with pytest.raises(ArtifactError, match="no artifact for sparse_decode"):
            SparseDecodeRunner.preflight("bf16")

    def test_under_capture_and_again_after(self, use, tmp_path) -> None:
        store(tmp_path, ("sparse_prefill", 256))
        driver = FakeDriver()
        use(Loader(tmp_path, driver))
        driver.capturing.add(5)
        with pytest.raises(CaptureError, match="preflight"):
            SparsePrefillRunner.preflight("bf16", stream=5)
        with pytest.raises(CaptureError, match="preflight"):
            SparsePrefillRunner.run("bf16", prefill(stream=5))
        driver.capturing.clear()
        SparsePrefillRunner.preflight("bf16", stream=5)
        driver.capturing.add(5)
        SparsePrefillRunner.preflight("bf16", stream=5)
