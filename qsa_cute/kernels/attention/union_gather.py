"""The gather warps of the union's main kernels by TMA: a quarter of a chunk's blocks a warp, into rings of K and V.

Shared by the dense kernel (`union_prefill.py`) and the paged one (`paged_union/prefill.py`), which differ in what an
entry names and in which tensor map has it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.union_steps import BOX_BYTES, STAGES, Tiles, UnionSteps


class UnionGather(UnionSteps):
    """`find_maps` and `copy_block` are the inheriting kernel's."""

    @cute.jit
    def gather(self, tiles: Tiles, maps: Int64, sK: Int32, sV: Int32, sMasks: Int32, bars, warp: Int32):
        """Per item: K of chunk 0, then K of chunk c and V of chunk c - 1, and V of the last."""
        k_full, k_empty, v_full, v_empty = bars
        if cute.arch.lane_idx() == 0:
            block, _, _ = cute.arch.block_idx()
            step, _, _ = cute.arch.grid_dim()
            sK = sK + warp * BOX_BYTES
            sV = sV + warp * BOX_BYTES
            self.acquire_maps(maps)
            ring = Int32(0)
            item, ns, pairs = self.find_item(tiles, block)
            while item < tiles.num_tiles * tiles.num_kv_heads:
                tile, kv_head = self.place(tiles, item)
                k_map, v_map = self.find_maps(tiles, maps, tile)
                at = tiles.entries + Int64(tile) * Int64(tiles.max_chunks) * (self.blocks * 4) + Int64(warp * 4)
                total = ns + 2 * pairs
                for c in cutlass.range(total + 1, unroll=1):
                    if c < total:
                        k_at = at + Int64(c) * (self.blocks * 4)
                        self.fill(tiles, k_map, 0, k_at, kv_head, sK, k_full, k_empty, ring + c, c - ns)
                        if warp == 0:
                            full = k_full + self.full_barrier(ring + c, c - ns)
                            self.load_masks(tiles, tile, c, ring + c, sMasks, full)
                    if c > 0:
                        v_at = at + Int64(c - 1) * (self.blocks * 4)
                        self.fill(tiles, v_map, 1, v_at, kv_head, sV, v_full, v_empty, ring + c - 1, c - 1 - ns)
                ring = ring + total
                item, ns, pairs = self.find_item(tiles, item + step)

    def acquire_maps(self, maps: Int64):
        """Of maps that all items share."""

    @cute.jit
    def fill(
        self,
        tiles: Tiles,
        tensor_map: Int64,
        plane: cutlass.Constexpr[int],
        entries: Int64,
        kv_head: Int32,
        slots: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        ring: Int32,
        exclusive: Int32,
    ):
        """This warp's blocks of one chunk into slot ring % 2, once that is free; `exclusive` as in `full_barrier`."""
        e = [union_ops.load_i32(entries + j * 16) for j in range(self.warp_blocks)]
        slot = ring % STAGES
        cute.arch.mbarrier_wait(empty + slot, (ring // STAGES + 1) % 2)
        if exclusive >= 0:  # in the stead of a warp of the warpgroup that skips the chunk
            cute.arch.mbarrier_arrive(empty + slot)
        barrier = full + self.full_barrier(ring, exclusive)
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.warp_blocks * self.boxes * BOX_BYTES)
        dst = slots + slot * self.slot_bytes
        bar = Int32(barrier.toint())
        for j in cutlass.range_constexpr(self.warp_blocks):
            self.copy_block(tiles, tensor_map, plane, e[j], dst + j * 4 * BOX_BYTES, kv_head, bar)
