"""Split-K sparse decode attention on SM90: the splits of a row are the blocks of one cluster.

The same rows, lists, guards and main loop as `sparse_decode.py`; only the merge differs. Each block reduces
its warps' partials and pushes, through distributed shared memory, every peer the columns that peer owns
(head_dim / num_splits of them) with its maxima and sums; after one cluster barrier each block sums its
columns over the ranks, in rank order, and stores them. No workspace, no counters, no memory round trip, and
nothing to zero: a launch is correct whatever its workspace holds.

Grid: as `sparse_decode.py`, with clusters of num_splits (1, 2, 4, 8, 16) consecutive blocks, given at launch.
`partial_o` and `partial_stats` are not used; `split_counters`, when given, are left zero, as hosts expect.

Shared memory: the ring, Q and statistics of `row_gather.py`; the inbox lies in unit 2 of the warps' rings,
which are free once every block of the cluster has finished its main loop (first barrier).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention.row_gather import EMPTY_MAX, ROWS
from qsa_cute.kernels.attention.sparse_decode import PARAMS as DECODE_PARAMS
from qsa_cute.kernels.attention.sparse_decode import RowOutput, SparseDecode
from qsa_cute.kernels.common import ops

PARAMS = DECODE_PARAMS
MAX_CLUSTER = 16  # the largest (non-portable) cluster of SM90


class SparseDecodeCluster(SparseDecode):
    def __init__(self, head_dim: int, dtype: str, warps: int, stages: int):
        super().__init__(head_dim, dtype, warps, stages)
        self.inbox_stats_offset = self.smem_bytes  # [rank][2][ROWS] FP32
        self.smem_bytes += MAX_CLUSTER * 2 * ROWS * 4
        self.inbox_slice = ROWS * head_dim * 4 // warps  # bytes of the inbox in one warp's ring
        if stages < 3 or self.inbox_slice > self.unit:
            raise ValueError("the inbox needs a third unit in every warp's ring")

    @cute.jit
    def ring_is_free(self, out: RowOutput):
        if out.num_splits > 1:
            cute.arch.cluster_arrive()

    @cute.jit
    def finish(self, smem: Int32, out: RowOutput, tid: Int32):
        if out.num_splits == 1:
            self.store_row(smem, out, tid)
        else:
            cute.arch.cluster_wait()
            self.push(smem, out, tid)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            self.sum_owned_columns(smem, out, tid)
        if out.counters != 0 and out.split == 0 and tid == 0:
            ops.store_global_i32(out.counters + Int64(out.unit) * 4, Int32(0))

    @cute.jit
    def inbox(self, smem: Int32, at: Int32) -> Int32:
        """Address of byte `at` of the inbox [rank][row][owned column] FP32, which lies in slices."""
        return smem + (at // self.inbox_slice) * self.ring + 2 * self.unit + at % self.inbox_slice

    @cute.jit
    def push(self, smem: Int32, out: RowOutput, tid: Int32):
        """Send every rank its columns of this block's O, and this block's maxima and sums."""
        factors = cute.make_rmem_tensor((self.warps,), Float32)
        quads = self.head_dim // 4
        owned = self.head_dim // out.num_splits
        for i in cutlass.range(tid, out.group * quads, self.threads, unroll=1):
            row = i // quads
            col = (i % quads) * 4
            self.combined_stats(smem, row, factors)
            v = self.combined_o(smem, row, col, factors)
            at = self.inbox(smem, ((out.split * ROWS + row) * owned + col % owned) * 4)
            ops.store_cluster_f32x4(ops.map_cluster(at, col // owned), (v[0], v[1], v[2], v[3]))
        for i in cutlass.range(tid, out.group * out.num_splits, self.threads, unroll=1):
            row = i // out.num_splits
            top, total = self.combined_stats(smem, row, factors)
            at = smem + self.inbox_stats_offset + (out.split * 2 * ROWS + row) * 4
            at = ops.map_cluster(at, i % out.num_splits)
            ops.store_cluster_f32(at, top)
            ops.store_cluster_f32(at + ROWS * 4, total)

    @cute.jit
    def sum_owned_columns(self, smem: Int32, out: RowOutput, tid: Int32):
        owned = self.head_dim // out.num_splits
        quads = owned // 4
        for i in cutlass.range(tid, out.group * quads, self.threads, unroll=1):
            row = i // quads
            col = (i % quads) * 4
            stats = smem + self.inbox_stats_offset + row * 4
            top = Float32(EMPTY_MAX)
            for s in cutlass.range(out.num_splits, unroll=2):
                top = cute.arch.fmax(top, ops.load_shared_f32(stats + s * (2 * ROWS * 4)))
            total = Float32(0.0)
            o0, o1, o2, o3 = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
            for s in cutlass.range(out.num_splits, unroll=2):
                at = stats + s * (2 * ROWS * 4)
                factor = cute.math.exp2(ops.load_shared_f32(at) - top, fastmath=True)
                v = ops.load_shared_f32x4(self.inbox(smem, ((s * ROWS + row) * owned + col) * 4))
                total = total + factor * ops.load_shared_f32(at + ROWS * 4)
                o0, o1, o2, o3 = o0 + factor * v[0], o1 + factor * v[1], o2 + factor * v[2], o3 + factor * v[3]
            head = Int64(row) * out.o_head
            self.store_o(out.o + head + Int64(out.split * owned + col) * 2, (o0, o1, o2, o3), total)
            if out.split == 0 and col == 0 and out.lse != 0:
                self.store_lse(out.lse + Int64(row) * 4, top, total)
