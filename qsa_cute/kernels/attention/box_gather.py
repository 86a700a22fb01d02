"""Attention of one query row's head group over a gathered list of tokens: gathering by TMA (SM90).

Lists come in groups of four entries, dealt to the splits in turn: split s of n takes groups s, s + n, ... A group that
is a whole block (four consecutive tokens, the first a multiple of four, all of which count) is one copy: a TMA box of 4
tokens by head_dim columns. Any other group comes token by token, 16 bytes a lane, zeros in place of entries that are
not valid. Where it all goes, and how a place in a stage is laid out: `box_products.py`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.attention.box_products import (
    GAP,
    LAST_STAGES,
    LINE,
    STAGE_GROUPS,
    STEP_STAGES,
    BoxProducts,
    BoxShare,
)
from qsa_cute.kernels.attention.row_gather import TokenSource
from qsa_cute.kernels.common import ops, tma

TABLES = 4  # a barrier: page tables are staged, and the ring is set up


def log2(number: int) -> int:
    """Of a power of two."""
    return number.bit_length() - 1


class BoxSource(TokenSource):
    """A `TokenSource` whose whole blocks can be copied as boxes.

    `places(id, looked_up)` returns the entry's places in K and V (two Int32, -1 when invalid), for `box`;
    `whole(first, last)` whether all tokens from first to last of one block count where the first one does, and are no
    negative ids;
    `tensor_map(of_v)` is the address of K's or V's tensor map;
    `box(place)` says where in it the block that begins at a place lies; place -1 is out of bounds, and so zeros.
    """


class BoxGather(BoxProducts):
    """What the warps that gather do."""

    surveys = False  # whether a list's end is found while the first step is under way; `await_groups` then knows it

    def wait_for_tables(self):
        cute.arch.barrier(barrier_id=TABLES, number_of_threads=self.threads)

    # ---- the list ------------------------------------------------------------------------------------

    def first_stage(self, warp: Int32) -> Int32:
        """Of a step, that `warp` fills; then every `fill_stages`-th."""
        return warp >> log2(self.stage_warps) if self.fill_stages > 1 else Int32(0)

    def stage_part(self, warp: Int32) -> Int32:
        """Which of a stage's parts of `fill_groups` groups `warp` fills."""
        return warp & (self.stage_warps - 1) if self.fill_stages > 1 else warp

    def lane_group(self, warp: Int32, lane: Int32) -> Int32:
        """This lane's group of a step: lanes have in turn those that `warp` fills."""
        stage = self.first_stage(warp) + (lane >> log2(self.fill_groups)) * self.fill_stages
        return stage * STAGE_GROUPS + self.stage_part(warp) * self.fill_groups + (lane & (self.fill_groups - 1))

    @cute.jit
    def first_at(self, share: BoxShare, stage: Int32, warp: Int32, lane: Int32) -> Int32:
        """Where in the list this lane's group of the step that begins with `stage` begins."""
        group = stage * STAGE_GROUPS + self.lane_group(warp, lane)
        return (group * share.num_splits + share.split) * BLOCK_TOKENS

    @cute.jit
    def entries(self, ids: Int64, top_k: Int32, share: BoxShare, stage: Int32, warp: Int32, lane: Int32):
        """The four entries of this lane's group; -1 past the end of the list."""
        lanes = -(-LAST_STAGES // self.fill_stages) * self.fill_groups
        at = self.first_at(share, stage, warp, lane)
        found = []
        for t in cutlass.range_constexpr(BLOCK_TOKENS):
            wanted = Int32(0)
            if lane < lanes and at + t < top_k:
                wanted = Int32(1)
            found.append(ops.load_global_i32_if(wanted, ids + Int64(at) * 4 + 4 * t, Int32(-1)))
        return tuple(found)

    # ---- gathering -----------------------------------------------------------------------------------

    @cute.jit
    def produce(
        self,
        smem: Int32,
        source: BoxSource,
        ids: Int64,
        top_k: Int32,
        groups: Int32,
        share: BoxShare,
        first: tuple,
        warp: Int32,
    ):
        """Fill the ring. `groups`: of the split, unless that is surveyed; `first`: this lane's entries of the first
        step."""
        lane = cute.arch.lane_idx()
        stage, slot, round_ = Int32(0), Int32(0), Int32(0)
        # Not 0: a slot may hold tokens that came without TMA. Of slots that one warp alone fills, that warp knows.
        mixed = Int32(self.fill_stages > 1)
        e0, e1, e2, e3 = first
        if cutlass.const_expr(self.surveys):
            left = self.most_stages(top_k, share)  # until the list has been surveyed
            least = cutlass.min(left, Int32(STEP_STAGES))
            take = least
        else:
            left, least = (groups + (STAGE_GROUPS - 1)) >> 3, Int32(0)
            take = self.step_stages(left, least)
        more = Int32(1)
        while more > 0:  # once even of nothing: others wait for who waits for the tables
            entries = (e0, e1, e2, e3)
            k, v, torn, live, empty = self.resolve(source, entries, stage, lane)
            mixed = mixed | torn
            boxes, place, begin, end = live, k, Int32(0), take
            # K, what of K a survey adds, V
            for part in cutlass.range(0, 3, 1 if self.surveys else 2, unroll=1):
                if cutlass.const_expr(self.surveys):
                    if part == 1:
                        if stage == 0:
                            groups = self.await_groups(smem, lane)
                            left = (groups + (STAGE_GROUPS - 1)) >> 3
                            take = self.step_stages(left, least)
                        begin, end = end, take
                if part == 2:
                    begin, place = Int32(0), v
                    half = self.lane_group(warp, lane) & -(STAGE_GROUPS // 2)
                    known = half < groups - stage * STAGE_GROUPS
                    boxes = live | cute.arch.vote_ballot_sync(empty != 0 and known)
                    if left > take:
                        e0, e1, e2, e3 = self.entries(ids, top_k, share, stage + take, warp, lane)
                of_v = part >> 1
                mine = begin
                if cutlass.const_expr(self.fill_stages > 1):
                    mine = begin + ((self.first_stage(warp) - begin) & (self.fill_stages - 1))
                for i in cutlass.range(mine, end, self.fill_stages, unroll=1):
                    at, turn = slot, round_
                    if cutlass.const_expr(self.fill_stages > 1):
                        at, turn = self.later(slot, round_, i + (take if of_v != 0 else Int32(0)))
                    if turn > 0:  # a wait costs some thirty clocks even where there is nothing to wait for
                        tma.wait(smem + self.at["empty"] + at * 8, (turn + 1) & 1)
                        if mixed != 0:
                            tma.fence_async_proxy()
                    first_lane = (i >> log2(self.fill_stages)) * self.fill_groups
                    self.fill(smem, source, of_v, entries, place, torn, live, boxes, first_lane, at, warp, lane)
                    if cutlass.const_expr(self.fill_stages == 1):  # step by step: so it stays in uniform registers
                        slot, round_ = self.later(slot, round_, Int32(1))
            if cutlass.const_expr(self.fill_stages > 1):
                slot, round_ = self.later(slot, round_, 2 * take)
            stage, left, least = stage + take, left - take, Int32(0)
            more, take = left, self.step_stages(left, least)

    @cute.jit
    def later(self, slot: Int32, round_: Int32, stages: Int32):
        """The slot so many stages on, at most a ring, and how often the ring was filled by then."""
        slot = slot + stages
        if slot >= self.ring:
            slot, round_ = slot - self.ring, round_ + 1
        return slot, round_

    @cute.jit
    def resolve(self, source: BoxSource, entries: tuple, stage: Int32, lane: Int32):
        """This lane's group: its first entry's places in K and in V, -1 unless the group is whole and valid. Of the
        warp's groups, a bit each: which come token by token; which are whole and valid. Is this lane's neither?"""
        e0, e1, e2, e3 = entries
        run = (e1 - e0 - 1) | (e2 - e0 - 2) | (e3 - e0 - 3) | (e0 & (BLOCK_TOKENS - 1))
        torn = Int32(1)
        if (run == 0 and source.whole(e0, e3)) or (e0 & e1 & e2 & e3) < 0:
            torn = Int32(0)
        by_token = cute.arch.vote_ballot_sync(torn != 0)
        if stage == 0:  # here, and not before the loop, so that all that can be done before is
            self.wait_for_tables()
        k, v = source.places(e0, source.look_up(e0))
        if torn != 0 or e0 < 0:
            k, v = Int32(-1), Int32(-1)
        return k, v, by_token, cute.arch.vote_ballot_sync(k >= 0), Int32(torn == 0 and k < 0)

    @cute.jit
    def fill(
        self,
        smem: Int32,
        source: BoxSource,
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
        """This warp's groups of a stage, those of lanes `shift` and on, to a free slot of the ring."""
        number, part = self.fill_groups, self.stage_part(warp)
        full = smem + self.at["full"] + slot * 8
        dst = smem + self.at["ring"] + slot * self.stage_bytes + part * (number // 2 * self.group_bytes)
        far = STAGE_GROUPS // 2 * self.group_bytes + GAP  # between the two of a pair
        places = [cute.arch.shuffle_sync(place, shift + j) for j in range(number)]
        every = (1 << number) - 1
        by_token = (torn >> shift) & every
        wanted = (boxes >> shift) & every
        whole = (live >> shift) & every
        valid = self.nibbles(whole)
        if by_token != 0:
            for j in cutlass.range(number, unroll=1):
                if (by_token >> j) & 1 != 0:
                    to = dst + (j >> 1) * self.group_bytes + (j & 1) * far
                    bits = self.copy_tokens(source, of_v, entries, shift + j, to, lane)
                    valid = valid | bits << (4 * j)
            tma.arrive_copied(full)
            cute.arch.sync_warp()
        if lane == 0:
            if of_v == 0:
                masks = smem + self.at["masks"] + slot * 4 + part * (number // 2)
                for pair in cutlass.range_constexpr(number // 2):
                    ops.store_shared_u8(masks + pair, valid >> (8 * pair))
            tma.arrive_expect(full, cute.arch.popc(wanted) * self.group_bytes)
            for j in cutlass.range_constexpr(number):
                if (wanted >> j) & 1 != 0:
                    to = dst + j // 2 * self.group_bytes + j % 2 * far
                    tma.load_box(to, source.tensor_map(of_v), source.box(places[j]), full, once=True)

    def nibbles(self, bits: Int32) -> Int32:
        """Four bits for each of `fill_groups`, which are 2 or 4."""
        spread = bits
        if self.fill_groups > 2:
            spread = (spread | spread << 6) & 0x03030303
        return ((spread | spread << 3) & 0x11111111) * 15

    @cute.jit
    def copy_tokens(self, source: BoxSource, of_v: Int32, entries: tuple, of: Int32, dst: Int32, lane: Int32) -> Int32:
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
