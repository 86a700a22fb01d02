"""`install` and `uninstall`, against a stand-in package with vLLM's module layout; signatures against vLLM 0.33's."""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from qsa_cute.errors import ArgumentError, ArtifactError, CaptureError, DriverError, OverlapError, UnsupportedError
from qsa_cute.hosts import vllm as host
from qsa_cute.hosts import vllm_select

# vLLM 0.33.0, vllm/models/qwen4_exp/nvidia/ops/qsa_indexer.py and qsa.py. "*": the rest by keyword only.
SIGNATURES = {
    "qsa_indexer": {
        "expand_qsa_block_indices": "block_indices query_positions visible_blocks compress_ratio token_topk out",
        "qsa_select_paged_decode": (
            "q k_cache page_table visible_blocks token_topk compress_ratio decode_query_len block_indices"
        ),
        "qsa_select_paged_prefill": (
            "q k_cache page_table query_start_loc visible_blocks token_topk compress_ratio max_query_len block_indices "
            "max_seq_len"
        ),
        "warmup_qsa_mqa_paged_decode": (
            "k_cache page_table * num_heads head_dim max_decode_query_len max_num_reqs max_num_batched_tokens"
        ),
    },
    "qsa": {
        "qsa_sparse_paged_attention": (
            "q k_cache v_cache logical_indices block_table token_to_req use_prefill_config out=None k_scale=None "
            "v_scale=None * output_gate"
        ),
        "warmup_qsa_sparse_paged_attention": "kv_cache block_table * num_query_heads selection_width",
    },
}
SELECT = tuple(SIGNATURES["qsa_indexer"])
OURS = {name: text for each in SIGNATURES.values() for name, text in each.items() if find_spec(host._HOMES[name])}


def source(functions: dict[str, str]) -> str:
    """A module whose functions tell that they were called."""
    lines = ["calls = []"]
    for name, arguments in functions.items():
        lines += [
            f"def {name}({', '.join(arguments.split())}):",
            f"    calls.append({name!r})",
            f"    return 'vLLM {name}'",
        ]
    return "\n".join(lines) + "\n"


USER = """
from vllm.models.qwen4_exp.nvidia.ops.qsa_indexer import qsa_select_paged_decode as select
from vllm.models.qwen4_exp.nvidia.ops import qsa_indexer
from vllm.models.qwen4_exp.nvidia.ops.qsa import qsa_sparse_paged_attention
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """The stand-in's modules by name, a `model` that imported from them included."""
    folder = tmp_path / "vllm/models/qwen4_exp/nvidia/ops"
    folder.mkdir(parents=True)
    for part in (folder, *folder.parents[:4]):
        (part / "__init__.py").touch()
    for name, functions in SIGNATURES.items():
        (folder / f"{name}.py").write_text(source(functions))
    (folder.parent / "model.py").write_text(USER)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = {name: importlib.import_module(f"{host.PACKAGE}.{name}") for name in SIGNATURES}
    modules["model"] = importlib.import_module("vllm.models.qwen4_exp.nvidia.model")
    yield modules
    host.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def ours(monkeypatch):
    """Stands for our select function: returns "ours", or raises `error`."""

    def select(*args, **kwargs):
        select.calls += 1
        if select.error is not None:
            raise select.error
        return "ours"

    select.calls, select.error = 0, None
    select.__signature__ = __import__("inspect").signature(vllm_select.qsa_select_paged_decode)
    monkeypatch.setattr(vllm_select, "qsa_select_paged_decode", select)
    return select


def arguments(rows: int = 2) -> tuple:
    cpu = torch.zeros(rows, 4, 128)
    return cpu, cpu, cpu, cpu, 2048, 4, 1, cpu


@pytest.mark.parametrize("name", OURS)
def test_signatures_are_vllms(name):
    names: dict[str, object] = {}
    exec(source({name: OURS[name]}), names)
    assert host.parameters(getattr(host, name)) == host.parameters(names[name])


def test_every_function_has_a_signature_here():
    assert {name: list(each) for name, each in host.FUNCTIONS.items()} == {
        name: list(each) for name, each in SIGNATURES.items()
    }


def test_importing_it_loads_neither_torch_nor_vllm():
    code = "import sys, qsa_cute.hosts.vllm; sys.exit(bool({'torch', 'vllm', 'cutlass'} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'qsa_anything'"):
        host.qsa_anything  # noqa: B018


def test_all_names_are_replaced_and_put_back(vllm, ours):
    before = {name: getattr(vllm["qsa_indexer"], name) for name in SELECT}
    assert set(host.install()) == set(OURS)
    for name in SELECT:
        assert getattr(vllm["qsa_indexer"], name) is not before[name]
        assert getattr(vllm["qsa_indexer"], name).__name__ == name
    assert vllm["model"].select is vllm["qsa_indexer"].qsa_select_paged_decode
    assert vllm["model"].select(*arguments()) == "ours"
    late = type(sys)("late")
    late.select = vllm["qsa_indexer"].qsa_select_paged_decode
    sys.modules["vllm.late"] = late
    replaced = vllm["model"].select
    host.install()
    assert vllm["model"].select is replaced, "installing twice is installing once"
    host.uninstall()
    for name in SELECT:
        assert getattr(vllm["qsa_indexer"], name) is before[name]
    assert vllm["model"].select is before["qsa_select_paged_decode"]
    assert late.select is before["qsa_select_paged_decode"]
    host.uninstall()


@pytest.mark.parametrize("kind", [ArgumentError, UnsupportedError, ArtifactError])
def test_a_refusal_goes_to_vllm_with_one_log_line(vllm, ours, caplog, kind):
    host.install()
    ours.error = kind("8 indexer heads; the kernels take 1 to 4")
    with caplog.at_level(logging.WARNING, "qsa_cute"):
        for _ in range(3):
            assert vllm["model"].select(*arguments()) == "vLLM qsa_select_paged_decode"
    assert ours.calls == 1, "a refused shape is not asked for again"
    assert [record.getMessage() for record in caplog.records] == [
        "qsa_select_paged_decode falls back to vLLM's own: 8 indexer heads; the kernels take 1 to 4"
    ]
    ours.error = None
    assert vllm["model"].select(*arguments(rows=3)) == "ours", "another shape is"
    assert vllm["model"].select(*arguments()) == "vLLM qsa_select_paged_decode"
    assert vllm["qsa_indexer"].calls == ["qsa_select_paged_decode"] * 4


@pytest.mark.parametrize("error", [CaptureError("first use"), OverlapError("out overlaps q")])
def test_what_may_pass_the_next_time_is_asked_again(vllm, ours, error):
    host.install()
    ours.error = error
    assert vllm["model"].select(*arguments()) == "vLLM qsa_select_paged_decode"
    ours.error = None
    assert vllm["model"].select(*arguments()) == "ours"


def test_a_failing_launch_is_not_hidden(vllm, ours):
    host.install()
    ours.error = DriverError("launch failed")
    with pytest.raises(DriverError):
        vllm["model"].select(*arguments())


def test_real_functions_refuse_what_is_on_the_cpu(vllm, caplog):
    host.install()
    q = torch.zeros(2, 4, 128)
    assert vllm["model"].select(*arguments()) == "vLLM qsa_select_paged_decode"
    assert "it takes a CUDA tensor" in caplog.text
    assert vllm["qsa_indexer"].expand_qsa_block_indices(q, q, q, 4, 2048, q) == "vLLM expand_qsa_block_indices"


def test_another_vllms_function_stays(vllm, caplog):
    def changed(q, k_cache, something_new):
        return "changed"

    vllm["qsa_indexer"].qsa_select_paged_prefill = changed
    assert "qsa_select_paged_prefill" not in host.install()
    assert vllm["qsa_indexer"].qsa_select_paged_prefill is changed
    assert "qsa_select_paged_prefill stays vLLM's own" in caplog.text
    assert "something_new" in caplog.text


def test_without_vllm(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UnsupportedError, match=r"does not import .*needs vLLM 0\.33"):
        host.install()
    monkeypatch.setenv(host.ENVIRONMENT, "1")
    host.plugin()
    assert "vLLM keeps its own functions" in caplog.text


def test_the_plugin_is_opt_in(vllm, monkeypatch):
    before = vllm["model"].select
    monkeypatch.delenv(host.ENVIRONMENT, raising=False)
    host.plugin()
    monkeypatch.setenv(host.ENVIRONMENT, "0")
    host.plugin()
    assert vllm["model"].select is before
    monkeypatch.setenv(host.ENVIRONMENT, "1")
    host.plugin()
    assert vllm["model"].select is not before
    monkeypatch.setenv(host.ENVIRONMENT, "yes")
    with pytest.raises(ArgumentError, match="it takes 1"):
        host.plugin()


def test_the_entry_point_is_there():
    """As the project declares it; an installed one must say the same."""
    import tomllib

    root = Path(__file__).resolve().parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert declared == {"qsa_cute": "qsa_cute.hosts.vllm:plugin"}
    found = metadata.EntryPoint("qsa_cute", declared["qsa_cute"], "vllm.general_plugins").load()
    assert found is host.plugin


def test_the_docs_table_has_every_environment_variable():
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs/integrating-vllm.md").read_text().partition("## Environment variables")[2]
    documented = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    code = [path.read_text() for path in (root / "qsa_cute").rglob("*.py")]
    ours = {name for each in code for name in re.findall(r"\"(QSA_CUTE_[A-Z_]+|VLLM_[A-Z_]+)\"", each)}
    assert sorted(ours) == sorted(documented)


def test_what_is_remembered_is_bounded_and_needs_no_hash():
    def ours(q, longest, scale=None):
        ours.calls += 1
        raise ArgumentError("no")

    ours.calls = 0
    call = host._guarded("select", lambda q, longest, scale=None: "vLLM", ours)
    for longest in range(2 * host._REFUSED):
        assert call(torch.zeros(1), longest) == "vLLM"
    remembered = next(cell.cell_contents for cell in call.__closure__ if isinstance(cell.cell_contents, set))
    assert len(remembered) <= host._REFUSED
    assert call(torch.zeros(1), 0, [0.5]) == "vLLM"
    assert call(torch.zeros(1), 0, scale=[0.5]) == "vLLM"


def test_a_vllm_that_cannot_be_imported_for_another_reason(vllm, tmp_path, monkeypatch, caplog):
    (tmp_path / "vllm/models/qwen4_exp/nvidia/ops/qsa.py").write_text("raise RuntimeError('no such platform')")
    monkeypatch.delitem(sys.modules, f"{host.PACKAGE}.qsa")
    importlib.invalidate_caches()
    monkeypatch.setenv(host.ENVIRONMENT, "1")
    host.plugin()
    assert "does not import (no such platform)" in caplog.text
