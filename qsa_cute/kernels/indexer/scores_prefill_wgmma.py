"""Block scores of prefill rows on SM90: the same logits as `scores_prefill.py`, by wgmma.

Grid: (row tiles, column splits). A row tile is 64 rows a consumer warpgroup, whose 256 (row, head) pairs stay in
shared memory as B of m64n256k16; 64-block tiles of keys are A and stream through a ring that all consumers read.
One warp copies the keys (cp.async, since the order of rows is its own and pools are strided), the warpgroups copy
their queries, multiply, and store straight from the accumulators: a thread holds all heads of two neighbouring
blocks of 16 rows, a warp store covers 64 contiguous bytes of four rows. With one consumer two blocks share an SM;
with two, the warpgroups take turns at the tensor cores, and one stores while the other multiplies.

Baked: type, consumer warpgroups, stages of the ring.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.geometry import INDEX_HEAD_DIM, INDEX_HEADS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.indexer.scores_ops import ROW_BYTES, RowTile, locate_rows, logit, q_rows
from qsa_cute.kernels.indexer.scores_prefill import PARAMS as PREFILL_PARAMS
from qsa_cute.kernels.indexer.scores_prefill import TILE, ScoresPrefill
from qsa_cute.kernels.indexer.wgmma_turns import PRODUCER, WgmmaTurns

PARAMS = PREFILL_PARAMS

GROUP_ROWS = 64  # rows a consumer warpgroup
GROUP_COLUMNS = GROUP_ROWS * INDEX_HEADS
HALF = 128  # bytes of a row in one swizzled half of an operand
LAST = 4  # k steps of a tile that are not complete when the turn is passed on: a half; 1 and 2 were no faster


class ScoresPrefillWgmma(WgmmaTurns, ScoresPrefill):
    def __init__(self, head_dim: int, dtype: str, groups: int, stages: int):
        self.dtype = dtype
        self.elem = ops.ELEMENTS[dtype]
        self.groups = groups
        self.stages = stages
        self.open_steps = LAST
        self.rows = GROUP_ROWS * groups
        self.threads = 128 * groups + PRODUCER
        self.min_blocks = 2 if groups == 1 else 1
        self.k_offset = groups * GROUP_COLUMNS * ROW_BYTES
        self.barrier_offset = self.k_offset + stages * TILE * ROW_BYTES  # full[stages], empty[stages]
        self.smem_bytes = self.barrier_offset + 16 * stages

    @cute.kernel
    def kernel(
        self,
        q_normed_ptr: cute.Pointer,
        kbar_ptr: cute.Pointer,
        logits_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        seq_len: Int32,
        num_blocks: Int32,
        row_start: Int32,
        num_rows: Int32,
        fill: Int32,
        q_stride_row: Int64,
        kbar_stride_batch: Int64,
        kbar_stride_block: Int64,
        logits_stride_row: Int64,
    ):
        early.begin()
        tid, _, _ = cute.arch.thread_idx()
        index, split, _ = cute.arch.block_idx()
        _, splits, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = locate_rows(
            index,
            self.rows,
            q_normed_ptr.toint(),
            kbar_ptr.toint(),
            logits_ptr.toint(),
            context_lengths.toint(),
            query_starts.toint(),
            seq_len,
            num_blocks,
            row_start,
            num_rows,
            q_stride_row,
            kbar_stride_batch,
            logits_stride_row,
        )
        begin, end, steps = self.columns(tile, split, splits)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        smem = Int32(base.toint())
        full, empty = self.make_ring(smem, tid)
        cute.arch.sync_threads()

        if warp == 4 * self.groups:
            self.produce(smem, tile, kbar_stride_block * 2, begin, steps, full, empty)
        else:
            if steps > 0:
                self.consume(base, smem, tile, q_stride_row * 2, begin, steps, fill, full, empty, tid)
            if fill != 0:
                self.mask(tile, begin + steps * TILE, end, tid, self.threads - PRODUCER)

    # ---- producer ------------------------------------------------------------------------------------

    @cute.jit
    def produce(
        self,
        smem: Int32,
        tile: RowTile,
        key_bytes: Int64,
        begin: Int32,
        steps: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
    ):
        """Copy the keys tile by tile. A tile is announced once the next one is under way: its copies are then
        complete and fenced for the tensor cores, which read through the async proxy."""
        lane = cute.arch.lane_idx()
        slot = Int32(0)
        phase = Int32(1)
        before = Int32(0)
        for i in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(empty + slot, phase)
            self.copy_keys(smem + self.k_offset + slot * (TILE * ROW_BYTES), tile, key_bytes, begin + i * TILE, lane)
            cute.arch.cp_async_commit_group()
            if i > 0:
                cute.arch.cp_async_wait_group(1)
                cute.arch.fence_view_async_shared()
                cute.arch.mbarrier_arrive(full + before)
            before = slot
            slot = slot + 1
            if slot == self.stages:
                slot = Int32(0)
                phase = phase ^ 1
        if steps > 0:
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            cute.arch.mbarrier_arrive(full + before)

    @cute.jit
    def copy_keys(self, sK: Int32, tile: RowTile, row_bytes: Int64, column: Int32, lane: Int32):
        """A tile of keys to [half][64 rows][128 bytes], swizzled, block 16w + 2l + e to row 16w + 8e + l: rows l
        and l + 8 of warp w's accumulators are neighbours. Blocks that no row sees become zeros, unread."""
        chunk = lane % 16
        e = lane // 16
        seen = tile.visible(tile.live - 1)
        to = sK + (chunk // 8) * (TILE * HALF) + e * (8 * HALF)
        source = tile.kbar + Int64(column) * row_bytes + Int64(chunk * 16)
        for i in cutlass.range_constexpr(TILE // 2):
            block = 2 * i + e
            live = column + block < seen
            dst = to + (16 * (i // 8) + i % 8) * HALF + ((chunk % 8) ^ (i % 8)) * 16
            ops.cp_async_16(dst, source + Int64(block if live else 0) * row_bytes, Int32(16) if live else Int32(0))

    # ---- consumer ------------------------------------------------------------------------------------

    @cute.jit
    def copy_queries(self, sQ: Int32, tile: RowTile, row_bytes: Int64, row0: Int32, tid: Int32):
        """A group's queries to [half][256 rows][128 bytes], swizzled; rows that may not be read become zeros."""
        chunk = tid % 16
        lane_row = tid // 16
        for i in cutlass.range_constexpr(GROUP_COLUMNS // 8):
            row = row0 + (8 * i + lane_row) // INDEX_HEADS
            live = tile.visible(row) > 0
            src = tile.q + Int64(row if live else tile.live - 1) * row_bytes
            src = src + Int64((lane_row % INDEX_HEADS) * ROW_BYTES + chunk * 16)
            at = q_rows(8 * i, lane_row)
            dst = sQ + ((chunk // 8) * GROUP_COLUMNS + at) * HALF + ((chunk % 8) ^ (at % 8)) * 16
            ops.cp_async_16(dst, src, Int32(16) if live else Int32(0))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def consume(
        self,
        base: cute.Pointer,
        smem: Int32,
        tile: RowTile,
        q_bytes: Int64,
        begin: Int32,
        steps: Int32,
        fill: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        tid: Int32,
    ):
        group = cute.arch.make_warp_uniform(tid // 128)
        self.copy_queries(smem + group * (GROUP_COLUMNS * ROW_BYTES), tile, q_bytes, group * GROUP_ROWS, tid % 128)
        mma, tK, tQ, tS = self.fragments(base, GROUP_COLUMNS, INDEX_HEAD_DIM, self.groups)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        if cutlass.const_expr(self.groups == 2):
            if group == 1:
                self.pass_turn(Int32(0))
        slot = Int32(0)
        phase = Int32(0)
        for i in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(full + slot, phase)
            self.multiply(mma, tS, tK[None, None, None, slot], (tQ[None, None, None, group],), group, i + 1 < steps)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + slot)
            self.store(tS, tile, group * GROUP_ROWS, begin + i * TILE, fill, tid % 128)
            slot = slot + 1
            if slot == self.stages:
                slot = Int32(0)
                phase = phase ^ 1

    @cute.jit
    def store(self, acc: cute.Tensor, tile: RowTile, row0: Int32, column: Int32, fill: Int32, tid: Int32):
        S = cute.make_tensor(acc.iterator, cute.make_layout(TILE * GROUP_COLUMNS // 128))
        lane = tid % 32
        row = row0 + lane % 4
        block = column + (tid // 32) * 16 + (lane // 4) * 2
        if self.needs_care(tile, column, 2):
            for j in cutlass.range_constexpr(GROUP_ROWS // 4):
                tile.store(row + 4 * j, block, self.pair(S, j), fill)
        else:
            at = tile.logits + Int64(row) * tile.stride + Int64(block) * 4
            step = tile.stride * 4
            for j in cutlass.range_constexpr(GROUP_ROWS // 4):
                v = self.pair(S, j)
                ops.store_global_f32x2(at, v[0], v[1])
                at = at + step

    @cute.jit
    def pair(self, S: cute.Tensor, j: cutlass.Constexpr[int]):
        """The thread's two logits of row 4j + c."""
        values = []
        for e in cutlass.range_constexpr(2):
            at = 8 * j + 2 * e
            values.append(logit(S[at], S[at + 1], S[at + 4], S[at + 5]))
        return values
