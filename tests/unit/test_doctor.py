"""`python -m qsa_cute doctor`: what it says, that nothing makes it fail, and that it needs next to nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runtime_fakes import FakeDriver, write_set

from qsa_cute import doctor, selftest
from qsa_cute.errors import DriverError
from qsa_cute.runtime import artifacts

ROOT = Path(__file__).parents[2]
MEND = "python build_cutedsl.py build --gpu-arch sm_90a"


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(doctor, "default_driver", lambda: fake)
    return fake


@pytest.fixture
def no_driver(monkeypatch) -> None:
    def absent():
        raise DriverError("no driver here")

    monkeypatch.setattr(doctor, "default_driver", absent)


def said(capsys, *arguments: object) -> tuple[int, str]:
    status = doctor.main(["doctor", *map(str, arguments)])
    return status, capsys.readouterr().out


class TestReport:
    def test_all_is_well(self, tmp_path, driver, capsys):
        name = write_set(tmp_path)
        status, text = said(capsys, "--artifacts", tmp_path)
        assert status == 0
        for part in (
            f"the path given: {tmp_path}, sm_90a  <- taken",
            "sm_90a: 1 variants, every hash is right; DSL 4.8.1, ptxas 13.4.59, for drivers of CUDA 13.0 and up",
            "driver: CUDA 13.1",
            "device 0: fake 0, compute capability 9.0",
            f"can use 1 variants: {name}",
            "no problem found",
        ):
            assert part in text

    def test_json_has_it_all(self, tmp_path, driver, capsys):
        name = write_set(tmp_path)
        status, text = said(capsys, "--artifacts", tmp_path, "--json")
        report = json.loads(text)
        assert status == 0
        assert report["devices"][1]["usable"] == [name]
        assert report["driver"]["cuda"] == "13.1"
        assert report["artifacts"]["root"] == str(tmp_path)
        assert set(report["packages"]) == {"cuda-bindings", "torch", "nvidia-cutlass-dsl"}
        assert report["problems"] == []

    def test_every_place_looked_at(self, tmp_path, driver, monkeypatch, capsys):
        package, named = tmp_path / "qsa_cute", tmp_path / "named"
        monkeypatch.setattr(artifacts, "_PACKAGE", package)
        write_set(tmp_path / "artifacts")
        monkeypatch.delenv(artifacts.ENVIRONMENT, raising=False)
        _, text = said(capsys)
        assert "$QSA_CUTE_ARTIFACTS: not set" in text
        assert f"the package: {package}/artifacts, not a folder" in text
        assert f"the checkout: {tmp_path}/artifacts, sm_90a  <- taken" in text
        monkeypatch.setenv(artifacts.ENVIRONMENT, str(named))
        status, text = said(capsys)
        assert status == 0
        assert f"$QSA_CUTE_ARTIFACTS: {named}, not a folder" in text
        assert "<- taken" not in text
        assert f"problem: $QSA_CUTE_ARTIFACTS is not a folder: {named}" in text

    def test_why_not_the_rest(self, tmp_path, driver, capsys):
        write_set(tmp_path, variants={"fits": {}, "greedy_sm90a": {"baked": {"max_splits": 9}, "smem_bytes": 1 << 20}})
        write_set(tmp_path, "sm_80")
        _, text = said(capsys, "--artifacts", tmp_path)
        assert "can use 1 variants: fits" in text
        assert "not sm_80: its cubins do not run on this compute capability" in text
        assert "not greedy_sm90a: no usable artifact" in text
        assert "needs 1048576 bytes of shared memory a block, the device allows" in text

    def test_what_the_registry_has_and_the_set_has_not(self, tmp_path, driver, capsys):
        write_set(tmp_path)
        _, text = said(capsys, "--artifacts", tmp_path)
        assert "more (--json has all); " + MEND in text

    def test_a_device_that_can_use_nothing(self, tmp_path, driver, capsys):
        write_set(tmp_path, "sm_80")
        status, text = said(capsys, "--artifacts", tmp_path)
        assert status == 0
        assert f"problem: device 0 (compute capability 9.0) can use no artifact; build its artifacts: {MEND}" in text

    @pytest.mark.parametrize("slip", ["", "sm_90a", "sm_90a/manifest.json"])
    def test_a_variable_that_names_something_else(self, tmp_path, driver, monkeypatch, capsys, slip):
        """An empty folder, the SM's own, a file: one problem, said once."""
        if slip:
            write_set(tmp_path)
        monkeypatch.setenv(artifacts.ENVIRONMENT, str(tmp_path / slip))
        status, text = said(capsys)
        found = {"": "holds no artifacts", "sm_90a": "is one SM's set", "sm_90a/manifest.json": "is a file"}[slip]
        assert status == 0
        assert [line for line in text.splitlines() if line.startswith("problem")] == [
            line for line in text.splitlines() if line.startswith(f"problem: $QSA_CUTE_ARTIFACTS {found}: {tmp_path}")
        ]
        assert "no problem found" not in text
        assert ("name its parent" if slip == "sm_90a" else "unset or correct QSA_CUTE_ARTIFACTS") in text


class TestNothingMakesItFail:
    def test_no_driver(self, tmp_path, no_driver, capsys):
        write_set(tmp_path)
        status, text = said(capsys, "--artifacts", tmp_path)
        assert status == 0
        assert "sm_90a: 1 variants, every hash is right" in text
        assert text.count("no driver here") == 1
        assert "driver: unusable, see below" in text

    def test_no_artifacts(self, tmp_path, driver, monkeypatch, capsys):
        monkeypatch.setattr(artifacts, "_PACKAGE", tmp_path / "qsa_cute")
        monkeypatch.delenv(artifacts.ENVIRONMENT, raising=False)
        status, text = said(capsys)
        assert status == 0
        assert text.count("problem: no artifacts: $QSA_CUTE_ARTIFACTS is not set") == 1

    @pytest.mark.parametrize("name", ["manifest.json", "qsa_sparse_decode_d256_bf16_s8_sm90a.cubin"])
    @pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[1]"])
    def test_damaged_artifacts(self, tmp_path, driver, capsys, name, data):
        write_set(tmp_path)
        (tmp_path / "sm_90a" / name).write_bytes(data)
        status, text = said(capsys, "--artifacts", tmp_path)
        assert status == 0
        assert f"{tmp_path}/sm_90a/{name}" in text
        assert MEND in text

    @pytest.mark.parametrize("call", ["device_count", "device_name", "capability", "smem_optin", "version"])
    def test_driver_calls(self, tmp_path, driver, monkeypatch, capsys, call):
        def fail(*_: object) -> None:
            raise DriverError(f"{call} failed: CUDA_ERROR_UNKNOWN")

        write_set(tmp_path)
        monkeypatch.setattr(driver, call, fail)
        status, text = said(capsys, "--artifacts", tmp_path)
        assert status == 0
        assert f"{call} failed: CUDA_ERROR_UNKNOWN" in text
        assert "no problem found" not in text

    def test_even_what_is_not_expected(self, tmp_path, driver, monkeypatch, capsys):
        monkeypatch.setattr(doctor, "places", lambda _path: 1 / 0)
        status, text = said(capsys)
        assert status == 0
        assert "problem: ZeroDivisionError: division by zero" in text

    def test_no_device(self, tmp_path, driver, monkeypatch, capsys):
        monkeypatch.setattr(driver, "device_count", lambda: 0)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        write_set(tmp_path)
        status, text = said(capsys, "--artifacts", tmp_path)
        assert status == 0
        assert "problem: the driver shows no device; CUDA_VISIBLE_DEVICES is ''" in text


class TestCheck:
    @pytest.fixture
    def results(self, tmp_path, driver, monkeypatch):
        """What the self-test of each device answers."""
        write_set(tmp_path)
        monkeypatch.setenv(artifacts.ENVIRONMENT, str(tmp_path))
        found = [{"name": "a case", "ok": True, "skipped": False, "detail": "", "seconds": 0.1}]
        monkeypatch.setattr(selftest, "run", lambda _device: [dict(one) for one in found])
        return found

    def test_passed(self, results, capsys):
        status, text = said(capsys, "--check")
        assert status == 0
        assert text.count("ok      a case (0.10 s)") == 2  # two devices

    def test_failed(self, results, capsys):
        results[0].update(ok=False, detail="it is wrong")
        status, text = said(capsys, "--check")
        assert status == 1
        assert "FAILED  a case (0.10 s): it is wrong" in text
        assert "problem: a case: it is wrong" in text

    def test_skipped(self, results, capsys):
        results.append({"name": "another", "ok": True, "skipped": True, "detail": "no such kernel", "seconds": 0.0})
        status, text = said(capsys, "--check")
        assert status == 0
        assert text.count("skipped another: no such kernel") == 2
        assert "no problem found" in text

    def test_all_skipped_is_no_success(self, results, capsys):
        results[0].update(skipped=True, detail="no such kernel")
        status, text = said(capsys, "--check")
        assert status == 1
        assert "problem: device 1: nothing was checked" in text

    def test_without_torch(self, results, capsys, monkeypatch):
        version = doctor._version
        monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else version(name))
        status, text = said(capsys, "--check")
        assert status == 0
        assert "torch is not installed" in text

    def test_that_cannot_run(self, results, monkeypatch, capsys):
        monkeypatch.setattr(selftest, "run", lambda _device: 1 / 0)
        status, text = said(capsys, "--check")
        assert status == 1
        assert "device 1: the self-test could not run: ZeroDivisionError" in text

    def test_nothing_to_check_is_no_success(self, tmp_path, no_driver, capsys):
        write_set(tmp_path)
        status, text = said(capsys, "--check", "--artifacts", tmp_path)
        assert status == 1
        assert "nothing could be checked" in text


def test_the_command_needs_neither_torch_nor_numpy_nor_a_compiler() -> None:
    """Each of these, if imported, would raise; cuda too, which the report then says."""
    heavy = ("torch", "numpy", "cutlass", "click", "rich", "cuda")
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({heavy}))\n"
        "from qsa_cute.doctor import main; raise SystemExit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "problem: cuda.bindings cannot be imported" in done.stdout
    assert "pip install 'cuda-bindings>=13,<14'" in done.stdout


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qsa_cute", "doctor", "--json"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["qsa_cute"]["at"] == str(ROOT / "qsa_cute")
    bare = subprocess.run([sys.executable, "-m", "qsa_cute"], cwd=ROOT, capture_output=True, text=True)
    assert bare.returncode == 2
    assert "doctor" in bare.stderr
