"""Digests follow what a variant is made from, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import SM, use_registry

from qsa_cute import variants as registry
from qsa_cute.aot import sources
from qsa_cute.errors import ArtifactError
from qsa_cute.variants import Kernel, Tuning, Variant

FILES = {
    "made/__init__.py": "",
    "made/kernel.py": "import cutlass\nfrom made import helper\nfrom made.deep import thing\n",
    "made/helper.py": "def f():\n    import made.late\n",
    "made/late.py": "LATE = 1\n",
    "made/deep/__init__.py": "thing = 1\n",
    "made/other.py": "OTHER = 1\n",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "made"]:
        monkeypatch.delitem(sys.modules, name)  # of another test's folder
    use_registry(monkeypatch, Kernel("made", "made.kernel:K", (Tuning({"warps": 1}, (SM,), (128,)),)))
    return tmp_path


@pytest.fixture
def variant(root: Path) -> Variant:
    return registry.variants([SM])[0]


def test_imports_are_followed_without_importing(root: Path) -> None:
    assert list(sources.module_files("made.kernel")) == [
        "made.deep", "made.helper", "made.kernel", "made.late",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["kernel.py", "helper.py", "late.py", "deep/__init__.py"])
def test_a_change_in_any_source_changes_the_digest(root: Path, variant: Variant, name: str) -> None:
    before = sources.Digests("1").of(variant)
    with (root / "made" / name).open("a") as file:
        file.write("# changed\n")
    assert sources.Digests("1").of(variant) != before


def test_what_is_not_imported_does_not_count(root: Path, variant: Variant) -> None:
    before = sources.Digests("1").of(variant)
    (root / "made" / "other.py").write_text("OTHER = 2\n")
    assert sources.Digests("1").of(variant) == before


def test_the_compiler_counts(variant: Variant) -> None:
    assert sources.Digests("1").of(variant) != sources.Digests("2").of(variant)


def test_variants_of_one_source_differ(root: Path) -> None:
    digests = sources.Digests("1")
    assert len({digests.of(variant) for variant in registry.variants([SM])}) == len(registry.variants([SM]))


def test_an_entry_that_is_nowhere(root: Path) -> None:
    with pytest.raises(ArtifactError, match=r"made\.nowhere.*cannot be found"):
        sources.module_files("made.nowhere")


def test_a_relative_import_is_refused(root: Path) -> None:
    (root / "made" / "kernel.py").write_text("from . import helper\n")
    with pytest.raises(ArtifactError, match=r"kernel\.py:1 has a relative import"):
        sources.module_files("made.kernel")
