"""What a build writes and a load expects: the version numbers and the scalar kinds, one home for both sides."""

from collections.abc import Mapping
from types import MappingProxyType

# Shape of manifest.json. A change that an older reader would misread raises it.
SCHEMA = 1

# What a launch hands a kernel: parameter meanings, workspace layouts, grids. A load refuses any other number.
ABI = 1

MANIFEST = "manifest.json"

# Kinds of kernel parameters and their `struct` codes (little endian, natural alignment = size).
KINDS: Mapping[str, str] = MappingProxyType({"ptr": "Q", "i64": "q", "i32": "i", "f32": "f"})
