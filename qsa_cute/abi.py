"""What a build writes and a load expects: the version numbers and the scalar kinds, one home for both sides."""

from collections.abc import Mapping
from types import MappingProxyType

# Shape of manifest.json. A change that an older reader would misread raises it.
SCHEMA = 1

# What a launch hands a kernel: parameter meanings, workspace layouts, grids. A load refuses any other number.
ABI = 1

MANIFEST = "manifest.json"

# Kinds of kernel parameters and their `struct` codes, native and aligned ("@"), as 64-bit hosts lay them out.
# N and n are the 8-byte size types: CPython packs them in two thirds of the time that Q and q take.
KINDS: Mapping[str, str] = MappingProxyType({"ptr": "N", "i64": "n", "i32": "i", "f32": "f"})
