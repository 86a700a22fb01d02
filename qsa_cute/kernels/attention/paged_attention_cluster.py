"""`paged_attention.py` on SM90 for few rows: the splits of a row are the blocks of one cluster.

O's columns are cut in groups of 8, and rank c of the cluster owns groups c, c + num_splits, ... Each block sends every
peer, through distributed shared memory, the columns that peer owns, its maxima and its sums; the sends complete bytes
on the receiver's mbarrier. When all have arrived a block sums its columns over the ranks, in rank order, and stores
them: no workspace, no counters, no trip through global memory.

Grid: as `paged_attention.py`, in clusters of (1, num_splits, 1), num_splits 1..16, given at launch. `partial_o` and
`partial_stats` are not used; `split_counters`, when given, are left zero, as hosts expect.

Shared memory: that of `row_gather.py`, one mbarrier, the gates of the columns that a block stores, which come with Q
([group of 8 columns][row][8] bf16), and the inbox [source rank][owned group][row][8], apart from V's tiles, so that a
block sends as soon as it is done.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention.box_merge import GROUP_BYTES, MAX_CLUSTER
from qsa_cute.kernels.attention.paged_attention import PARAMS as ROW_PARAMS
from qsa_cute.kernels.attention.paged_attention import PagedAttention
from qsa_cute.kernels.attention.paged_rows import PagedOutput
from qsa_cute.kernels.attention.row_gather import EMPTY_MAX, ROWS, RowOutput, Share
from qsa_cute.kernels.attention.sparse_decode import Workspace
from qsa_cute.kernels.common import ops

PARAMS = ROW_PARAMS
GATE_GROUP_BYTES = ROWS * 16


class PagedAttentionCluster(PagedAttention):
    early_launch = True  # `begin` waits for the kernels before this one

    def __init__(self, head_dim: int, dtype: str, warps: int, k_stages: int, v_stages: int, blocks_per_sm: int):
        super().__init__(head_dim, dtype, warps, k_stages, v_stages, blocks_per_sm, max_splits=MAX_CLUSTER)
        self.chains = 4  # with one block an SM there are registers for it, and nothing else hides the latency
        self.groups = head_dim // 8
        self.sizes |= {
            "inbox_full": 8,
            "gate": self.groups * GATE_GROUP_BYTES,
            "inbox": (self.groups + MAX_CLUSTER) * GROUP_BYTES,
            "peers": MAX_CLUSTER * ROWS * 8,  # [rank][ROWS][maximum, sum] FP32
            "weights": MAX_CLUSTER * ROWS * 4,  # [rank][ROWS] FP32
        }
        self.lay_out()
        if self.threads < MAX_CLUSTER * ROWS:
            raise ValueError("a thread weighs a rank's row")

    @cute.jit
    def begin(self, smem: Int32, share: Share, tid: Int32):
        """Expect every rank's share of this block's columns; let the next kernel start, wait for the last one."""
        if share.num_splits > 1:
            if tid == 0:
                self.expect_peers(smem, share)
            cute.arch.cluster_arrive_relaxed()  # says that the mbarrier is set up; awaited in `finish`
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def expect_peers(self, smem: Int32, share: Share):
        barrier = ops.shared_barrier(smem + self.at["inbox_full"])
        owned = (self.groups - share.split + share.num_splits - 1) // share.num_splits
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, share.num_splits * share.group * (owned * 32 + 8))

    @cute.jit
    def stage_gate(self, smem: Int32, gate: Int64, gate_head: Int64, share: Share, tid: Int32) -> Int64:
        """Start copying the gates of this block's columns; they are committed, and have landed, with Q."""
        staged = Int64(0)
        if gate != 0:
            staged = Int64(smem + self.at["gate"])
            owned = (self.groups - share.split + share.num_splits - 1) // share.num_splits
            for i in cutlass.range(tid, owned * ROWS, self.threads, unroll=1):
                row, group = i % ROWS, i // ROWS * share.num_splits + share.split
                live = row < share.group
                src = gate + Int64(row if live else Int32(0)) * gate_head + Int64(group * 16)
                ops.cp_async_16(
                    smem + self.at["gate"] + group * GATE_GROUP_BYTES + row * 16, src, Int32(16) if live else Int32(0)
                )
        return staged

    @cute.jit
    def finish(
        self,
        smem: Int32,
        out: RowOutput,
        work: Workspace,
        share: Share,
        tO: cute.Tensor,
        tMax: cute.Tensor,
        tSum: cute.Tensor,
        tid: Int32,
    ):
        if share.num_splits == 1:
            self.store_row(out, share.group, tO, tMax, tSum, tid)
        else:
            cute.arch.cluster_wait()
            slots = (self.groups + share.num_splits - 1) // share.num_splits  # of a rank in the inbox
            self.send(smem, share, slots, tO, tMax, tSum, tid)
            cute.arch.mbarrier_wait(ops.shared_barrier(smem + self.at["inbox_full"]), 0)
            self.weigh_ranks(smem, out, share, tid)
            cute.arch.sync_threads()
            self.sum_owned_columns(smem, out, share, slots, tid)
        if work.counters != 0 and share.split == 0 and tid == 0:
            ops.store_global_i32(work.counters + Int64(work.unit) * 4, Int32(0))

    @cute.jit
    def send(
        self,
        smem: Int32,
        share: Share,
        slots: Int32,
        tO: cute.Tensor,
        tMax: cute.Tensor,
        tSum: cute.Tensor,
        tid: Int32,
    ):
        """Every rank its groups of this block's O, and this block's maxima and sums."""
        lane = tid % 32
        barrier = smem + self.at["inbox_full"]
        # Neighbouring lanes trade halves: the even one sends four columns of row r, the odd one of row r + 8.
        odd = lane % 2 == 1
        row = lane // 4 + 8 * (lane % 2)
        inbox = smem + self.at["inbox"] + share.split * slots * GROUP_BYTES + row * 32 + (lane // 2 % 2) * 16
        for n in cutlass.range_constexpr(self.warp_cols // 8):
            group = (tid // 32) * (self.warp_cols // 8) + n
            slot = group // share.num_splits
            rank = group - slot * share.num_splits
            got = [cute.arch.shuffle_sync_bfly(tO[4 * n + i] if odd else tO[4 * n + 2 + i], offset=1) for i in range(2)]
            if row < share.group:
                quad = (
                    got[0] if odd else tO[4 * n],
                    got[1] if odd else tO[4 * n + 1],
                    tO[4 * n + 2] if odd else got[0],
                    tO[4 * n + 3] if odd else got[1],
                )
                ops.store_cluster_async_x4(
                    ops.map_cluster(inbox + slot * GROUP_BYTES, rank), quad, ops.map_cluster(barrier, rank)
                )
        peers = smem + self.at["peers"] + (share.split * ROWS + lane // 4) * 8
        for rank in cutlass.range(tid // 32, share.num_splits, self.warps, unroll=1):
            to = ops.map_cluster(peers, rank)
            to_barrier = ops.map_cluster(barrier, rank)
            for r in cutlass.range_constexpr(2):
                if lane % 4 == 0 and lane // 4 + 8 * r < share.group:
                    ops.store_cluster_async_x2(to + r * 64, tMax[r], tSum[r], to_barrier)

    @cute.jit
    def weigh_ranks(self, smem: Int32, out: RowOutput, share: Share, tid: Int32):
        """weights[rank][row]: what rank's partial O is multiplied by; a (row, rank) a thread, half a warp a row."""
        rank, row = tid % MAX_CLUSTER, tid // MAX_CLUSTER
        if tid < MAX_CLUSTER * ROWS:
            mine, length = Float32(EMPTY_MAX), Float32(0.0)
            if rank < share.num_splits and row < share.group:
                mine, length = ops.load_shared_f32x2(smem + self.at["peers"] + (rank * ROWS + row) * 8)
            top = mine
            for step in cutlass.range_constexpr(4):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=8 >> step))
            factor = cute.math.exp2(mine - top, fastmath=True)
            total = factor * length
            for step in cutlass.range_constexpr(4):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=8 >> step)
            ops.store_shared_f32(smem + self.at["weights"] + (rank * ROWS + row) * 4, factor * self.inverse(total))
            if rank == 0 and row < share.group and share.split == 0 and out.lse != 0:
                self.store_lse(out.lse + Int64(row) * 4, top, total)

    @cute.jit
    def sum_owned_columns(self, smem: Int32, out: RowOutput, share: Share, slots: Int32, tid: Int32):
        """Four columns of a row a thread: the weighted sum over the ranks, in order; store."""
        owned = (self.groups - share.split + share.num_splits - 1) // share.num_splits
        for i in cutlass.range(tid, owned * (2 * ROWS), self.threads, unroll=1):
            half, row, slot = i % 2, i // 2 % ROWS, i // (2 * ROWS)
            if row < share.group:
                part = smem + self.at["inbox"] + slot * GROUP_BYTES + row * 32 + half * 16
                o0, o1, o2, o3 = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
                for s in cutlass.range(share.num_splits, unroll=4):
                    weight = ops.load_shared_f32(smem + self.at["weights"] + (s * ROWS + row) * 4)
                    v = ops.load_shared_f32x4(part + s * slots * GROUP_BYTES)
                    o0, o1, o2, o3 = o0 + weight * v[0], o1 + weight * v[1], o2 + weight * v[2], o3 + weight * v[3]
                column = (slot * share.num_splits + share.split) * 8 + half * 4
                self.store_quad(out, row, column, (o0, o1, o2, o3))

    @cute.jit
    def load_gate_pair(self, out: PagedOutput, row: Int32, col: Int32) -> Int32:
        return ops.load_shared_i32(self.gate_at(out, row, col))

    @cute.jit
    def load_gate_quad(self, out: PagedOutput, row: Int32, col: Int32):
        return ops.load_shared_i32x2(self.gate_at(out, row, col))

    @cute.jit
    def gate_at(self, out: PagedOutput, row: Int32, col: Int32) -> Int32:
        return Int32(out.gate) + col // 8 * GATE_GROUP_BYTES + row * 16 + col % 8 * 2
