"""What a build writes and a load expects: the version numbers and the scalar kinds, one home for both sides."""

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Shape of manifest.json. A change that an older reader would misread raises it.
SCHEMA = 1

# What a launch hands a kernel: parameter meanings, workspace layouts, grids. A load refuses any other number.
ABI = 1

MANIFEST = "manifest.json"

# Its keys. No other is read: a key that was altered must not look like one that is not there.
MANIFEST_KEYS = frozenset({"schema", "abi", "sm", "dsl_version", "ptxas_version", "source_digest", "variants"})
CHECKSUM = "checksum"  # beside them, of all the rest; manifests of earlier builds have none

# Kinds of kernel parameters and their `struct` codes (little endian, natural alignment = size).
KINDS: Mapping[str, str] = MappingProxyType({"ptr": "Q", "i64": "q", "i32": "i", "f32": "f"})


def checksum(manifest: Mapping[str, Any]) -> str:
    """sha256 of a manifest's contents without its checksum, however they are spaced."""
    rest = {key: value for key, value in manifest.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def altered(manifest: Mapping[str, Any]) -> str:
    """What tells that a manifest is not as it was written; "" for nothing."""
    unknown = sorted(manifest.keys() - MANIFEST_KEYS - {CHECKSUM})
    if unknown:
        return f"has keys that no manifest has: {', '.join(unknown)}"
    said = manifest.get(CHECKSUM)
    return "" if said in (None, checksum(manifest)) else "was altered: its contents do not have the checksum it says"
