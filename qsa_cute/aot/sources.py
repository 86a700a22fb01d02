"""What a variant is made from, and one hash over it: the answer to "is this cubin up to date?".

Sources are found by reading import statements, not by running kernels' files: a digest needs no compiler.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from qsa_cute.errors import ArtifactError
from qsa_cute.variants import KERNELS, Variant

DSL = "nvidia-cutlass-dsl"
# How a kernel is compiled is part of what it is made from; what the registry says is in the variant's name.
RECIPE = "qsa_cute.aot.compile"
REGISTRY = "qsa_cute.variants"


def dsl_version() -> str:
    """The installed DSL's version.

    Raises:
        ArtifactError: it is not installed.
    """
    try:
        return metadata.version(DSL)
    except metadata.PackageNotFoundError:
        raise ArtifactError(f"{DSL} is not installed, and only it can build; run: pip install -e '.[build]'") from None


def module_files(module: str) -> dict[str, Path]:
    """`module` and every module of its own package and of qsa_cute that it imports, transitively: name -> file."""
    local = {module.split(".")[0], "qsa_cute"}
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = _file(name)
        waiting += [i for i in _imports(found[name], local) if i not in found]
    return dict(sorted(found.items()))


def _file(module: str) -> Path:
    spec = _spec(module)
    if spec is None or spec.origin is None:
        raise ArtifactError(f"the source of module {module!r} cannot be found; is the registry's entry right?")
    return Path(spec.origin)


def _spec(module: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None


def _imports(file: Path, local: set[str]) -> Iterator[str]:
    """Names of the local modules that a file imports, at any depth of nesting."""
    for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in local)
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise ArtifactError(f"{file}:{node.lineno} has a relative import, which a digest does not follow; name it")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in local:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if _spec(submodule) else node.module


def _hash(modules: Iterable[str]) -> str:
    """Over the names and bytes of the modules and of all they import."""
    files: dict[str, Path] = {}
    for module in modules:
        files |= module_files(module)
    total = hashlib.sha256()
    for name, path in sorted(files.items()):
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


class Digests:
    """Digests of variants against the sources as they are now; each kernel's files are read once.

    Args:
        dsl: version of the DSL that builds.
    """

    def __init__(self, dsl: str):
        self.dsl = dsl
        self._recipe = hashlib.sha256(_file(RECIPE).read_bytes()).hexdigest()
        self._kernels: dict[str, str] = {}

    def of(self, variant: Variant) -> str:
        entry = KERNELS[variant.kernel].entry
        if entry not in self._kernels:
            self._kernels[entry] = _hash([entry.partition(":")[0]])
        made_from = [entry, variant.name, variant.baked, self.dsl, self._recipe, self._kernels[entry]]
        return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def source_digest() -> str:
    """One hash over the sources of all kernels and the registry."""
    return _hash([REGISTRY, *(kernel.entry.partition(":")[0] for kernel in KERNELS.values())])
