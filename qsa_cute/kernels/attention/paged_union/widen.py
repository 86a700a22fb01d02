"""The gather of `prefill_fp8.py`: K and V in e4m3, through registers, to fp16 in the slots that wgmma reads.

A fill is one chunk of K or of V; per item K of chunk 0, then K of chunk c and V of chunk c - 1, and V of the last. Each
of four warps takes every fourth block of a chunk. Lane 4 j + t works out where token t of the warp's block j lies, and
whether any row wants it: what is not wanted is not read, and becomes zeros.

A unit is 128 columns of a block, 16 bytes a lane: lanes 4 t .. 4 t + 3 and 16 more hold token t. So a warp reads whole
lines, and eight lanes in a row, of two tokens, write to all banks. `depth` units a lane are on their way at any time,
across fills and items, so that no fill waits for memory that the one before could have asked for.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.paged_union.consumer import Tiles
from qsa_cute.kernels.attention.union_steps import BOX_BYTES, STAGES
from qsa_cute.kernels.attention.union_tile import PAIRS
from qsa_cute.kernels.common import ops


@dataclass(frozen=True)
class Plane:
    """K or V: address, and strides in bytes."""

    at: Int64
    page: Int64
    token: Int64
    head: Int64


class WideningGather:
    """Needs `find_item`, `place` and `full_barrier` of `UnionSteps`, and `units` and `depth` of the kernel."""

    @cute.jit
    def gather(self, tiles: Tiles, k: Plane, v: Plane, sK: Int32, sV: Int32, sMasks: Int32, bars, warp: Int32):
        k_full, k_empty, v_full, v_empty = (Int32(bar.toint()) for bar in bars)
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        num_items = tiles.num_tiles * tiles.num_kv_heads
        column = Int64(lane % 4 * 16 + lane // 16 * 64)
        token = lane // 4 % 4
        # Where this lane's tokens go; the swizzle is by token % 8, and the parity of a warp's blocks is the warp's.
        swizzled = (lane % 4 * 2) ^ (warp % 2 * 4 + token)
        to = warp * BOX_BYTES + token * 128 + lane // 16 * (self.tile * 128) + swizzled * 16
        u = cute.make_rmem_tensor((4 * self.units,), Int32)

        fill = Int32(0)  # of the item
        ring = Int32(0)
        item, ns, pairs = self.find_item(tiles, block)
        at = self.find_token(tiles, k, v, item, ns + 2 * pairs, fill, warp, lane)
        for i in cutlass.range_constexpr(self.depth):
            self.load(u, i, at, token, column)
        while item < num_items:
            total = ns + 2 * pairs
            next_fill = fill + 1
            next_item, next_ns, next_pairs, next_ring = item, ns, pairs, ring
            if next_fill == 2 * total:
                next_fill = Int32(0)
                next_ring = ring + total
                next_item, next_ns, next_pairs = self.find_item(tiles, item + step)
            next_at = self.find_token(tiles, k, v, next_item, next_ns + 2 * next_pairs, next_fill, warp, lane)

            of_v, chunk = self.place_fill(fill, total)
            full, empty, dst = k_full, k_empty, sK
            if of_v:
                full, empty, dst = v_full, v_empty, sV
            n = ring + chunk
            full = ops.shared_barrier(full + self.full_barrier(n, chunk - ns) * 8)
            empty = ops.shared_barrier(empty + n % STAGES * 8)
            cute.arch.mbarrier_wait(empty, (n // STAGES + 1) % 2)
            if lane == 0:
                if chunk >= ns:  # in the stead of a warp of the warpgroup that skips the chunk
                    cute.arch.mbarrier_arrive(empty)
                if warp == 0 and not of_v:
                    self.load_masks(tiles, item, chunk, n, sMasks, full)
            dst = dst + n % STAGES * self.slot_bytes + to
            for i in cutlass.range_constexpr(self.units):
                self.widen(u, i, dst, dst ^ 16)
                if cutlass.const_expr(i + self.depth < self.units):
                    self.load(u, i + self.depth, at, token, column)
                else:
                    self.load(u, i + self.depth - self.units, next_at, token, column)
                if cutlass.const_expr(i % 2 == 1):
                    union_ops.exit_if_negative(n)  # never: it keeps ptxas from putting all reads after all writes
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(full)
            fill, item, ns, pairs, ring, at = next_fill, next_item, next_ns, next_pairs, next_ring, next_at

    @cute.jit
    def place_fill(self, fill: Int32, total: Int32):
        """Whether an item's fill is of V, and its chunk."""
        of_v = (fill % 2 == 0) & (fill > 0) | (fill == 2 * total - 1)
        return of_v, (fill - 1) // 2 if of_v else (fill + 1) // 2

    @cute.jit
    def find_token(
        self, tiles: Tiles, k: Plane, v: Plane, item: Int32, total: Int32, fill: Int32, warp: Int32, lane: Int32
    ) -> Int64:
        """The address of this lane's token in a fill, plus 1 where a row wants it; even where none does."""
        at = Int64(0)
        if item < tiles.num_tiles * tiles.num_kv_heads and lane < BLOCK_TOKENS * self.warp_blocks:
            tile, kv_head = self.place(tiles, item)
            of_v, chunk = self.place_fill(fill, total)
            entries = (Int64(tile) * Int64(tiles.max_chunks) + Int64(chunk)) * (self.blocks * 4)
            e = union_ops.load_i32(tiles.entries + entries + Int64(warp * 4 + lane // 4 * 16))
            if e >= 0 and (e >> (lane % 4)) & 1 != 0:
                token = ((e >> 2) & ((BLOCK_TOKENS << tiles.entry_shift) - BLOCK_TOKENS)) + lane % 4
                page = Int64(e >> (tiles.entry_shift + 4))
                at = k.at + page * k.page + Int64(token) * k.token + Int64(kv_head) * k.head
                if of_v:
                    at = v.at + page * v.page + Int64(token) * v.token + Int64(kv_head) * v.head
                at = at + 1
        return at

    @cute.jit
    def load(self, u: cute.Tensor, unit: cutlass.Constexpr[int], at: Int64, token: Int32, column: Int64):
        """Start reading a unit of a fill."""
        halves = self.boxes // 2
        low, high = ops.split_i64(at)
        source = Int32(unit // halves * 4) + token
        low = cute.arch.shuffle_sync(low, source)
        high = cute.arch.shuffle_sync(high, source)
        address = ops.join_i64(low, high) + column + Int64(unit % halves * 128 - 1)
        words = union_ops.load_stream_x4_if(low & 1, address)
        for i in cutlass.range_constexpr(4):
            u[4 * unit + i] = words[i]

    @cute.jit
    def widen(self, u: cute.Tensor, unit: cutlass.Constexpr[int], dst: Int32, dst_odd: Int32):
        """A unit's 16 columns a lane to fp16, in two pieces."""
        halves = self.boxes // 2
        to = unit // halves * (4 * BOX_BYTES) + unit % halves * (2 * self.tile * 128)
        w = [ops.e4m3_to_half(u[4 * unit + i]) for i in range(4)]
        union_ops.store_shared_i32x4(dst + to, (*w[0], *w[1]))
        union_ops.store_shared_i32x4(dst_odd + to, (*w[2], *w[3]))

    @cute.jit
    def load_masks(self, tiles: Tiles, item: Int32, chunk: Int32, ring: Int32, sMasks: Int32, full: cute.Pointer):
        """The chunk's mask words; they complete on K's barrier."""
        tile, _ = self.place(tiles, item)
        size = tiles.mask_rows * 4
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
        src = tiles.masks + (Int64(tile) * Int64(tiles.max_chunks) + Int64(chunk)) * Int64(size)
        union_ops.bulk_load(sMasks + ring % STAGES * (PAIRS * 4), src, size, Int32(full.toint()))
