"""`verify` and `lock`: what each finds, and what it says to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SM

from qsa_cute import variants as registry
from qsa_cute.abi import CHECKSUM, checksum
from qsa_cute.aot import build, sources, verify
from qsa_cute.aot.store import Store
from qsa_cute.errors import ArtifactError
from qsa_cute.variants import Variant

BUILD = f"python build_cutedsl.py build --gpu-arch {SM}"


def edit(path: Path, change: Callable[[dict], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    if CHECKSUM in value:
        value[CHECKSUM] = checksum(value)
    path.write_text(json.dumps(value))


def problems(root: Path, **what: bool) -> str:
    return "\n".join(verify.verify(root, (SM,), **({"lock": False, "evidence": False} | what))[SM])


@pytest.fixture
def locked(built: Path) -> Path:
    verify.write_lock(built, (SM,))
    return built


@pytest.fixture
def proven(locked: Path) -> Path:
    """Built, locked, and with the evidence of a GPU run in which everything passed."""
    manifest = verify.load(locked, SM)
    evidence = {
        "schema": 1,
        "sm": SM,
        "variants": {name: entry["sha256"] for name, entry in manifest["variants"].items()},
        "tests": {"passed": 10, "failed": 0, "skipped": 0},
    }
    (locked / "evidence").mkdir()
    (locked / "evidence" / f"{SM}.json").write_text(json.dumps(evidence))
    return locked


def test_a_sound_set_has_no_problems(proven: Path) -> None:
    assert problems(proven, lock=True, evidence=True) == ""


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes, the manifest says"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\xff"), "was altered"),
    ],
    ids=["missing", "truncated", "altered"],
)
def test_files(built: Path, toys: list[Variant], spoil: Callable[[Path], None], said: str) -> None:
    spoil(built / SM / f"{toys[0].name}.cubin")
    found = problems(built)
    assert said in found
    assert toys[0].name in found
    assert toys[1].name not in found
    assert f"{BUILD} --output {built}" in found


def test_a_stray_file(built: Path) -> None:
    (built / SM / "stray.cubin").write_bytes(b"")
    assert "stray.cubin is not in the manifest" in problems(built)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(schema=99), "has schema 99, this qsa_cute reads schema 1"),
        (lambda m: m.update(abi=99), "has abi 99"),
        (lambda m: m.update(sm="sm_80"), "is for 'sm_80' but lies in a folder named 'sm_90a'"),
        (lambda m: m.pop("ptxas_version"), "lacks ptxas_version"),
        (lambda m: next(iter(m["variants"].values())).pop("symbol"), "lacks symbol of qsa_fill"),
        (lambda m: next(iter(m["variants"].values())).update(file="../../x.cubin"), "names '../../x.cubin'"),
    ],
    ids=["schema", "abi", "sm", "head field", "entry field", "traversal"],
)
def test_manifests(built: Path, change: Callable[[dict], None], said: str) -> None:
    edit(built / SM / "manifest.json", change)
    found = problems(built)
    assert said in found
    assert found.endswith(f"; rebuild it: {BUILD} --output {built}")
    plan = build.plan(Store(built), registry.variants([SM]), sources.Digests(sources.dsl_version()))
    assert plan[0].changes  # which is what the sentence promises


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_manifests_that_are_not(built: Path, text: str) -> None:
    (built / SM / "manifest.json").write_bytes(text.encode("latin-1"))
    assert "manifest.json" in problems(built)


def test_no_set(built: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no set for sm_80, built are: sm_90a; run: .*--gpu-arch sm_80"):
        verify.load(built, "sm_80")


def test_lock_round_trip_and_change(locked: Path, toys: list[Variant]) -> None:
    assert problems(locked, lock=True) == ""
    edit(locked / "lock.json", lambda lock: lock["variants"].update({toys[0].name: "0" * 64}))
    assert f"{toys[0].name} differs from lock.json" in problems(locked, lock=True)
    assert verify.write_lock(locked, (SM,)) == [toys[0].name]
    assert problems(locked, lock=True) == ""


def test_a_variant_that_is_not_locked(locked: Path, toys: list[Variant]) -> None:
    edit(locked / "lock.json", lambda lock: lock["variants"].pop(toys[0].name))
    assert f"{toys[0].name} is not in lock.json" in problems(locked, lock=True)


def test_no_lock(built: Path) -> None:
    found = problems(built, lock=True)
    assert "lock.json is missing" in found
    assert found.endswith(f"python build_cutedsl.py lock --output {built}")


def test_other_tools_than_the_locks(locked: Path) -> None:
    edit(locked / "lock.json", lambda lock: lock.update(ptxas_version="12.9.1"))
    found = problems(locked, lock=True)
    assert "12.9.1" in found
    assert "pip install" in found


def test_an_incomplete_set_is_not_locked(built: Path, toys: list[Variant]) -> None:
    edit(built / SM / "manifest.json", lambda m: m["variants"].pop(toys[0].name))
    (built / SM / f"{toys[0].name}.cubin").unlink()
    with pytest.raises(ArtifactError, match=f"not built: {toys[0].name}"):
        verify.write_lock(built, (SM,))


def test_locking_one_sm_keeps_the_hashes_of_another(locked: Path, toys: list[Variant]) -> None:
    other = registry.variants(["sm_80"])[0].name
    edit(locked / "lock.json", lambda lock: lock["variants"].update({other: "1" * 64, "qsa_gone_sm80": "2" * 64}))
    verify.write_lock(locked, (SM,))
    hashes = json.loads((locked / "lock.json").read_text())["variants"]
    assert hashes[other] == "1" * 64
    assert "qsa_gone_sm80" not in hashes


def test_one_lock_is_of_one_set_of_tools(locked: Path) -> None:
    other = registry.variants(["sm_80"])[0].name
    edit(locked / "lock.json", lambda lock: lock["variants"].update({other: "1" * 64}))
    edit(locked / "lock.json", lambda lock: lock.update(dsl_version="1.0"))
    with pytest.raises(ArtifactError, match=r"DSL 1\.0"):
        verify.write_lock(locked, (SM,))


def test_evidence_of_another_cubin(proven: Path, toys: list[Variant]) -> None:
    edit(proven / "evidence" / f"{SM}.json", lambda e: e["variants"].update({toys[0].name: "0" * 64}))
    assert f"{toys[0].name} is not the cubin that" in problems(proven, evidence=True)


def test_evidence_of_failures(proven: Path) -> None:
    edit(proven / "evidence" / f"{SM}.json", lambda e: e["tests"].update(failed=1))
    assert "1 failed" in problems(proven, evidence=True)


def test_evidence_of_nothing(proven: Path) -> None:
    edit(proven / "evidence" / f"{SM}.json", lambda e: e["tests"].update(passed=0))
    assert "0 passed" in problems(proven, evidence=True)


def test_no_evidence(locked: Path) -> None:
    assert "make gpu-test" in problems(locked, evidence=True)


@pytest.mark.parametrize(
    ("runs", "composed", "problem", "note"),
    [
        ([{"failed": 0}, {"failed": 0}], "", "", "2 runs; 0 failures: it does not say why"),
        ([{"failed": 0}, {"failed": 1}], "one of a variant that is gone", "", "2 runs; 1 failure: one of a variant"),
        ([{"failed": 1}, {"failed": 2}], "", "3 failures in its runs", "2 runs; 3 failures: it does not say why"),
        ([{"failed": 1}], " ", "1 failure in its runs", "1 run; 1 failure"),
        ([{"passed": 1}], "x", "runs without a count of failures", "unknown failures: x"),
        ({}, "x", "runs without a count", "several runs; unknown failures: x"),
    ],
)
def test_evidence_that_is_composed(proven: Path, runs: object, composed: str, problem: str, note: str) -> None:
    """Never passed over in silence, and failures only with a reason."""
    edit(proven / "evidence" / f"{SM}.json", lambda e: e.update(runs=runs, composed=composed))
    assert problem in problems(proven, evidence=True)
    assert bool(problem) == bool(problems(proven, evidence=True))
    (said,) = verify.evidence_notes(proven, (SM,))
    assert said.startswith(f"evidence of {SM} is composed of ")
    assert note in said


def test_evidence_of_one_run_needs_no_note(proven: Path) -> None:
    assert verify.evidence_notes(proven, (SM, "sm_80")) == []


def test_the_committed_evidence_says_how_it_came_about() -> None:
    root = Path(__file__).parents[2] / "artifacts"
    for path in (root / "evidence").glob("*.json"):
        record = json.loads(path.read_text())
        assert bool(verify.evidence_notes(root, (path.stem,))) == ("runs" in record or "composed" in record)
