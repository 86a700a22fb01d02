"""Counts instructions of a cubin's SASS, with NVIDIA's disassembler."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from importlib import metadata
from pathlib import Path

from qsa_cute.errors import ArtifactError

WHEEL = "nvidia-cuda-cuobjdump"
OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
TENSOR_CORE = re.compile(r"(?:UTC)?[A-Z]G?MMA$")  # HMMA, IMMA, QMMA, HGMMA, UTCHMMA, ...
LOCAL_MEMORY = ("STL", "LDL")


def cuobjdump() -> Path:
    """Where the tool is: in its wheel, else on PATH.

    Raises:
        ArtifactError: in neither.
    """
    try:
        for file in metadata.files(WHEEL) or ():
            if file.name == "cuobjdump":
                return Path(str(file.locate()))
    except metadata.PackageNotFoundError:
        pass
    on_path = shutil.which("cuobjdump")
    if on_path is None:
        raise ArtifactError(
            "cuobjdump is neither installed as a wheel nor on PATH, and without it the SASS cannot be checked; "
            "install the build tools: pip install -e '.[build]'"
        )
    return Path(on_path)


def opcodes(cubin: Path) -> Counter[str]:
    """How often each opcode (without its modifiers) stands in the SASS."""
    done = subprocess.run([cuobjdump(), "-sass", cubin], capture_output=True, text=True)
    counts = Counter(OPCODE.findall(done.stdout))
    if done.returncode or not counts:
        raise ArtifactError(f"cuobjdump found no SASS in {cubin}: {done.stderr.strip() or 'it printed nothing'}")
    return counts


def tensor_core(counts: Counter[str]) -> dict[str, int]:
    """The tensor-core instructions among `counts`."""
    return {opcode: count for opcode, count in sorted(counts.items()) if TENSOR_CORE.match(opcode)}


def local_memory(counts: Counter[str]) -> int:
    """Loads and stores of local memory: spills, or arrays that did not fit registers."""
    return sum(counts[opcode] for opcode in LOCAL_MEMORY)
