"""Scores of prefill rows on SM90's tensor cores: what `score_rows_tc.py` computes, by wgmma.

Grid: (tiles of 64 rows, column splits). The pipeline is `indexer/scores_prefill_wgmma.py`'s: one warp copies 64-block
tiles of keys, A of m64n128k16, through a ring; two warpgroups of 32 rows each, whose 128 (row, head) pairs lie in
shared memory as B, once for each of the two terms, take turns at the tensor cores and store from the accumulators. A
tile of keys is multiplied by the high and then the low term into one accumulator.

Baked: type, consumer warpgroups, stages of the ring. Else as `score_rows_tc.py`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.geometry import INDEX_HEAD_DIM, INDEX_HEADS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.indexer.scores_ops import ROW_BYTES, q_rows
from qsa_cute.kernels.indexer.scores_prefill import TILE
from qsa_cute.kernels.indexer.scores_prefill_wgmma import HALF, LAST, ScoresPrefillWgmma
from qsa_cute.kernels.indexer.wgmma_turns import PRODUCER
from qsa_cute.kernels.metrale.score_rows_tc import PARAMS as TC_PARAMS
from qsa_cute.kernels.metrale.score_rows_tc import MaskedTile, TwoTermLaunch, locate, mask_rest, split_query

PARAMS = TC_PARAMS

GROUP_ROWS = 32  # rows a consumer warpgroup: both terms of two groups and four tiles of keys fill an SM's memory
GROUP_COLUMNS = GROUP_ROWS * INDEX_HEADS
TERMS = 2
TERM_BYTES = GROUP_COLUMNS * ROW_BYTES


class ScoreRowsTcWgmma(TwoTermLaunch, ScoresPrefillWgmma):
    def __init__(self, head_dim: int, dtype: str, groups: int, stages: int):
        self.dtype = dtype
        self.elem = ops.ELEMENTS[dtype]
        self.groups = groups
        self.stages = stages
        self.rows = GROUP_ROWS * groups
        self.threads = 128 * groups + PRODUCER
        self.min_blocks = 1
        self.open_steps = LAST
        self.k_offset = groups * TERMS * TERM_BYTES
        self.barrier_offset = self.k_offset + stages * TILE * ROW_BYTES  # full[stages], empty[stages]
        self.smem_bytes = self.barrier_offset + 16 * stages

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,
        block_keys: cute.Pointer,
        scores: cute.Pointer,
        rows: Int32,
        n_blocks_max: Int32,
        first_pos: Int32,
        ratio: Int32,
        score_stride: Int64,
    ):
        early.begin()
        tid, _, _ = cute.arch.thread_idx()
        index, split, _ = cute.arch.block_idx()
        _, splits, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = locate(
            index,
            self.rows,
            q.toint(),
            block_keys.toint(),
            scores.toint(),
            rows,
            n_blocks_max,
            first_pos,
            ratio,
            score_stride,
        )
        begin, end, steps = self.columns(tile, split, splits)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        smem = Int32(base.toint())
        full, empty = self.make_ring(smem, tid)
        cute.arch.sync_threads()

        if warp == 4 * self.groups:
            self.produce(smem, tile, Int64(ROW_BYTES), begin, steps, full, empty)
        else:
            if steps > 0:
                self.consume_terms(base, smem, tile, begin, steps, full, empty, tid)
            mask_rest(tile, begin + steps * TILE, end, tid, self.threads - PRODUCER)

    @cute.jit
    def split_queries(self, sQ: Int32, tile: MaskedTile, row0: Int32, tid: Int32):
        """A group's queries to [term][half][128 rows][128 bytes], swizzled; unseen rows are zeros."""
        chunk = tid % 16
        lane_row = tid // 16
        for i in cutlass.range_constexpr(GROUP_COLUMNS // 8):
            linear = 8 * i + lane_row
            high, low = split_query(self.dtype, tile, row0 + linear // INDEX_HEADS, linear % INDEX_HEADS, chunk)
            at = q_rows(8 * i, lane_row)
            dst = sQ + ((chunk // 8) * GROUP_COLUMNS + at) * HALF + ((chunk % 8) ^ (at % 8)) * 16
            ops.store_shared_i32x4(dst, high)
            ops.store_shared_i32x4(dst + TERM_BYTES, low)

    @cute.jit
    def consume_terms(
        self,
        base: cute.Pointer,
        smem: Int32,
        tile: MaskedTile,
        begin: Int32,
        steps: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        tid: Int32,
    ):
        group = cute.arch.make_warp_uniform(tid // 128)
        self.split_queries(smem + group * (TERMS * TERM_BYTES), tile, group * GROUP_ROWS, tid % 128)
        mma, tK, tQ, tS = self.fragments(base, GROUP_COLUMNS, INDEX_HEAD_DIM, TERMS * self.groups)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        if group == 1:
            self.pass_turn(Int32(0))
        slot = Int32(0)
        phase = Int32(0)
        for i in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(full + slot, phase)
            terms = tuple(tQ[None, None, None, TERMS * group + term] for term in range(TERMS))
            self.multiply(mma, tS, tK[None, None, None, slot], terms, group, i + 1 < steps)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + slot)
            self.store_terms(tS, tile, group * GROUP_ROWS, begin + i * TILE, tid % 128)
            slot = slot + 1
            if slot == self.stages:
                slot = Int32(0)
                phase = phase ^ 1

    @cute.jit
    def store_terms(self, acc: cute.Tensor, tile: MaskedTile, row0: Int32, column: Int32, tid: Int32):
        S = cute.make_tensor(acc.iterator, cute.make_layout(TILE * GROUP_COLUMNS // 128))
        lane = tid % 32
        row = row0 + lane % 4
        block = column + (tid // 32) * 16 + (lane // 4) * 2
        if self.needs_care(tile, column, 2) or tile.logits % 8 != 0:
            for j in cutlass.range_constexpr(GROUP_ROWS // 4):
                tile.store(row + 4 * j, block, self.pair(S, j), Int32(1))
        else:
            at = tile.logits + Int64(row) * tile.stride + Int64(block) * 4
            step = tile.stride * 4
            for j in cutlass.range_constexpr(GROUP_ROWS // 4):
                v = self.pair(S, j)
                ops.store_global_f32x2(at, v[0], v[1])
                at = at + step
