"""Compiles one variant, in a process of its own: `python -m qsa_cute.aot.compile JOB`, JOB being JSON.

A fresh process per variant keeps a build bit-reproducible (nothing left of the variant before) and parallel.
Writes `<name>.cubin` and `<name>.json` (what only the kernel's class knows) into the job's folder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One compilation.

    Attributes:
        entry: "module:Class" of the kernel.
        name: prefix of the symbol, stem of the two files.
        sm: target, e.g. "sm_90a".
        head_dim, dtype, baked: arguments of the class.
        folder: where the files go; it exists.
    """

    entry: str
    name: str
    sm: str
    head_dim: int
    dtype: str
    baked: Mapping[str, int]
    folder: str

    def command(self) -> list[str]:
        return [sys.executable, "-m", __name__, json.dumps({**asdict(self), "baked": dict(self.baked)})]


def environment(sm: str, dump: str) -> dict[str, str]:
    """The child's environment: the target named, no device visible, and no DSL setting of the caller's."""
    mine = {key: value for key, value in os.environ.items() if not key.startswith("CUTE_DSL_")}
    return mine | {
        "CUTE_DSL_ARCH": sm,
        "CUTE_DSL_KEEP": "cubin",
        "CUTE_DSL_DUMP_DIR": dump,
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def compile_variant(job: Job) -> tuple[bytes, dict[str, Any]]:
    """The cubin, and {"threads", "smem_bytes", "early_launch", "params": [{"name", "kind"}]}. Needs `environment`."""
    import cuda.bindings.driver as cuda
    import cutlass.cute as cute

    module_name, _, class_name = job.entry.partition(":")
    module = importlib.import_module(module_name)
    cls = getattr(module, class_name)
    obj = cls(job.head_dim, job.dtype, **job.baked)
    cls.kernel.set_name_prefix(job.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    arguments = [_placeholder(param, job.dtype) for param in module.PARAMS]
    compiled = cute.compile(obj, *arguments, cuda.CUstream(0))
    report = {
        "threads": obj.threads,
        "smem_bytes": obj.smem_bytes,
        "early_launch": bool(getattr(cls, "early_launch", False)),
        "params": [{"name": name, "kind": kind} for param in module.PARAMS for name, kind in param.words()],
    }
    return bytes(compiled.artifacts.CUBIN), report


def _placeholder(param: Any, dtype: str) -> Any:
    """A stand-in of the parameter's type; its value is never looked at."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    if param.kind == "map":
        return tuple(cutlass.Int64(1) for _ in param.words())
    if param.kind != "ptr":
        return {"i32": cutlass.Int32, "i64": cutlass.Int64, "f32": cutlass.Float32}[param.kind](1)
    elements = {
        "bf16": cutlass.BFloat16,
        "fp16": cutlass.Float16,
        "fp8_e4m3": cutlass.Float8E4M3FN,
        "f32": cutlass.Float32,
        "i32": cutlass.Int32,
        "i64": cutlass.Int64,
        "u8": cutlass.Uint8,
    }
    element = elements[dtype if param.element == "elem" else param.element]
    return make_ptr(element, 16, cute.AddressSpace.gmem, assumed_align=param.align)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    cubin, report = compile_variant(job)
    Path(job.folder, f"{job.name}.cubin").write_bytes(cubin)
    Path(job.folder, f"{job.name}.json").write_text(json.dumps(report))


def run_job(job: Job, timeout_s: float = 600) -> str:
    """Run `job` in its own process and wait for it.

    Returns: "" when it succeeded, else a message with the head of what the compiler said.
    """
    import subprocess

    with tempfile.TemporaryDirectory(prefix="qsa-cute-") as dump:
        try:
            done = subprocess.run(
                job.command(),
                env=environment(job.sm, dump),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                cwd=dump,
            )
        except subprocess.TimeoutExpired:
            return f"the compiler did not finish within {timeout_s:g} s"
    if done.returncode == 0:
        return ""
    return f"the compiler ended with status {done.returncode}:\n{_digest_of(done.stderr or done.stdout)}"


def _digest_of(text: str, head: int = 20, tail: int = 10) -> str:
    """The first lines, which say where, and the last, which say what."""
    lines = text.strip().splitlines()
    if len(lines) > head + tail:
        lines = [*lines[:head], f"... ({len(lines) - head - tail} lines left out)", *lines[-tail:]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
