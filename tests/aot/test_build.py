"""The build itself: what is compiled, what is refused, and what stays when something goes wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BROKEN, FILL, GREEDY, SM, FakeCompiler, use_registry

from qsa_cute import variants as registry
from qsa_cute.abi import CHECKSUM, checksum
from qsa_cute.aot import build, sources
from qsa_cute.aot.store import Store
from qsa_cute.errors import ArtifactError
from qsa_cute.variants import Kernel, Tuning, Variant


def manifest_of(root: Path, sm: str = SM) -> dict:
    return json.loads((root / sm / "manifest.json").read_text())


def state_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_manifest_of_a_real_build(real_build: Path, toys: list[Variant]) -> None:
    manifest = manifest_of(real_build)
    assert (manifest["schema"], manifest["abi"], manifest["sm"]) == (1, 1, SM)
    assert re.fullmatch(r"\d+\.\d+\.\d+", manifest["ptxas_version"])
    assert manifest["dsl_version"] == sources.dsl_version()
    assert set(manifest["variants"]) == {variant.name for variant in toys}
    entry = manifest["variants"]["qsa_fill_d128_bf16_w1_sm90a"]
    assert entry["symbol"].startswith("qsa_fill_d128_bf16_w1_sm90a")
    assert (entry["threads"], entry["smem_bytes"], entry["static_smem_bytes"], entry["spill_bytes"]) == (32, 0, 0, 0)
    assert 0 < entry["registers"] <= 255
    assert [(p["name"], p["kind"], p["offset"], p["size"]) for p in entry["params"]] == [
        ("out", "ptr", 0, 8), ("count", "i32", 8, 4), ("start", "i64", 16, 8), ("value", "f32", 24, 4),
    ]  # fmt: skip
    assert entry["param_bytes"] == 28


def test_builds_are_bit_reproducible(real_build: Path, toys: list[Variant], tmp_path: Path) -> None:
    again = build.build(Store(tmp_path), toys[:1], jobs=1)
    assert again.built == [toys[0].name]
    here, there = manifest_of(tmp_path)["variants"], manifest_of(real_build)["variants"]
    assert here[toys[0].name] == there[toys[0].name]


def test_what_cannot_be_published_is_named_with_its_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One real build: a kernel that is right beside two that are not. Nothing of that SM is published."""
    use_registry(monkeypatch, FILL, GREEDY, BROKEN)
    result = build.build(Store(tmp_path), registry.variants(["sm_80"], dtypes=["bf16"]), jobs=2)
    assert set(result.failed) == {"qsa_greedy_d128_bf16_w1_sm80", "qsa_broken_d128_bf16_w1_sm80"}
    greedy, broken = result.failed["qsa_greedy_d128_bf16_w1_sm80"], result.failed["qsa_broken_d128_bf16_w1_sm80"]
    assert "307200 bytes of shared memory" in greedy
    assert str(163 * 1024) in greedy
    assert "no HMMA" in greedy
    assert "broken on purpose" in broken
    assert "there was no set before" in result.unpublished["sm_80"]
    assert not (tmp_path / "sm_80").exists()
    assert [path.name for path in tmp_path.iterdir()] == [".build.lock"]


def test_a_second_build_does_nothing(built: Path, toys: list[Variant], compiler: FakeCompiler) -> None:
    before = state_of(built)
    result = build.build(Store(built), toys, jobs=2)
    assert (result.built, result.up_to_date, compiler.compiled) == ([], [variant.name for variant in toys], [])
    assert state_of(built) == before


def test_nothing_to_do_needs_no_write_access(built: Path, toys: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "writing", lambda _self: pytest.fail("took the lock"))
    assert build.build(Store(built), toys, jobs=1).ok


@pytest.mark.parametrize("spoil", [b"", b"\x7fELF truncated"])
def test_a_damaged_file_is_built_again(built: Path, toys: list[Variant], compiler: FakeCompiler, spoil: bytes) -> None:
    (built / SM / f"{toys[0].name}.cubin").write_bytes(spoil)
    assert build.build(Store(built), toys, jobs=1).built == [toys[0].name]
    assert build.plan(Store(built), toys, sources.Digests(sources.dsl_version()))[0].todo == []


def test_an_unreadable_manifest_is_built_over(built: Path, toys: list[Variant], compiler: FakeCompiler) -> None:
    (built / SM / "manifest.json").write_text("{")
    assert build.build(Store(built), toys, jobs=1).built == [variant.name for variant in toys]


@pytest.mark.parametrize("change", [{"abi": 99}, {"sm": "sm_80"}, {CHECKSUM: None}])
def test_what_a_load_refuses_or_cannot_trust_is_built_over(
    built: Path, toys: list[Variant], compiler: FakeCompiler, change: dict
) -> None:
    """Whatever a manifest says, a plain build mends its set; one without a checksum may say anything."""
    found = {key: value for key, value in manifest_of(built).items() if key != CHECKSUM} | change
    head = {key: value for key, value in found.items() if value is not None}
    if change != {CHECKSUM: None}:
        head[CHECKSUM] = checksum(head)
    (built / SM / "manifest.json").write_text(json.dumps(head))
    assert build.build(Store(built), toys, jobs=1).built == [variant.name for variant in toys]
    assert manifest_of(built)["sm"] == SM


def test_force_builds_what_is_up_to_date(built: Path, toys: list[Variant], compiler: FakeCompiler) -> None:
    assert build.build(Store(built), toys, jobs=1, force=True).built == [variant.name for variant in toys]


def test_a_filtered_build_keeps_the_others(built: Path, toys: list[Variant], compiler: FakeCompiler) -> None:
    others = (built / SM / f"{toys[1].name}.cubin").read_bytes()
    (built / SM / f"{toys[0].name}.cubin").unlink()
    result = build.build(Store(built), toys[:1], jobs=1)
    assert (result.built, result.dropped) == ([toys[0].name], {})
    assert set(manifest_of(built)["variants"]) == {variant.name for variant in toys}
    assert (built / SM / f"{toys[1].name}.cubin").read_bytes() == others


def test_what_is_stale_and_not_asked_for_is_dropped(
    built: Path, toys: list[Variant], compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    retuned = Kernel("fill", FILL.entry, (Tuning({"warps": 2}, (SM,), (128,)),), tensor_core="")
    use_registry(monkeypatch, retuned)
    result = build.build(Store(built), registry.variants([SM], dtypes=["bf16"]), jobs=1)
    assert result.built == ["qsa_fill_d128_bf16_w2_sm90a"]
    assert result.dropped == {variant.name: "no longer in the registry" for variant in toys}
    assert sorted(path.name for path in (built / SM).iterdir()) == [
        "manifest.json",
        "qsa_fill_d128_bf16_w2_sm90a.cubin",
    ]


def test_a_failure_leaves_the_old_set(built: Path, toys: list[Variant], compiler: FakeCompiler) -> None:
    before = state_of(built)
    compiler.fails[toys[0].name] = "the compiler ended with status 1:\nsomething"
    result = build.build(Store(built), toys, jobs=1, force=True)
    assert result.failed == {toys[0].name: "the compiler ended with status 1:\nsomething"}
    assert set(compiler.compiled) == {variant.name for variant in toys}, "the others must be built all the same"
    assert "the set built before stays" in result.unpublished[SM]
    assert {name: data for name, data in state_of(built).items() if name != ".build.lock"} == {
        name: data for name, data in before.items() if name != ".build.lock"
    }


def test_one_sm_failing_does_not_hold_back_another(toys: list[Variant], compiler: FakeCompiler, tmp_path: Path) -> None:
    wanted = registry.variants([SM, "sm_80"], dtypes=["bf16"])
    compiler.fails["qsa_fill_d128_bf16_w1_sm80"] = "no"
    result = build.build(Store(tmp_path), wanted, jobs=2)
    assert result.built == ["qsa_fill_d128_bf16_w1_sm90a"]
    assert (tmp_path / SM / "manifest.json").exists()
    assert not (tmp_path / "sm_80").exists()


def test_a_full_disk_leaves_the_old_set(
    built: Path, toys: list[Variant], compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("qsa_cute.aot.manifest.write_json", full)
    before = manifest_of(built)
    result = build.build(Store(built), toys, jobs=1, force=True)
    assert "No space left" in result.unpublished[SM]
    assert manifest_of(built) == before


def test_an_interrupt_leaves_the_old_set(built: Path, toys: list[Variant], compiler: FakeCompiler) -> None:
    def interrupt(_job: object) -> None:
        raise KeyboardInterrupt

    before = manifest_of(built)
    compiler.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        build.build(Store(built), toys, jobs=1, force=True)
    assert manifest_of(built) == before
    assert not list(built.glob(".staging-*"))


def test_sources_that_move_during_the_build_fail_it(
    toys: list[Variant], compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qsa_cute.aot.sources._hash", lambda _modules: f"state {len(compiler.compiled)}")
    result = build.build(Store(tmp_path), toys[:1], jobs=1)
    assert "changed while it was compiled" in result.failed[toys[0].name]


def test_one_set_is_of_one_ptxas(built: Path, toys: list[Variant], compiler: FakeCompiler) -> None:
    path = built / SM / "manifest.json"
    manifest = manifest_of(built) | {"ptxas_version": "12.9.1"}
    path.write_text(json.dumps(manifest | {CHECKSUM: checksum(manifest)}))
    (built / SM / f"{toys[0].name}.cubin").unlink()
    assert "12.9.1" in build.build(Store(built), toys, jobs=1).unpublished[SM]


def test_missing_tools_are_named_before_anything_is_touched(
    built: Path, toys: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state_of(built)
    monkeypatch.setattr(sources, "DSL", "no-such-distribution")
    with pytest.raises(ArtifactError, match=r"not installed.*pip install"):
        build.build(Store(built), toys, jobs=1)
    assert state_of(built) == before


def test_a_killed_build_is_taken_over(built: Path) -> None:
    """A process that dies holding the folder: the next one takes it over and clears its staging."""
    script = (
        "import os, pathlib, sys\n"
        "from qsa_cute.aot.store import Store\n"
        "with Store(pathlib.Path(sys.argv[1])).writing() as staging:\n"
        "    (staging / 'half').write_text('half'); os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, built]).returncode == 9
    assert list(built.glob(".staging-*"))
    with Store(built).writing():
        pass
    assert not list(built.glob(".staging-*"))
    assert manifest_of(built)
