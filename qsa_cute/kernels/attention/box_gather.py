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

    @cute.jit
    def first_at(self, share: BoxShare, stage: Int32, warp: Int32, lane: Int32) -> Int32:
        """Where in the list this lane's group begins: lanes 2 i and 2 i + 1 have those of stage + i that `warp`
        gathers."""
        group = (stage + (lane >> 1)) * STAGE_GROUPS + 2 * warp + (lane & 1)
        return (group * share.num_splits + share.split) * BLOCK_TOKENS

    @cute.jit
    def entries(self, ids: Int64, top_k: Int32, share: BoxShare, stage: Int32, warp: Int32, lane: Int32):
        """The four entries of this lane's group; -1 past the end of the list."""
        at = self.first_at(share, stage, warp, lane)
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
        mixed = Int32(0)  # not 0: some slot may hold tokens that came without TMA
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
                    self.fill(smem, source, of_v, entries, place, torn, live, boxes, 2 * i, slot, warp, lane)
                    slot = slot + 1
                    if slot == self.ring:
                        slot, round_ = Int32(0), round_ + 1
            stage, left, least = stage + take, left - take, Int32(0)
            more, take = left, self.step_stages(left, least)

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
                    tma.load_box(dst + j * far, source.tensor_map(of_v), source.box(places[j]), full, once=True)

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
