"""What importing costs, and who may import the compiler, torch and the driver."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "qsa_cute"
HEAVY = ("cutlass", "torch", "cuda", "triton", "numpy", "rich")
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def modules() -> list[str]:
    """Every module but the kernels', which are the DSL's, and torch_ops, whose import is the request for torch."""
    dotted = [".".join(("qsa_cute", *path.with_suffix("").parts)).removesuffix(".__init__") for path in FILES]
    return [name for name in dotted if not name.startswith("qsa_cute.kernels.") and name != "qsa_cute.torch_ops"]


@pytest.mark.parametrize("module", [name for name in modules() if not name.startswith("qsa_cute.reference")])
def test_an_import_loads_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}} & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def imports(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imported(path))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_who_may_import_what(path: Path) -> None:
    """Lazy imports inside functions count, too."""
    place = path.parts[0]
    if place != "kernels" and path.as_posix() != "aot/compile.py":
        assert not imports(path, "cutlass")
        assert not imports(path, "qsa_cute.kernels")
    if place in ("kernels", "aot"):
        assert not imports(path, "torch")
    if place != "aot":
        assert not imports(path, "qsa_cute.aot")
    if place in ("kernels", "aot", "runtime", "runners", "selftest") or len(path.parts) == 1:
        assert not imports(path, "qsa_cute.hosts")
