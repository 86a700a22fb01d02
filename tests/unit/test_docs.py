"""README and docs: their commands parse, their code runs without a GPU, and what they point to is there."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from attention_params import FakeTensor, ints
from click.testing import CliRunner
from runtime_fakes import FakeDriver, write_set

from qsa_cute import runtime
from qsa_cute.aot.cli import main as build_cutedsl
from qsa_cute.runners import SparseDecodeRunner, SparsePrefillRunner
from qsa_cute.runtime import Loader

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
PLACES = ("qsa_cute/", "tests/", "bench/", "docs/", "examples/", ".ci/", "kernels/", "runners/", "runtime/")

pages = pytest.mark.parametrize("page", TEXT)


def blocks(page: str, *languages: str) -> list[str]:
    """Fenced blocks in these languages, without their common indent."""
    found = [(language, body) for language, body in FENCE.findall(TEXT[page]) if language in languages]
    return ["\n".join(line[len(body) - len(body.lstrip(" ")) :] for line in body.splitlines()) for _, body in found]


def commands() -> list[str]:
    """Every command in shell blocks and in running text, without comments and optional parts."""
    found = []
    for page, text in TEXT.items():
        lines = [line for block in blocks(page, "", "sh", "bash", "shell") for line in block.splitlines()]
        lines += [inline for inline in INLINE.findall(FENCE.sub("", text)) if " " in inline]
        plain = (re.sub(r"\s+#.*|\[.*?\]", "", line).strip() for line in lines)
        found += [line for line in plain if re.match(r"make \w|python3? \S+(\.py| )|\.ci/run", line)]
    return sorted(set(found))


def test_there_are_commands() -> None:
    assert {"make build", "make test", "python -m qsa_cute doctor", 'make wheel SM="sm_90a sm_80"'} <= set(commands())


@pytest.mark.parametrize("command", commands())
def test_a_command(command: str) -> None:
    """Make's targets exist; builds plan; everything else takes its options."""
    words = shlex.split(command)
    if words[0] == "make":
        run(["make", "-n", *words[1:], f"GPU_PYTHON={sys.executable}"])
    elif words[1] == "build_cutedsl.py":
        action = ["--dry-run", "--output", "/none"] if words[2:3] == ["build"] else ["--help"]
        arguments = [word.replace("SM", "sm_90a") if word == "SM" else word for word in words[2:]]
        done = CliRunner().invoke(build_cutedsl, [*arguments, *action])
        assert done.exit_code == 0, done.output
    elif words[0] != ".ci/run":
        extra = [] if words[3:4] == ["doctor"] and "--check" not in words else ["--help"]
        run([sys.executable, *words[1:], *extra])


def run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr


@pages
def test_links_and_paths_lead_somewhere(page: str) -> None:
    text, here = TEXT[page], (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http:", "https:")):
            assert (here / target).exists(), target
    for name in INLINE.findall(FENCE.sub("", text)):
        if name.startswith(PLACES) and re.fullmatch(r"[\w./*-]+", name):
            assert any(any(root.glob(name)) for root in (ROOT, ROOT / "qsa_cute")) or "*" in name, name


@pages
def test_python_parses_and_its_names_are_there(page: str) -> None:
    for block in blocks(page, "python", "py"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qsa_cute"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_the_readmes_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors that are none, with runners that keep what they are given."""
    ran = []
    for runner in (SparseDecodeRunner, SparsePrefillRunner):
        monkeypatch.setattr(runner, "preflight", staticmethod(lambda dtype: ran.append(("preflight", dtype))))
        monkeypatch.setattr(runner, "run", staticmethod(lambda dtype, params: ran.append((type(params), dtype))))
    decode = {
        "q": FakeTensor(4, 1, 24, 256),
        "kv_pool": FakeTensor(64, 128, 2, 384),
        "page_table": ints(4, 2, 8),
        "indices": ints(4, 1, 2051),
        "context_lengths": ints(4),
        "out": FakeTensor(4, 1, 24, 256),
    }
    prefill = {
        "batch": 1,
        "rows": 256,
        "kv_rows": 4096,
        "q": FakeTensor(1, 256, 24, 256),
        "k": FakeTensor(1, 4096, 2, 256),
        "v": FakeTensor(1, 4096, 2, 256),
        "out": FakeTensor(1, 256, 24, 256),
        "block_ids": ints(1, 256, 512),
        "context_lengths": ints(1),
    }
    found = blocks("README.md", "python")
    assert len(found) == 2
    names: dict[str, object] = {}
    exec(found[0], names | decode)
    exec("import torch", names)
    torch = names["torch"]
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: FakeTensor(size, dtype=str(dtype)))
    exec(found[1], names | prefill)
    kinds = [getattr(kind, "__name__", kind) for kind, _ in ran]
    assert kinds == ["preflight", "SparseDecodeParams", "SparsePrefillParams"]


def test_the_artifact_pages_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    write_set(tmp_path)
    loader = Loader(tmp_path, FakeDriver())
    monkeypatch.setattr(runtime.loader, "default_loader", lambda: loader)
    (code,) = blocks("docs/artifacts.md", "python")
    exec(code, {})
    said = capsys.readouterr().out
    assert "0 fake 0 ('qsa_sparse_decode_d256_bf16_s8_sm90a',) {}" in said
    assert said.endswith("None\n")


@pages
def test_make_targets_in_text_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", TEXT[page])) <= targets
