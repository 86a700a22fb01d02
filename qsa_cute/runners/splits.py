"""How many blocks share the list of one (row, KV head): from sizes that the host knows, never from the device."""

from __future__ import annotations

TILE = 64  # list entries that a block takes at a time: 8 warps of 8
SM_COUNT = 132  # of an H200
MAX_CLUSTER = 16  # the largest cluster of SM90
# Entries that a tile beyond the shares may have in the largest cluster: one sequence takes 7.0 us in 16 blocks, one of
# which has three more entries, and 7.8 in 11 blocks of three whole tiles. In 8 blocks against 7 it loses (11.4, 11.1).
SHORT_TILE = 8

# Clusters of 1, 2, ... 16 blocks, one block an SM, that run at once on an H200, as cuOccupancyMaxActiveClusters
# counts them there: a cluster lies within a GPC. One more makes a second wave, which costs more than wider sharing
# saves (docs/performance.md, "Decode: clusters").
CLUSTERS_AT_ONCE = (132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7)


def of_cluster(units: int, top_k: int) -> int:
    """Blocks of a cluster for `units` (rows x KV heads) lists of `top_k` entries.

    As many as one wave allows, then fewer while no block gets more tiles: 1..16.
    """
    fits = max((blocks for blocks, most in enumerate(CLUSTERS_AT_ONCE, 1) if units <= most), default=1)
    return _fewest(fits, max(1, top_k - SHORT_TILE) if fits == MAX_CLUSTER else top_k)


def of_workspace(units: int, top_k: int, most: int) -> int:
    """Splits, up to `most`, that merge through memory: as many as one block an SM allows, then fewer as above."""
    return _fewest(max(1, min(most, SM_COUNT // max(1, units))), top_k)


def _fewest(most: int, top_k: int) -> int:
    tiles = -(-top_k // TILE)
    share = -(-tiles // most)
    return -(-tiles // share)
