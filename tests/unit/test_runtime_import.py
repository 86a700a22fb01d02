"""Importing the package or its run time loads no torch, no compiler and no driver."""

from __future__ import annotations

import subprocess
import sys

import pytest

import qsa_cute

HEAVY = ("torch", "cutlass", "cuda.bindings.driver", "qsa_cute.aot")
PURE = f"import sys; {{}}; print([m for m in {HEAVY} if m in sys.modules])"


@pytest.mark.parametrize(
    "statement",
    ["import qsa_cute", "import qsa_cute.runtime", "import qsa_cute; qsa_cute.Support; qsa_cute.ArtifactError"],
)
def test_import_is_pure(statement):
    done = subprocess.run([sys.executable, "-c", PURE.format(statement)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = qsa_cute.Missing


def test_the_public_names_are_listed():
    assert set(qsa_cute.__all__) <= set(dir(qsa_cute))
