"""Split-K sparse decode attention on SM90: the splits of a row are the blocks of one cluster.

The same rows, lists, guards and main loop as `sparse_decode.py`, with another merge. O's columns are cut in groups of 8, and rank c of the cluster owns groups c, c + num_splits, ... Each
block sends every peer, through distributed shared memory, the columns that peer owns, its maxima and its sums;
the sends complete bytes on the receiver's mbarrier. When all have arrived a block sums its columns over the
ranks, in rank order, and stores them. No workspace, no counters, no trip through global memory, and nothing to
zero: right whatever the workspace holds.

Grid: as `sparse_decode.py`, in clusters of (1, num_splits, 1), num_splits 1..16, given at launch.
`partial_o` and `partial_stats` are not used; `split_counters`, when given, are left zero, as hosts expect.

Shared memory: that of `row_gather.py` and one mbarrier. The inbox [source rank][owned group][row][8] and the
peers' statistics take the place of V's tiles once every block of the cluster has left its main loop.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention.row_gather import EMPTY_MAX, ROWS, RowOutput
from qsa_cute.kernels.attention.sparse_decode import PARAMS as DECODE_PARAMS
from qsa_cute.kernels.attention.sparse_decode import SparseDecode
from qsa_cute.kernels.common import ops

PARAMS = DECODE_PARAMS
MAX_CLUSTER = 16  # the largest (non-portable) cluster of SM90
GROUP_BYTES = ROWS * 8 * 4  # a group of 8 columns in the inbox


class SparseDecodeCluster(SparseDecode):
    def __init__(self, head_dim: int, dtype: str, warps: int, k_stages: int, v_stages: int, blocks_per_sm: int):
        super().__init__(head_dim, dtype, warps, k_stages, v_stages, blocks_per_sm, max_splits=MAX_CLUSTER)
        self.sizes["inbox_full"] = 8
        self.lay_out()
        self.groups = head_dim // 8
        inbox = (self.groups + MAX_CLUSTER) * GROUP_BYTES
        self.at["peers"] = self.at["v"] + inbox  # [rank][ROWS][maximum, sum] FP32
        if inbox + MAX_CLUSTER * ROWS * 8 > self.sizes["v"]:
            raise ValueError("the inbox does not fit in V's tiles")

    @cute.jit
    def begin(self, smem: Int32, out: RowOutput, tid: Int32):
        """Expect every rank's share of this block's columns; let the next kernel start, wait for the last one."""
        if out.num_splits > 1 and tid == 0:
            barrier = ops.shared_barrier(smem + self.at["inbox_full"])
            owned = (self.groups - out.split + out.num_splits - 1) // out.num_splits
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, out.num_splits * out.group * (owned * 32 + 8))
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def finish(
        self, smem: Int32, out: RowOutput, tO: cute.Tensor, tMax: cute.Tensor, tSum: cute.Tensor, tid: Int32
    ):
        if out.num_splits == 1:
            self.store_row(out, tO, tMax, tSum, tid)
        else:
            # Orders the set-up of the mbarriers and the reuse of V's tiles; carries no data.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
            slots = (self.groups + out.num_splits - 1) // out.num_splits  # of a rank in the inbox
            self.send(smem, out, slots, tO, tMax, tSum, tid)
            cute.arch.mbarrier_wait(ops.shared_barrier(smem + self.at["inbox_full"]), 0)
            self.sum_owned_columns(smem, out, slots, tid)
        if out.counters != 0 and out.split == 0 and tid == 0:
            ops.store_global_i32(out.counters + Int64(out.unit) * 4, Int32(0))

    @cute.jit
    def send(
        self, smem: Int32, out: RowOutput, slots: Int32, tO: cute.Tensor, tMax: cute.Tensor, tSum: cute.Tensor,
        tid: Int32,
    ):
        """Every rank its groups of this block's O, and this block's maxima and sums."""
        lane = tid % 32
        barrier = smem + self.at["inbox_full"]
        # Neighbouring lanes trade halves: the even one sends four columns of row r, the odd one of row r + 8.
        odd = lane % 2 == 1
        row = lane // 4 + 8 * (lane % 2)
        inbox = smem + self.at["v"] + out.split * slots * GROUP_BYTES + row * 32 + (lane // 2 % 2) * 16
        for n in cutlass.range_constexpr(self.warp_cols // 8):
            group = (tid // 32) * (self.warp_cols // 8) + n
            slot = group // out.num_splits
            rank = group - slot * out.num_splits
            got = [
                cute.arch.shuffle_sync_bfly(tO[4 * n + i] if odd else tO[4 * n + 2 + i], offset=1) for i in range(2)
            ]
            if row < out.group:
                quad = (
                    got[0] if odd else tO[4 * n],
                    got[1] if odd else tO[4 * n + 1],
                    tO[4 * n + 2] if odd else got[0],
                    tO[4 * n + 3] if odd else got[1],
                )
                ops.store_cluster_async_x4(
                    ops.map_cluster(inbox + slot * GROUP_BYTES, rank), quad, ops.map_cluster(barrier, rank)
                )
        peers = smem + self.at["peers"] + (out.split * ROWS + lane // 4) * 8
        for rank in cutlass.range(tid // 32, out.num_splits, self.warps, unroll=1):
            to = ops.map_cluster(peers, rank)
            to_barrier = ops.map_cluster(barrier, rank)
            for r in cutlass.range_constexpr(2):
                if lane % 4 == 0 and lane // 4 + 8 * r < out.group:
                    ops.store_cluster_async_x2(to + r * 64, tMax[r], tSum[r], to_barrier)

    @cute.jit
    def sum_owned_columns(self, smem: Int32, out: RowOutput, slots: Int32, tid: Int32):
        """Two lanes share a pair of columns, even ranks and odd ranks in order, then their sum; store."""
        owned = (self.groups - out.split + out.num_splits - 1) // out.num_splits
        half = tid % 2
        pair = tid // 2 % 4
        for i in cutlass.range(tid // 8, owned * ROWS, self.threads // 8, unroll=1):
            row = i % ROWS
            slot = i // ROWS
            stats = smem + self.at["peers"] + row * 8
            part = smem + self.at["v"] + slot * GROUP_BYTES + row * 32 + pair * 8
            top, total, o0, o1 = Float32(EMPTY_MAX), Float32(0.0), Float32(0.0), Float32(0.0)
            if row < out.group:
                for s in cutlass.range(half, out.num_splits, 2, unroll=4):
                    top = cute.arch.fmax(top, ops.load_shared_f32(stats + s * (ROWS * 8)))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
            if row < out.group:
                for s in cutlass.range(half, out.num_splits, 2, unroll=4):
                    top_s, sum_s = ops.load_shared_f32x2(stats + s * (ROWS * 8))
                    v0, v1 = ops.load_shared_f32x2(part + s * slots * GROUP_BYTES)
                    factor = cute.math.exp2(top_s - top, fastmath=True)
                    total, o0, o1 = total + factor * sum_s, o0 + factor * v0, o1 + factor * v1
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
            o0 = o0 + cute.arch.shuffle_sync_bfly(o0, offset=1)
            o1 = o1 + cute.arch.shuffle_sync_bfly(o1, offset=1)
            if row < out.group and half == 0:
                inverse = self.inverse(total)
                column = (slot * out.num_splits + out.split) * 8 + pair * 2
                ops.store_global_i32(
                    out.o + Int64(row) * out.o_head + Int64(column) * 2,
                    ops.pack_2(self.dtype, o0 * inverse, o1 * inverse),
                )
                if column == 0 and out.lse != 0:
                    self.store_lse(out.lse + Int64(row) * 4, top, total)
