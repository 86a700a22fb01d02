"""A registry of toy kernels, one real build of it, and a compiler that copies instead of compiling."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import pytest

from qsa_cute import variants as registry
from qsa_cute.aot import build, manifest, sources
from qsa_cute.aot.compile import Job
from qsa_cute.aot.store import Store
from qsa_cute.variants import Kernel, Tuning, Variant

SM = "sm_90a"
ONE_WARP = Tuning({"warps": 1}, (SM, "sm_80"), (128,))
FILL = Kernel("fill", "toy_kernels:Fill", (ONE_WARP,), tensor_core="")
GREEDY = Kernel("greedy", "toy_kernels:Greedy", (Tuning({"warps": 1}, ("sm_80",), (128,), ("bf16",)),))
BROKEN = Kernel("broken", "toy_kernels:Broken", (Tuning({"warps": 1}, ("sm_80",), (128,), ("bf16",)),))

# Runs at the start of every compiler process: a build that asks the driver for a device fails there.
POISON = """
import pathlib
import cuda.bindings.driver as driver

def refuse(*_):
    raise RuntimeError("a build asked the driver for a device")

for name in ("cuInit", "cuDeviceGet", "cuDeviceGetCount", "cuCtxGetCurrent", "cuDevicePrimaryCtxRetain"):
    setattr(driver, name, refuse)
pathlib.Path(__file__).with_name("poisoned").touch()
"""


def use_registry(patch: pytest.MonkeyPatch, *kernels: Kernel) -> None:
    """Put `kernels` in the place of the registry's, wherever it is read."""
    table = MappingProxyType({kernel.name: kernel for kernel in kernels})
    for module in (registry, build, manifest, sources):
        patch.setattr(module, "KERNELS", table)


@pytest.fixture(scope="session")
def real_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact folder with `fill` really compiled for sm_90a, by compilers that must not look for a device."""
    poison = tmp_path_factory.mktemp("poison")
    (poison / "sitecustomize.py").write_text(POISON)
    root = tmp_path_factory.mktemp("artifacts")
    with pytest.MonkeyPatch.context() as patch:
        use_registry(patch, FILL)
        patch.syspath_prepend(str(poison))
        result = build.build(Store(root), registry.variants([SM]), jobs=2)
    assert result.ok, result.failed
    assert (poison / "poisoned").exists()
    return root


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """The registry holds the toys that compile; its variants for sm_90a."""
    use_registry(monkeypatch, FILL)
    return registry.variants([SM])


@dataclass
class FakeCompiler:
    """Stands in for `compile.run_job`: hands out `fill` as compiled in `real_build`.

    Attributes:
        compiled: names, in the order asked.
        fails: name -> message.
        before: called with each job first.
    """

    folder: Path
    compiled: list[str] = field(default_factory=list)
    fails: dict[str, str] = field(default_factory=dict)
    before: Callable[[Job], None] = lambda _job: None

    def __call__(self, job: Job) -> str:
        self.before(job)
        self.compiled.append(job.name)
        if job.name in self.fails:
            return self.fails[job.name]
        source = next(self.folder.glob("*.cubin"))
        shutil.copy(source, Path(job.folder, f"{job.name}.cubin"))
        entry = json.loads((self.folder / "manifest.json").read_text())["variants"][source.stem]
        params = [{"name": param["name"], "kind": param["kind"]} for param in entry["params"]]
        report = {key: entry[key] for key in ("threads", "smem_bytes", "early_launch")} | {"params": params}
        Path(job.folder, f"{job.name}.json").write_text(json.dumps(report))
        return ""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, toys: list[Variant], real_build: Path) -> FakeCompiler:
    fake = FakeCompiler(real_build / SM)
    monkeypatch.setattr("qsa_cute.aot.compile.run_job", fake)
    return fake


@pytest.fixture
def built(tmp_path: Path, toys: list[Variant], real_build: Path) -> Path:
    """A copy of `real_build` that a test may spoil."""
    return Path(shutil.copytree(real_build, tmp_path / "artifacts"))
