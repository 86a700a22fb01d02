"""Packing against parameter tables, and what a launch hands to the driver."""

from __future__ import annotations

import ctypes
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_fakes import FakeDriver, write_set

from qsa_cute.aot.cubin import read_cubin
from qsa_cute.errors import ArgumentError, DriverError
from qsa_cute.runtime import Loader, Store, Wanted
from qsa_cute.runtime.launch import Packer

DECODE = Wanted("sparse_decode", 256, "bf16")
RANGES = {
    "ptr": st.integers(0, 2**64 - 1),
    "i64": st.integers(-(2**63), 2**63 - 1),
    "i32": st.integers(-(2**31), 2**31 - 1),
    "f32": st.floats(width=32, allow_nan=False),
}
CODES = {"ptr": "<Q", "i64": "<q", "i32": "<i", "f32": "<f"}


def params(**changes):
    return SimpleNamespace(**{"q_ptr": 0x7F00_0000_0000, "top_k": 2051, "stride": 1 << 40, "scale": 0.0625, **changes})


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def kernel(tmp_path, driver):
    write_set(tmp_path)
    return Loader(tmp_path, driver).kernel(DECODE)


class TestPack:
    @given(q=RANGES["ptr"], top_k=RANGES["i32"], stride=RANGES["i64"], scale=RANGES["f32"])
    def test_every_value_of_every_kind_arrives(self, tmp_path_factory, q, top_k, stride, scale):
        driver = FakeDriver()
        root = tmp_path_factory.getbasetemp() / "store"
        write_set(root)
        given_params = params(q_ptr=q, top_k=top_k, stride=stride, scale=scale)
        Loader(root, driver).kernel(DECODE).launch(given_params, 1, 0)
        assert driver.launches[0].values == vars(given_params)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"top_k": 2**31}, "parameter top_k of sparse_decode takes a value of kind i32, got 2147483648"),
            ({"top_k": 1.5}, "kind i32, got 1.5"),
            ({"q_ptr": -1}, "parameter q_ptr of sparse_decode takes a value of kind ptr, got -1"),
            ({"stride": 2**63}, "parameter stride"),
            ({"scale": None}, "kind f32, got None"),
        ],
    )
    def test_a_value_that_does_not_fit_is_named_and_nothing_is_launched(self, kernel, driver, change, says):
        with pytest.raises(ArgumentError, match=says):
            kernel.launch(params(**change), 1, 0)
        assert driver.launches == []
        kernel.launch(params(), 1, 0)

    def test_a_missing_attribute_is_named(self, kernel):
        without = params()
        del without.stride
        with pytest.raises(ArgumentError, match="parameter stride"):
            kernel.launch(without, 1, 0)


def built():
    """(set, variant) of everything that was built before the tests ran."""
    store = Store(Path(__file__).parents[2] / "artifacts")
    found = [(store.read(sm), record) for sm in store.sms() for record in store.read(sm).variants.values()]
    return [pytest.param(folder, record, id=record.name) for folder, record in found]


@pytest.mark.parametrize(("folder", "record"), built())
def test_packing_against_the_cubins_own_table(folder, record):
    cubin = read_cubin(folder.cubin(record))
    samples = {"ptr": 2**63 + 8, "i64": -(2**40), "i32": -3, "f32": 0.5}
    values = {param.name: samples[param.kind] for param in record.params}
    packer = Packer(record)
    buffer = ctypes.create_string_buffer(b"\xff" * packer.size, packer.size)
    packer.layout.pack_into(buffer, 0, *packer.values(SimpleNamespace(**values)))
    assert cubin.symbol == record.symbol
    assert len(cubin.params) == len(record.params)
    for (offset, size), param in zip(cubin.params, record.params, strict=True):
        assert struct.unpack(CODES[param.kind], buffer.raw[offset : offset + size])[0] == values[param.name]
    assert packer.size == sum(cubin.params[-1])


class TestLaunch:
    def test_what_the_driver_gets(self, kernel, driver):
        kernel.launch(params(), 132, 0xABC)
        (launch,) = driver.launches
        assert launch.function == (kernel.record.symbol, 1)
        assert (launch.grid, launch.block, launch.smem) == ((132, 1, 1), (128, 1, 1), 100_000)
        assert (launch.stream, launch.cluster, launch.early) == (0xABC, (1, 1, 1), False)

    def test_nothing_of_one_launch_stays_for_the_next(self, kernel, driver):
        kernel.launch(params(), (8, 4, 2), 1, cluster=8)
        kernel.launch(params(top_k=-1), 70_000, 2)
        first, second = driver.launches
        assert (first.grid, first.cluster, first.stream) == ((8, 4, 2), (8, 1, 1), 1)
        assert (second.grid, second.cluster, second.stream) == ((70_000, 1, 1), (1, 1, 1), 2)
        assert second.values["top_k"] == -1

    def test_a_frozen_object_is_packed_once_a_kernel(self, tmp_path, driver):
        write_set(tmp_path, variants={"a": {}, "b": {"kernel": "sparse_prefill"}})
        loader = Loader(tmp_path, driver)
        first, second = (loader.kernel((name, 256, "bf16")) for name in ("sparse_decode", "sparse_prefill"))
        given = params(packed=None)
        for kernel in (first, first, second, first):
            kernel.launch(given, 1, 0)
            assert given.packed[0] is kernel._packer
        assert [launch.values for launch in driver.launches] == [driver.launches[0].values] * 4
        image = given.packed
        first.launch(given, 1, 0)
        assert given.packed is image

    @pytest.mark.parametrize("cluster", [1, 4, (1, 3, 1)])
    def test_a_kernel_that_waits_for_its_predecessors_is_launched_early(self, tmp_path, driver, cluster):
        name = write_set(tmp_path, variants={"early": {"early_launch": True}})
        kernel = Loader(tmp_path, driver).kernel(("sparse_decode", 256, "bf16"))
        assert kernel.record.name == name
        kernel.launch(params(), (4, 12, 2), 0, cluster=cluster)
        (launch,) = driver.launches
        expected = cluster if isinstance(cluster, tuple) else (cluster, 1, 1)
        assert (launch.early, launch.cluster, launch.attributes) == (True, expected, {})

    def test_one_buffer_serves_every_launch_of_a_thread(self, kernel):
        for _ in range(5):
            kernel.launch(params(), 1, 0)
        assert len(kernel._slots) == 1

    def test_threads_do_not_share_a_buffer(self, kernel, driver):
        frozen = make_dataclass("Frozen", ["q_ptr", "top_k", "stride", "scale"], frozen=True)

        def launch(number):
            for _ in range(200):
                kernel.launch(frozen(number, number, number, float(number)), number, number)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(launch, range(1, 9)))
        assert len(driver.launches) == 1600
        for launched in driver.launches:
            assert set(launched.values.values()) == {launched.stream} == {launched.grid[0]}

    def test_a_refused_launch_says_what_was_asked(self, kernel, driver):
        driver.status = 1
        with pytest.raises(DriverError, match=r"sm90a \(grid 9, cluster 16, 128 threads, 100000 bytes\).*CUDA_ERROR_1"):
            kernel.launch(params(), 9, 0, cluster=16)

    def test_a_kernel_of_another_device_runs_in_its_context(self, tmp_path, driver):
        write_set(tmp_path)
        kernel = Loader(tmp_path, driver).kernel(DECODE, device=1)
        kernel.launch(params(), 1, 5)
        assert driver.launches[0].context == 101
        assert driver.launches[0].function[1] == 101
        assert driver.current_context() == 1
