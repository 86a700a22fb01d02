"""Scores of prefill rows on SM90's tensor cores: what `score_rows_tc.py` computes, by wgmma.

Grid: (tiles of 64 rows, column splits). The pipeline is `indexer/scores_prefill_wgmma.py`'s: one warp copies 64-block
tiles of keys, A of m64n128k16, through a ring; two warpgroups of 32 rows each, whose 128 (row, head) pairs lie in
shared memory as B, once for each of the two terms, take turns at the tensor cores and store from the accumulators. A
tile of keys is multiplied by the high and then the low term into one accumulator.

Baked: type, consumer warpgroups, stages of the ring. Else as `score_rows_tc.py`.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum

from qsa_cute.geometry import INDEX_HEAD_DIM, INDEX_HEADS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.indexer.scores_ops import ROW_BYTES, q_rows
from qsa_cute.kernels.indexer.scores_prefill import TILE
from qsa_cute.kernels.indexer.scores_prefill_wgmma import HALF, LAST, PRODUCER, TURN, ScoresPrefillWgmma
from qsa_cute.kernels.metrale.score_rows_tc import PARAMS as TC_PARAMS
from qsa_cute.kernels.metrale.score_rows_tc import MaskedTile, locate, mask_rest, split_query

PARAMS = TC_PARAMS

GROUP_ROWS = 32  # rows a consumer warpgroup: both terms of two groups and four tiles of keys fill an SM's memory
GROUP_COLUMNS = GROUP_ROWS * INDEX_HEADS
TERMS = 2
TERM_BYTES = GROUP_COLUMNS * ROW_BYTES


class ScoreRowsTcWgmma(ScoresPrefillWgmma):
    def __init__(self, head_dim: int, dtype: str, groups: int, stages: int):
        self.dtype = dtype
        self.elem = ops.ELEMENTS[dtype]
        self.groups = groups
        self.stages = stages
        self.rows = GROUP_ROWS * groups
        self.threads = 128 * groups + PRODUCER
        self.min_blocks = 1
        self.k_offset = groups * TERMS * TERM_BYTES
        self.barrier_offset = self.k_offset + stages * TILE * ROW_BYTES  # full[stages], empty[stages]
        self.smem_bytes = self.barrier_offset + 16 * stages

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        block_keys: cute.Pointer,
        scores: cute.Pointer,
        rows: Int32,
        n_blocks_max: Int32,
        first_pos: Int32,
        ratio: Int32,
        score_stride: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(q, block_keys, scores, rows, n_blocks_max, first_pos, ratio, score_stride).launch(
            grid=(1, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=self.min_blocks,
            preferred_smem_carveout=100,
        )

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
        full = ops.shared_barrier(smem + self.barrier_offset)
        empty = ops.shared_barrier(smem + self.barrier_offset + 8 * self.stages)
        if tid == 0:
            for s in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + s, PRODUCER)
                cute.arch.mbarrier_init(empty + s, 4 * self.groups)
        cute.arch.mbarrier_init_fence()
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
        atom = warpgroup.make_smem_layout_atom(
            hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.elem, INDEX_HEAD_DIM), self.elem
        )
        q_layout = cute.tile_to_shape(atom, (GROUP_COLUMNS, INDEX_HEAD_DIM, self.groups * TERMS), order=(0, 1, 2))
        k_layout = cute.tile_to_shape(atom, (TILE, INDEX_HEAD_DIM, self.stages), order=(0, 1, 2))
        sQ = cute.make_tensor(cute.recast_ptr(base, q_layout.inner, dtype=self.elem), q_layout.outer)
        sK = cute.make_tensor(cute.recast_ptr(base + self.k_offset, k_layout.inner, dtype=self.elem), k_layout.outer)
        mma = hopper.make_trivial_tiled_mma(
            self.elem,
            self.elem,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(TILE, GROUP_COLUMNS),
        )
        slice_ = mma.get_slice(0)
        tK = slice_.make_fragment_A(slice_.partition_A(sK))
        tQ = slice_.make_fragment_B(slice_.partition_B(sQ))
        tS = cute.make_rmem_tensor(slice_.partition_shape_C((TILE, GROUP_COLUMNS)), Float32)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        if group == 1:
            self.pass_turn(Int32(0))
        slot = Int32(0)
        phase = Int32(0)
        for i in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(full + slot, phase)
            high = tQ[None, None, None, TERMS * group]
            low = tQ[None, None, None, TERMS * group + 1]
            self.multiply_terms(mma, tS, tK[None, None, None, slot], high, low, group, i + 1 < steps)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + slot)
            self.store_terms(tS, tile, group * GROUP_ROWS, begin + i * TILE, tid % 128)
            slot = slot + 1
            if slot == self.stages:
                slot = Int32(0)
                phase = phase ^ 1

    @cute.jit
    def multiply_terms(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        a: cute.Tensor,
        high: cute.Tensor,
        low: cute.Tensor,
        group: Int32,
        more: cutlass.Boolean,
    ):
        """`ScoresPrefillWgmma.multiply` of both terms: in turn with the other group."""
        steps = cute.size(a.shape[2])
        cute.arch.barrier(barrier_id=TURN + group, number_of_threads=256)
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for term in cutlass.range_constexpr(TERMS):
            b = (high, low)[term]
            for k in cutlass.range_constexpr(steps):
                cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
                atom.set(warpgroup.Field.ACCUMULATE, True)
                if cutlass.const_expr(term == TERMS - 1 and k == steps - LAST - 1):
                    warpgroup.commit_group()
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if group == 0 or more:
            self.pass_turn(1 - group)
        warpgroup.wait_group(0)

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
