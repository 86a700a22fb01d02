"""How many blocks share the list of one (row, KV head): from sizes that the host knows, never from the device."""

from __future__ import annotations

# Blocks that one launch should at most make: two on each of an H200's SMs. More splits than that only add merging.
SM_COUNT = 132
BLOCKS_PER_SM = 2
MAX_CLUSTER = 16  # the largest cluster of SM90


def choose(units: int, most: int) -> int:
    """The largest power of two up to `most` with which `units` (rows x KV heads) still fit at once; at least 1."""
    splits = 1
    while splits * 2 <= most and units * splits * 2 <= SM_COUNT * BLOCKS_PER_SM:
        splits *= 2
    return splits
