"""Attention of one query row's head group over a gathered list of tokens: what the row kernels share.

    O[h] = sum_i softmax_i(scale * Q[h] . K[id_i]) V[id_i]      over the valid ids of the row's list

One block works on one (row, KV head, split). The query heads of the group are the M extent of m16n8k16
(zero rows where the group is smaller). The list is cut in tiles of 8 entries a warp; a split takes every
num_splits-th tile. In a tile

    each warp gathers the K and V rows of its own 8 entries and computes S = Q K^T for them;
    the warps agree on the running maximum through shared memory                                  (barrier A)
    each warp writes its P to shared memory, in the input type                                    (barrier B)
    each warp multiplies the whole P by its own head_dim / warps columns of V.

So O lives once in the block, spread over the warps' registers, and nothing is left to combine but the sums.
K tiles are private to a warp; V tiles and P are shared, and barrier A of the next tile frees them. QK^T of the
next tile runs between the two barriers.

List entries are resolved to slots (a token's place in K or V) a chunk at a time, one entry a thread, two
chunks ahead of their use. Invalid entries (holes, padding, out of range, unmapped pages) are zero-filled in
shared memory, never read from global memory, and masked to -inf before the softmax: weight exactly 0, no 0 x NaN.

Shared memory: K tiles, V tiles, Q (16 rows; P later), slots and validity masks of three chunks, maxima and sums. The
16-byte chunk c of a row of K, V, Q or P sits at chunk c ^ (row % 8): no bank conflicts for gather or ldmatrix.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.common import ops

ROWS = 16  # M extent: query heads of a group, padded
WARP_TOKENS = 8  # list entries a warp scores in a tile: N of one MMA
EMPTY_MAX = -1.0e30  # running maximum before any entry: finite, so that no inf - inf arises
RESCALE_THRESHOLD = 8.0  # log2: O is rescaled only when the maximum grew by more; P stays below 2^8
CHUNKS = 3  # chunks of resolved entries kept: the one in use and the two ahead
LEAD = CHUNKS - 1


class TokenSource:
    """Where list entries lead. Subclasses are frozen dataclasses of addresses and strides.

    `look_up(id)` starts the memory reads that resolving needs and returns their results (two Int32);
    `slots(id, looked_up)` returns the entry's places in K and V (two Int32, -1 when invalid; both or none);
    `address(slot, plane)` is the address of a valid slot's row in K (plane 0) or V (plane 1).
    """


@dataclass(frozen=True)
class Share:
    """Which part of a row's list a block attends to: tiles split, split + num_splits, ..."""

    split: Int32
    num_splits: Int32
    group: Int32  # query heads


@dataclass(frozen=True)
class RowOutput:
    """Where one (row, KV head) goes; a 0 address means not wanted. Made after the main loop, to spare registers."""

    o: Int64
    o_head: Int64  # bytes between heads
    lse: Int64


class RowGather:
    """Static configuration and the device-side steps; kernels inherit and add addressing and the epilogue."""

    def __init__(self, head_dim: int, dtype: str, warps: int, k_stages: int, v_stages: int, blocks_per_sm: int):
        # With K and V in fp8, Q and O are bf16 and both products fp16; otherwise all are of one type.
        self.fp8 = dtype == "fp8_e4m3"
        self.dtype, self.mma_dtype = ("bf16", "fp16") if self.fp8 else (dtype, dtype)
        self.head_dim, self.warps = head_dim, warps
        self.k_stages, self.v_stages, self.blocks_per_sm = k_stages, v_stages, blocks_per_sm
        self.chains = 2  # sums of QK^T that do not wait for each other
        self.threads = self.workers = 32 * warps  # of a block, and those that multiply
        self.tile = WARP_TOKENS * warps
        self.chunk_tiles = self.threads // self.tile
        self.pitch = head_dim if self.fp8 else head_dim * 2  # bytes of a K or V row
        self.q_pitch = head_dim * 2
        self.p_pitch = self.tile * 2
        self.tile_bytes = self.tile * self.pitch
        self.warp_cols = head_dim // warps
        self.lead = max(k_stages, v_stages - 1)  # iterations of copies in flight before the first
        if self.warp_cols % 16 or self.tile % 64:
            raise ValueError("a warp owns a multiple of 16 columns, a tile a multiple of 64 entries")
        self.sizes = {
            "k": k_stages * self.tile_bytes,
            "v": v_stages * self.tile_bytes,
            "q": ROWS * self.q_pitch,
            "slots": CHUNKS * self.threads * 8,
            "masks": CHUNKS * warps * 4,
            "maxima": ROWS * warps * 4,
            "sums": ROWS * warps * 4,
        }
        self.lay_out()

    def lay_out(self):
        """Offsets of the shared-memory parts, in order; all parts are multiples of 16 bytes."""
        self.at, self.smem_bytes = {}, 0
        for part, size in self.sizes.items():
            self.at[part] = self.smem_bytes
            self.smem_bytes += (size + 15) // 16 * 16
        self.at["p"] = self.at["q"]  # P comes after barrier A, when every warp has its fragments of Q

    def swizzle(self, chunk, row):
        """Where a row's 16-byte chunk sits: spread over the banks so that 8 rows can be read at once."""
        return chunk ^ (row % 8)

    # ---- the list ------------------------------------------------------------------------------------

    @cute.jit
    def entry(self, ids: Int64, top_k: Int32, chunk: Int32, share: Share, tid: Int32) -> Int32:
        """This thread's entry of a chunk of the split's tiles; -1 past the end of the list."""
        tile = (chunk * self.chunk_tiles + tid // self.tile) * share.num_splits + share.split
        at = tile * self.tile + tid % self.tile
        return ops.load_global_i32_if(Int32(at < top_k), ids + Int64(at) * 4, Int32(-1))

    @cute.jit
    def first_entries(self, ids: Int64, top_k: Int32, share: Share, tid: Int32):
        """This thread's entries of the first two chunks."""
        return self.entry(ids, top_k, Int32(0), share, tid), self.entry(ids, top_k, Int32(1), share, tid)

    @cute.jit
    def publish(self, smem: Int32, chunk: Int32, slots, tid: Int32):
        """This thread's resolved entry to the chunk's place in the ring of three."""
        ring = chunk % CHUNKS
        ops.store_shared_i32x2(smem + self.at["slots"] + (ring * self.threads + tid) * 8, slots[0], slots[1])
        valid = cute.arch.vote_ballot_sync(slots[0] >= 0)
        if tid % 32 == 0:
            ops.store_shared_i32(smem + self.at["masks"] + (ring * self.warps + tid // 32) * 4, valid)

    @cute.jit
    def count_tiles(self, ids: Int64, top_k: Int32, first: Int32, share: Share, tid: Int32) -> Int32:
        """Tiles up to this warp's last entry with an id >= 0; `first` is its entry of chunk 0."""
        last = tid // self.tile + 1 if first >= 0 else Int32(0)
        step = self.chunk_tiles * self.tile * share.num_splits
        chunk = Int32(1)
        while chunk * step + share.split * self.tile < top_k:
            if self.entry(ids, top_k, chunk, share, tid) >= 0:
                last = chunk * self.chunk_tiles + tid // self.tile + 1
            chunk = chunk + 1
        return cute.arch.warp_redux_sync(last, "max")

    # ---- loading -------------------------------------------------------------------------------------

    @cute.jit
    def load_q(self, smem: Int32, q: Int64, head_bytes: Int64, group: Int32, tid: Int32):
        """Start copying the group's query heads to shared memory; rows past the group become zeros."""
        chunks = self.q_pitch // 16
        for j in cutlass.range_constexpr(ROWS * chunks // self.workers):
            i = tid + j * self.workers
            row = i // chunks
            c = i % chunks
            live = row < group
            src = q + Int64(row if live else Int32(0)) * head_bytes + Int64(c * 16)
            dst = smem + self.at["q"] + row * self.q_pitch + self.swizzle(c, row) * 16
            ops.cp_async_16(dst, src, Int32(16) if live else Int32(0))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def gather(
        self, smem: Int32, source: TokenSource, tile: Int32, tiles: Int32, plane: cutlass.Constexpr[int], tid: Int32
    ):
        """Start copying this warp's 8 rows of a tile of K or V; always commits, so that groups can be counted.

        Lane l copies 16-byte chunk l % 8 of rows l // 8 and 4 + l // 8, 128 bytes of a row at a time.
        """
        if tile >= 0 and tile < tiles:
            lane = tid % 32
            for j in cutlass.range_constexpr(WARP_TOKENS // 4):
                row = (tid // 32) * WARP_TOKENS + 4 * j + lane // 8
                slot = self.slot(smem, tile, row, plane)
                size = Int32(16) if slot >= 0 else Int32(0)
                src = source.address(slot if slot >= 0 else Int32(0), plane) + Int64((lane % 8) * 16)
                dst = self.tile_at(smem, tile, plane) + row * self.pitch + self.swizzle(lane % 8, row) * 16
                for c in cutlass.range_constexpr(self.pitch // 128):
                    ops.cp_async_16(dst + c * 128, src + c * 128, size)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def slot(self, smem: Int32, tile: Int32, row: Int32, plane: cutlass.Constexpr[int]) -> Int32:
        """The resolved place of a tile's entry in K or V; -1 when invalid."""
        ring = (tile // self.chunk_tiles) % CHUNKS
        entry = ring * self.threads + (tile % self.chunk_tiles) * self.tile + row
        return ops.load_shared_i32(smem + self.at["slots"] + entry * 8 + 4 * plane)

    @cute.jit
    def tile_at(self, smem: Int32, tile: Int32, plane: cutlass.Constexpr[int]) -> Int32:
        if cutlass.const_expr(plane == 1):
            return smem + self.at["v"] + (tile % self.v_stages) * self.tile_bytes
        return smem + self.at["k"] + (tile % self.k_stages) * self.tile_bytes

    # ---- products ------------------------------------------------------------------------------------

    @cute.jit
    def read_q(self, smem: Int32, tQ: cute.Tensor, lane: Int32):
        """Q's A fragments, 4 registers a k-step, kept for the whole row."""
        row = lane % 16
        base = smem + self.at["q"] + row * self.q_pitch
        for k in cutlass.range_constexpr(self.head_dim // 16):
            chunk = self.swizzle(2 * (k % 4) + lane // 16, row)
            r = ops.ldmatrix_x4(base + chunk * 16 + (k // 4) * 128)
            for i in cutlass.range_constexpr(4):
                tQ[4 * k + i] = r[i]

    @cute.jit
    def qk(self, sK: Int32, tQ: cute.Tensor, tS: cute.Tensor, lane: Int32):
        """S = Q K^T for the warp's 8 entries, in PTX's accumulator order; k-steps take turns in `chains` sums."""
        row = lane % 8
        base = sK + row * self.pitch
        acc = cute.make_rmem_tensor((4 * self.chains,), Float32)
        acc.fill(0.0)
        for k in cutlass.range_constexpr(self.head_dim // 32):
            chunk = self.swizzle(4 * (k % 2) + lane // 8, row)
            b = ops.ldmatrix_x4(base + chunk * 16 + (k // 2) * 128)
            for n in cutlass.range_constexpr(2):
                a = (tQ[8 * k + 4 * n], tQ[8 * k + 4 * n + 1], tQ[8 * k + 4 * n + 2], tQ[8 * k + 4 * n + 3])
                ops.add_mma_16816(self.mma_dtype, acc, 4 * ((2 * k + n) % self.chains), a, (b[2 * n], b[2 * n + 1]))
        self.sum_chains(acc, tS)

    @cute.jit
    def sum_chains(self, acc: cute.Tensor, tS: cute.Tensor):
        for i in cutlass.range_constexpr(4):
            tS[i] = acc[i] + acc[4 + i]
            if cutlass.const_expr(self.chains == 4):
                tS[i] = tS[i] + (acc[8 + i] + acc[12 + i])

    @cute.jit
    def pv(self, smem: Int32, sV: Int32, tO: cute.Tensor, tid: Int32):
        """O += P V over the tile's entries for the warp's columns: tO[4 n + i], n the group of 8 columns."""
        lane = tid % 32
        row = lane % 16
        chunk0 = (tid // 32) * (self.warp_cols // 8)
        for k in cutlass.range_constexpr(self.tile // 16):
            a = ops.ldmatrix_x4(smem + self.at["p"] + row * self.p_pitch + ((2 * k + lane // 16) ^ (row % 8)) * 16)
            base = sV + (16 * k + row) * self.pitch
            for d in cutlass.range_constexpr(self.warp_cols // 16):
                b = ops.ldmatrix_x4_trans(base + self.swizzle(chunk0 + 2 * d + lane // 16, row) * 16)
                for n in cutlass.range_constexpr(2):
                    ops.add_mma_16816(self.mma_dtype, tO, 8 * d + 4 * n, a, (b[2 * n], b[2 * n + 1]))

    # ---- softmax -------------------------------------------------------------------------------------

    @cute.jit
    def mask_and_max(self, smem: Int32, tile: Int32, tS: cute.Tensor, scale_log2: Float32, tid: Int32):
        """Scale, mask, and put the warp's row maxima where the other warps read them."""
        lane = tid % 32
        entry = (tile % self.chunk_tiles) * self.tile + (tid // 32) * WARP_TOKENS
        word = ((tile // self.chunk_tiles) % CHUNKS) * self.warps + entry // 32
        valid = ops.load_shared_i32(smem + self.at["masks"] + word * 4) >> (entry % 32 + (lane % 4) * 2)
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                s = tS[2 * r + i] * scale_log2
                tS[2 * r + i] = s if (valid >> i) & 1 != 0 else -Float32.inf
            top = cute.arch.fmax(tS[2 * r], tS[2 * r + 1])
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
            if lane % 4 == 0:
                row = lane // 4 + 8 * r
                ops.store_shared_f32(smem + self.at["maxima"] + (row * self.warps + tid // 32) * 4, top)

    @cute.jit
    def exponentiate(
        self, smem: Int32, tS: cute.Tensor, tMax: cute.Tensor, tSum: cute.Tensor, tO: cute.Tensor, tid: Int32
    ):
        """The block's new maxima, P to shared memory, and O and the sums rescaled where a maximum grew enough."""
        lane = tid % 32
        for r in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * r
            old = tMax[r]
            top = old
            for w in cutlass.range_constexpr(0, self.warps, 4):
                part = ops.load_shared_f32x4(smem + self.at["maxima"] + (row * self.warps + w) * 4)
                top = cute.arch.fmax(
                    top, cute.arch.fmax(cute.arch.fmax(part[0], part[1]), cute.arch.fmax(part[2], part[3]))
                )
            new = top if top - old > RESCALE_THRESHOLD else old
            factor = cute.math.exp2(old - new, fastmath=True)
            tMax[r] = new
            p0 = cute.math.exp2(tS[2 * r] - new, fastmath=True)
            p1 = cute.math.exp2(tS[2 * r + 1] - new, fastmath=True)
            tSum[r] = tSum[r] * factor + (p0 + p1)
            ops.store_shared_i32(
                smem + self.at["p"] + row * self.p_pitch + ((tid // 32) ^ (row % 8)) * 16 + (lane % 4) * 4,
                ops.pack_2(self.mma_dtype, p0, p1),
            )
            for n in cutlass.range_constexpr(self.warp_cols // 8):
                tO[4 * n + 2 * r] = tO[4 * n + 2 * r] * factor
                tO[4 * n + 2 * r + 1] = tO[4 * n + 2 * r + 1] * factor

    # ---- the row -------------------------------------------------------------------------------------

    @cute.jit
    def attend(
        self,
        smem: Int32,
        source: TokenSource,
        ids: Int64,
        top_k: Int32,
        scale_log2: Float32,
        share: Share,
        tO: cute.Tensor,
        tMax: cute.Tensor,
        tSum: cute.Tensor,
        tid: Int32,
    ):
        """Run the split's tiles; Q's copy is in flight on entry. On return tSum holds the block's sums.

        Copies are counted in groups, two an iteration: iteration i starts V of tile i - 1 + v_stages, then scores
        tile i + 1 and starts K of tile i + 1 + k_stages. The prologue starts what the iterations before 0 would
        have. So K of a tile has landed when at most 2 k_stages - 1 groups are open, V when 2 v_stages - 1 are.
        """
        lane = tid % 32
        tO.fill(0.0)
        tMax.fill(EMPTY_MAX)
        tSum.fill(0.0)
        entry0, entry1 = self.first_entries(ids, top_k, share, tid)
        pages0 = source.look_up(entry0)
        pages1 = source.look_up(entry1)
        mine = self.count_tiles(ids, top_k, entry0, share, tid)
        if lane == 0:
            ops.store_shared_i32(smem + self.at["sums"] + (tid // 32) * 4, mine)
        self.publish(smem, Int32(0), source.slots(entry0, pages0), tid)
        self.publish(smem, Int32(1), source.slots(entry1, pages1), tid)
        cute.arch.sync_threads()
        tiles = Int32(0)
        for w in cutlass.range_constexpr(self.warps):
            tiles = cutlass.max(tiles, ops.load_shared_i32(smem + self.at["sums"] + w * 4))

        for i in cutlass.range(-self.lead, 0, unroll=1):
            self.gather(smem, source, i + self.k_stages, tiles, 0, tid)
            self.gather(smem, source, i - 1 + self.v_stages, tiles, 1, tid)
        cute.arch.cp_async_wait_group(2 * self.lead)
        cute.arch.sync_threads()
        tQ = cute.make_rmem_tensor((self.head_dim // 4,), Int32)
        tS = cute.make_rmem_tensor((4,), Float32)
        self.read_q(smem, tQ, lane)
        if tiles > 0:
            self.score(smem, source, Int32(0), tiles, tQ, tS, tid)
        tS_next = cute.make_rmem_tensor((4,), Float32)
        ahead, pages = Int32(-1), (Int32(-1), Int32(-1))
        for i in cutlass.range(tiles, unroll=1):
            self.mask_and_max(smem, i, tS, scale_log2, tid)
            if i % self.chunk_tiles == 2:
                self.publish(smem, i // self.chunk_tiles + LEAD, source.slots(ahead, pages), tid)
            cute.arch.sync_threads()  # A: maxima are there; the last tile's V and P are free
            self.gather(smem, source, i - 1 + self.v_stages, tiles, 1, tid)
            if i % self.chunk_tiles == 0:
                ahead = self.entry(ids, top_k, i // self.chunk_tiles + LEAD, share, tid)
            if i % self.chunk_tiles == 1:
                pages = source.look_up(ahead)
            if i + 1 < tiles:
                self.score(smem, source, i + 1, tiles, tQ, tS_next, tid)
            else:
                cute.arch.cp_async_commit_group()  # keep the count of groups in step
            self.exponentiate(smem, tS, tMax, tSum, tO, tid)
            cute.arch.cp_async_wait_group(2 * self.v_stages - 1)
            cute.arch.sync_threads()  # B: P is there, and every warp's rows of V
            self.pv(smem, self.tile_at(smem, i, 1), tO, tid)
            for j in cutlass.range_constexpr(4):
                tS[j] = tS_next[j]
        cute.arch.cp_async_wait_group(0)
        self.sum_warps(smem, tSum, tid)

    @cute.jit
    def score(
        self,
        smem: Int32,
        source: TokenSource,
        tile: Int32,
        tiles: Int32,
        tQ: cute.Tensor,
        tS: cute.Tensor,
        tid: Int32,
    ):
        """S of this warp's entries of a tile; then its K rows are free for the tile k_stages on."""
        cute.arch.cp_async_wait_group(2 * self.k_stages - 1)
        cute.arch.sync_warp()
        self.qk(self.tile_at(smem, tile, 0) + (tid // 32) * WARP_TOKENS * self.pitch, tQ, tS, tid % 32)
        cute.arch.sync_warp()
        self.gather(smem, source, tile + self.k_stages, tiles, 0, tid)

    @cute.jit
    def sum_warps(self, smem: Int32, tSum: cute.Tensor, tid: Int32):
        """tSum: from this lane's share to the block's sums, in warp order."""
        lane = tid % 32
        for r in cutlass.range_constexpr(2):
            total = tSum[r]
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
            total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
            if lane % 4 == 0:
                row = lane // 4 + 8 * r
                ops.store_shared_f32(smem + self.at["sums"] + (row * self.warps + tid // 32) * 4, total)
        cute.arch.sync_threads()
        for r in cutlass.range_constexpr(2):
            total = Float32(0.0)
            for w in cutlass.range_constexpr(0, self.warps, 4):
                part = ops.load_shared_f32x4(smem + self.at["sums"] + ((lane // 4 + 8 * r) * self.warps + w) * 4)
                total = total + ((part[0] + part[1]) + (part[2] + part[3]))
            tSum[r] = total

    # ---- output --------------------------------------------------------------------------------------

    @cute.jit
    def store_row(
        self, out: RowOutput, group: Int32, tO: cute.Tensor, tMax: cute.Tensor, tSum: cute.Tensor, tid: Int32
    ):
        """The only split of a row: normalise and store; a row with no valid entry is zeros, its LSE -inf."""
        lane = tid % 32
        for r in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * r
            if row < group:
                inverse = self.inverse(tSum[r])
                at = out.o + Int64(row) * out.o_head + Int64((tid // 32) * self.warp_cols + (lane % 4) * 2) * 2
                for n in cutlass.range_constexpr(self.warp_cols // 8):
                    ops.store_global_i32(
                        at + 16 * n,
                        ops.pack_2(self.dtype, tO[4 * n + 2 * r] * inverse, tO[4 * n + 2 * r + 1] * inverse),
                    )
                if tid < 32 and lane % 4 == 0 and out.lse != 0:
                    self.store_lse(out.lse + Int64(row) * 4, tMax[r], tSum[r])

    @cute.jit
    def store_quad(self, out: RowOutput, row: Int32, col: Int32, v: tuple):
        """Four neighbouring columns of a head's output."""
        ops.store_global_i32x2(
            out.o + Int64(row) * out.o_head + Int64(col) * 2,
            ops.pack_2(self.dtype, v[0], v[1]),
            ops.pack_2(self.dtype, v[2], v[3]),
        )

    @cute.jit
    def inverse(self, total: Float32) -> Float32:
        return cute.arch.rcp_approx(total) if total > 0.0 else Float32(0.0)

    @cute.jit
    def store_lse(self, at: Int64, top: Float32, total: Float32):
        """Natural-log LSE of a row; -inf when it has no valid entry."""
        value = -Float32.inf
        if total > 0.0:
            value = (top + cute.math.log2(total, fastmath=True)) * ops.LN_2
        ops.store_global_f32(at, value)
