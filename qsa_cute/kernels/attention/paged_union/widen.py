"""The gather of `prefill_fp8.py`: K and V in e4m3, through registers, to fp16 in the slots that wgmma reads.

One warpgroup fills K's slots, chunk after chunk over all items of the block, another V's. Each of its four warps takes
every fourth block of a chunk. Lane 4 j + t works out where token t of the warp's block j lies, and whether any row
wants it: what is not wanted is not read, and becomes zeros.

A unit is 128 columns of a block, 16 bytes a lane: lanes 4 t .. 4 t + 3 and 16 more hold token t. So a warp reads whole
lines, and eight lanes in a row, of two tokens, write to all banks. `depth` units a lane are on their way at any time,
across chunks and items; entries are asked for a chunk ahead, and no branch depends on one.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.paged_union.consumer import Tiles
from qsa_cute.kernels.attention.union_steps import BOX_BYTES, STAGES
from qsa_cute.kernels.common import ops


@dataclass(frozen=True)
class Plane:
    """K or V: address, bytes between heads, and strides in units of `unit` bytes."""

    at: Int64
    head: Int64
    page: Int32
    token: Int32
    unit: Int32


class WideningGather:
    """Needs `UnionSteps`, and `units` and `depth` of the kernel."""

    @cute.jit
    def gather(
        self,
        tiles: Tiles,
        plane: Plane,
        with_masks: cutlass.Constexpr[bool],
        slots: Int32,
        masks: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        warp: Int32,
    ):
        """A warpgroup's part: all chunks of K, or of V. `slots` and `masks` are addresses in shared memory."""
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        num_items = tiles.num_tiles * tiles.num_kv_heads
        u = cute.make_rmem_tensor((4 * self.units,), Int32)

        item, ns, pairs = self.find_item(tiles, block)
        chunk = Int32(0)  # of the item
        n = Int32(0)  # of the block
        tile, kv_head = self.place(tiles, item)
        live = item < num_items
        at = self.find_token(tiles, plane, self.load_entry(tiles, live, tile, chunk, warp, lane), lane)
        head = self.find_head(plane, kv_head, lane)
        for i in cutlass.range_constexpr(self.depth):
            self.load(u, i, at, head, plane.unit, lane)
        while item < num_items:
            next_item, next_ns, next_pairs, next_tile, next_chunk = item, ns, pairs, tile, chunk + 1
            if next_chunk == ns + 2 * pairs:
                next_item, next_ns, next_pairs = self.find_item(tiles, item + step)
                next_tile, kv_head = self.place(tiles, next_item)
                next_chunk = Int32(0)
            e = self.load_entry(tiles, next_item < num_items, next_tile, next_chunk, warp, lane)
            slot = n % STAGES
            cute.arch.mbarrier_wait(empty + slot, (n // STAGES + 1) % 2)
            barrier = full + self.full_barrier(n, chunk - ns)
            if lane == 0:
                if chunk >= ns:  # in the stead of a warp of the warpgroup that skips the chunk
                    cute.arch.mbarrier_arrive(empty + slot)
                if cutlass.const_expr(with_masks):
                    if warp == 0:
                        self.load_masks(tiles, tile, chunk, n, masks, barrier)
            lane = ops.forget(cute.arch.lane_idx())
            token = (lane >> 2) & 3
            # The swizzle is by token % 8, and the parity of a warp's blocks is the warp's.
            swizzled = ((lane & 3) * 2) ^ ((warp & 1) * 4 + token)
            dst = slots + slot * self.slot_bytes + warp * BOX_BYTES
            dst = dst + token * 128 + (lane >> 4) * (self.tile * 128) + swizzled * 16
            for i in cutlass.range_constexpr(self.units):
                if cutlass.const_expr(i == self.units - self.depth):
                    at = self.find_token(tiles, plane, e, lane)
                    head = self.find_head(plane, kv_head, lane)
                self.widen(u, i, dst, dst ^ 16)
                self.load(u, (i + self.depth) % self.units, at, head, plane.unit, lane)
                union_ops.exit_if_negative(n)  # never: it keeps ptxas from putting all reads after all writes
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(barrier)
            item, ns, pairs, tile, chunk = next_item, next_ns, next_pairs, next_tile, next_chunk
            n = n + 1

    @cute.jit
    def load_entry(
        self, tiles: Tiles, live: cutlass.Boolean, tile: Int32, chunk: Int32, warp: Int32, lane: Int32
    ) -> Int32:
        """The entry of the block that this lane answers for; -1 for none."""
        wanted = live and lane < BLOCK_TOKENS * self.warp_blocks
        at = (Int64(tile) * Int64(tiles.max_chunks) + Int64(chunk)) * (self.blocks * 4)
        at = tiles.entries + at + Int64(warp * 4 + (lane >> 2) * 16)
        return union_ops.load_i32_if(Int32(1) if wanted else Int32(0), at, Int32(-1))

    @cute.jit
    def find_token(self, tiles: Tiles, plane: Plane, e: Int32, lane: Int32) -> Int32:
        """Where this lane's token lies, in units from the head's first one; -1 where no row wants it."""
        token = ((e >> 2) & ((BLOCK_TOKENS << tiles.entry_shift) - BLOCK_TOKENS)) + (lane & 3)
        at = (e >> (tiles.entry_shift + 4)) * plane.page + token * plane.token
        return at if e >= 0 and (e >> (lane & 3)) & 1 != 0 else Int32(-1)

    @cute.jit
    def find_head(self, plane: Plane, kv_head: Int32, lane: Int32) -> Int64:
        """The address of this lane's part of the first token of a head."""
        return plane.at + Int64(kv_head) * plane.head + Int64((lane & 3) * 16 + (lane >> 4) * 64)

    @cute.jit
    def load(self, u: cute.Tensor, unit: cutlass.Constexpr[int], at: Int32, head: Int64, step: Int32, lane: Int32):
        """Start reading a unit of a fill."""
        halves = self.boxes // 2
        place = cute.arch.shuffle_sync(at, Int32(unit // halves * 4) + ((lane >> 2) & 3))
        words = union_ops.load_stream_x4_if(place, head + Int64(place) * Int64(step), unit % halves * 128)
        for i in cutlass.range_constexpr(4):
            u[4 * unit + i] = words[i]

    @cute.jit
    def widen(self, u: cute.Tensor, unit: cutlass.Constexpr[int], dst: Int32, dst_odd: Int32):
        """A unit's 16 columns a lane to fp16, in two pieces."""
        halves = self.boxes // 2
        to = unit // halves * (4 * BOX_BYTES) + unit % halves * (2 * self.tile * 128)
        w = [ops.e4m3_to_half(u[4 * unit + i]) for i in range(4)]
        ops.store_shared_i32x4(dst + to, (*w[0], *w[1]))
        ops.store_shared_i32x4(dst_odd + to, (*w[2], *w[3]))
