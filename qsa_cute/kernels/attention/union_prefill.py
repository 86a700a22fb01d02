"""Sparse prefill attention that shares its gather between neighbouring rows (SM90).

    O[r, h] = sum_i softmax_i(scale * Q[r, h] . K[id_i]) V[id_i]      over the valid ids of row r's selection

A tile is up to 128 consecutive (row, head of the group) pairs of one sequence and one KV head: the M extent of
two wgmma warpgroups. It walks the union of its rows' 4-token blocks once, as `union_prepare` left it, in chunks
of `tile` tokens; a bit per (row, block) masks what a row did not select:

    chunk 0            holds every block of which some row wants only a part, so has a bit per token;
    chunks 1 .. ns-1   shared by both warpgroups;
    then x pairs       one chunk that only warpgroup 0's rows want, one that only warpgroup 1's want; the other
                       warpgroup skips it.

Grid: one persistent block an SM; block b takes items b, b + grid, ... An item is (tile, KV head), the last tiles
of the sequences first, since theirs are the longest unions. An item is never split over blocks: measured on the
H200, the merge costs more than the idle SMs, down to 512 rows.

Warps 0-3 gather: each issues the TMA boxes (4 tokens x 64 columns, 128-byte swizzle) of a quarter of a chunk's
blocks into a ring of two K and two V slots. Padding blocks lie out of bounds: zeros, and no memory is touched.
Warps 4-11 are the two consumer warpgroups: while P V of chunk i runs on the tensor cores, the softmax of chunk
i + 1 runs beside it. The ring runs on over items, so that the next item's K, V and Q arrive during this one's
last products and epilogue.

A tile whose `union_counts` say 0 chunks is left to `union_rows`. A V that is not finite would reach rows that
did not select it as 0 x NaN; so a warp that meets one gives its tile to `union_rows` too, which recomputes it.

Baked: head dim, type, tile. Run-time: everything else. The caller guarantees 16-byte aligned rows of Q
and O, and that `union_prepare` ran before this launch on the same stream with the same sizes.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum

from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.row_gather import EMPTY_MAX
from qsa_cute.kernels.attention.union_steps import BOX_BYTES, BOX_COLUMNS, STAGES, Heads, Tiles, UnionSteps
from qsa_cute.kernels.attention.union_tile import PAIRS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import f32, i32, i64, ptr

PARAMS = (
    ptr("q_ptr", "elem", 16),
    ptr("o_ptr", "elem", 16),
    ptr("lse_ptr", "f32"),
    ptr("tensor_maps", "i32", 16),
    ptr("union_counts", "i32", 8),
    ptr("union_entries", "i32"),
    ptr("union_masks", "i32", 16),
    ptr("union_first_masks", "i32"),
    ptr("row_path", "i32"),
    i32("seq_len"),
    i32("num_kv_heads"),
    i32("group_size"),
    i32("tile_pairs"),
    i32("tiles_per_sequence"),
    i32("num_tiles"),
    i32("max_chunks"),
    i32("mask_rows"),
    i64("q_stride_batch"),
    i64("q_stride_row"),
    i64("q_stride_head"),
    i64("o_stride_batch"),
    i64("o_stride_row"),
    i64("o_stride_head"),
    f32("attention_scale"),
)

GATHER_REGISTERS, CONSUMER_REGISTERS = 32, 232  # 128 * 32 + 256 * 232 <= 65536


class UnionPrefill(UnionSteps):
    early_launch = True

    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        o_ptr: cute.Pointer,
        lse_ptr: cute.Pointer,
        tensor_maps: cute.Pointer,
        union_counts: cute.Pointer,
        union_entries: cute.Pointer,
        union_masks: cute.Pointer,
        union_first_masks: cute.Pointer,
        row_path: cute.Pointer,
        seq_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        tile_pairs: Int32,
        tiles_per_sequence: Int32,
        num_tiles: Int32,
        max_chunks: Int32,
        mask_rows: Int32,
        q_stride_batch: Int64,
        q_stride_row: Int64,
        q_stride_head: Int64,
        o_stride_batch: Int64,
        o_stride_row: Int64,
        o_stride_head: Int64,
        attention_scale: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_ptr,
            o_ptr,
            lse_ptr,
            tensor_maps,
            union_counts,
            union_entries,
            union_masks,
            union_first_masks,
            row_path,
            seq_len,
            num_kv_heads,
            group_size,
            tile_pairs,
            tiles_per_sequence,
            num_tiles,
            max_chunks,
            mask_rows,
            q_stride_batch,
            q_stride_row,
            q_stride_head,
            o_stride_batch,
            o_stride_row,
            o_stride_head,
            attention_scale,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        q_ptr: cute.Pointer,
        o_ptr: cute.Pointer,
        lse_ptr: cute.Pointer,
        tensor_maps: cute.Pointer,
        union_counts: cute.Pointer,
        union_entries: cute.Pointer,
        union_masks: cute.Pointer,
        union_first_masks: cute.Pointer,
        row_path: cute.Pointer,
        seq_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        tile_pairs: Int32,
        tiles_per_sequence: Int32,
        num_tiles: Int32,
        max_chunks: Int32,
        mask_rows: Int32,
        q_stride_batch: Int64,
        q_stride_row: Int64,
        q_stride_head: Int64,
        o_stride_batch: Int64,
        o_stride_row: Int64,
        o_stride_head: Int64,
        attention_scale: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
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
        bars = (
            storage.k_full.data_ptr(),
            storage.k_empty.data_ptr(),
            storage.v_full.data_ptr(),
            storage.v_empty.data_ptr(),
        )
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
        early.begin()

        sQ = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sK = storage.k.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        sV = storage.v.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        sVt = cute.composition(sV, cute.make_ordered_layout((self.head_dim, self.tile, STAGES), order=(1, 0, 2)))
        tiles = Tiles(
            union_counts.toint(),
            union_entries.toint(),
            union_masks.toint(),
            union_first_masks.toint(),
            seq_len,
            num_kv_heads,
            group_size,
            tile_pairs,
            tiles_per_sequence,
            num_tiles,
            max_chunks,
            mask_rows,
        )
        slots = [Int32(part.data_ptr().toint()) for part in (storage.q, storage.k, storage.v, storage.masks)]
        if warp < 4:
            cute.arch.setmaxregister_decrease(GATHER_REGISTERS)
            self.gather(tiles, tensor_maps.toint(), slots[1], slots[2], slots[3], bars, warp)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(
                tiles,
                Heads(q_ptr.toint(), q_stride_batch, q_stride_row, q_stride_head),
                Heads(o_ptr.toint(), o_stride_batch, o_stride_row, o_stride_head),
                lse_ptr.toint(),
                row_path.toint(),
                attention_scale * ops.LOG2_E,
                (sQ, sK, sVt),
                slots[0],
                slots[3],
                bars,
                tid - 128,
            )

    # ---- items ---------------------------------------------------------------------------------------

    # ---- gather --------------------------------------------------------------------------------------

    @cute.jit
    def gather(self, tiles: Tiles, maps: Int64, sK: Int32, sV: Int32, sMasks: Int32, bars, warp: Int32):
        """Per item: K of chunk 0, then K of chunk c and V of chunk c - 1, and V of the last."""
        k_full, k_empty, v_full, v_empty = bars
        if cute.arch.lane_idx() == 0:
            block, _, _ = cute.arch.block_idx()
            step, _, _ = cute.arch.grid_dim()
            sK = sK + warp * BOX_BYTES
            sV = sV + warp * BOX_BYTES
            ring = Int32(0)
            item, ns, pairs = self.find_item(tiles, block)
            while item < tiles.num_tiles * tiles.num_kv_heads:
                tile, kv_head = self.place(tiles, item)
                k_map = maps + Int64(tile // tiles.per_sequence) * (2 * union_ops.TENSOR_MAP_BYTES)
                v_map = k_map + union_ops.TENSOR_MAP_BYTES
                union_ops.acquire_tensor_map(k_map)
                union_ops.acquire_tensor_map(v_map)
                at = tiles.entries + Int64(tile) * Int64(tiles.max_chunks) * (self.blocks * 4) + Int64(warp * 4)
                total = ns + 2 * pairs
                for c in cutlass.range(total + 1, unroll=1):
                    if c < total:
                        k_at = at + Int64(c) * (self.blocks * 4)
                        self.fill(k_map, k_at, kv_head, sK, k_full, k_empty, ring + c, c - ns)
                        if warp == 0:
                            size = tiles.mask_rows * 4
                            full = k_full + self.full_barrier(ring + c, c - ns)
                            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
                            src = tiles.masks + (Int64(tile) * Int64(tiles.max_chunks) + Int64(c)) * Int64(size)
                            union_ops.bulk_load(sMasks + (ring + c) % 2 * (PAIRS * 4), src, size, Int32(full.toint()))
                    if c > 0:
                        v_at = at + Int64(c - 1) * (self.blocks * 4)
                        self.fill(v_map, v_at, kv_head, sV, v_full, v_empty, ring + c - 1, c - 1 - ns)
                ring = ring + total
                item, ns, pairs = self.find_item(tiles, item + step)

    @cute.jit
    def fill(
        self,
        tensor_map: Int64,
        entries: Int64,
        kv_head: Int32,
        slots: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        ring: Int32,
        exclusive: Int32,
    ):
        """This warp's blocks of one chunk into slot ring % 2, once that is free; `exclusive` as in `full_barrier`."""
        t = [union_ops.load_i32(entries + j * 16) for j in range(self.warp_blocks)]
        slot = ring % STAGES
        cute.arch.mbarrier_wait(empty + slot, (ring // STAGES + 1) % 2)
        if exclusive >= 0:  # in the stead of a warp of the warpgroup that skips the chunk
            cute.arch.mbarrier_arrive(empty + slot)
        barrier = full + self.full_barrier(ring, exclusive)
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.warp_blocks * self.boxes * BOX_BYTES)
        dst = slots + slot * self.slot_bytes
        for j in cutlass.range_constexpr(self.warp_blocks):
            for c in cutlass.range_constexpr(self.boxes):
                union_ops.tma_load_3d(
                    dst + (j * 4 * BOX_BYTES + c * (self.tile * 128)),
                    tensor_map,
                    Int32(c * BOX_COLUMNS),
                    kv_head,
                    t[j],
                    Int32(barrier.toint()),
                )

    # ---- consumers -----------------------------------------------------------------------------------

    @cute.jit
    def consume(
        self,
        tiles: Tiles,
        q: Heads,
        o: Heads,
        lse: Int64,
        row_path: Int64,
        scale_log2: Float32,
        operands,
        q_smem: Int32,
        sMasks: Int32,
        bars,
        tid: Int32,
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
            tiler_mn=(64, self.head_dim),
            a_source=warpgroup.OperandSource.RMEM,
        )
        wg = cute.arch.make_warp_uniform(tid // 128)
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
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
            cute.arch.cp_async_wait_group(0)
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
                lse_base,
                all_heads,
                start,
                live,
                group_size,
                scale_log2,
                pair0,
                lane,
            )
            item, ns, pairs = next_item, next_ns, next_pairs
