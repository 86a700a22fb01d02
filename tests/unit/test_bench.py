"""The bench without a GPU: ids, useful work by hand, targets, the JSON lines, the command line, and the plots."""

from __future__ import annotations

import ast
import json
import lzma
import shutil
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import bench
from bench import device, fetch_peers, plot, report, targets
from bench.cases import FAMILIES, PROVIDER_NAMES, Target, entries, parse, registry, select
from bench.results import RESULTS, Row, append, latest, read
from bench.run import NO_DEVICE, main
from qsa_cute.errors import ArgumentError

FACTORS = {"ours": 1.0, "ours_lists": 1.1, "ours_rows": 4.6, "vllm": 5.0, "sglang": 4.8, "torch": 6.0, "fa4": 5.5}


def row(case: str, provider: str = "ours", us: float = 10.0, run_id: str = "r1") -> Row:
    made = parse(case)
    rates = (made.tflops(us), made.tbps(us))
    return Row(run_id, "2026-11-29T12:00:00+00:00", "NVIDIA H200", "abc", case, provider, us, 0.1, *rates)


def sample_rows() -> list[Row]:
    """Every attention case at a tenth of the bounds' speed for the slowest provider."""
    rows = []
    for case in select(["prefill/*", "prefill_full/*", "decode/*"]):
        base = max(case.flops / 5e8, case.bytes / 3.5e6)
        rows += [row(case.id, name, base * factor) for name, factor in FACTORS.items()]
    return rows


# Cases.


@pytest.mark.parametrize(
    ("case_id", "found"),
    [
        ("prefill/ctx32768/rows4096/rho0.995", {"ctx": 32768, "rows": 4096, "rho": 0.995, "batch": 1}),
        ("prefill/ctx8192/rows4096/rho0/fp16", {"ctx": 8192, "rho": 0.0, "dtype": "fp16"}),
        ("prefill_full/ctx32768/rho0.995", {"ctx": 32768, "rows": 32768}),
        ("decode/ctx65536/b32", {"ctx": 65536, "batch": 32, "dtype": "bf16"}),
        ("scores_prefill/ctx131072/rows4096", {"ctx": 131072, "rows": 4096}),
        ("scores_decode/ctx65536/b64", {"ctx": 65536, "batch": 64}),
        ("topk/4096x32768", {"rows": 4096, "columns": 32768}),
        ("layer_prefill/ctx131072/rows4096", {"rows": 4096}),
        ("layer_decode/ctx65536/b1", {"batch": 1}),
        ("vllm_select/ctx65536/b64/fp8", {"batch": 64, "rows": 0, "dtype": "fp8", "bytes": 64 * 16384 * 128}),
        ("vllm_select/ctx65536/b64", {"dtype": "bf16", "bytes": 64 * 16384 * 256}),
        ("vllm_select/ctx32768/rows4096", {"rows": 4096, "batch": 1, "flops": 4096 * 8192 * 1024}),
        ("host/launch", {"flops": 0, "bytes": 0}),
    ],
)
def test_an_id_gives_its_shape(case_id: str, found: dict[str, object]) -> None:
    case = parse(case_id)
    assert case.id == case_id
    assert {name: getattr(case, name) for name in found} == found


@pytest.mark.parametrize(
    "case_id",
    [
        "",
        "decode",
        "decode/b1",
        "decode/ctx65536/b0",
        "decode/ctx65536/b1/fp8",
        "vllm_select/ctx8192/b1/fp16",
        "prefill/ctx8/rows9/rho0",
        "none/ctx1",
    ],
)
def test_an_id_that_is_none_is_refused(case_id: str) -> None:
    with pytest.raises(ArgumentError, match="case"):
        parse(case_id)


def test_the_registry_has_each_id_once() -> None:
    ids = [case.id for case in registry()]
    assert len(ids) == len(set(ids))
    assert {case.family for case in registry()} == set(FAMILIES)


def test_a_pattern_selects_and_a_full_id_needs_no_registry() -> None:
    assert [case.id for case in select(["decode/*b1", "decode/ctx65536/b1"])] == ["decode/ctx65536/b1"]
    assert [case.batch for case in select(["decode/ctx4096/b3"])] == [3]
    with pytest.raises(ArgumentError):
        select(["nothing*"])


def test_entries_counts_short_rows() -> None:
    assert entries(0, 4) == 1 + 2 + 3 + 4
    assert entries(2049, 3) == 2050 + 2051 + 2051
    assert entries(65535, 1) == 2051


def test_useful_work_by_hand() -> None:
    prefill = parse("prefill/ctx32768/rows4096/rho0.995")
    assert prefill.flops == 4 * 4096 * 24 * 2051 * 256
    assert prefill.tflops(2278) == pytest.approx(91, abs=0.5)  # vLLM's figure
    assert prefill.bytes == 4096 * (2 * 24 * 256 * 2 + 2051 * 4) + 32768 * 2048
    decode = parse("decode/ctx65536/b32")
    assert decode.bytes == 32 * 2051 * 2 * 2 * 256 * 2
    assert decode.tbps(58.6) == pytest.approx(2.3, abs=0.05)
    assert parse("scores_prefill/ctx32768/rows4096").tflops(134) == pytest.approx(257, abs=1)
    assert parse("scores_decode/ctx65536/b128").tbps(133.5) == pytest.approx(4.0, abs=0.05)
    assert parse("topk/2x2048").bytes == 2 * (2048 + 512) * 4
    layer, parts = parse("layer_decode/ctx65536/b4"), ("decode/ctx65536/b4", "scores_decode/ctx65536/b4")
    assert layer.flops == sum(parse(part).flops for part in parts)


def test_a_target_is_met_short_or_open() -> None:
    both = Target(us=2.5, ratio=2, peers=("a", "b"))
    assert str(both) == "<= 2.5 us, >= 2x a and b"
    assert both.met({"ours": 2, "a": 4, "b": 9}) is True
    assert both.met({"ours": 2, "a": 3.9, "b": 9}) is False
    assert both.met({"ours": 2.6, "a": 9}) is False
    assert both.met({"ours": 2}) is None
    assert Target(us=3).met({"a": 1}) is None
    assert Target(us=3).met({"ours": 3}) is True


# Results.


def test_a_line_has_exactly_the_published_keys(tmp_path: Path) -> None:
    path = tmp_path / "new" / "h200.jsonl"
    append(path, [row("decode/ctx65536/b1", us=5.123456)])
    append(path, [row("host/launch")])
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    keys = "run_id date device source_digest case provider us us_iqr useful_tflops tbps"
    assert list(first) == keys.split()
    assert first["us"] == 5.123
    assert second["useful_tflops"] is None
    assert [found.case for found in read(path)] == ["decode/ctx65536/b1", "host/launch"]


@pytest.mark.parametrize("line", ["{", '{"us": 1}', row("host/launch").line().replace("10.0", "0"), "[]"])
def test_a_line_that_is_no_result_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(ArgumentError, match=r"bad\.jsonl:2"):
        read(path)


def test_the_latest_run_of_ours_counts_and_runs_are_not_mixed() -> None:
    case = "decode/ctx65536/b1"
    rows = [
        row(case, "vllm", 9, "r1"),
        row(case, "ours", 5, "r1"),
        row(case, "ours", 4, "r2"),
        row(case, "vllm", 8, "r3"),
    ]
    assert {name: found.us for name, found in latest(rows)[case].items()} == {"ours": 4}


def test_a_run_without_a_peer_that_the_target_is_over_does_not_replace_one_with_all() -> None:
    case = "prefill_full/ctx32768/rho0.995"
    rows = [row(case, name, us, "r1") for name, us in (("ours", 5), ("torch", 40), ("fa4", 30))]
    rows += [row(case, name, us, "r2") for name, us in (("ours", 4), ("torch", 41))]
    assert {name: found.us for name, found in latest(rows)[case].items()} == {"ours": 5, "torch": 40, "fa4": 30}
    assert latest(rows[3:])[case]["ours"].us == 4


# The command line and what it prints.


def test_no_method_keeps_the_inputs_of_a_case_alive() -> None:
    """`functools.cache` on a method keeps every object that it was called on: a run of all cases fills the device."""
    kept = [
        f"{path.name}: {cls.name}.{method.name}"
        for path in Path(str(files(bench))).glob("*.py")
        for cls in ast.walk(ast.parse(path.read_text()))
        if isinstance(cls, ast.ClassDef)
        for method in cls.body
        if isinstance(method, ast.FunctionDef)
        if any("cached_property" not in (text := ast.unparse(one)) and "cache" in text for one in method.decorator_list)
    ]
    assert not kept


def test_list_needs_no_gpu() -> None:
    result = CliRunner().invoke(main, ["--list", "--case", "decode/*"])
    assert result.exit_code == 0
    assert "decode/ctx65536/b32                    <= 37 us" in result.stdout


def test_list_as_json() -> None:
    result = CliRunner().invoke(main, ["--list", "--json", "--case", "decode/*", "--case", "host/launch"])
    found = {case["id"]: case for case in map(json.loads, result.stdout.splitlines())}
    assert list(found) == [case.id for case in select(["decode/*", "host/launch"])]
    assert found["decode/ctx65536/b32"]["target"]["us"] == 37
    assert found["decode/ctx65536/b32"]["batch"] == 32


@pytest.mark.parametrize("command", [main, plot.main, targets.main])
def test_help_has_an_example_the_providers_and_the_exit_codes(command: click.Command) -> None:
    said = CliRunner().invoke(command, ["--help"], terminal_width=120).stdout
    words = " ".join(said.split())
    for part in (f"python -m {command.callback.__module__} --", "Providers: ", "ours", "vllm", "Exit codes: 0 "):
        assert part in words
    assert all(option.help for option in command.params)
    defaults = [str(option.default) for option in command.params if isinstance(option.default, Path)]
    assert all(default in said.replace("\n", "").replace(" ", "") for default in defaults)


def test_every_provider_is_in_the_help() -> None:
    words = CliRunner().invoke(main, ["--help"]).stdout.replace(",", " ").replace(".", " ").split()
    assert set(PROVIDER_NAMES) <= set(words)


@pytest.mark.parametrize("command", [plot.main, targets.main])
def test_results_that_are_none_are_one_line(tmp_path: Path, command: click.Command) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    arguments = ["--results", str(tmp_path / "bad.jsonl"), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "bad.jsonl:1: " in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--case", "nothing/at/all"], ["--providers", "nobody", "--all"]])
def test_usage_errors(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, arguments).exit_code == 2


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["--all"])
    assert result.exit_code == NO_DEVICE
    assert "needs a CUDA device" in result.stderr


@pytest.mark.parametrize(
    ("cuda", "visible", "says"),
    [
        (None, None, "this torch is 9.9.0+cpu, built without CUDA; make -B build TORCH=... installs another, or GPU_P"),
        ("13.0", "", "torch 9.9.0+cpu sees none; CUDA_VISIBLE_DEVICES is ''"),
        ("13.0", None, "torch 9.9.0+cpu sees none; CUDA_VISIBLE_DEVICES is not set"),
    ],
)
def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, cuda, visible, says) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "9.9.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert says in CliRunner().invoke(main, ["--all"]).stderr
    with pytest.raises(SystemExit, match=r"^it needs a CUDA device, and .*torch"):
        device.require("it")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.missing() is None
    device.require("it")


def no_gpu(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run at the root where no device is to be seen."""
    shown = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""} | more
    return subprocess.run(command, cwd=plot.ROOT, env=shown, capture_output=True, text=True)


@pytest.mark.parametrize("script", sorted(path.name for path in plot.ROOT.glob("tests/gpu/sanitize*.py")))
def test_the_sanitizers_scripts_say_it_in_a_line(script: str) -> None:
    done = no_gpu([sys.executable, f"tests/gpu/{script}"])
    assert done.returncode == 1
    assert done.stderr.startswith(f"{script} needs a CUDA device, and ")
    assert done.stderr.count("\n") == 1


def test_the_gpu_tests_say_it_and_fail() -> None:
    done = no_gpu([sys.executable, "-m", "pytest", "tests/gpu/test_doctor.py", "-q"])
    assert done.returncode == 1
    assert "tests/gpu needs a CUDA device, and " in done.stdout + done.stderr


def test_make_says_that_there_is_no_sanitizer(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    done = no_gpu([shutil.which("make") or "make", "gpu-sanitize", "GPU_PYTHON=python3"], PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("compute-sanitizer is not on the path; it comes with the CUDA toolkit: PATH=/")
    assert ":$PATH make gpu-sanitize\n" in done.stderr


def test_the_lines_of_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = report.Outcome(parse("decode/ctx65536/b1"))
    outcome.rows += [row(outcome.case.id, "ours", 5), row(outcome.case.id, "vllm", 10)]
    outcome.notes.append("sglang: no kernel")
    report.plain(outcome)
    report.notes(outcome)
    printed = capsys.readouterr()
    ours, vllm = printed.out.splitlines()
    assert "5.00 us" in ours
    assert "2.00x vllm" in ours
    assert ours.endswith("target <= 5.5 us met")
    assert "target" not in vllm
    assert "without sglang: no kernel" in printed.err


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = report.Outcome(parse("decode/ctx65536/b1"), [row("decode/ctx65536/b1", us=6)])
    report.table([outcome])
    assert "short" in capsys.readouterr().out


# Plots.


def test_curves_follow_the_results() -> None:
    lines = plot.curves(
        latest(sample_rows()), lambda case: case.batch if case.family == "decode" else None, lambda found: found.us
    )
    assert list(lines) == list(plot.STYLES)
    assert [x for x, _ in lines["ours"]] == [1, 4, 16, 32, 64, 128]


def test_plots_are_drawn_for_what_was_measured(tmp_path: Path) -> None:
    assert [path.name for path in plot.draw([row("decode/ctx65536/b1")], tmp_path)] == ["decode.png", "roofline.png"]
    whole = ("ours", "ours_indexer", "ours_attention")
    more = [row("layer_decode/ctx65536/b1", name, 9) for name in whole] + [row("layer_decode/ctx65536/b32", "ours", 9)]
    more += [row("host/launch", name, 5) for name in ("ours", "bare")]
    assert len(plot.draw(sample_rows(), tmp_path)) == len(plot.FIGURES) - 2
    assert {path.stem for path in plot.draw(sample_rows() + more, tmp_path)} == set(plot.FIGURES)
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())


def test_a_rank_of_vllms_attention() -> None:
    half, whole = (parse(f"vllm_attention/tp1/ctx65536/b32{dtype}") for dtype in ("/fp8", ""))
    assert (half.dtype, half.tp, half.batch, half.rows) == ("fp8", 1, 32, 0)
    assert half.flops == whole.flops == 32 * 2051 * 4 * 24 * 256
    assert 2 * half.bytes == whole.bytes == 32 * 2051 * 2 * 2 * 256 * 2
    assert parse("vllm_attention/tp8/ctx65536/b1").bytes == 2051 * 2 * 256 * 2
    assert parse("vllm_attention/tp4/ctx65536/rows4096").rows == 4096
    for wrong in ("vllm_attention/tp3/ctx65536/b1", "vllm_attention/tp1/ctx65536/b1/fp16", "decode/ctx65536/b1/fp8"):
        with pytest.raises(ArgumentError, match="is none"):
            parse(wrong)


# The page of targets.


def test_the_page_of_targets_is_what_the_results_say() -> None:
    assert targets.PAGE.read_text() == targets.page(latest(read(RESULTS))), "python -m bench.targets"


@pytest.mark.parametrize(
    ("ours", "vllm", "ends"),
    [
        (5.0, 9.0, "| 5 | 9 | 1.80x | <= 5.5 us | met |"),
        (6.5, 9.0, "| 6.5 | 9 | 1.38x | <= 5.5 us | short |"),
        (None, 9.0, "|  | 9 |  | <= 5.5 us | not measured |"),
    ],
)
def test_a_target_is_met_short_or_not_measured(ours, vllm, ends) -> None:
    case = parse("decode/ctx65536/b1")
    rows = {name: row(case.id, name, us) for name, us in (("ours", ours), ("vllm", vllm)) if us}
    assert targets.line(case, rows).endswith(ends)


# The peers' files.


def test_the_peers_files_come_out_of_their_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(requirement: str, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "peer.whl", "w") as wheel:
            for member in (*fetch_peers.FILES[requirement], fetch_peers.OPERATORS):
                wheel.writestr(member, f"{requirement} {member}")
        return folder / "peer.whl"

    monkeypatch.setattr(fetch_peers, "download", download)
    result = CliRunner().invoke(fetch_peers.main, ["--dest", str(tmp_path / "peers"), "--with-topk"])
    assert result.exit_code == 0, result.output
    found = {path.name for path in (tmp_path / "peers").iterdir()}
    names = {name for files in fetch_peers.FILES.values() for name in files.values()}
    assert found == names | {"peers.py", "vllm_ops.so.xz"}
    assert "qsa_indexer.py" in (tmp_path / "peers/vllm_qsa_indexer.py").read_text()
    assert lzma.decompress((tmp_path / "peers/vllm_ops.so.xz").read_bytes()).endswith(fetch_peers.OPERATORS.encode())


def test_a_download_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], check: bool) -> None:
        raise subprocess.CalledProcessError(3, command)

    monkeypatch.setattr(fetch_peers.subprocess, "run", run)
    result = CliRunner().invoke(fetch_peers.main, ["--dest", str(tmp_path)])
    assert result.exit_code == 1
    assert "pip could not download vllm==0.33.0 (exit code 3)" in result.output
