"""What is recorded of a variant and of a folder of variants, and what makes a variant fail the build."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from qsa_cute.abi import ABI, CHECKSUM, KINDS, MANIFEST_KEYS, SCHEMA, bad_manifest, checksum, read_head
from qsa_cute.aot.cubin import Cubin
from qsa_cute.aot.sass import local_memory, tensor_core
from qsa_cute.errors import ArtifactError
from qsa_cute.variants import KERNELS, SMEM_OPTIN_KIB, Variant, order_baked

Record = dict[str, Any]


class Entry(TypedDict):
    """A variant in the manifest. Sizes in bytes; registers and spills a thread, shared memory a block."""

    kernel: str
    head_dim: int
    dtype: str
    baked: dict[str, int]
    file: str
    sha256: str
    size: int
    symbol: str  # as the cubin has it
    threads: int
    smem_bytes: int  # dynamic, given at launch
    static_smem_bytes: int
    early_launch: bool  # it waits for the kernels before it by itself
    registers: int
    spill_bytes: int
    params: list[Record]  # name, kind, offset, size, in the order of the signature
    param_bytes: int
    tensor_core: dict[str, int]  # opcode -> how often in the SASS
    digest: str  # of all it is made from


def layout(params: Iterable[Mapping[str, str]]) -> list[Record]:
    """Offsets and sizes of a parameter list at natural alignment: [{"name", "kind", "offset", "size"}]."""
    table, end = [], 0
    for param in params:
        size = struct.calcsize(f"<{KINDS[param['kind']]}")
        offset = -(-end // size) * size
        table.append({**param, "offset": offset, "size": size})
        end = offset + size
    return table


def record(
    variant: Variant, digest: str, data: bytes, cubin: Cubin, counts: Counter[str], report: Mapping[str, Any]
) -> Entry:
    """A variant's entry in the manifest.

    Args:
        data, cubin: the file and what its ELF says.
        counts: its SASS opcodes.
        report: what the kernel's class says, from `compile.compile_variant`.
    """
    params = layout(report["params"])
    return {
        "kernel": variant.kernel,
        "head_dim": variant.head_dim,
        "dtype": variant.dtype,
        "baked": dict(variant.baked),
        "file": f"{variant.name}.cubin",
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "symbol": cubin.symbol,
        "threads": report["threads"],
        "smem_bytes": report["smem_bytes"],
        "static_smem_bytes": cubin.static_smem_bytes,
        "early_launch": report["early_launch"],
        "registers": cubin.registers,
        "spill_bytes": cubin.stack_bytes,
        "params": params,
        "param_bytes": params[-1]["offset"] + params[-1]["size"] if params else 0,
        "tensor_core": tensor_core(counts),
        "digest": digest,
    }


def defects(entry: Entry, sm: str, cubin: Cubin, counts: Counter[str]) -> list[str]:
    """Reasons, each with its figure, for which a variant must not be published."""
    found = []
    if entry["spill_bytes"] or local_memory(counts):
        found.append(
            f"it spills: {entry['spill_bytes']} bytes of stack a thread, {local_memory(counts)} accesses to local "
            f"memory, at {entry['registers']} registers"
        )
    smem, limit = entry["smem_bytes"] + entry["static_smem_bytes"], SMEM_OPTIN_KIB[sm] * 1024
    if smem > limit:
        found.append(f"it needs {smem} bytes of shared memory, {sm} gives a block at most {limit}")
    expected = KERNELS[entry["kernel"]].instructions(entry["dtype"])
    if expected and not any(one in entry["tensor_core"] for one in expected):
        found.append(
            f"its SASS has no {' or '.join(expected)}; its tensor-core instructions: {entry['tensor_core'] or 'none'}"
        )
    declared = tuple((param["offset"], param["size"]) for param in entry["params"])
    if declared != cubin.params:
        found.append(f"PARAMS lays its parameters out as {declared}, the cubin as {cubin.params} (offset, size)")
    return found


def variant_of(entry: Entry, sm: str) -> Variant | None:
    """The variant that an entry describes; None when its baked constants are none of today's."""
    try:
        return Variant(entry["kernel"], entry["head_dim"], entry["dtype"], sm, order_baked(entry["baked"]))
    except ValueError:
        return None


def manifest(sm: str, dsl: str, ptxas: str, source_digest: str, entries: Mapping[str, Entry]) -> Record:
    head = {
        "schema": SCHEMA,
        "abi": ABI,
        "sm": sm,
        "dsl_version": dsl,
        "ptxas_version": ptxas,
        "source_digest": source_digest,
        "variants": dict(entries),
    }
    return head | {CHECKSUM: checksum(head)}


def write_json(path: Path, value: Record) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: Path, fields: Mapping[str, type], mend: str) -> Record | None:
    """A lock or evidence file; None when there is none.

    Args:
        fields: key -> type of what it must have beside the schema.
        mend: what to do where it is unreadable.

    Raises:
        ArtifactError: not JSON, not an object, of another schema, or a field is missing or of another type.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}; {mend}") from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        got = value.get("schema") if isinstance(value, dict) else type(value).__name__
        raise ArtifactError(f"{path} has schema {got!r}, this version reads {SCHEMA}; {mend}")
    what = _wrong_fields(value, fields)
    if what:
        raise ArtifactError(f"{path} {what}; {mend}")
    return value


def _wrong_fields(value: Any, fields: Mapping[str, type], of: str = "") -> str:
    """What is wrong with a record's fields; "" for nothing."""
    if not isinstance(value, dict):
        return f"has no record{of}"
    missing = [f"{field}{of}" for field in sorted(fields) if type(value.get(field)) is not fields[field]]
    return f"lacks {', '.join(missing)}" if missing else ""


HEAD_FIELDS = {key: {"schema": int, "abi": int, "variants": dict}.get(key, str) for key in MANIFEST_KEYS}
ENTRY_FIELDS = {key: getattr(kind, "__origin__", kind) for key, kind in get_type_hints(Entry).items()}


def read_manifest(folder: Path) -> Record | None:
    """The manifest of an SM's folder, None when there is none.

    Raises:
        ArtifactError: as `abi.read_head`, or it lacks what a build writes.
    """
    found = read_head(folder)
    if found is None:
        return None
    what = _wrong_fields(found, HEAD_FIELDS)
    for name, entry in found["variants"].items():
        what = what or _wrong_fields(entry, ENTRY_FIELDS, f" of {name}")
        if not what and (entry["file"] != f"{name}.cubin" or Path(entry["file"]).name != entry["file"] or "\0" in name):
            what = f"names {entry['file']!r} as the file of {name}"
    if what:
        raise bad_manifest(folder, what)
    return found


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
