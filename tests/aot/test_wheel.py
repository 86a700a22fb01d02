"""The wheel: made of the chosen sets and nothing else, and of use in an environment that has no other package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import SM

from qsa_cute.aot import verify
from qsa_cute.aot.wheel import make_wheel
from qsa_cute.errors import ArtifactError

ROOT = Path(__file__).parents[2]

# Run in the clean environment, from elsewhere. Nothing heavy is installed there, so importing it would fail.
USE = """
import importlib.util, json, sys
import qsa_cute
from qsa_cute.runtime import Store

absent = [name for name in ("torch", "cutlass", "cuda", "click", "numpy") if importlib.util.find_spec(name) is None]
store = Store()
sets = {sm: store.read(sm) for sm in store.sms()}
answers = [
    bool(runner.can_implement(*shape, sm, dtype))
    for runner, shape in (
        (qsa_cute.SparsePrefillRunner, (24, 2, 256)),
        (qsa_cute.SparseDecodeRunner, (24, 2, 256, 384)),
        (qsa_cute.IndexerPrefillRunner, (4, 128)),
    )
    for sm, dtype in (("sm_90a", "bf16"), (90, "fp16"), (75, "bf16"))
]
try:
    qsa_cute.SparsePrefillRunner.preflight("bf16")
except qsa_cute.DriverError as error:
    refusal = str(error)
print(json.dumps({
    "at": qsa_cute.__file__,
    "root": str(store.root),
    "absent": absent,
    "loaded": {sm: sum(len(one.cubin(record)) > 0 for record in one.variants.values()) for sm, one in sets.items()},
    "answers": answers,
    "refusal": refusal,
}))
"""


@pytest.fixture(scope="module")
def artifacts(real_build: Path) -> Path:
    """The checkout's set where it is built, as it is whenever `make build` came first; else the toys'."""
    built = ROOT / "artifacts"
    return built if SM in verify.built_sms(built) else real_build


@pytest.fixture(scope="module")
def wheel(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(artifacts, [SM], tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    found = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(found), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, wheel], check=True)
    return found


def run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "QSA_CUTE"))}
    return subprocess.run([python, *arguments], cwd=folder, env=clean, capture_output=True, text=True)


def test_holds_the_chosen_sets_and_no_other(wheel: Path, artifacts: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    data = {name: content for name, content in packed.items() if name.startswith("qsa_cute/artifacts/")}
    entries = verify.load(artifacts, SM)["variants"].values()
    assert set(data) == {f"qsa_cute/artifacts/{SM}/{name}" for name in ("manifest.json", *(e["file"] for e in entries))}
    assert all((artifacts / name.removeprefix("qsa_cute/artifacts/")).read_bytes() == data[name] for name in data)
    top = {name.split("/")[0] for name in packed}
    assert {name for name in top if not name.endswith(".dist-info")} == {"qsa_cute"}
    assert "qsa_cute/__main__.py" in packed


def test_in_a_clean_environment(python: Path, artifacts: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, "-c", USE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["absent"] == ["torch", "cutlass", "cuda", "click", "numpy"]
    assert str(python.parents[1]) in found["at"]
    assert found["root"] == str(Path(found["at"]).parent / "artifacts")
    assert found["loaded"] == {SM: len(verify.load(artifacts, SM)["variants"])}
    assert found["answers"] == [True, True, False] * 3
    assert "pip install 'cuda-bindings>=13,<14'" in found["refusal"]


def test_doctor_in_a_clean_environment(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, "-m", "qsa_cute", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["artifacts"]["sets"][SM]["problems"] == []
    assert report["qsa_cute"]["version"] is not None
    assert len(report["problems"]) == 1
    assert "cuda.bindings cannot be imported" in report["problems"][0]


def test_damage_after_installing_is_named_with_what_mends_it_there(python: Path, tmp_path: Path) -> None:
    folder = next(python.parents[1].glob("lib/*/site-packages/qsa_cute/artifacts")) / SM
    cubin = next(folder.glob("*.cubin"))
    whole = cubin.read_bytes()
    try:
        cubin.write_bytes(whole[:-1])
        done = run(python, tmp_path, "-m", "qsa_cute", "doctor")
    finally:
        cubin.write_bytes(whole)
    assert done.returncode == 0, done.stderr
    assert f"{SM}: " in done.stdout
    assert "1 damaged" in done.stdout
    assert f"has {len(whole) - 1} bytes where its manifest says {len(whole)}" in done.stdout
    assert "artifacts that came in a wheel: install that wheel again" in done.stdout


def test_two_wheels_are_the_same_bytes(wheel: Path, artifacts: Path, tmp_path: Path) -> None:
    assert make_wheel(artifacts, [SM], tmp_path).read_bytes() == wheel.read_bytes()


def test_what_is_not_built_or_damaged_is_not_packed(built: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no set for sm_80, .*--gpu-arch sm_80"):
        make_wheel(built, [SM, "sm_80"], tmp_path / "dist")
    next((built / SM).glob("*.cubin")).write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"not packed: .* has 0 bytes"):
        make_wheel(built, [SM], tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_not_a_checkout(built: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="made in a checkout"):
        make_wheel(built, [SM], tmp_path / "dist", project=tmp_path)
