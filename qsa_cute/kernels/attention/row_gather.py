"""Attention of one query row's head group over a gathered list of tokens: what the row kernels share.

    O[h] = sum_i softmax_i(scale * Q[h] . K[id_i]) V[id_i]      over the valid ids of the row's list

One block works on one (row, KV head, split). The query heads of the group are the M extent of m16n8k16
(zero rows where the group is smaller), 16 listed tokens are the N extent of QK^T and the K extent of PV.

Each warp runs a pipeline of its own over every W-th tile of 16 list entries (W warps share the row): it
reads ids, resolves them to addresses, gathers K and V rows with 16-byte cp.async into a private ring of
shared-memory units (K, V, K, V, ...; one unit is 16 tokens), and keeps O, the running maximum and the sum in
registers. No barrier between the warps until their partial results are combined, in warp order.

Invalid ids (holes, padding, out of range, unmapped pages) are zero-filled in shared memory, never read from
global memory, and masked to -inf before the softmax: weight exactly 0 and no 0 x NaN.

Shared memory: [warps][stages] units, then Q (16 rows), then per-warp statistics. A unit row is head_dim
elements; its 16-byte chunk c sits at chunk c ^ (row % 8), so that ldmatrix and the gather are free of bank
conflicts. After the main loop a warp's ring holds its FP32 partial of O (two units).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.common import ops

TILE = 16  # listed tokens a step: the K extent of the PV product
ROWS = 16  # M extent: query heads of a group, padded
EMPTY_MAX = -1.0e30  # running maximum before any entry: finite, so that no inf - inf arises
RESCALE_THRESHOLD = 8.0  # log2: O is rescaled only when the maximum grew by more; P stays below 2^8


class TokenSource:
    """Resolves a list entry to the addresses of its K and V rows. One per kernel; see the subclasses.

    `resolve(id, plane)` returns the row's address in the plane (0 = K, 1 = V), or 0 when the entry is invalid.
    """


class RowGather:
    """Static configuration and the device-side steps; kernels inherit and add addressing and the epilogue."""

    def __init__(self, head_dim: int, dtype: str, warps: int, stages: int):
        self.head_dim, self.dtype, self.warps, self.stages = head_dim, dtype, warps, stages
        self.elem = ops.ELEMENTS[dtype]
        self.threads = 32 * warps
        self.pitch = head_dim * 2  # bytes of a unit row
        self.unit = TILE * self.pitch
        self.ring = stages * self.unit  # bytes of a warp's ring
        self.q_offset = warps * self.ring
        self.stats_offset = self.q_offset + ROWS * self.pitch
        self.smem_bytes = self.stats_offset + warps * 2 * ROWS * 4

    # ---- loading -------------------------------------------------------------------------------------

    @cute.jit
    def load_q(self, smem: Int32, q: Int64, head_bytes: Int64, group: Int32, tid: Int32):
        """Start copying the group's query heads to shared memory; rows past the group become zeros."""
        chunks = self.pitch // 16
        for j in cutlass.range_constexpr(ROWS * chunks // self.threads):
            i = tid + j * self.threads
            row = i // chunks
            c = i % chunks
            live = row < group
            src = q + Int64(row if live else Int32(0)) * head_bytes + Int64(c * 16)
            dst = smem + self.q_offset + row * self.pitch + (c ^ (row % 8)) * 16
            ops.cp_async_16(dst, src, Int32(16) if live else Int32(0))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch_id(self, ids: Int64, top_k: Int32, tile: Int32, lane: Int32) -> Int32:
        """This lane's entry of a tile (lanes 16..31 repeat 0..15); -1 past the end of the list."""
        at = tile * TILE + lane % TILE
        token = Int32(-1)
        if at < top_k:
            token = ops.load_global_i32(ids + Int64(at) * 4)
        return token

    @cute.jit
    def count_tiles(self, ids: Int64, top_k: Int32, first: Int32, step: Int32, lane: Int32) -> Int32:
        """How many of this warp's tiles (first, first + step, ...) run up to the last one with an id >= 0."""
        total = (top_k + TILE - 1) // TILE
        mine = (total - first + step - 1) // step
        last = Int32(0)
        for i in cutlass.range(lane // TILE, mine, 2, unroll=1):
            if self.fetch_id(ids, top_k, first + i * step, lane) >= 0:
                last = i + 1
        return cute.arch.warp_redux_sync(last, "max")

    @cute.jit
    def valid_mask(self, addr: Int64) -> Int32:
        """Bit i: list entry i of the tile is valid in both planes (K in lanes 0..15, V in lanes 16..31)."""
        ballot = cute.arch.vote_ballot_sync(addr != 0)
        return ballot & (ballot >> 16) & 0xFFFF

    @cute.jit
    def issue(self, dst: Int32, addr: Int64, mask: Int32, base: Int64, plane: cutlass.Constexpr[int], lane: Int32):
        """Gather one plane of a tile: lane l copies chunk l % 8 of rows l // 8 + 4j, 128 bytes a row at a time."""
        for j in cutlass.range_constexpr(TILE // 4):
            row = 4 * j + lane // 8
            source = row + TILE * plane
            low = cute.arch.shuffle_sync(Int32(addr & 0xFFFFFFFF), offset=source)
            high = cute.arch.shuffle_sync(Int32(addr >> 32), offset=source)
            valid = (mask >> row) & 1
            src = base
            if valid != 0:
                src = (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)
            src = src + Int64((lane % 8) * 16)
            to = dst + row * self.pitch + ((lane % 8) ^ (row % 8)) * 16
            for c in cutlass.range_constexpr(self.pitch // 128):
                ops.cp_async_16(to + c * 128, src + c * 128, valid * 16)

    # ---- products ------------------------------------------------------------------------------------

    @cute.jit
    def read_q(self, smem: Int32, tQ: cute.Tensor, lane: Int32):
        """Q's A fragments, 4 registers a k-step, kept for the whole row."""
        row = lane % 16
        at = smem + self.q_offset + row * self.pitch
        for k in cutlass.range_constexpr(self.head_dim // 16):
            chunk = (2 * (k % 4) + lane // 16) ^ (row % 8)
            r = ops.ldmatrix_x4(at + chunk * 16 + (k // 4) * 128)
            for i in cutlass.range_constexpr(4):
                tQ[4 * k + i] = r[i]

    @cute.jit
    def qk(self, sK: Int32, tQ: cute.Tensor, tS: cute.Tensor, lane: Int32):
        """S = Q K^T for one tile: tS[4 n + i], n the 8-token half, i PTX's accumulator order."""
        row = lane % 8 + (lane // 16) * 8
        at = sK + row * self.pitch
        tS.fill(0.0)
        for k in cutlass.range_constexpr(self.head_dim // 16):
            chunk = (2 * (k % 4) + (lane // 8) % 2) ^ (row % 8)
            b = ops.ldmatrix_x4(at + chunk * 16 + (k // 4) * 128)
            a = (tQ[4 * k], tQ[4 * k + 1], tQ[4 * k + 2], tQ[4 * k + 3])
            for n in cutlass.range_constexpr(2):
                self.mma(tS, 4 * n, a, (b[2 * n], b[2 * n + 1]))

    @cute.jit
    def pv(self, sV: Int32, tP: cute.Tensor, tO: cute.Tensor, lane: Int32):
        """O += P V for one tile: tO[4 n + i], n the group of 8 head-dim columns."""
        row = lane % 16
        at = sV + row * self.pitch
        a = (tP[0], tP[1], tP[2], tP[3])
        for d in cutlass.range_constexpr(self.head_dim // 16):
            chunk = (2 * (d % 4) + lane // 16) ^ (row % 8)
            b = ops.ldmatrix_x4_trans(at + chunk * 16 + (d // 4) * 128)
            for n in cutlass.range_constexpr(2):
                self.mma(tO, 8 * d + 4 * n, a, (b[2 * n], b[2 * n + 1]))

    @cute.jit
    def mma(self, acc: cute.Tensor, at: cutlass.Constexpr[int], a, b):
        d = ops.mma_16816(self.dtype, a, b, (acc[at], acc[at + 1], acc[at + 2], acc[at + 3]))
        for i in cutlass.range_constexpr(4):
            acc[at + i] = d[i]

    @cute.jit
    def softmax(
        self, tS: cute.Tensor, tP: cute.Tensor, tO: cute.Tensor, tMax: cute.Tensor, tSum: cute.Tensor,
        mask: Int32, scale_log2: Float32, lane: Int32,
    ):
        """Online softmax of one tile: P in the input type, O rescaled when a row's maximum grew enough."""
        factor = cute.make_rmem_tensor((2,), Float32)
        col = (lane % 4) * 2
        for r in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    s = tS[4 * n + 2 * r + i] * scale_log2
                    tS[4 * n + 2 * r + i] = s if (mask >> (col + 8 * n + i)) & 1 != 0 else -Float32.inf
            top = cute.arch.fmax(
                cute.arch.fmax(tS[2 * r], tS[2 * r + 1]), cute.arch.fmax(tS[4 + 2 * r], tS[4 + 2 * r + 1])
            )
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
            old = tMax[r]
            new = top if top - old > RESCALE_THRESHOLD else old
            factor[r] = cute.math.exp2(old - new, fastmath=True)
            tMax[r] = new
            total = tSum[r] * factor[r]
            for n in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    p = cute.math.exp2(tS[4 * n + 2 * r + i] - new, fastmath=True)
                    tS[4 * n + 2 * r + i] = p
                    total = total + p
            tSum[r] = total
        if cute.arch.vote_any_sync((factor[0] != 1.0) | (factor[1] != 1.0)):
            for i in cutlass.range_constexpr(self.head_dim // 8):
                for r in cutlass.range_constexpr(2):
                    tO[4 * i + 2 * r] = tO[4 * i + 2 * r] * factor[r]
                    tO[4 * i + 2 * r + 1] = tO[4 * i + 2 * r + 1] * factor[r]
        for n in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                tP[2 * n + r] = ops.pack_2(self.dtype, tS[4 * n + 2 * r], tS[4 * n + 2 * r + 1])

    # ---- the row -------------------------------------------------------------------------------------

    @cute.jit
    def attend(
        self, smem: Int32, source: TokenSource, ids: Int64, top_k: Int32, first: Int32, step: Int32,
        scale_log2: Float32, tO: cute.Tensor, tMax: cute.Tensor, tSum: cute.Tensor,
    ):
        """Run this warp's pipeline over tiles first, first + step, ...; Q's copy is in flight on entry.

        Unit u of the ring is K (u even) or V (u odd) of the warp's tile u // 2; `stages` units are in flight.
        """
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        ring = smem + warp * self.ring
        plane = lane // TILE
        tO.fill(0.0)
        tMax.fill(EMPTY_MAX)
        tSum.fill(0.0)

        addr0 = source.resolve(self.fetch_id(ids, top_k, first, lane), plane)
        addr1 = source.resolve(self.fetch_id(ids, top_k, first + step, lane), plane)
        addr2 = source.resolve(self.fetch_id(ids, top_k, first + 2 * step, lane), plane)
        token = self.fetch_id(ids, top_k, first + 3 * step, lane)
        mask0, mask1, mask2 = self.valid_mask(addr0), self.valid_mask(addr1), self.valid_mask(addr2)
        for u in cutlass.range_constexpr(self.stages):
            if cutlass.const_expr(u < 2):
                self.issue(ring + u * self.unit, addr0, mask0, source.base, u % 2, lane)
            else:
                self.issue(ring + u * self.unit, addr1, mask1, source.base, u % 2, lane)
            cute.arch.cp_async_commit_group()
        tiles = self.count_tiles(ids, top_k, first, step, lane)

        cute.arch.cp_async_wait_group(self.stages)
        cute.arch.sync_threads()
        tQ = cute.make_rmem_tensor((self.head_dim // 4,), Int32)
        tS = cute.make_rmem_tensor((8,), Float32)
        tP = cute.make_rmem_tensor((4,), Int32)
        self.read_q(smem, tQ, lane)

        slot = Int32(0)
        for i in cutlass.range(tiles, unroll=1):
            slot_k = ring + slot * self.unit
            cute.arch.cp_async_wait_group(self.stages - 1)
            cute.arch.sync_warp()
            self.qk(slot_k, tQ, tS, lane)
            cute.arch.sync_warp()
            self.refill(slot_k, 0, i, tiles, addr1, addr2, mask1, mask2, source.base, lane)
            self.softmax(tS, tP, tO, tMax, tSum, mask0, scale_log2, lane)
            slot = self.next_slot(slot)
            slot_v = ring + slot * self.unit
            cute.arch.cp_async_wait_group(self.stages - 1)
            cute.arch.sync_warp()
            self.pv(slot_v, tP, tO, lane)
            cute.arch.sync_warp()
            self.refill(slot_v, 1, i, tiles, addr1, addr2, mask1, mask2, source.base, lane)
            slot = self.next_slot(slot)
            addr1, mask0, mask1 = addr2, mask1, mask2
            addr2 = source.resolve(token, plane)
            mask2 = self.valid_mask(addr2)
            token = self.fetch_id(ids, top_k, first + (i + 4) * step, lane)
        cute.arch.cp_async_wait_group(0)
        for r in cutlass.range_constexpr(2):
            total = tSum[r]
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
            tSum[r] = total + cute.arch.shuffle_sync_bfly(total, offset=2)

    @cute.jit
    def refill(
        self, slot: Int32, parity: cutlass.Constexpr[int], i: Int32, tiles: Int32, addr1: Int64, addr2: Int64,
        mask1: Int32, mask2: Int32, base: Int64, lane: Int32,
    ):
        """Into the unit just consumed: the unit `stages` further on. An empty group keeps the count in step."""
        ahead = (parity + self.stages) // 2
        if i + ahead < tiles:
            if cutlass.const_expr(ahead == 1):
                self.issue(slot, addr1, mask1, base, (parity + self.stages) % 2, lane)
            else:
                self.issue(slot, addr2, mask2, base, (parity + self.stages) % 2, lane)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def next_slot(self, slot: Int32) -> Int32:
        slot = slot + 1
        return slot if slot < self.stages else Int32(0)

    # ---- combining warps -----------------------------------------------------------------------------

    @cute.jit
    def put_partial(self, smem: Int32, tO: cute.Tensor, tMax: cute.Tensor, tSum: cute.Tensor):
        """This warp's O to its own ring, its maxima and sums to the statistics area."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        for r in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * r
            at = smem + warp * self.ring + row * (self.head_dim * 4)
            for n in cutlass.range_constexpr(self.head_dim // 8):
                col = (8 * n + (lane % 4) * 2) ^ ((row % 8) * 8)
                ops.store_shared_f32x2(at + col * 4, tO[4 * n + 2 * r], tO[4 * n + 2 * r + 1])
            if lane % 4 == 0:
                stats = smem + self.stats_offset + (warp * 2 * ROWS + row) * 4
                ops.store_shared_f32(stats, tMax[r])
                ops.store_shared_f32(stats + ROWS * 4, tSum[r])

    @cute.jit
    def combined_stats(self, smem: Int32, row: Int32, factors: cute.Tensor):
        """Maximum and sum of a row over the block's warps; `factors[w]` scales warp w's partial. In warp order."""
        top = Float32(EMPTY_MAX)
        for w in cutlass.range_constexpr(self.warps):
            top = cute.arch.fmax(top, ops.load_shared_f32(smem + self.stats_offset + (w * 2 * ROWS + row) * 4))
        total = Float32(0.0)
        for w in cutlass.range_constexpr(self.warps):
            stats = smem + self.stats_offset + (w * 2 * ROWS + row) * 4
            factors[w] = cute.math.exp2(ops.load_shared_f32(stats) - top, fastmath=True)
            total = total + factors[w] * ops.load_shared_f32(stats + ROWS * 4)
        return top, total

    @cute.jit
    def combined_o(self, smem: Int32, row: Int32, col: Int32, factors: cute.Tensor):
        """Four columns of a row's O summed over the block's warps, in warp order."""
        out = [Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)]
        at = smem + row * (self.head_dim * 4) + (col ^ ((row % 8) * 8)) * 4
        for w in cutlass.range_constexpr(self.warps):
            part = ops.load_shared_f32x4(at + w * self.ring)
            for i in cutlass.range_constexpr(4):
                out[i] = out[i] + factors[w] * part[i]
        return out

    @cute.jit
    def store_o(self, at: Int64, out, total: Float32):
        """Normalise four columns and store them in the output type; a row with no valid entry is zeros."""
        inverse = 1.0 / total if total > 0.0 else Float32(0.0)
        ops.store_global_i32x2(
            at,
            ops.pack_2(self.dtype, out[0] * inverse, out[1] * inverse),
            ops.pack_2(self.dtype, out[2] * inverse, out[3] * inverse),
        )

    @cute.jit
    def store_lse(self, at: Int64, top: Float32, total: Float32):
        """Natural-log LSE of a row; -inf when it has no valid entry."""
        value = -Float32.inf
        if total > 0.0:
            value = (top + cute.math.log2(total, fastmath=True)) * ops.LN_2
        ops.store_global_f32(at, value)
