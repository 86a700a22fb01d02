"""Attention of one query row's head group over a gathered list of tokens, gathered by TMA (SM90).

The same sum as `row_gather.py`, with other hands. Lists come in groups of four entries; a group that is a whole block
(four consecutive tokens, the first a multiple of four, all below the length) is one copy: a TMA box of 4 tokens by
head_dim columns. Any other group comes token by token, 16 bytes a lane, zeros in place of entries that are not valid.

Warps 0 .. 7 multiply, warps 8 .. 11 gather. Split s of n takes groups s, s + n, ... of the list. Its groups go eight to
a stage of 32 tokens, its stages to steps of four (five, where that is what is left). A ring of stages is filled in
order: K of a step, V of the step, K of the next. In a step

    each warp scores up to three times 8 tokens, S = Q K^T;
    the warps agree on the running maximum through shared memory                                  (barrier)
    each warp writes its P to shared memory, in the input type                                    (barrier)
    each warp multiplies the whole P by its own head_dim / 8 columns of V.

A stage in shared memory: 8 places of [head_dim / 64][4 tokens][128 bytes], the 16-byte chunks of a line of 128 bytes
swizzled as TMA does it: chunk c of the line at address a sits at c ^ a / 128 % 8. Places p and p + 4, groups 2 p and
2 p + 1 of the stage, make up the 8 tokens of one MMA; places 4 .. 7 lie 512 bytes further than they would without a
gap, so that the two meet no bank conflict. Gather warp p fills both.

What a place may hold: of K anything where no entry is valid, since a bit an entry masks S before the softmax; of V
zeros, except in 16 tokens past the end of the list, which nobody multiplies.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS, PAGE_TOKENS
from qsa_cute.kernels.attention.row_gather import EMPTY_MAX, RESCALE_THRESHOLD, ROWS, RowGather, Share
from qsa_cute.kernels.attention.sparse_decode import PagedTokens
from qsa_cute.kernels.common import ops, tma

WARPS = 8  # that multiply
GATHER_WARPS = 4
STAGE_GROUPS = 8
STEP_STAGES = 4
PASSES = 3  # times 8 tokens that a warp scores in a step at most: five stages over 8 warps
LAST_STAGES = 5  # of a list's last step: one sequence in 16 blocks leaves 129 tokens to one of them
LINE = 128  # bytes of a token's part in a box of 64 columns
GAP = BLOCK_TOKENS * LINE  # see above
PAGE_SHIFT = PAGE_TOKENS.bit_length() - 1  # place -1 lies on page -1: out of bounds, zeros
SURVEYED = 3  # entries of a list that a thread looks at at once
TABLES, COUNTS = 4, 5  # barriers
TABLE_PAGES = 1024  # of a sequence whose page tables are kept in shared memory


@dataclass(frozen=True)
class StagedTokens(PagedTokens):
    """`PagedTokens` whose page tables lie in shared memory when there is room for them."""

    staged: Int32  # shared address of K's table, V's after it; 0: they are in global memory alone

    @cute.jit
    def look_up(self, token: Int32):
        at = token >> PAGE_SHIFT
        mapped = Int32(0)
        if token >= 0 and at < self.max_pages:
            mapped = Int32(1)
        k_page, v_page = Int32(-1), Int32(-1)
        if self.staged != 0:
            place = self.staged + (at if mapped != 0 else Int32(0)) * 4
            k_page = ops.load_shared_i32(place)
            v_page = ops.load_shared_i32(place + TABLE_PAGES * 4)
            k_page = k_page if mapped != 0 else Int32(-1)
        else:
            k_page = ops.load_global_i32_if(mapped, self.k_table + Int64(at) * 4, Int32(-1))
            v_page = ops.load_global_i32_if(mapped, self.v_table + Int64(at) * 4, Int32(-1))
        return k_page, v_page

    @cute.jit
    def slots(self, token: Int32, pages):
        k_slot, v_slot = Int32(-1), Int32(-1)
        known = pages[0] >= 0 and pages[0] < self.num_pages and pages[1] >= 0 and pages[1] < self.num_pages
        if known and token < self.length:
            row = token & (PAGE_TOKENS - 1)
            k_slot = (pages[0] << PAGE_SHIFT) + row
            v_slot = (pages[1] << PAGE_SHIFT) + row
        return k_slot, v_slot


class BoxGather(RowGather):
    """Static configuration and the device-side steps; kernels inherit and add addressing and the epilogue."""

    def __init__(self, head_dim: int, dtype: str, stages: int):
        RowGather.__init__(self, head_dim, dtype, WARPS, k_stages=1, v_stages=1, blocks_per_sm=1)
        self.chains, self.ring = 4, stages
        self.threads = self.workers + 32 * GATHER_WARPS
        self.lines = self.head_dim // 64  # lines of 128 bytes of a token
        self.group_bytes = BLOCK_TOKENS * self.pitch
        self.stage_bytes = STAGE_GROUPS * self.group_bytes + GAP
        self.p_pitch = (2 * PASSES * 32 + 8) * 2  # an odd number of chunks: no bank conflicts
        self.sizes = {
            "ring": self.ring * self.stage_bytes,
            "q": max(ROWS * self.q_pitch, ROWS * self.p_pitch),
            "table": 2 * TABLE_PAGES * 4,
            "full": self.ring * 8,
            "empty": self.ring * 8,
            "masks": self.ring * 4,
            "counts": self.warps * 4,
            "maxima": ROWS * self.warps * 4,
            "sums": ROWS * self.warps * 4,
            "tops": ROWS * 4,  # the maxima at the end of the list
        }
        self.lay_out()

    def sync_workers(self):
        cute.arch.barrier(barrier_id=1, number_of_threads=self.workers)

    @cute.jit
    def set_up_ring(self, smem: Int32):
        for s in cutlass.range_constexpr(self.ring):
            cute.arch.mbarrier_init(ops.shared_barrier(smem + self.at["full"] + 8 * s), GATHER_WARPS)
            cute.arch.mbarrier_init(ops.shared_barrier(smem + self.at["empty"] + 8 * s), self.warps)

    # ---- the list ------------------------------------------------------------------------------------

    @cute.jit
    def stage_tables(self, smem: Int32, k_table: Int64, v_table: Int64, pages: Int32, tid: Int32):
        """Copy a sequence's page tables to shared memory, if they fit, for the warps that `wait_for_tables`."""
        pages = pages if pages <= TABLE_PAGES else Int32(0)
        steps = TABLE_PAGES // self.workers
        k_pages = cute.make_rmem_tensor((steps,), Int32)
        v_pages = cute.make_rmem_tensor((steps,), Int32)
        for j in cutlass.range_constexpr(steps):
            wanted = Int32(tid + j * self.workers < pages)
            at = Int64(tid + j * self.workers) * 4
            k_pages[j] = ops.load_global_i32_if(wanted, k_table + at, Int32(-1))
            v_pages[j] = ops.load_global_i32_if(wanted, v_table + at, Int32(-1))
        place = smem + self.at["table"] + tid * 4
        for j in cutlass.range_constexpr(steps):
            if j * self.workers < pages:
                ops.store_shared_i32(place + j * self.workers * 4, k_pages[j])
                ops.store_shared_i32(place + (TABLE_PAGES + j * self.workers) * 4, v_pages[j])
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=TABLES, number_of_threads=self.threads)

    def wait_for_tables(self):
        cute.arch.barrier(barrier_id=TABLES, number_of_threads=self.threads)

    @cute.jit
    def survey(self, smem: Int32, ids: Int64, top_k: Int32, share: Share, tid: Int32):
        """Leave, a warp, the split's groups up to the last with an id >= 0, for `count`."""
        stride = self.workers * share.num_splits
        entry, i, last = ((tid >> 2) * share.num_splits + share.split) * BLOCK_TOKENS + (tid & 3), tid, Int32(0)
        while entry < top_k:
            found = [self.entry_at(ids, top_k, entry + j * stride) for j in range(SURVEYED)]
            for j in cutlass.range_constexpr(SURVEYED):
                if found[j] >= 0:
                    last = ((i + j * self.workers) >> 2) + 1
            entry, i = entry + SURVEYED * stride, i + SURVEYED * self.workers
        last = cute.arch.warp_redux_sync(last, "max")
        if (tid & 31) == 0:
            ops.store_shared_i32(smem + self.at["counts"] + (tid >> 5) * 4, last)
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=COUNTS, number_of_threads=self.threads)

    def wait_for_counts(self):
        cute.arch.barrier(barrier_id=COUNTS, number_of_threads=self.threads)

    @cute.jit
    def entry_at(self, ids: Int64, top_k: Int32, at: Int32) -> Int32:
        """-1 past the end of the list."""
        return ops.load_global_i32_if(Int32(at < top_k), ids + Int64(at) * 4, Int32(-1))

    @cute.jit
    def count(self, smem: Int32, lane: Int32) -> Int32:
        """Groups of the split, after `survey`."""
        return cute.arch.warp_redux_sync(
            ops.load_shared_i32(smem + self.at["counts"] + (lane & (self.warps - 1)) * 4), "max"
        )

    @cute.jit
    def most_stages(self, top_k: Int32, share: Share) -> Int32:
        """Of a list that is full; one at least."""
        groups = (top_k + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS - share.split
        stride = STAGE_GROUPS * share.num_splits
        return cutlass.max((groups + stride - 1) // stride, Int32(1))

    @cute.jit
    def step_stages(self, left: Int32, first: Int32) -> Int32:
        """Of the step that begins when `left` stages are left, `first` at least: the first step, which begins before it
        is known what the list holds, has so many in any case."""
        return cutlass.max(left if left <= LAST_STAGES else Int32(STEP_STAGES), first)

    @cute.jit
    def entries(self, ids: Int64, top_k: Int32, share: Share, stage: Int32, warp: Int32, lane: Int32):
        """The four entries of this lane's group: lanes 2 i and 2 i + 1 have those of stage + i that `warp` gathers."""
        group = (stage + (lane >> 1)) * STAGE_GROUPS + 2 * warp + (lane & 1)
        at = (group * share.num_splits + share.split) * BLOCK_TOKENS
        found = []
        for t in cutlass.range_constexpr(BLOCK_TOKENS):
            wanted = Int32(0)
            if lane < 2 * LAST_STAGES and at + t < top_k:
                wanted = Int32(1)
            found.append(ops.load_global_i32_if(wanted, ids + Int64(at) * 4 + 4 * t, Int32(-1)))
        return tuple(found)

    # ---- gathering -----------------------------------------------------------------------------------

    @cute.jit
    def produce(
        self,
        smem: Int32,
        source: StagedTokens,
        tensor_map: Int64,
        kv_head: Int32,
        ids: Int64,
        top_k: Int32,
        share: Share,
        first: tuple,
        warp: Int32,
    ):
        """Fill the ring. `first`: this lane's entries of the first step."""
        lane = cute.arch.lane_idx()
        stage, slot, round_ = Int32(0), Int32(0), Int32(0)
        mixed = Int32(0)  # not 0: some slot may hold tokens that came without TMA
        e0, e1, e2, e3 = first
        groups, left = Int32(0), self.most_stages(top_k, share)  # until the list has been surveyed
        least = cutlass.min(left, Int32(STEP_STAGES))
        take = least
        while left > 0:
            entries = (e0, e1, e2, e3)
            k, v, torn, live, empty = self.resolve(source, entries, lane)
            mixed = mixed | torn
            boxes, place, begin, end = live, k, Int32(0), take
            for part in cutlass.range(3, unroll=1):  # K as far as it is known how much there is, the rest of K, V
                if part == 1:
                    if stage == 0:
                        self.wait_for_counts()
                        groups = self.count(smem, lane)
                        left = (groups + (STAGE_GROUPS - 1)) >> 3
                        take = self.step_stages(left, least)
                    begin, end = end, take
                if part == 2:
                    begin, place = Int32(0), v
                    known = (lane >> 1) * STAGE_GROUPS + (warp >> 1) * 4 < groups - stage * STAGE_GROUPS
                    boxes = live | cute.arch.vote_ballot_sync(empty != 0 and known)
                    if left > take:
                        e0, e1, e2, e3 = self.entries(ids, top_k, share, stage + take, warp, lane)
                of_v = part >> 1
                for i in cutlass.range(begin, end, unroll=1):
                    if round_ > 0:  # a wait costs a hundred clocks even where there is nothing to wait for
                        tma.wait(smem + self.at["empty"] + slot * 8, (round_ + 1) & 1)
                    if mixed != 0:
                        tma.fence_async_proxy()
                    self.fill(
                        smem,
                        source,
                        tensor_map,
                        kv_head,
                        of_v,
                        entries,
                        place,
                        torn,
                        live,
                        boxes,
                        2 * i,
                        slot,
                        warp,
                        lane,
                    )
                    slot = slot + 1
                    if slot == self.ring:
                        slot, round_ = Int32(0), round_ + 1
            stage, left, least = stage + take, left - take, Int32(0)
            take = self.step_stages(left, least)

    @cute.jit
    def resolve(self, source: StagedTokens, entries: tuple, lane: Int32):
        """This lane's group: its first entry's slots in K and in V, -1 unless the group is whole and valid. Of the
        warp's groups, a bit each: which come token by token; which are whole and valid. Is this lane's neither?"""
        e0, e1, e2, e3 = entries
        run = (e1 - e0 - 1) | (e2 - e0 - 2) | (e3 - e0 - 3) | (e0 & (BLOCK_TOKENS - 1))
        k, v = source.slots(e0, source.look_up(e0))
        torn = Int32(1)
        if (run == 0 and e0 >= 0 and e3 < source.length) or (e0 & e1 & e2 & e3) < 0:
            torn = Int32(0)
        if torn != 0 or e0 < 0:
            k, v = Int32(-1), Int32(-1)
        empty = Int32(torn == 0 and k < 0)
        return k, v, cute.arch.vote_ballot_sync(torn != 0), cute.arch.vote_ballot_sync(k >= 0), empty

    @cute.jit
    def fill(
        self,
        smem: Int32,
        source: StagedTokens,
        tensor_map: Int64,
        kv_head: Int32,
        of_v: Int32,
        entries: tuple,
        place: Int32,
        torn: Int32,
        live: Int32,
        boxes: Int32,
        shift: Int32,
        slot: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """This warp's two groups of a stage, those of lanes `shift` and `shift` + 1, to a free slot of the ring."""
        full = smem + self.at["full"] + slot * 8
        dst = smem + self.at["ring"] + slot * self.stage_bytes + warp * self.group_bytes
        far = STAGE_GROUPS // 2 * self.group_bytes + GAP  # between the two
        places = [cute.arch.shuffle_sync(place, shift + j) for j in range(2)]
        both = (torn >> shift) & 3
        wanted = (boxes >> shift) & 3
        whole = (live >> shift) & 3
        valid = (whole & 1) * 15 + (whole >> 1) * 240
        if both != 0:
            for j in cutlass.range(2, unroll=1):
                if (both >> j) & 1 != 0:
                    bits = self.copy_tokens(source, of_v, entries, shift + j, dst + j * far, lane)
                    valid = valid | bits << (4 * j)
            tma.arrive_copied(full)
            cute.arch.sync_warp()
        if lane == 0:
            if of_v == 0:
                ops.store_shared_u8(smem + self.at["masks"] + slot * 4 + warp, valid)
            tma.arrive_expect(full, ((wanted & 1) + (wanted >> 1)) * self.group_bytes)
            for j in cutlass.range_constexpr(2):
                if (wanted >> j) & 1 != 0:
                    at = (Int32(0), places[j] & (PAGE_TOKENS - 1), Int32(0), kv_head, places[j] >> PAGE_SHIFT)
                    tma.load_box(dst + j * far, tensor_map, at, full, once=True)

    @cute.jit
    def copy_tokens(
        self, source: StagedTokens, of_v: Int32, entries: tuple, of: Int32, dst: Int32, lane: Int32
    ) -> Int32:
        """Start copying the group of lane `of` token by token; a bit for each that is valid."""
        entry = Int32(-1)
        for t in cutlass.range_constexpr(BLOCK_TOKENS):
            one = cute.arch.shuffle_sync(entries[t], of)
            entry = one if lane == t else entry
        slots = source.slots(entry, source.look_up(entry))
        mine = slots[1] if of_v != 0 else slots[0]
        line = dst + (lane >> 3) * (BLOCK_TOKENS * LINE)
        for t in cutlass.range(BLOCK_TOKENS, unroll=1):
            place = cute.arch.shuffle_sync(mine, t)
            if lane < self.pitch // 16:
                k_row = source.address(place if place >= 0 else Int32(0), 0)
                v_row = source.address(place if place >= 0 else Int32(0), 1)
                src = v_row if of_v != 0 else k_row
                at = line + (((lane & 7) ^ ((line >> 7) & 7)) << 4)
                ops.cp_async_16(at, src + Int64(lane * 16), Int32(16) if place >= 0 else Int32(0))
            line = line + LINE
        return cute.arch.vote_ballot_sync(mine >= 0)

    # ---- multiplying ---------------------------------------------------------------------------------

    @cute.jit
    def consume(
        self,
        smem: Int32,
        scale_log2: Float32,
        top_k: Int32,
        share: Share,
        tO: cute.Tensor,
        tMax: cute.Tensor,
        tSum: cute.Tensor,
        tid: Int32,
    ):
        """Run the split's steps, one at least; Q's copy is in flight on entry. tSum ends as the block's sums."""
        warp, lane = tid >> 5, tid & 31
        tO.fill(0.0)
        tMax.fill(EMPTY_MAX)
        tSum.fill(0.0)
        cute.arch.cp_async_wait_group(0)
        self.sync_workers()
        groups = self.count(smem, lane)
        least = cutlass.min(self.most_stages(top_k, share), Int32(STEP_STAGES))
        tQ = cute.make_rmem_tensor((self.head_dim // 4,), Int32)
        tS = cute.make_rmem_tensor((4 * PASSES,), Float32)
        self.read_q(smem, tQ, lane)
        slot, parity, more = Int32(0), Int32(0), Int32(1)
        while more > 0:
            left = (groups + (STAGE_GROUPS - 1)) >> 3
            take = self.step_stages(left, least)
            least = Int32(0)
            for i in cutlass.range_constexpr(PASSES):
                stage = (warp >> 2) + 2 * i
                if stage < take:
                    self.score(smem, slot + stage, parity, i, scale_log2, tQ, tS, warp, lane)
                else:
                    for j in cutlass.range_constexpr(4):
                        tS[4 * i + j] = -Float32.inf
            self.publish_maxima(smem, tS, warp, lane)
            more = cutlass.max(left - take, Int32(0))
            if more > 0:
                cute.arch.sync_warp()
                if lane < take:
                    tma.arrive(smem + self.at["empty"] + self.wrap(slot + lane) * 8)
            self.sync_workers()
            self.exponentiate_step(smem, tS, tMax, tSum, tO, warp, lane)
            self.sync_workers()
            if more == 0:
                self.publish_sums(smem, tMax, tSum, warp, lane)
                if share.num_splits > 1:
                    cute.arch.sync_warp()
                    cute.arch.barrier_arrive(barrier_id=3, number_of_threads=self.threads)
            slot, parity = self.pv_step(smem, slot + take, parity, take, groups, more, tO, warp, lane)
            groups = groups - take * STAGE_GROUPS
        if share.num_splits == 1:
            self.sync_workers()
            for r in cutlass.range_constexpr(2):
                tSum[r] = self.read_sum(smem, (lane >> 2) + 8 * r)

    @cute.jit
    def wrap(self, slot: Int32) -> Int32:
        """A slot of the ring, from less than twice its length."""
        return slot - self.ring if slot >= self.ring else slot

    @cute.jit
    def score(
        self,
        smem: Int32,
        slot: Int32,
        parity: Int32,
        i: cutlass.Constexpr[int],
        scale_log2: Float32,
        tQ: cute.Tensor,
        tS: cute.Tensor,
        warp: Int32,
        lane: Int32,
    ):
        """Scaled and masked S of the stage's groups warp % 4 and warp % 4 + 4, to tS[4 i ..]."""
        parity = parity ^ 1 if slot >= self.ring else parity
        slot = self.wrap(slot)
        row, group = lane & 7, warp & 3
        line = smem + self.at["ring"] + slot * self.stage_bytes + group * self.group_bytes + (row & 3) * LINE
        line = line + (row >> 2) * (STAGE_GROUPS // 2 * self.group_bytes + GAP)
        chunk = ((lane >> 3) ^ ((line >> 7) & 7)) << 4
        tma.wait(smem + self.at["full"] + slot * 8, parity)
        valid = ops.load_shared_u8(smem + self.at["masks"] + slot * 4 + group)
        acc = cute.make_rmem_tensor((4 * self.chains,), Float32)
        acc.fill(0.0)
        if valid != 0:
            for k in cutlass.range_constexpr(self.head_dim // 32):
                b = ops.ldmatrix_x4(line + k // 2 * (BLOCK_TOKENS * LINE) + (chunk ^ (64 * ((k % 2) ^ (k // 2 % 2)))))
                for n in cutlass.range_constexpr(2):
                    a = (tQ[8 * k + 4 * n], tQ[8 * k + 4 * n + 1], tQ[8 * k + 4 * n + 2], tQ[8 * k + 4 * n + 3])
                    ops.add_mma_16816(self.mma_dtype, acc, 4 * ((2 * k + n) % self.chains), a, (b[2 * n], b[2 * n + 1]))
        self.sum_chains(acc, acc)
        bits = valid >> ((lane & 3) * 2)
        for j in cutlass.range_constexpr(4):
            tS[4 * i + j] = acc[j] * scale_log2 if (bits >> (j % 2)) & 1 != 0 else -Float32.inf

    @cute.jit
    def publish_maxima(self, smem: Int32, tS: cute.Tensor, warp: Int32, lane: Int32):
        for r in cutlass.range_constexpr(2):
            top = cute.arch.fmax(tS[2 * r], tS[2 * r + 1])
            for i in cutlass.range_constexpr(1, PASSES):
                top = cute.arch.fmax(top, cute.arch.fmax(tS[4 * i + 2 * r], tS[4 * i + 2 * r + 1]))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
            if (lane & 3) == 0:
                ops.store_shared_f32(smem + self.at["maxima"] + (((lane >> 2) + 8 * r) * self.warps + warp) * 4, top)

    @cute.jit
    def exponentiate_step(
        self,
        smem: Int32,
        tS: cute.Tensor,
        tMax: cute.Tensor,
        tSum: cute.Tensor,
        tO: cute.Tensor,
        warp: Int32,
        lane: Int32,
    ):
        """The block's new maxima, P to shared memory, and O and the sums rescaled where a maximum grew enough."""
        maxima = smem + self.at["maxima"] + (lane >> 2) * self.warps * 4
        parts = [
            [ops.load_shared_f32x4(maxima + (8 * r * self.warps + w) * 4) for w in range(0, self.warps, 4)]
            for r in range(2)
        ]
        for r in cutlass.range_constexpr(2):
            row = (lane >> 2) + 8 * r
            old = tMax[r]
            top = old
            for part in parts[r]:
                top = cute.arch.fmax(
                    top, cute.arch.fmax(cute.arch.fmax(part[0], part[1]), cute.arch.fmax(part[2], part[3]))
                )
            new = top if top - old > RESCALE_THRESHOLD else old
            factor = cute.math.exp2(old - new, fastmath=True)
            tMax[r] = new
            total = tSum[r] * factor
            for i in cutlass.range_constexpr(PASSES):  # zeros past the step's end: no branch, so that all overlap
                p0 = cute.math.exp2(tS[4 * i + 2 * r] - new, fastmath=True)
                p1 = cute.math.exp2(tS[4 * i + 2 * r + 1] - new, fastmath=True)
                total = total + (p0 + p1)
                at = smem + self.at["p"] + row * self.p_pitch + (warp + 8 * i) * 16 + (lane & 3) * 4
                ops.store_shared_i32(at, ops.pack_2(self.mma_dtype, p0, p1))
            tSum[r] = total
            for n in cutlass.range_constexpr(self.warp_cols // 8):
                tO[4 * n + 2 * r] = tO[4 * n + 2 * r] * factor
                tO[4 * n + 2 * r + 1] = tO[4 * n + 2 * r + 1] * factor

    @cute.jit
    def publish_sums(self, smem: Int32, tMax: cute.Tensor, tSum: cute.Tensor, warp: Int32, lane: Int32):
        """The maxima, and the sums of this warp's entries for `read_sum` behind a barrier."""
        for r in cutlass.range_constexpr(2):
            total = tSum[r]
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
            total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
            if (lane & 3) == 0:
                row = (lane >> 2) + 8 * r
                ops.store_shared_f32(smem + self.at["sums"] + (row * self.warps + warp) * 4, total)
                if warp == 0:
                    ops.store_shared_f32(smem + self.at["tops"] + row * 4, tMax[r])

    @cute.jit
    def read_sum(self, smem: Int32, row: Int32) -> Float32:
        """The block's sum of a row, in warp order."""
        total = Float32(0.0)
        for w in cutlass.range_constexpr(0, self.warps, 4):
            part = ops.load_shared_f32x4(smem + self.at["sums"] + (row * self.warps + w) * 4)
            total = total + ((part[0] + part[1]) + (part[2] + part[3]))
        return total

    @cute.jit
    def pv_step(
        self,
        smem: Int32,
        slot: Int32,
        parity: Int32,
        take: Int32,
        groups: Int32,
        more: Int32,
        tO: cute.Tensor,
        warp: Int32,
        lane: Int32,
    ):
        """O += P V over the step's stages for the warp's columns; then where the ring goes on."""
        if slot >= self.ring:
            slot, parity = slot - self.ring, parity ^ 1
        row = lane & 15
        chunk0 = warp * (self.warp_cols // 8)
        sP = smem + self.at["p"] + row * self.p_pitch + (lane >> 4) * 16
        row = row & 7
        place = (lane >> 3 & 1) * self.group_bytes + (row & 3) * LINE
        place = (
            place + (row >> 2) * (STAGE_GROUPS // 2 * self.group_bytes + GAP) + (chunk0 >> 3) * (BLOCK_TOKENS * LINE)
        )
        chunk = (chunk0 & 7) + (lane >> 4)
        done = Int32(0)
        if groups > (STEP_STAGES - 1) * STAGE_GROUPS:
            # A whole step, two stages at a time: loads of shared memory and products overlap, and the first half need
            # not wait for the second to be there. Of 16 tokens past the end P is zero, and in place of their V stands
            # the half stage before.
            done = Int32(STEP_STAGES)
            last = (2 if groups > (STEP_STAGES - 1) * STAGE_GROUPS + STAGE_GROUPS // 2 else 0) * self.group_bytes
            for half in cutlass.range_constexpr(2):
                pair = (2 * half, 2 * half + 1)
                for i in pair:
                    at, phase = self.ahead(slot, parity, Int32(i))
                    tma.wait(smem + self.at["full"] + at * 8, phase)
                for i in pair:
                    at, _ = self.ahead(slot, parity, Int32(i))
                    line = smem + self.at["ring"] + at * self.stage_bytes + place
                    self.multiply_v(sP + 64 * i, line, chunk, tO)
                    second = line + (2 * self.group_bytes if i < STEP_STAGES - 1 else last)
                    self.multiply_v(sP + 64 * i + 32, second, chunk, tO)
            if more > 0:
                cute.arch.sync_warp()
                if lane < STEP_STAGES:
                    at, _ = self.ahead(slot, parity, lane)
                    tma.arrive(smem + self.at["empty"] + at * 8)
            slot, parity = self.ahead(slot, parity, Int32(STEP_STAGES))
            sP = sP + 64 * STEP_STAGES
            groups = groups - STEP_STAGES * STAGE_GROUPS
        for _ in cutlass.range(done, take, unroll=1):
            line = smem + self.at["ring"] + slot * self.stage_bytes + place
            tma.wait(smem + self.at["full"] + slot * 8, parity)
            for k in cutlass.range_constexpr(2):
                if 4 * k < groups:
                    self.multiply_v(sP + 32 * k, line + 2 * k * self.group_bytes, chunk, tO)
            if more > 0:
                cute.arch.sync_warp()
                if lane == 0:
                    tma.arrive(smem + self.at["empty"] + slot * 8)
            sP = sP + 64
            groups = groups - STAGE_GROUPS
            slot, parity = self.ahead(slot, parity, Int32(1))
        return slot, parity

    @cute.jit
    def ahead(self, slot: Int32, parity: Int32, stages: Int32):
        """The slot so many stages on, at most a ring, and its parity."""
        slot = slot + stages
        if slot >= self.ring:
            slot, parity = slot - self.ring, parity ^ 1
        return slot, parity

    @cute.jit
    def multiply_v(self, p: Int32, line: Int32, chunk: Int32, tO: cute.Tensor):
        """O += P V over 16 tokens: this lane's rows of both lie at `p` and `line`, its columns from `chunk` on."""
        a = ops.ldmatrix_x4(p)
        for d in cutlass.range_constexpr(self.warp_cols // 16):
            b = ops.ldmatrix_x4_trans(line + (((chunk + 2 * d) ^ ((line >> 7) & 7)) << 4))
            for n in cutlass.range_constexpr(2):
                ops.add_mma_16816(self.mma_dtype, tO, 8 * d + 4 * n, a, (b[2 * n], b[2 * n + 1]))
