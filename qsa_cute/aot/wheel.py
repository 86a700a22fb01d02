"""Packs the package and the built sets of chosen SMs into one wheel, which a load takes as it is.

The wheel is made from a copy, so that neither a set of an earlier wheel nor a stray file gets in, and twice from the
same sources and sets it has the same bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from qsa_cute.abi import MANIFEST
from qsa_cute.aot import verify
from qsa_cute.errors import ArtifactError

PROJECT = Path(__file__).resolve().parents[2]
_SOURCES = ("pyproject.toml", "README.md")
_NOT_PACKED = shutil.ignore_patterns("__pycache__", "artifacts", "*.egg-info")
_SETUPTOOLS = 77  # as pyproject.toml asks; where the environment has it, nothing is downloaded
_EPOCH = "315532800"  # 1980-01-01, the first date that a zip file can say


def make_wheel(root: Path, sms: Sequence[str], out: Path, project: Path = PROJECT) -> Path:
    """A wheel in `out` that holds the sets of `sms` from the artifact folder `root`; the wheel's path.

    Raises:
        ArtifactError: a set is missing or damaged, this is no checkout, or packing failed; says which.
    """
    if not (project / "pyproject.toml").is_file():
        raise ArtifactError(f"a wheel is made in a checkout of qsa-cute, and {project} is none")
    problems = [one for found in verify.verify(root, tuple(sms), lock=False, evidence=False).values() for one in found]
    if problems:
        raise ArtifactError(f"not packed: {'; '.join(problems)}")
    with tempfile.TemporaryDirectory(prefix="qsa-cute-") as folder:
        tree, made = Path(folder, "tree"), Path(folder, "dist")
        packed = _copy(project, root, sms, tree)
        _run_pip(tree, made)
        wheel = next(made.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            absent = packed - set(archive.namelist())
        if absent:
            raise ArtifactError(f"the wheel lacks {', '.join(sorted(absent))}; does pyproject.toml name them?")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def _copy(project: Path, root: Path, sms: Sequence[str], tree: Path) -> set[str]:
    """The package's sources and the sets; the names that the wheel must have."""
    shutil.copytree(project / "qsa_cute", tree / "qsa_cute", ignore=_NOT_PACKED)
    for name in _SOURCES:
        shutil.copy(project / name, tree)
    names = set()
    for sm in sms:
        target = tree / "qsa_cute" / "artifacts" / sm
        target.mkdir(parents=True)
        for file in (MANIFEST, *(entry["file"] for entry in verify.load(root, sm)["variants"].values())):
            shutil.copy(root / sm / file, target)
            names.add(f"qsa_cute/artifacts/{sm}/{file}")
    return names


def _run_pip(tree: Path, out: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(tree)]
    if _has_setuptools():
        command.insert(4, "--no-build-isolation")
    done = subprocess.run(command, env=os.environ | {"SOURCE_DATE_EPOCH": _EPOCH}, capture_output=True, text=True)
    if done.returncode:
        raise ArtifactError(f"pip could not make the wheel:\n{(done.stderr or done.stdout).strip()}")


def _has_setuptools() -> bool:
    try:
        return int(metadata.version("setuptools").split(".")[0]) >= _SETUPTOOLS
    except (metadata.PackageNotFoundError, ValueError):
        return False
