"""`paged_attention.py` on SM90 for few rows: the splits of a row are the blocks of one cluster.

They merge in shared memory as those of `sparse_decode_cluster.py` do; no workspace. The gates of the columns that a
block stores come to its shared memory with Q, [group of 8 columns][row][8] bf16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.kernels.attention.paged_attention import PARAMS as ROW_PARAMS
from qsa_cute.kernels.attention.paged_attention import PagedAttention
from qsa_cute.kernels.attention.paged_rows import PagedOutput
from qsa_cute.kernels.attention.row_gather import ROWS, Share
from qsa_cute.kernels.attention.sparse_decode_cluster import GROUP_BYTES, MAX_CLUSTER, SparseDecodeCluster
from qsa_cute.kernels.common import ops

PARAMS = ROW_PARAMS
GATE_GROUP_BYTES = ROWS * 16


class PagedAttentionCluster(PagedAttention, SparseDecodeCluster):
    def __init__(self, head_dim: int, dtype: str, warps: int, k_stages: int, v_stages: int, blocks_per_sm: int):
        SparseDecodeCluster.__init__(self, head_dim, dtype, warps, k_stages, v_stages, blocks_per_sm)
        self.chains = 4  # with one block an SM there are registers for it, and nothing else hides the latency
        self.at["gate"] = self.smem_bytes
        self.smem_bytes += self.groups * GATE_GROUP_BYTES
        # An inbox apart from V's tiles lets a block send as soon as it is done.
        inbox = (self.groups + MAX_CLUSTER) * GROUP_BYTES
        for part, size in (("inbox", inbox), ("peers", MAX_CLUSTER * ROWS * 8), ("weights", MAX_CLUSTER * ROWS * 4)):
            self.at[part] = self.smem_bytes
            self.smem_bytes += size

    @cute.jit
    def begin(self, smem: Int32, share: Share, tid: Int32):
        if share.num_splits > 1:
            if tid == 0:
                self.expect_peers(smem, share)
            cute.arch.cluster_arrive_relaxed()  # says that the mbarrier is set up; awaited in `meet`
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

    def meet(self):
        cute.arch.cluster_wait()

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
    def load_gate_pair(self, out: PagedOutput, row: Int32, col: Int32) -> Int32:
        return ops.load_shared_i32(self.gate_at(out, row, col))

    @cute.jit
    def load_gate_quad(self, out: PagedOutput, row: Int32, col: Int32):
        return ops.load_shared_i32x2(self.gate_at(out, row, col))

    @cute.jit
    def gate_at(self, out: PagedOutput, row: Int32, col: Int32) -> Int32:
        return Int32(out.gate) + col // 8 * GATE_GROUP_BYTES + row * 16 + col % 8 * 2
