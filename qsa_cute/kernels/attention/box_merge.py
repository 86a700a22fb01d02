"""The blocks of a cluster that share a list and gather it by TMA (`box_gather.py`) merge in shared memory (SM90).

Rank c of n owns groups c, c + n, ... of O's columns, eight a group. While a block multiplies for the last time, its
gather warps tell every rank its maxima and sums, and one of them finds what each rank's O is to be multiplied by. Each
rank gets its columns of every O as they are, and stores their weighted sum, in rank order.

Shared memory: that of `box_gather.py`, two mbarriers, and an inbox apart from the ring, so that a block sends as soon
as it is done: [source rank][owned group][row][8] FP32.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import MAX_CLUSTER
from qsa_cute.kernels.attention.box_gather import BoxGather
from qsa_cute.kernels.attention.box_products import GATHER_WARPS, BoxShare
from qsa_cute.kernels.attention.row_gather import EMPTY_MAX, ROWS, RowOutput
from qsa_cute.kernels.common import early, ops, tma

GROUP_BYTES = ROWS * 8 * 4  # a group of 8 columns in the inbox


class BoxMerge(BoxGather):
    """`begin`; then the warps that gather run `share_sums` and `weigh`, those that multiply `address_columns`,
    `send_columns` and `sum_columns`."""

    early_launch = True  # kernels `early.wait` after `begin`

    def __init__(self, head_dim: int, dtype: str, stages: int):
        super().__init__(head_dim, dtype, stages)
        self.groups = head_dim // 8
        self.warp_groups = self.warp_cols // 8
        self.sizes |= {
            "inbox_full": 8,
            "peers_full": 8,
            "inbox": (self.groups + MAX_CLUSTER) * GROUP_BYTES,
            "peers": MAX_CLUSTER * ROWS * 8,  # [rank][ROWS][maximum, sum] FP32
            "weights": MAX_CLUSTER * ROWS * 4,  # [rank][ROWS] FP32, of the ranks' O
        }
        self.lay_out()

    def owned(self, share: BoxShare) -> Int32:
        """Groups of columns that this block stores."""
        return share.divide(self.groups - share.split + share.num_splits - 1)

    @cute.jit
    def begin(self, smem: Int32, share: BoxShare, tid: Int32):
        """Set up the mbarriers; let the next kernel start."""
        if tid == 0:
            self.set_up_ring(smem)
            owned = self.owned(share)
            for part, row_bytes in (("inbox_full", owned * 32), ("peers_full", Int32(8))):
                barrier = ops.shared_barrier(smem + self.at[part])
                cute.arch.mbarrier_init(barrier, 1)
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, share.num_splits * share.group * row_bytes)
            cute.arch.mbarrier_init_fence()
        if share.num_splits > 1:
            cute.arch.cluster_arrive_relaxed()  # says that the mbarriers are set up; awaited before stores to peers
        early.let_next_start()

    def lane_rows(self, lane: Int32) -> list:
        """The rows of which `lane_quads` gives this lane four columns each."""
        return [(lane >> 2) + 8 * (lane & 1)]

    def lane_places(self, tid: Int32) -> list:
        """Of each such row: where its quads stand, as a group of 8 columns and a half of it."""
        return [[((tid >> 5) * self.warp_groups + n, tid >> 1 & 1) for n in range(self.warp_groups)]]

    @cute.jit
    def lane_quads(self, tO: cute.Tensor, lane: Int32):
        """Of each such row: four neighbouring columns of O at a time. Neighbouring lanes trade halves: the even one
        gets four columns of row r, the odd one of row r + 8."""
        odd = (lane & 1) == 1
        quads = []
        for n in cutlass.range_constexpr(self.warp_groups):
            o = [tO[4 * n + i] for i in range(4)]
            got = [cute.arch.shuffle_sync_bfly(o[i] if odd else o[2 + i], offset=1) for i in range(2)]
            quads.append([got[i] if odd else o[i] for i in range(2)] + [o[2 + i] if odd else got[i] for i in range(2)])
        return [quads]

    @cute.jit
    def address_columns(self, smem: Int32, share: BoxShare, slots: Int32, tTo: cute.Tensor, tid: Int32):
        """Where in the cluster each of this lane's quads goes, and its mbarrier."""
        rows, places = self.lane_rows(tid & 31), self.lane_places(tid)
        inbox = smem + self.at["inbox"] + share.split * slots * GROUP_BYTES
        for r in cutlass.range_constexpr(len(rows)):
            for n in cutlass.range_constexpr(len(places[r])):
                group, half = places[r][n]
                slot = share.divide(group)
                rank = group - slot * share.num_splits
                i = 2 * (r * len(places[r]) + n)
                tTo[i] = ops.map_cluster(inbox + rows[r] * 32 + half * 16 + slot * GROUP_BYTES, rank)
                tTo[i + 1] = ops.map_cluster(smem + self.at["inbox_full"], rank)

    @cute.jit
    def merge(self, smem: Int32, lse: Int64, share: BoxShare, gatherer: Int32, lane: Int32):
        """What the warps that gather do for a cluster once they are done: statistics of all ranks, weights, LSE."""
        if share.num_splits > 1:
            cute.arch.cluster_wait()
            self.share_sums(smem, share, gatherer, lane)
            if gatherer == 0:
                self.weigh(smem, lse, share, lane)

    @cute.jit
    def store(
        self,
        smem: Int32,
        out: RowOutput,
        share: BoxShare,
        slots: Int32,
        tO: cute.Tensor,
        tMax: cute.Tensor,
        tSum: cute.Tensor,
        tTo: cute.Tensor,
        tid: Int32,
    ):
        """The row by one block, or this block's columns of it by a cluster's."""
        if share.num_splits == 1:
            self.store_row(out, share.group, tO, tMax, tSum, tid)
        else:
            self.send_columns(smem, share, tO, tTo, tid)
            self.sum_columns(smem, out, share, slots, tid)

    @cute.jit
    def share_sums(self, smem: Int32, share: BoxShare, gatherer: Int32, lane: Int32):
        """Tell every rank this block's maxima and sums, beside its last products: a half of a warp a rank."""
        cute.arch.barrier(barrier_id=3, number_of_threads=self.threads)
        row = lane & (ROWS - 1)
        top = ops.load_shared_f32(smem + self.at["tops"] + row * 4)
        total = self.read_sum(smem, row)
        peers = smem + self.at["peers"] + (share.split * ROWS + row) * 8
        for rank in cutlass.range(gatherer + GATHER_WARPS * (lane >> 4), share.num_splits, 2 * GATHER_WARPS, unroll=1):
            to = ops.map_cluster(peers, rank)
            barrier = ops.map_cluster(smem + self.at["peers_full"], rank)
            if row < share.group:
                ops.store_cluster_async_x2(to, top, total, barrier)

    @cute.jit
    def weigh(self, smem: Int32, lse: Int64, share: BoxShare, lane: Int32):
        """weights[rank][row]: what a rank's O is multiplied by. By one warp, beside the last products: two lanes a row,
        eight ranks each."""
        tma.wait(smem + self.at["peers_full"], Int32(0))
        row = lane % ROWS
        peers = smem + self.at["peers"] + row * 8
        stats = []
        for j in cutlass.range_constexpr(MAX_CLUSTER // 2):
            rank = lane // ROWS * (MAX_CLUSTER // 2) + j
            top, length = Float32(EMPTY_MAX), Float32(0.0)
            if rank < share.num_splits and row < share.group:
                top, length = ops.load_shared_f32x2(peers + rank * (ROWS * 8))
            stats.append((top, length))
        top = stats[0][0]
        for j in cutlass.range_constexpr(1, MAX_CLUSTER // 2):
            top = cute.arch.fmax(top, stats[j][0])
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=ROWS))
        total = Float32(0.0)
        weights = []
        for j in cutlass.range_constexpr(MAX_CLUSTER // 2):
            weights.append(cute.math.exp2(stats[j][0] - top, fastmath=True))
            total = total + weights[j] * stats[j][1]
        total = total + cute.arch.shuffle_sync_bfly(total, offset=ROWS)
        inverse = self.inverse(total)
        at = smem + self.at["weights"] + (lane // ROWS * (MAX_CLUSTER // 2) * ROWS + row) * 4
        for j in cutlass.range_constexpr(MAX_CLUSTER // 2):
            ops.store_shared_f32(at + j * (ROWS * 4), weights[j] * inverse)
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=2, number_of_threads=self.workers + 32)
        if lane < share.group and share.split == 0 and lse != 0:
            self.store_lse(lse + Int64(row) * 4, top, total)

    @cute.jit
    def send_columns(self, smem: Int32, share: BoxShare, tO: cute.Tensor, tTo: cute.Tensor, tid: Int32):
        """Every rank its groups of this block's O."""
        rows, quads = self.lane_rows(tid & 31), self.lane_quads(tO, tid & 31)
        for r in cutlass.range_constexpr(len(rows)):
            if rows[r] < share.group:
                for n in cutlass.range_constexpr(len(quads[r])):
                    i = 2 * (r * len(quads[r]) + n)
                    ops.store_cluster_async_x4(tTo[i], quads[r][n], tTo[i + 1])

    @cute.jit
    def sum_columns(self, smem: Int32, out: RowOutput, share: BoxShare, slots: Int32, tid: Int32):
        """Four columns of a row: the weighted sum over the ranks, four ranks a lane; store. What does not depend on the
        other ranks comes before the wait for them."""
        ranks = share.num_splits
        parts = Int32(0)  # log2 of the lanes that share a sum
        if ranks > 8:
            parts = Int32(2)
        elif ranks > 4:
            parts = Int32(1)
        # Lanes side by side read 16 bytes side by side: no bank conflicts.
        width = 5 - parts
        lane = tid & 31
        part, i = lane >> width, (tid >> 5 << width) + (lane & ((1 << width) - 1))
        half, row, slot = i & 1, (i >> 1) & (ROWS - 1), i >> 5
        owned = slots if share.split + (slots - 1) * ranks < self.groups else slots - 1
        more = self.workers // 32 >> parts  # slots further that this thread's next columns lie
        column = (slot * ranks + share.split) * 8 + half * 4
        rank = [part + (j << parts) for j in range(4)]
        known = [cutlass.min(r, ranks - 1) for r in rank]
        inbox = smem + self.at["inbox"] + slot * GROUP_BYTES + row * 32 + half * 16
        at = [inbox + r * slots * GROUP_BYTES for r in known]
        tGate = cute.make_rmem_tensor((4,), Float32)
        if slot < owned:
            self.load_gates(out, row, column, tGate)
        tma.wait(smem + self.at["inbox_full"], Int32(0))
        cute.arch.barrier(barrier_id=2, number_of_threads=self.workers + 32)
        weights = [ops.load_shared_f32(smem + self.at["weights"] + (r * ROWS + row) * 4) for r in known]
        while slot < owned:
            found = [ops.load_shared_f32x4(a) for a in at]
            o = [Float32(0.0) for _ in range(4)]
            for j in cutlass.range_constexpr(4):
                for c in cutlass.range_constexpr(4):
                    o[c] = o[c] + (found[j][c] if rank[j] < ranks else Float32(0.0)) * weights[j]
            if parts > 0:
                for c in cutlass.range_constexpr(4):
                    o[c] = o[c] + cute.arch.shuffle_sync_bfly(o[c], offset=16)
            if parts > 1:
                for c in cutlass.range_constexpr(4):
                    o[c] = o[c] + cute.arch.shuffle_sync_bfly(o[c], offset=8)
            if row < share.group and part == 0:
                self.store_gated(out, row, column, tuple(o), tGate)
            slot, column = slot + more, column + more * ranks * 8
            at = [a + more * GROUP_BYTES for a in at]
            if slot < owned:
                self.load_gates(out, row, column, tGate)

    def load_gates(self, out: RowOutput, row: Int32, column: Int32, tGate: cute.Tensor):
        """What `store_gated` multiplies four columns by; here by nothing."""

    def store_gated(self, out: RowOutput, row: Int32, column: Int32, o: tuple, tGate: cute.Tensor):
        self.store_quad(out, row, column, o)
