"""The loader against a fake driver: once per context, safe to retry, never under capture."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from runtime_fakes import PARAMS, FakeDriver, write_set

from qsa_cute.errors import ArgumentError, ArtifactError, CaptureError, DriverError
from qsa_cute.runtime import Loader, Wanted
from qsa_cute.runtime.launch import ForeignKernel

DECODE = Wanted("sparse_decode", 256, "bf16")
MEND = "python build_cutedsl.py build --gpu-arch sm_90a"


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def loader(tmp_path, driver):
    write_set(tmp_path)
    return Loader(tmp_path, driver)


class TestOnce:
    def test_eight_threads_load_once(self, loader, driver):
        barrier = threading.Barrier(8)

        def load(_):
            barrier.wait()
            return loader.kernel(DECODE)

        with ThreadPoolExecutor(8) as pool:
            kernels = list(pool.map(load, range(8)))
        assert len(set(kernels)) == 1
        assert driver.count("load_library") == driver.count("get_function") == 1

    def test_peek_loads_and_then_finds(self, loader, driver):
        kernel = loader.peek(DECODE)
        assert loader.peek(DECODE) is kernel
        assert loader.kernel(("sparse_decode", 256, "bf16")) is kernel
        assert driver.count("load_library") == 1

    def test_each_context_has_its_own_function_of_one_library(self, loader, driver):
        first = loader.kernel(DECODE)
        driver.set_current(2)
        second = loader.kernel(DECODE)
        assert first is not second
        assert [call[2] for call in driver.calls if call[0] == "get_function"] == [1, 2]
        assert driver.count("load_library") == driver.count("allow_smem") == 1

    def test_each_device_has_its_attributes_set(self, loader, driver):
        loader.kernel(DECODE)
        loader.kernel(DECODE, device=1)
        assert [call for call in driver.calls if call[0] == "allow_smem"] == [
            ("allow_smem", 0, 100_000),
            ("allow_smem", 1, 100_000),
        ]
        assert driver.count("allow_large_clusters") == 2

    def test_little_shared_memory_needs_no_attribute(self, tmp_path, driver):
        write_set(tmp_path, variants={"small": {"smem_bytes": 48 * 1024}})
        Loader(tmp_path, driver).kernel(DECODE)
        assert driver.count("allow_smem") == 0

    def test_artifacts_replaced_under_a_running_process_do_not_matter(self, tmp_path, loader, driver):
        name = write_set(tmp_path)
        loader.kernel(DECODE)
        (tmp_path / "sm_90a" / f"{name}.cubin").write_bytes(b"another build")
        driver.set_current(2)
        assert loader.kernel(DECODE).record.name == name

    def test_info_once_a_load(self, loader, caplog):
        with caplog.at_level(logging.INFO, "qsa_cute"):
            loader.kernel(DECODE)
            loader.kernel(DECODE)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "loaded qsa_sparse_decode_d256_bf16_s8_sm90a on device 0" in caplog.text


class TestWhere:
    def test_another_device_gets_its_primary_context(self, loader, driver):
        kernel = loader.kernel(DECODE, device=1)
        assert kernel.device == 1
        assert driver.current_context() == 1
        assert ("get_function", kernel.record.symbol, 101) in driver.calls

    def test_the_current_device_by_ordinal_stays_in_the_current_context(self, loader, driver):
        driver.set_current(2)
        loader.kernel(DECODE, device=0)
        assert driver.count("retain_primary") == 0
        assert driver.calls[-1][2] == 2

    @pytest.mark.parametrize("device", [-1, 1])
    def test_a_map_is_encoded_where_no_context_is_current(self, loader, driver, device):
        """The driver refuses to, in a thread that has none."""
        driver.set_current(0)
        seen, encode = [], driver.encode_map
        driver.encode_map = lambda *asked: (seen.append(driver.current_device()), encode(*asked))[1]
        for _ in range(2):
            assert len(loader.encode_map(device, "bf16", 256, (64, 4), (128,), (64, 4))) == 16
        assert seen == [max(device, 0)] * 2
        assert driver.current_context() == 0
        assert driver.count("retain_primary") == 1

    def test_no_current_context_takes_the_primary_of_device_0(self, loader, driver):
        driver.set_current(0)
        kernel = loader.peek(DECODE)
        assert kernel.device == 0
        assert ("get_function", kernel.record.symbol, 100) in driver.calls
        assert driver.current_context() == 0

    def test_the_first_peek_is_not_taken_for_one_without_a_context(self, loader, driver):
        kernel = loader.peek(DECODE)
        driver.set_current(0)  # as on another thread
        assert loader.peek(DECODE) is not kernel
        assert isinstance(loader.peek(DECODE), ForeignKernel)
        driver.set_current(1)
        assert loader.peek(DECODE) is kernel

    def test_a_primary_context_is_retained_once(self, loader, driver):
        loader.kernel(DECODE, device=1)
        driver.set_current(2)
        loader.kernel(DECODE, device=1)
        assert driver.count("retain_primary") == 1

    def test_an_ordinal_below_minus_one(self, loader, driver):
        with pytest.raises(ArgumentError, match=r"device is an ordinal, or -1 .*, got -2"):
            loader.kernel(DECODE, device=-2)
        assert driver.calls == []


class TestCapture:
    def test_a_first_load_is_refused_and_names_preflight(self, loader, driver):
        driver.capturing.add(7)
        with pytest.raises(CaptureError, match=r"sparse_decode d256 bf16 .*stream 0x7 .*preflight"):
            loader.kernel(DECODE, stream=7)
        assert driver.calls == []

    def test_a_loaded_kernel_is_found(self, loader, driver):
        kernel = loader.kernel(DECODE)
        driver.capturing.add(7)
        assert loader.kernel(DECODE, stream=7) is kernel
        assert loader.kernel(DECODE, device=0, stream=7) is kernel

    def test_another_context_is_a_first_load_again(self, loader, driver):
        loader.kernel(DECODE)
        driver.set_current(2)
        driver.capturing.add(7)
        with pytest.raises(CaptureError):
            loader.kernel(DECODE, stream=7)


class TestFailure:
    @pytest.mark.parametrize(
        "call", ["load_library", "get_kernel", "allow_smem", "allow_large_clusters", "get_function"]
    )
    def test_a_failed_call_leaves_nothing_and_can_be_tried_again(self, loader, driver, call):
        driver.fail.add(call)
        with pytest.raises(DriverError, match=call):
            loader.kernel(DECODE)
        kernel = loader.kernel(DECODE)
        assert loader.peek(DECODE) is kernel
        assert driver.count("load_library") - driver.count("unload_library") == 1 + (call == "load_library")

    def test_a_repaired_artifact_is_seen(self, tmp_path, loader):
        name = write_set(tmp_path)
        (tmp_path / "sm_90a" / f"{name}.cubin").write_bytes(b"damaged")
        with pytest.raises(ArtifactError, match=MEND):
            loader.kernel(DECODE)
        write_set(tmp_path)
        assert loader.kernel(DECODE).record.name == name

    def test_a_rebuild_with_other_bytes_is_seen(self, tmp_path, loader):
        name = write_set(tmp_path)
        loader.store.read("sm_90a")
        write_set(tmp_path, variants={name: {"threads": 64}})
        (tmp_path / "sm_90a" / f"{name}.cubin").write_bytes(b"x")
        with pytest.raises(ArtifactError):
            loader.kernel(DECODE)
        write_set(tmp_path, variants={name: {"threads": 64}})
        assert loader.kernel(DECODE).record.threads == 64

    def test_artifacts_built_after_a_refusal_are_found(self, tmp_path, driver):
        loader = Loader(tmp_path / "later", driver)
        with pytest.raises(ArtifactError):
            loader.kernel(DECODE)
        write_set(tmp_path / "later")
        assert loader.kernel(DECODE)

    @pytest.mark.parametrize(
        ("table", "says"),
        [
            ([(0, 8), (8, 4), (16, 8)], "3 parameters against 4"),
            ([(0, 8), (8, 8), (16, 8), (24, 4)], r"parameter top_k at \(offset, size\) \(8, 8\) against \(8, 4\)"),
        ],
    )
    def test_the_cubin_must_agree_with_the_manifest(self, loader, driver, table, says):
        driver.param_table = table
        with pytest.raises(ArtifactError, match=says) as caught:
            loader.kernel(DECODE)
        assert MEND in str(caught.value)
        assert str(caught.value).endswith(" --force")  # both files are as they were written: a build would keep them
        assert driver.count("unload_library") == 1
        driver.param_table = [(param["offset"], param["size"]) for param in PARAMS]
        assert loader.kernel(DECODE)

    def test_an_old_driver(self, loader, driver):
        driver.cubin_version = 12080
        with pytest.raises(ArtifactError, match=r"needs a driver for CUDA 13, and this one is for 12\.8; update"):
            loader.kernel(DECODE)

    def test_too_much_shared_memory(self, loader, driver):
        driver.smem_limit = 99_000
        with pytest.raises(ArtifactError, match="needs 100000 bytes of shared memory a block, the device allows 99000"):
            loader.kernel(DECODE)

    def test_too_many_threads_for_its_registers(self, loader, driver):
        driver.threads_limit = 64
        with pytest.raises(ArtifactError, match="launches 128 threads, its registers allow 64"):
            loader.kernel(DECODE)


class TestChoice:
    def test_a_variant_that_does_not_fit_gives_way_to_one_that_does(self, tmp_path, caplog):
        driver = FakeDriver(capability=(8, 9))
        driver.smem_limit = 99 * 1024
        write_set(tmp_path, "sm_86", variants={"large": {"smem_bytes": 150_000}})
        write_set(tmp_path, "sm_80", variants={"small": {"smem_bytes": 90_000}})
        with caplog.at_level(logging.DEBUG, "qsa_cute"):
            assert Loader(tmp_path, driver).kernel(DECODE).record.name == "small"
        assert "refused large on device 0: needs 150000 bytes" in caplog.text
        assert driver.count("allow_large_clusters") == 0

    def test_missing_reason(self, loader, driver):
        assert loader.missing_reason(DECODE) is None
        assert "no artifact for sparse_decode d128 bf16" in loader.missing_reason(("sparse_decode", 128, "bf16"))
        assert driver.calls == []

    def test_available(self, tmp_path, driver):
        name = write_set(tmp_path)
        write_set(tmp_path, "sm_80")
        write_set(tmp_path, "sm_90", schema=9)
        reports = Loader(tmp_path, driver).available()
        assert [report.device for report in reports] == [0, 1]
        assert reports[0].usable == (name,)
        assert reports[0].name == "fake 0"
        assert set(reports[0].refused) == {"sm_90", "qsa_sparse_decode_d256_bf16_s8_sm80"}
        assert "schema 9" in reports[0].refused["sm_90"]
        json.dumps(reports[0].refused)

    def test_available_when_the_store_has_several_bakings(self, tmp_path, driver):
        write_set(tmp_path, variants={"s8": {}, "s16": {"baked": {"max_splits": 16}}})
        assert Loader(tmp_path, driver).available()[0].usable == ("s16", "s8")
