"""The consumer warpgroups of the union's main kernels: a tile's chunks, P V of one under the softmax of the next.

Shared by the dense kernel (`union_prefill.py`) and the paged ones (`paged_union/`), which differ in how chunks are
gathered and in what becomes of the output.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum

from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.row_gather import EMPTY_MAX
from qsa_cute.kernels.attention.union_steps import STAGES, Heads, Tiles, UnionSteps
from qsa_cute.kernels.attention.union_tile import PAIRS


@dataclass(frozen=True)
class Thread:
    """A consumer thread among the consumers; the warpgroup and the warp uniform in a warp."""

    tid: Int32
    warpgroup: Int32
    warp: Int32
    lane: Int32


def consumer_thread(tid: Int32) -> Thread:
    """The thread of this number among the consumers."""
    return Thread(tid, cute.arch.make_warp_uniform(tid // 128), cute.arch.make_warp_uniform(tid // 32), tid % 32)


@dataclass(frozen=True)
class Output:
    """Where O goes, the LSE (0: not wanted), and the flags by which a tile is given to the row path."""

    o: Heads
    lse: Int64
    row_path: Int64


class UnionConsumer(UnionSteps):
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
        out: Output,
        scale_log2: Float32,
        operands,
        q_smem: Int32,
        sMasks: Int32,
        bars,
        thread: Thread,
    ):
        """`operands` are Q, K and V transposed in shared memory; `q_smem` and `sMasks` addresses in it."""
        wg, warp, lane = thread.warpgroup, thread.warp, thread.lane
        f = self.fragments(operands, wg)
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
            start = (tile % tiles.per_sequence) * tiles.tile_pairs
            m0, to_m1, words = self.first_masks(tiles, tile, start, pair0, lane)
            at0 = sMasks + m0 * 4
            f.max.fill(EMPTY_MAX)
            f.sum.fill(0.0)
            f.scale.fill(1.0)
            f.o.fill(0.0)
            self.begin_item(tiles, out, item, thread)
            cute.arch.cp_async_wait_group(0)
            self.settle_q(q_smem, warp, lane)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1 + wg, number_of_threads=128)

            k_phases = self.first_step(f, words, half, ring, bars, k_phases, scale_log2)
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
                    f,
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
            self.finish(flying, bars[3], f.s, f.p)
            next_item, next_ns, next_pairs = self.find_item(tiles, item + step)
            cute.arch.barrier(barrier_id=1 + wg, number_of_threads=128)  # the warpgroup is done with Q
            if next_item < tiles.num_tiles * tiles.num_kv_heads:
                self.load_q(tiles, q, q_smem, next_item, warp, lane)
            v_phases = self.last_product(f, done, done_full, bars, v_phases)
            ring = ring + ns + 2 * pairs
            self.end_item(f, tiles, out, tile, kv_head, start, scale_log2, pair0, lane)
            item, ns, pairs = next_item, next_ns, next_pairs

    def fragments(self, operands, wg: Int32) -> SimpleNamespace:
        """A warpgroup's products: the two MMAs, their operands in shared memory (sq, sk, sv) and in registers (rp, of
        which p are the words), accumulators (acc_s, acc_o, flat s and o), and maxima, sums and O's factor a row."""
        sQ, sK, sVt = operands
        majors = warpgroup.OperandMajorMode
        given = (self.element, self.element, majors.K)
        qk = hopper.make_trivial_tiled_mma(
            *given, majors.K, Float32, atom_layout_mnk=(2, 1, 1), tiler_mn=(64, self.tile)
        )
        pv = hopper.make_trivial_tiled_mma(
            *given,
            majors.MN,
            Float32,
            atom_layout_mnk=(2, 1, 1),
            tiler_mn=(64, self.pv_columns),
            a_source=warpgroup.OperandSource.RMEM,
        )
        qk_slice = qk.get_slice(wg * 128)
        pv_slice = pv.get_slice(wg * 128)
        sq = qk_slice.make_fragment_A(qk_slice.partition_A(sQ))
        sk = qk_slice.make_fragment_B(qk_slice.partition_B(sK))
        sv = pv_slice.make_fragment_B(pv_slice.partition_B(sVt))
        acc_s = cute.make_rmem_tensor(qk_slice.partition_shape_C((PAIRS, self.tile)), Float32)
        acc_o = cute.make_rmem_tensor(pv_slice.partition_shape_C((PAIRS, self.head_dim)), Float32)
        rp = pv_slice.make_fragment_A(pv_slice.partition_shape_A((PAIRS, self.tile)))
        s = cute.make_tensor(acc_s.iterator, cute.make_layout(self.tile // 2))
        o = cute.make_tensor(acc_o.iterator, cute.make_layout(self.head_dim // 2))
        p = cute.make_tensor(cute.recast_ptr(rp.iterator, dtype=Int32), cute.make_layout(self.tile // 4))
        rows = {name: cute.make_rmem_tensor((2,), Float32) for name in ("max", "sum", "scale")}
        return SimpleNamespace(
            qk=qk, pv=pv, sq=sq, sk=sk, sv=sv, acc_s=acc_s, acc_o=acc_o, rp=rp, s=s, o=o, p=p, **rows
        )

    def first_masks(self, tiles: Tiles, tile: Int32, start: Int32, pair0: Int32, lane: Int32):
        """Of this lane's two rows: the first, counted from the tile's, bytes to the second, and chunk 0's words, which
        has some for each of a block's tokens, `plane` bytes apart. Pairs past a tile that is cut small take those of
        the last row: there are no others."""
        row0 = start // tiles.group_size
        last = tiles.mask_rows - 1
        m0 = cutlass.min((start + pair0) // tiles.group_size - row0, last)
        to_m1 = (cutlass.min((start + pair0 + 8) // tiles.group_size - row0, last) - m0) * 4
        plane = tiles.mask_rows * 4
        at = tiles.first_masks + (Int64(tile * 4 + (lane % 2) * 2) * Int64(tiles.mask_rows) + Int64(m0)) * 4
        w0 = union_ops.load_i32(at)
        w0_odd = union_ops.load_i32(at + Int64(plane))
        w1 = union_ops.load_i32(at + Int64(to_m1))
        w1_odd = union_ops.load_i32(at + Int64(to_m1 + plane))
        return m0, to_m1, (w0, w0_odd, w1, w1_odd)

    def begin_item(self, tiles: Tiles, out: Output, item: Int32, thread: Thread):
        """What can be on its way while the item is worked on."""

    def settle_q(self, q_smem: Int32, warp: Int32, lane: Int32):
        """What is left to do to the part of Q that this thread copied."""

    @cute.jit
    def end_item(
        self,
        f: SimpleNamespace,
        tiles: Tiles,
        out: Output,
        tile: Int32,
        kv_head: Int32,
        start: Int32,
        scale_log2: Float32,
        pair0: Int32,
        lane: Int32,
    ):
        group_size = tiles.group_size
        all_heads = tiles.num_kv_heads * group_size
        self.check_finite(f.o, out.row_path + Int64(tile * tiles.num_kv_heads + kv_head) * 4, lane)
        for j in cutlass.range_constexpr(2):
            f.sum[j] = f.sum[j] + cute.arch.shuffle_sync_bfly(f.sum[j], offset=1)
            f.sum[j] = f.sum[j] + cute.arch.shuffle_sync_bfly(f.sum[j], offset=2)
        batch = tile // tiles.per_sequence
        head = Int64(kv_head * group_size)
        o_base = out.o.at + (Int64(batch) * out.o.batch + head * out.o.head) * 2
        gate = self.gates(out, batch, head)
        lse_base = Int64(0)
        if out.lse != 0:
            lse_base = out.lse + (Int64(batch) * Int64(tiles.seq_len) * Int64(all_heads) + head) * 4
        live = cutlass.min(tiles.seq_len * group_size - start, tiles.tile_pairs)
        self.store(
            f.o,
            f.max,
            f.sum,
            o_base,
            out.o.row * 2,
            out.o.head * 2,
            lse_base,
            all_heads,
            start,
            live,
            group_size,
            scale_log2,
            pair0,
            lane,
            *gate,
            *self.factors(out),
        )

    def gates(self, out: Output, batch: Int32, head: Int64) -> tuple:
        """More arguments of `store`: where the gate of a head lies, and strides, if there is any."""
        return ()

    def factors(self, out: Output) -> tuple:
        """And what O is multiplied by, if it is."""
        return ()
