"""Which cubins run on which device.

The rules (CUDA C++ programming guide, "binary compatibility" and "feature sets"):
- a plain target `sm_XY` runs on compute capability X.Z with Z >= Y, of the same major only;
- Tegra devices stand apart: a cubin for one runs on exactly that capability, and no other runs there;
- an architecture-specific target `sm_XYa` runs on exactly X.Y.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

Capability = tuple[int, int]

_TEGRA: frozenset[Capability] = frozenset({(8, 7), (11, 0)})  # Orin, Thor
_NAME = re.compile(r"sm_(\d+)(\d)(a?)")


def parse(sm: str) -> tuple[Capability, bool] | None:
    """("sm_90a") -> ((9, 0), True): the capability and whether only that one; None for another name."""
    match = _NAME.fullmatch(sm)
    return ((int(match[1]), int(match[2])), bool(match[3])) if match else None


def runs_on(sm: str, capability: Capability) -> bool:
    """Whether a cubin of target `sm` runs on a device of `capability` (major, minor)."""
    parsed = parse(sm)
    if parsed is None:
        return False
    built, exact = parsed
    if exact or built in _TEGRA or capability in _TEGRA:
        return built == capability
    return built[0] == capability[0] and built[1] <= capability[1]


def preference(sms: Iterable[str], capability: Capability) -> list[str]:
    """Those of `sms` that run on the device, best first: its own `a` target, then the highest plain one."""
    usable = [(parsed[1], parsed[0], sm) for sm in sms if (parsed := parse(sm)) and runs_on(sm, capability)]
    return [sm for _, _, sm in sorted(usable, reverse=True)]
