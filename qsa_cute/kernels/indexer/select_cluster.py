"""Selection of the 512 best blocks of a long row on SM90: the blocks of one cluster share the row.

As `select.py`, with the row's chunks dealt to the blocks in turn. Maxima, bound and list are the cluster's: the
first histogram and the list lie in block 0's shared memory, to which all count and append through distributed
shared memory; block 0 then finishes alone. Few rows are latency, not traffic: what is shared is the reading.

Grid: (rows, ranks), in clusters of (1, ranks, 1), ranks 1 to 8.
"""

import cutlass.cute as cute
from cutlass import Int32, Uint32

from qsa_cute.kernels.indexer import select_ops as so
from qsa_cute.kernels.indexer.select import PARAMS as SELECT_PARAMS
from qsa_cute.kernels.indexer.select import Select

PARAMS = SELECT_PARAMS
MAX_RANKS = 8


class SelectCluster(Select):
    space = "shared::cluster"

    def max_ranks(self) -> int:
        return MAX_RANKS

    @cute.jit
    def prepare(self, smem: Int32, tid: Int32):
        cute.arch.cluster_arrive_relaxed()  # shared memory of a peer may be written once it runs
        Select.prepare(self, smem, tid)

    @cute.jit
    def at_root(self, addr: Int32) -> Int32:
        return so.map_cluster(addr, Int32(0))

    @cute.jit
    def sync_all(self):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def leave(self):
        cute.arch.cluster_wait()

    @cute.jit
    def share_extremes(self, smem: Int32, low: Uint32, high: Uint32, rank: Int32, ranks: Int32, tid: Int32):
        cute.arch.cluster_wait()
        peer = tid % 32
        if peer < ranks:
            at = smem + self.extremes + (rank * self.warps + tid // 32) * 8
            so.store_u32x2(so.map_cluster(at, peer), low, high, self.space)
        self.sync_all()
