"""The command line: what it prints where, and with which code it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from conftest import SM, FakeCompiler

from qsa_cute.aot import verify as aot_verify
from qsa_cute.aot.cli import main
from qsa_cute.variants import FP8_SMS, SMS, Variant

ROOT = Path(__file__).parents[2]


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def names(toys: list[Variant]) -> list[str]:
    return [variant.name for variant in toys]


class TestBuild:
    def test_data_to_stdout_logs_to_stderr(self, tmp_path: Path, toys: list[Variant], compiler: FakeCompiler) -> None:
        result = invoke("build", "--gpu-arch", SM, "--output", tmp_path)
        assert result.exit_code == 0
        assert result.stdout.split() == names(toys)
        assert "2 built, 0 up to date, 0 failed" in result.stderr

    def test_json(self, built: Path, toys: list[Variant]) -> None:
        result = invoke("build", "--gpu-arch", SM, "--output", built, "--json")
        assert json.loads(result.stdout)["up_to_date"] == names(toys)

    def test_dry_run_says_why_and_builds_nothing(
        self, tmp_path: Path, toys: list[Variant], compiler: FakeCompiler
    ) -> None:
        result = invoke("build", "--gpu-arch", SM, "--output", tmp_path / "new", "--dry-run")
        assert result.exit_code == 0
        assert result.stdout.splitlines() == [f"build\t{name}\tmissing" for name in names(toys)]
        assert compiler.compiled == []
        assert not (tmp_path / "new").exists()

    def test_check(self, built: Path, toys: list[Variant]) -> None:
        assert invoke("build", "--gpu-arch", SM, "--output", built, "--check").exit_code == 0
        (built / SM / f"{toys[0].name}.cubin").unlink()
        result = invoke("build", "--gpu-arch", SM, "--output", built, "--check", "--json")
        assert result.exit_code == 3
        assert json.loads(result.stdout)["build"] == {toys[0].name: "damaged"}

    def test_a_failure_is_named_and_ends_with_1(self, built: Path, toys: list[Variant], compiler: FakeCompiler) -> None:
        compiler.fails[toys[0].name] = "the compiler ended with status 1:\nwhat it said"
        result = invoke("build", "--gpu-arch", SM, "--output", built, "--force")
        assert result.exit_code == 1
        assert f"FAILED {toys[0].name}: the compiler ended with status 1:\nwhat it said" in result.stderr
        assert "sm_90a was not published" in result.stderr

    def test_filters(self, tmp_path: Path, toys: list[Variant]) -> None:
        result = invoke("build", "--gpu-arch", "all", "--dtype", "fp16", "--output", tmp_path, "--dry-run")
        assert [line.split("\t")[1] for line in result.stdout.splitlines()] == [
            "qsa_fill_d128_fp16_w1_sm80",
            "qsa_fill_d128_fp16_w1_sm90a",
        ]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--gpu-arch", "sm_91"], 2, ", ".join(SMS)),
        (["--gpu-arch", SM, "--kernels", "nope*"], 2, "there are: sparse_prefill"),
        (["--gpu-arch", SM, "--head-dim", "64"], 2, "256, 128"),
        (["--gpu-arch", SM, "--dtype", "fp64"], 2, "bf16, fp16"),
        (["--gpu-arch", "sm_80", "--kernels", "sparse_decode_tma"], 2, "sparse_decode_tma for sm_90a"),
        (
            ["--gpu-arch", "sm_80", "--dtype", "fp8_e4m3", "--kernels", "paged_attention*"],
            2,
            "--gpu-arch sm_80 leaves nothing of --kernels 'paged_attention*' --dtype fp8_e4m3; there are: "
            f"paged_attention for {', '.join(FP8_SMS)}; paged_attention_tma for sm_90a",
        ),
        (
            ["--gpu-arch", SM, "--dtype", "fp8_e4m3", "--kernels", "sparse_*"],
            2,
            "--dtype fp8_e4m3 leaves nothing of --kernels 'sparse_*'; there are: "
            "sparse_prefill, sparse_decode, sparse_decode_tma for bf16, fp16",
        ),
        (["--gpu-arch", SM, "--kernels", "index_*", "--head-dim", "256"], 2, "--head-dim 256 leaves nothing of"),
        (["--gpu-arch", "sm_90"], 2, "unknown SM 'sm_90'; did you mean sm_90a? there are: sm_80"),
        (["--gpu-arch", "90a"], 2, "did you mean sm_90a?"),
        (["--gpu-arch", "90"], 2, "did you mean sm_90a?"),
        (["--gpu-arch", "12.0"], 2, "did you mean sm_120a?"),
        (["--gpu-arch", SM, "--kernels", "sparse_prefill", "--max-splits", "4"], 2, "--max-splits is of sparse_decode"),
        ([], 2, "--gpu-arch SM or 'all'"),
        (["--gpu-arch", SM, "--jobs", "0"], 2, "--jobs"),
        (["--gpu-arch", SM, "--max-splits", "0"], 2, "--max-splits"),
    ],
)
def test_what_does_not_exist_is_answered_with_what_does(args: list[str], code: int, said: str) -> None:
    result = invoke("build", "--dry-run", *args)
    assert result.exit_code == code
    assert said in result.stderr
    assert result.stdout == ""
    assert len(result.stderr) < 900  # only of the kernels that were asked for


@pytest.mark.parametrize("command", ["verify", "lock", "wheel", "clean", "list"])
def test_every_command_knows_the_names_of_an_sm(command: str, tmp_path: Path) -> None:
    result = invoke(command, "--gpu-arch", "sm_90", "--output", tmp_path)
    assert result.exit_code == 2
    assert "did you mean sm_90a?" in result.stderr


def test_max_splits_changes_the_variant() -> None:
    args = (
        "build",
        "--gpu-arch",
        SM,
        "--kernels",
        "sparse_decode",
        "--max-splits",
        16,
        "--dry-run",
        "--output",
        "/none",
    )
    lines = invoke(*args).stdout.splitlines()
    assert len(lines) == 4
    assert all("_s16_" in line for line in lines)


def test_list(built: Path, toys: list[Variant]) -> None:
    (built / SM / f"{toys[1].name}.cubin").write_bytes(b"")
    lines = invoke("list", "--gpu-arch", SM, "--output", built).stdout.splitlines()
    assert lines == [f"{toys[0].name}\t{SM}\tok", f"{toys[1].name}\t{SM}\tdamaged"]
    states = json.loads(invoke("list", "--output", built, "--json").stdout)
    assert [row["state"] for row in states if row["sm"] == "sm_80"] == ["missing", "missing"]


def test_list_without_the_dsl(built: Path, toys: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qsa_cute.aot.sources.DSL", "no-such-distribution")
    assert "\tok" in invoke("list", "--gpu-arch", SM, "--output", built).stdout


def test_lock_then_verify(built: Path, toys: list[Variant]) -> None:
    assert invoke("verify", "--output", built).exit_code == 1
    assert invoke("lock", "--output", built).stdout.split() == names(toys)
    result = invoke("verify", "--output", built)
    assert (result.exit_code, result.stdout) == (0, f"{SM}\tok\n")
    assert invoke("verify", "--output", built, "--evidence").exit_code == 1


def test_verify_counts_problems_and_says_what_evidence_is_composed(built: Path, toys: list[Variant]) -> None:
    invoke("lock", "--output", built)
    (built / "evidence").mkdir()
    hashes = {name: entry["sha256"] for name, entry in aot_verify.load(built, SM)["variants"].items()}
    record = {"schema": 1, "sm": SM, "variants": hashes, "tests": {"passed": 10, "failed": 0}, "composed": "why"}
    record["runs"] = [{"failed": 0}, {"failed": 2}]
    (built / "evidence" / f"{SM}.json").write_text(json.dumps(record))
    result = invoke("verify", "--output", built, "--evidence")
    assert (result.exit_code, result.stdout) == (0, f"{SM}\tok\n")
    assert result.stderr == f"evidence of {SM} is composed of 2 runs; 2 failures: why\n"
    assert invoke("verify", "--output", built).stderr == ""
    (built / SM / f"{toys[0].name}.cubin").unlink()
    assert invoke("verify", "--output", built).stdout == f"{SM}\t1 problem\n"


def test_verify_json_and_nothing_built(built: Path, tmp_path: Path) -> None:
    assert json.loads(invoke("verify", "--output", built, "--no-lock", "--json").stdout) == {SM: []}
    result = invoke("verify", "--output", tmp_path / "none")
    assert result.exit_code == 1
    assert "build_cutedsl.py build" in result.stderr


def test_inspect(built: Path, toys: list[Variant]) -> None:
    text = invoke("inspect", toys[0].name, "--output", built).stdout
    assert "spill_bytes\t0" in text
    assert "start\ti64\t16\t8" in text
    entry = json.loads(invoke("inspect", toys[0].name, "--output", built, "--json").stdout)
    assert entry["baked"] == {"warps": 1}
    for wrong in (toys[0].name[:-1], "nope"):
        result = invoke("inspect", wrong, "--output", built)
        assert result.exit_code == 2
        assert (toys[0].name in result.stderr) is (wrong != "nope")
        assert f"not one of the {len(toys)} built" in " ".join(result.stderr.split())


def test_wheel(built: Path, tmp_path: Path) -> None:
    result = invoke("wheel", "--output", built, "--dist", tmp_path / "dist")
    assert result.exit_code == 0, result.stderr
    assert [Path(line) for line in result.stdout.splitlines()] == list((tmp_path / "dist").glob("*.whl"))
    assert f"MB with the artifacts of {SM}" in result.stderr
    assert invoke("wheel", "--gpu-arch", "sm_80", "--output", built).exit_code == 1


def test_clean(built: Path) -> None:
    invoke("lock", "--output", built)
    assert invoke("clean", "--output", built).stdout.split() == [str(built / SM)]
    assert (built / "lock.json").exists()
    assert invoke("clean", "--gpu-arch", "sm_91", "--output", built).exit_code == 2


def test_help_documents_the_exit_codes() -> None:
    text = invoke("--help").stdout
    assert "Exit codes: 0 done; 1 something failed" in " ".join(text.split())
    for command in ("build", "list", "verify", "inspect", "lock", "wheel", "clean"):
        assert invoke(command, "--help").exit_code == 0


def test_nothing_but_a_compiler_process_loads_cuda_or_the_dsl(built: Path) -> None:
    """Each of these modules, if imported, would raise."""
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('cuda', 'cutlass', 'torch')))\n"
        "from qsa_cute.aot.cli import main; main()"
    )
    for command in (["list"], ["build", "--gpu-arch", "all", "--dry-run"], ["verify", "--no-lock", "--gpu-arch", SM]):
        done = subprocess.run(
            [sys.executable, "-c", script, *command, "--output", built], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_the_script(built: Path) -> None:
    done = subprocess.run([sys.executable, "build_cutedsl.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert "no GPU is needed" in " ".join(done.stdout.split())


@pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["inspect", "NAME"]])
def test_a_reader_that_has_seen_enough_is_no_error(built: Path, toys: list[Variant], command: list[str]) -> None:
    command = [toys[0].name if word == "NAME" else word for word in command]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "build_cutedsl.py", *command, "--output", str(built)],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert done.stderr == ""


def test_rich_only_on_a_terminal(
    built: Path, toys: list[Variant], monkeypatch: pytest.MonkeyPatch, compiler: FakeCompiler
) -> None:
    """Elsewhere rich is not even imported: here it could not be."""
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert invoke("build", "--gpu-arch", SM, "--output", built, "--force").exit_code == 0
