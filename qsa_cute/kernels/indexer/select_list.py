"""The list of `select.py`: what reached the bound is cut to the best 512, and these are put in order and stored.

Numbers are (value, ~index), distinct, so that ties need no care. The class that inherits these steps has the shared
memory's layout, and says whose list it is (`at_root`, `sync_all`): this block's, or a cluster's.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from qsa_cute.geometry import BLOCK_TOKENS, INDEX_WIDTH, TOP_BLOCKS
from qsa_cute.kernels.common import ops
from qsa_cute.kernels.indexer import select_ops as so

BINS = 2048
BITS = 11
FEW = 64  # numbers of one bin that are ranked directly
WINDOW = 32 * BINS  # ids a bitmap in the first histogram's place holds
NONE = 0xFFFFFFFF


class SelectList:
    # ---- selecting -----------------------------------------------------------------------------------

    @cute.jit
    def scan(self, smem: Int32, hist: Int32, space: cutlass.Constexpr[str], need: Int32, tid: Int32):
        """Find, from the highest bin down, the one that holds the need-th count. Words 0, 1, 2: the bin, the counts
        above it, its own; untouched when there are fewer. The histogram is complete; all threads return after
        the words are."""
        per = BINS // self.threads
        warp = tid // 32
        lane = tid % 32
        first = BINS - (tid + 1) * per
        tC = cute.make_rmem_tensor((per,), Int32)
        mine = Int32(0)
        for i in cutlass.range_constexpr(per):
            tC[i] = so.load_i32(hist + (first + i) * 4, space)
            mine = mine + tC[i]
        before = self.warp_prefix(mine)
        if lane == 31:
            ops.store_shared_i32(smem + self.totals + warp * 4, before + mine)
        cute.arch.sync_threads()
        other = Int32(0)
        if lane < warp:
            other = so.load_i32(smem + self.totals + lane * 4)
        before = before + cute.arch.warp_redux_sync(other, "add")
        if before < need and need <= before + mine:
            for j in cutlass.range_constexpr(per):
                i = per - 1 - j
                if before < need and need <= before + tC[i]:
                    ops.store_shared_i32(smem + self.words, first + i)
                    ops.store_shared_i32(smem + self.words + 4, before)
                    ops.store_shared_i32(smem + self.words + 8, tC[i])
                before = before + tC[i]
        cute.arch.sync_threads()

    @cute.jit
    def threshold(self, smem: Int32, length: Int32, low: Uint64, high: Uint64, tid: Int32) -> Uint64:
        """The 512th largest of the list's first `length` distinct numbers, which all lie in [low, high]. Leaves
        the second histogram zero."""
        need = Int32(TOP_BLOCKS)
        width = cutlass.max(64 - Int32(cute.arch.clz(high - low)) - BITS, Int32(0))
        limit = Uint64(BINS)  # places of the range that is left
        done = Int32(0)
        while done == 0:
            hist = smem + self.hist_b
            for i in cutlass.range(tid, length, self.threads, unroll=1):
                number = so.load_u64(smem + i * 8)
                place = (number - low) >> Uint64(width)
                if number >= low and place < limit:
                    so.count_one(hist + Int32(place) * 4, "shared")
            cute.arch.sync_threads()
            self.scan(smem, hist, "shared", need, tid)
            for i in cutlass.range_constexpr(BINS // self.threads):
                ops.store_shared_i32(hist + (tid + i * self.threads) * 4, Int32(0))
            low = low + (Uint64(so.load_u32(smem + self.words)) << Uint64(width))
            need = need - so.load_i32(smem + self.words + 4)
            inside = so.load_i32(smem + self.words + 8)
            if inside == need or width == 0:
                done = Int32(1)
            elif inside <= FEW:
                low = self.rank_few(smem, length, low, width, need, inside, tid)
                done = Int32(1)
            limit = Uint64(1) << Uint64(cutlass.min(width, Int32(BITS)))
            width = cutlass.max(width - BITS, Int32(0))
            cute.arch.sync_threads()
        return low

    @cute.jit
    def rank_few(
        self, smem: Int32, length: Int32, low: Uint64, width: Int32, need: Int32, inside: Int32, tid: Int32
    ) -> Uint64:
        """The need-th largest of the `inside` numbers in [low, low + 2^width)."""
        if tid == 0:
            ops.store_shared_i32(smem + self.words + 16, Int32(0))
        cute.arch.sync_threads()
        for i in cutlass.range(tid, length, self.threads, unroll=1):
            number = so.load_u64(smem + i * 8)
            if number >= low and ((number - low) >> Uint64(width)) == 0:
                at = so.atomic_add(smem + self.words + 16, Int32(1), "shared")
                ops.store_shared_64(smem + self.few + at * 8, number)
        cute.arch.sync_threads()
        if tid < inside:
            number = so.load_u64(smem + self.few + tid * 8)
            above = Int32(1)
            for i in cutlass.range(inside, unroll=1):
                above = above + Int32(so.load_u64(smem + self.few + i * 8) > number)
            if above == need:
                ops.store_shared_64(smem + self.result, number)
        cute.arch.sync_threads()
        return so.load_u64(smem + self.result)

    @cute.jit
    def finish(self, smem: Int32, logits: Int64, visible: Int32, bound: Uint32, ranked: Int32, tid: Int32):
        """From the list, or from the row where the list does not do, to the 512 chosen ids."""
        length = so.load_i32(smem + self.words + 12)
        least = Uint64(0)
        if length >= TOP_BLOCKS and length <= self.list_size:
            top = Uint32(0)
            for i in cutlass.range(tid, length, self.threads, unroll=1):
                number = so.candidate(smem + i * 8)
                ops.store_shared_64(smem + i * 8, number)
                top = so.largest(top, Uint32(number >> 32))
            top = cute.arch.warp_redux_sync(top, "umax")
            if cute.arch.lane_idx() == 0:
                so.atomic_max(smem + self.words + 20, top, "shared")
            cute.arch.sync_threads()
            top = so.load_u32(smem + self.words + 20)
            least = self.threshold(smem, length, Uint64(bound) << 32, (Uint64(top) << 32) | Uint64(NONE), tid)
        else:
            length, least = self.select_in_pieces(smem, logits, visible, tid)
        if ranked != 0:
            self.emit_ranked(smem, length, least, tid)
        else:
            self.emit_ascending(smem, length, least, visible, tid)

    @cute.jit
    def select_in_pieces(self, smem: Int32, logits: Int64, visible: Int32, tid: Int32):
        """Any row: append piece after piece, cut the list to the best 512 when the next piece might not fit."""
        shift = Int32((logits % 16) // 4)
        cute.arch.sync_threads()
        if tid == 0:
            ops.store_shared_i32(smem + self.words + 12, Int32(0))
        cute.arch.sync_threads()
        least = Uint64(0)  # numbers below it are not among the best 512
        length = Int32(0)
        coming = self.read_4(logits, tid * 4 - shift, visible)
        v0, v1, v2, v3 = coming
        for first in cutlass.range(0, visible + shift, self.chunk, unroll=1):
            at = first + tid * 4 - shift
            n0, n1, n2, n3 = self.read_4(logits, at + self.chunk, visible)
            self.append_number(smem, v0, at, visible, least)
            self.append_number(smem, v1, at + 1, visible, least)
            self.append_number(smem, v2, at + 2, visible, least)
            self.append_number(smem, v3, at + 3, visible, least)
            v0, v1, v2, v3 = n0, n1, n2, n3
            cute.arch.sync_threads()
            length = so.load_i32(smem + self.words + 12)
            cute.arch.sync_threads()
            if length > self.list_size - self.chunk:
                least = self.threshold(smem, length, least, Uint64(0xFFFFFFFFFFFFFFFF), tid)
                self.cut(smem, length, least, tid)
                length = Int32(TOP_BLOCKS)
        if length > TOP_BLOCKS:
            least = self.threshold(smem, length, least, Uint64(0xFFFFFFFFFFFFFFFF), tid)
        return length, least

    @cute.jit
    def append_number(self, smem: Int32, value: Float32, index: Int32, visible: Int32, least: Uint64):
        number = so.rank_number(value, index)
        wanted = index >= 0 and index < visible and number >= least
        ballot = cute.arch.vote_ballot_sync(wanted)
        lane = cute.arch.lane_idx()
        base = Int32(0)
        if lane == 0:
            base = so.atomic_add(smem + self.words + 12, cute.arch.popc(ballot), "shared")
        base = cute.arch.shuffle_sync(base, offset=0)
        if wanted:
            at = base + cute.arch.popc(ballot & ((Int32(1) << lane) - 1))
            ops.store_shared_64(smem + at * 8, number)

    @cute.jit
    def cut(self, smem: Int32, length: Int32, least: Uint64, tid: Int32):
        """Keep the list's numbers from `least` up."""
        own = self.list_size // self.threads
        tN = cute.make_rmem_tensor((own,), Uint64)
        for i in cutlass.range_constexpr(own):
            tN[i] = Uint64(0)
            if tid + i * self.threads < length:
                tN[i] = so.load_u64(smem + (tid + i * self.threads) * 8)
        cute.arch.sync_threads()
        if tid == 0:
            ops.store_shared_i32(smem + self.words + 12, Int32(0))
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(own):
            if tid + i * self.threads < length and tN[i] >= least:
                at = so.atomic_add(smem + self.words + 12, Int32(1), "shared")
                ops.store_shared_64(smem + at * 8, tN[i])
        cute.arch.sync_threads()

    # ---- the chosen ----------------------------------------------------------------------------------

    @cute.jit
    def emit_ascending(self, smem: Int32, length: Int32, least: Uint64, visible: Int32, tid: Int32):
        """The ids of the numbers from `least` up, ascending, by a bitmap of WINDOW ids at a time."""
        bitmap = smem + self.hist_a
        lane = tid % 32
        done = Int32(0)
        for window in cutlass.range(0, visible, WINDOW, unroll=1):
            words = (cutlass.min(visible - window, Int32(WINDOW)) + 31) // 32
            per = (words + self.threads - 1) // self.threads
            for i in cutlass.range(tid, per * self.threads, self.threads, unroll=1):
                ops.store_shared_i32(bitmap + i * 4, Int32(0))
            cute.arch.sync_threads()
            for i in cutlass.range(tid, length, self.threads, unroll=1):
                number = so.load_u64(smem + i * 8)
                index = so.number_index(number) - window
                if number >= least and index >= 0 and index < WINDOW:
                    so.atomic_or(bitmap + (index // 32) * 4, Int32(1) << (index % 32))
            cute.arch.sync_threads()
            mine = Int32(0)
            for i in cutlass.range(per, unroll=1):
                mine = mine + cute.arch.popc(so.load_i32(bitmap + (tid * per + i) * 4))
            before = self.warp_prefix(mine)
            if lane == 31:
                ops.store_shared_i32(smem + self.totals + (tid // 32) * 4, before + mine)
            cute.arch.sync_threads()
            total = Int32(0)
            if lane < self.warps:
                total = so.load_i32(smem + self.totals + lane * 4)
            lower = cute.arch.warp_redux_sync(total if lane < tid // 32 else Int32(0), "add")
            at = smem + self.chosen + (done + before + lower) * 4
            if mine > 0:
                for i in cutlass.range(per, unroll=1):
                    bits = so.load_i32(bitmap + (tid * per + i) * 4)
                    while bits != 0:
                        lowest = 31 - Int32(cute.arch.clz(bits & -bits))
                        ops.store_shared_i32(at, window + (tid * per + i) * 32 + lowest)
                        at = at + 4
                        bits = bits & (bits - 1)
            done = done + cute.arch.warp_redux_sync(total, "add")
            cute.arch.sync_threads()

    @cute.jit
    def emit_ranked(self, smem: Int32, length: Int32, least: Uint64, tid: Int32):
        """The ids of the 512 numbers from `least` up, largest number first."""
        best = smem + self.hist_a
        cute.arch.sync_threads()
        if tid == 0:
            ops.store_shared_i32(smem + self.words + 16, Int32(0))
        cute.arch.sync_threads()
        for i in cutlass.range(tid, length, self.threads, unroll=1):
            number = so.load_u64(smem + i * 8)
            if number >= least:
                at = so.atomic_add(smem + self.words + 16, Int32(1), "shared")
                ops.store_shared_64(best + at * 8, number)
        cute.arch.sync_threads()
        for i in cutlass.range(tid, TOP_BLOCKS, self.threads, unroll=1):
            number = so.load_u64(best + i * 8)
            above = Int32(0)
            for j in cutlass.range(TOP_BLOCKS, unroll=8):
                above = above + Int32(so.load_u64(best + j * 8) > number)
            ops.store_shared_i32(smem + self.chosen + above * 4, so.number_index(number))
        cute.arch.sync_threads()

    @cute.jit
    def output(self, smem: Int32, out: Int64, count: Int32, seen: Int32, expand: Int32, tid: Int32):
        if expand == 0:
            for i in cutlass.range(tid, TOP_BLOCKS, self.threads, unroll=1):
                block = Int32(-1)
                if i < count:
                    block = so.load_i32(smem + self.chosen + i * 4)
                ops.store_global_i32(out + Int64(i) * 4, block)
        else:
            tail = seen % BLOCK_TOKENS
            for i in cutlass.range(tid, INDEX_WIDTH, self.threads, unroll=1):
                token = Int32(-1)
                past = i - count * BLOCK_TOKENS
                if past < 0:
                    token = so.load_i32(smem + self.chosen + (i // BLOCK_TOKENS) * 4) * BLOCK_TOKENS + i % BLOCK_TOKENS
                elif past < tail:
                    token = seen - tail + past
                ops.store_global_i32(out + Int64(i) * 4, token)
