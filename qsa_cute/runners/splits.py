"""How many blocks share the list of one (row, KV head): from sizes that the host knows, never from the device."""

from __future__ import annotations

from qsa_cute.geometry import MAX_CLUSTER

TILE = 64  # list entries that a block of `sparse_decode` or `paged_attention` takes at a time: 8 warps of 8
STAGE = 32  # that one of a cluster takes, 8 boxes
SM_COUNT = 132  # of an H200
# Entries that a stage beyond the shares may have in the largest cluster: one of 16 blocks takes the last three of 2051.
SHORT_STAGE = 8

# Clusters of 1, 2, ... 16 blocks, one block an SM, that run at once on an H200, as cuOccupancyMaxActiveClusters
# counts them there: a cluster lies within a GPC. One more makes a second wave, which costs more than wider sharing
# saves (docs/performance.md, "Decode: clusters").
CLUSTERS_AT_ONCE = (132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7)


def of_cluster(units: int, top_k: int) -> int:
    """Blocks of a cluster for `units` (rows x KV heads) lists of `top_k` entries.

    As many as one wave allows, then fewer while no block gets more stages: 1..16.
    """
    fits = max((blocks for blocks, most in enumerate(CLUSTERS_AT_ONCE, 1) if units <= most), default=1)
    return _fewest(fits, max(1, top_k - SHORT_STAGE) if fits == MAX_CLUSTER else top_k, STAGE)


def of_workspace(units: int, top_k: int, most: int) -> int:
    """Splits, up to `most`, that merge through memory: as many as one block an SM allows, then fewer as above."""
    return _fewest(max(1, min(most, SM_COUNT // max(1, units))), top_k, TILE)


def _fewest(most: int, top_k: int, tile: int) -> int:
    tiles = -(-top_k // tile)
    share = -(-tiles // most)
    return -(-tiles // share)
