"""The consumer warpgroups of the paged union: a tile's chunks in turn, P V of one under the softmax of the next.

Shared by `prefill.py`, whose K and V are of Q's type, and `prefill_fp8.py`: the two differ in how chunks are gathered.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum

from qsa_cute.kernels.attention import union_ops, union_steps
from qsa_cute.kernels.attention.paged_union.tile import PagedUnionTile
from qsa_cute.kernels.attention.row_gather import EMPTY_MAX
from qsa_cute.kernels.attention.union_steps import STAGES, Heads, UnionSteps
from qsa_cute.kernels.attention.union_tile import PAIRS


@dataclass(frozen=True)
class Tiles(union_steps.Tiles):
    entry_shift: Int32  # bits of an entry that name a block of a page


@dataclass(frozen=True)
class Thread:
    """A consumer thread among the consumers; the warpgroup and the warp uniform in a warp."""

    tid: Int32
    warpgroup: Int32
    warp: Int32
    lane: Int32


@dataclass(frozen=True)
class OutputScale:
    """What O is multiplied by, of an fp8 cache; an address of a factor on the device, 0 for none."""

    number: Float32
    at: Int64


class UnionConsumer(PagedUnionTile, UnionSteps):
    def __init__(self, head_dim: int, dtype: str, tile: int):
        super().__init__(head_dim, dtype, tile)
        self.pv_columns = head_dim  # of one instruction

    def allocate(self):
        """Shared memory: Q, K and V^T as tensors; the addresses of Q, K, V and the masks; the barriers."""
        atom = warpgroup.make_smem_layout_atom(
            hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.element, self.head_dim), self.element
        )
        q_layout = cute.tile_to_shape(atom, (PAIRS, self.head_dim), order=(0, 1))
        kv_layout = cute.tile_to_shape(atom, (self.tile, self.head_dim, STAGES), order=(0, 1, 2))

        @cute.struct
        class Storage:
            k_full: cute.struct.MemRange[Int64, STAGES + 2]  # a slot's, then a warpgroup's: see `wait`
            k_empty: cute.struct.MemRange[Int64, STAGES]
            v_full: cute.struct.MemRange[Int64, STAGES + 2]
            v_empty: cute.struct.MemRange[Int64, STAGES]
            masks: cute.struct.Align[cute.struct.MemRange[Int32, STAGES * PAIRS], 16]
            q: cute.struct.Align[cute.struct.MemRange[self.element, PAIRS * self.head_dim], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.element, self.tile * self.head_dim * STAGES], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.element, self.tile * self.head_dim * STAGES], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        bars = tuple(part.data_ptr() for part in (storage.k_full, storage.k_empty, storage.v_full, storage.v_empty))
        sQ = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sK = storage.k.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        sV = storage.v.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        sVt = cute.composition(sV, cute.make_ordered_layout((self.head_dim, self.tile, STAGES), order=(1, 0, 2)))
        slots = [Int32(part.data_ptr().toint()) for part in (storage.q, storage.k, storage.v, storage.masks)]
        return (sQ, sK, sVt), slots, bars

    @cute.jit
    def init_barriers(self, bars, warp: Int32):
        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(STAGES + 2):
                    cute.arch.mbarrier_init(bars[0] + s, 5)  # gather warps, and warp 0's masks
                    cute.arch.mbarrier_init(bars[2] + s, 4)
                for s in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(bars[1] + s, 8)  # consumer warps
                    cute.arch.mbarrier_init(bars[3] + s, 8)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @cute.jit
    def consume(
        self,
        tiles: Tiles,
        q: Heads,
        o: Heads,
        gate: Heads,
        lse: Int64,
        row_path: Int64,
        scale_log2: Float32,
        scale: OutputScale,
        operands,
        q_smem: Int32,
        sMasks: Int32,
        bars,
        thread: Thread,
    ):
        """`operands` are Q, K and V transposed in shared memory; `q_smem` and `sMasks` addresses in it."""
        sQ, sK, sVt = operands
        group_size = tiles.group_size
        all_heads = tiles.num_kv_heads * group_size
        k_full, k_empty, v_full, v_empty = bars
        qk_mma = hopper.make_trivial_tiled_mma(
            self.element,
            self.element,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            atom_layout_mnk=(2, 1, 1),
            tiler_mn=(64, self.tile),
        )
        pv_mma = hopper.make_trivial_tiled_mma(
            self.element,
            self.element,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.MN,
            Float32,
            atom_layout_mnk=(2, 1, 1),
            tiler_mn=(64, self.pv_columns),
            a_source=warpgroup.OperandSource.RMEM,
        )
        wg, warp, lane = thread.warpgroup, thread.warp, thread.lane
        qk_slice = qk_mma.get_slice(wg * 128)
        pv_slice = pv_mma.get_slice(wg * 128)
        tSrQ = qk_slice.make_fragment_A(qk_slice.partition_A(sQ))
        tSrK = qk_slice.make_fragment_B(qk_slice.partition_B(sK))
        tOrV = pv_slice.make_fragment_B(pv_slice.partition_B(sVt))
        accS = cute.make_rmem_tensor(qk_slice.partition_shape_C((PAIRS, self.tile)), Float32)
        accO = cute.make_rmem_tensor(pv_slice.partition_shape_C((PAIRS, self.head_dim)), Float32)
        tOrP = pv_slice.make_fragment_A(pv_slice.partition_shape_A((PAIRS, self.tile)))
        tS = cute.make_tensor(accS.iterator, cute.make_layout(self.tile // 2))
        tO = cute.make_tensor(accO.iterator, cute.make_layout(self.head_dim // 2))
        tP = cute.make_tensor(cute.recast_ptr(tOrP.iterator, dtype=Int32), cute.make_layout(self.tile // 4))
        tMax = cute.make_rmem_tensor((2,), Float32)
        tSum = cute.make_rmem_tensor((2,), Float32)
        tScale = cute.make_rmem_tensor((2,), Float32)

        block, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        half = (lane % 4) // 2  # a lane's columns 8 i + 2 (lane % 4) lie in block 2 i + half
        pair0 = warp * 16 + lane // 4
        ring = Int32(0)
        k_phases = Int32(0)
        v_phases = Int32(0)
        item, ns, pairs = self.find_item(tiles, block)
        if item < tiles.num_tiles * tiles.num_kv_heads:
            self.load_q(tiles, q, q_smem, item, warp, lane)
        while item < tiles.num_tiles * tiles.num_kv_heads:
            tile, kv_head = self.place(tiles, item)
            # Mask words of this lane's two rows, counted from the tile's first row.
            start = (tile % tiles.per_sequence) * tiles.tile_pairs
            row0 = start // group_size
            m0 = (start + pair0) // group_size - row0
            to_m1 = ((start + pair0 + 8) // group_size - row0 - m0) * 4
            # Chunk 0 has words for each of a block's tokens, `plane` bytes apart.
            plane = tiles.mask_rows * 4
            at = tiles.first_masks + (Int64(tile * 4 + (lane % 2) * 2) * Int64(tiles.mask_rows) + Int64(m0)) * 4
            w0 = union_ops.load_i32(at)
            w0_odd = union_ops.load_i32(at + Int64(plane))
            w1 = union_ops.load_i32(at + Int64(to_m1))
            w1_odd = union_ops.load_i32(at + Int64(to_m1 + plane))
            at0 = sMasks + m0 * 4
            tMax.fill(EMPTY_MAX)
            tSum.fill(0.0)
            tScale.fill(1.0)
            tO.fill(0.0)
            if gate.at != 0:
                self.prefetch_gate(tiles, gate, item, thread.tid)
            cute.arch.cp_async_wait_group(0)
            self.settle_q(q_smem, warp, lane)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1 + wg, number_of_threads=128)

            k_phases = self.wait(k_full, ring % 2, k_phases)
            self.gemm(qk_mma, accS, tSrQ, tSrK[None, None, None, ring % 2], True)
            warpgroup.wait_group(0)
            self.release(k_empty, ring)
            self.apply_masks(tS, w0 >> half, w0_odd >> half, w1 >> half, w1_odd >> half)
            self.softmax(tS, tMax, tSum, tScale, scale_log2)

            flying = Int32(-1)  # the chunk whose P V is in flight
            done = ring  # the chunk whose P V comes next, and its barrier
            done_full = ring % 2
            for i in cutlass.range(1, ns + pairs, unroll=1):
                next_chunk = ring + i
                next_full = next_chunk % 2
                if i >= ns:
                    next_chunk = next_chunk + i - ns + wg
                    next_full = 2 + wg
                k_phases, v_phases = self.step(
                    qk_mma,
                    pv_mma,
                    accS,
                    accO,
                    tSrQ,
                    tSrK,
                    tOrP,
                    tOrV,
                    tS,
                    tO,
                    tP,
                    tMax,
                    tSum,
                    tScale,
                    half,
                    at0,
                    to_m1,
                    next_chunk,
                    next_full,
                    done,
                    done_full,
                    flying,
                    bars,
                    k_phases,
                    v_phases,
                    scale_log2,
                )
                flying = done
                done = next_chunk
                done_full = next_full
            self.finish(flying, v_empty, tS, tP)
            next_item, next_ns, next_pairs = self.find_item(tiles, item + step)
            cute.arch.barrier(barrier_id=1 + wg, number_of_threads=128)  # the warpgroup is done with Q
            if next_item < tiles.num_tiles * tiles.num_kv_heads:
                self.load_q(tiles, q, q_smem, next_item, warp, lane)
            self.rescale(tO, tScale)
            v_phases = self.wait(v_full, done_full, v_phases)
            self.gemm(pv_mma, accO, tOrP, tOrV[None, None, None, done % 2], False)
            warpgroup.wait_group(0)
            self.release(v_empty, done)
            ring = ring + ns + 2 * pairs

            self.check_finite(tO, row_path + Int64(tile * tiles.num_kv_heads + kv_head) * 4, lane)
            for j in cutlass.range_constexpr(2):
                tSum[j] = tSum[j] + cute.arch.shuffle_sync_bfly(tSum[j], offset=1)
                tSum[j] = tSum[j] + cute.arch.shuffle_sync_bfly(tSum[j], offset=2)
            batch = tile // tiles.per_sequence
            head = Int64(kv_head * group_size)
            o_base = o.at + (Int64(batch) * o.batch + head * o.head) * 2
            gate_base = Int64(0)
            if gate.at != 0:
                gate_base = gate.at + (Int64(batch) * gate.batch + head * gate.head) * 2
            lse_base = Int64(0)
            if lse != 0:
                lse_base = lse + (Int64(batch) * Int64(tiles.seq_len) * Int64(all_heads) + head) * 4
            live = cutlass.min(tiles.seq_len * group_size - start, tiles.tile_pairs)
            self.store(
                tO,
                tMax,
                tSum,
                o_base,
                o.row * 2,
                o.head * 2,
                gate_base,
                gate.row * 2,
                gate.head * 2,
                lse_base,
                all_heads,
                start,
                live,
                group_size,
                scale_log2,
                self.factor(scale),
                pair0,
                lane,
            )
            item, ns, pairs = next_item, next_ns, next_pairs

    def settle_q(self, q_smem: Int32, warp: Int32, lane: Int32):
        """What is left to do to the part of Q that this thread copied."""

    def factor(self, scale: OutputScale):
        return 1.0

    @cute.jit
    def prefetch_gate(self, tiles: Tiles, gate: Heads, item: Int32, tid: Int32):
        """Bring the item's gate to the L2: two threads a pair."""
        tile, kv_head = self.place(tiles, item)
        start = (tile % tiles.per_sequence) * tiles.tile_pairs
        pair = start + tid // 2
        if tid // 2 < tiles.tile_pairs and pair < tiles.seq_len * tiles.group_size:
            row = pair // tiles.group_size
            head = pair - row * tiles.group_size + kv_head * tiles.group_size
            at = gate.at + Int64(tile // tiles.per_sequence) * gate.batch * 2
            at = at + (Int64(row) * gate.row + Int64(head) * gate.head) * 2 + Int64(tid % 2) * self.head_dim
            for line in cutlass.range_constexpr(self.head_dim // 128):
                union_ops.prefetch_l2(at + line * 128)
