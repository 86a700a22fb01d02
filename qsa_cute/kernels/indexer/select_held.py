"""Selection of the 512 best blocks of a row that fits in registers: what `select.py` selects, by a shorter way.

Every logit is read once, by the block or the cluster of blocks that holds the row, warp after warp in ascending
order. One histogram finds the 512th:
1. The highest value, and the least of the threads' maxima, span 2048 bins of equal width; what lies below is bin 0
   and is not counted. The bin is one fused multiply-add, monotonic in the value whatever it is: infinities, NaN
   or a span of 0 put everything into bin 0.
2. A scan from the highest bin finds the one with the 512th; the few elements in it are ranked by (value, ~index).
   More than fit (a bin full of ties, say) are told apart by a radix select over that number, still in registers.
3. Ids leave in ascending order as they lie: a prefix over chunks, lanes and warps is the place in the list.
A cluster shares the extremes, reads all its histograms, and exchanges the few and the counts: three barriers.

A row that sees <= 512 blocks selects them all.

Grid: (rows), or (rows, ranks) in clusters of (1, ranks, 1). Rows, outputs and parameters are those of `select.py`.

Baked: threads, elements a thread holds (8, 16, 24 or 32), blocks that share a row, blocks an SM has registers for. The
caller guarantees num_blocks <= threads * held * ranks. Any alignment of rows. Elements between `visible` and
num_blocks may be loaded, before the length is known, and are then ignored; past num_blocks nothing is read, nor is
anything when num_blocks <= 512.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from qsa_cute.geometry import BLOCK_TOKENS, TOP_BLOCKS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.indexer import select_ops as so
from qsa_cute.kernels.indexer.select import PARAMS as SELECT_PARAMS
from qsa_cute.kernels.indexer.select import Select
from qsa_cute.kernels.indexer.select_chosen import CHUNK, SelectChosen
from qsa_cute.kernels.indexer.select_list import BINS, BITS, NONE

PARAMS = SELECT_PARAMS

FEW = 32  # numbers of one bin and block that are ranked directly: one a lane
ONE = 0x4B000000  # 2^23: bins are the low bits of floats from here on


class SelectHeld(SelectChosen, Select):
    def __init__(self, head_dim: int, dtype: str, threads: int, held: int, blocks_per_sm: int, ranks: int):
        self.threads, self.held, self.ranks = threads, held, ranks
        self.space = "shared" if ranks == 1 else "shared::cluster"
        self.warps = threads // 32
        self.scanners = 1 << (threads.bit_length() - 1)  # threads that scan the bins: each as many
        self.chunks = held // 4
        self.segment = 32 * held  # elements of a warp
        self.hist = 0  # at the end: the numbers to be ranked
        self.chosen = BINS * 4
        self.few = self.chosen + TOP_BLOCKS * 4  # [rank][FEW]
        self.extremes = self.few + ranks * FEW * 8  # [rank][warp] (min, max)
        self.totals = self.extremes + 8 * ranks * self.warps
        self.shares = self.totals + 128  # [rank] chosen so far
        self.words = self.shares + 32  # bin, above, count, few's length, least key, highest key
        self.unused = self.words + 32  # where what is in bin 0 is counted, a word a lane
        self.smem_bytes = self.unused + 128
        self.min_blocks = blocks_per_sm

    @cute.kernel
    def kernel(
        self,
        logits_ptr: cute.Pointer,
        out_ptr: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        split_counters: cute.Pointer,
        seq_len: Int32,
        from_end: Int32,
        row_start: Int32,
        num_blocks: Int32,
        ranked: Int32,
        expand: Int32,
        num_kv_heads: Int32,
        logits_stride_row: Int64,
        out_stride_row: Int64,
    ):
        tid, _, _ = cute.arch.thread_idx()
        row, rank, _ = cute.arch.block_idx()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        self.prepare(smem, tid)
        early.begin()
        sequence = row_start + row
        if seq_len > 1:  # the division is worth a branch: everything waits for it
            sequence = sequence // seq_len
        length = ops.load_global_i32(context_lengths.toint() + Int64(sequence) * 4)
        start = ops.load_global_i32_if(
            Int32(query_starts.toint() != 0), query_starts.toint() + Int64(sequence) * 4, Int32(0)
        )
        token = (row_start + row) - sequence * seq_len
        reach = num_blocks  # of what may be read before the length is here
        if num_blocks <= TOP_BLOCKS:  # all are selected, and there need not be any logits
            reach = Int32(0)
        if from_end == 0 and query_starts.toint() == 0:
            reach = cutlass.min(reach, (token + 1) // BLOCK_TOKENS)
        logits = logits_ptr.toint() + Int64(row) * logits_stride_row * 4
        origin = (rank * self.warps + tid // 32) * self.segment
        tV = cute.make_rmem_tensor((self.held,), Float32)
        self.read(tV, logits, origin, reach, tid)

        if from_end != 0:
            start = length - seq_len
        position = start + token
        seen = Int32(0)
        if position >= 0 and position < length:
            seen = position + 1
        visible = cutlass.min(seen // BLOCK_TOKENS, num_blocks)
        out = out_ptr.toint() + Int64(row) * out_stride_row * 4
        counters = split_counters.toint()
        if counters != 0 and rank == 0:
            for i in cutlass.range(tid, num_kv_heads, self.threads, unroll=1):
                ops.store_global_i32(counters + (Int64(row) * num_kv_heads + i) * 4, Int32(0))
        if visible <= TOP_BLOCKS:
            self.leave()
            if rank == 0:
                for i in cutlass.range(tid, visible, self.threads, unroll=1):
                    ops.store_shared_i32(smem + self.chosen + i * 4, i)
                cute.arch.sync_threads()
                self.output(smem, out, visible, seen, expand, tid)
        else:
            if origin + self.segment > visible:
                self.mask(tV, origin + tid % 32 * 4, visible)
            self.choose(smem, tV, logits, out, origin, visible, seen, rank, ranked, expand, tid)

    # ---- reading -------------------------------------------------------------------------------------

    @cute.jit
    def prepare(self, smem: Int32, tid: Int32):
        if cutlass.const_expr(self.ranks > 1):
            cute.arch.cluster_arrive_relaxed()  # shared memory of a peer may be written once it runs
        self.zero_bins(smem, tid)
        for i in cutlass.range(tid, self.ranks * FEW, self.threads, unroll=1):
            ops.store_shared_64(smem + self.few + i * 8, Uint64(0))
        if tid < 16:
            ops.store_shared_i32(smem + self.shares + tid * 4, Int32(0))

    @cute.jit
    def read(self, tV: cute.Tensor, logits: Int64, origin: Int32, reach: Int32, tid: Int32):
        """This thread's elements, four neighbours of each of its warp's chunks; NaN from `reach` on."""
        off = Int32(logits % 16)  # of a row that is not aligned: it is read one by one
        first = origin + tid % 32 * 4
        left = reach - first
        addr = logits + Int64(first) * 4
        for i in cutlass.range_constexpr(self.chunks):
            v = so.load_f32x4_if(Int32(off == 0 and left >= i * CHUNK + 4), addr + i * CHUNK * 4)
            for e in cutlass.range_constexpr(4):
                tV[4 * i + e] = v[e]
        if off != 0 or (origin < reach and reach < origin + self.segment and reach % 4 != 0):
            for i in cutlass.range_constexpr(self.chunks):
                rest = Int32(0)
                if off != 0 or left < i * CHUNK + 4:
                    rest = left - i * CHUNK
                for e in cutlass.range_constexpr(4):
                    tV[4 * i + e] = so.load_f32_if(Int32(rest > e), addr + (i * CHUNK + e) * 4, tV[4 * i + e])

    @cute.jit
    def mask(self, tV: cute.Tensor, first: Int32, visible: Int32):
        for i in cutlass.range_constexpr(self.chunks):
            for e in cutlass.range_constexpr(4):
                if first + i * CHUNK + e >= visible:
                    tV[4 * i + e] = Float32(float("nan"))

    # ---- the 512th -----------------------------------------------------------------------------------

    @cute.jit
    def choose(
        self,
        smem: Int32,
        tV: cute.Tensor,
        logits: Int64,
        out: Int64,
        origin: Int32,
        visible: Int32,
        seen: Int32,
        rank: Int32,
        ranked: Int32,
        expand: Int32,
        tid: Int32,
    ):
        lane = tid % 32
        first = origin + lane * 4
        scale, bias = self.span(smem, tV, visible, rank, tid)
        base = smem + self.hist - Int32(ONE << 2 & 0xFFFFFFFF)
        zero = self.zero(smem)
        for j in cutlass.range_constexpr(self.held):
            so.count_place(tV[j], scale, bias, base, smem + self.unused + lane * 4, zero + 1)
        self.sync_all()
        self.scan(smem, Int32(TOP_BLOCKS), tid)
        edge = so.place_value(so.load_i32(smem + self.words))
        need = TOP_BLOCKS - so.load_i32(smem + self.words + 4)

        if cutlass.const_expr(self.held > 16):
            scale = scale + so.float_of(self.zero(smem))  # or the bins would be kept
        taken = Int32(0)  # a bit an element: of a higher bin
        same = Int32(0)  # of the 512th's
        for j in cutlass.range_constexpr(self.held):
            taken, same = so.sift(tV[j], scale, bias, edge, taken, same, 1 << j)
        mine = self.publish(smem, tV, taken, same, first, rank, lane)
        self.sync_all()

        tN = cute.make_rmem_tensor((self.ranks,), Uint64)
        tL = cute.make_rmem_tensor((self.ranks,), Int32)
        most = Int32(0)
        for r in cutlass.range_constexpr(self.ranks):
            tN[r] = so.load_u64(smem + self.few + (r * FEW + lane) * 8)
            tL[r] = cute.arch.popc(cute.arch.vote_ballot_sync(tN[r] != 0))
            most = cutlass.max(most, tL[r])
        before = Int32(0)  # chosen by lower ranks
        if most < FEW:
            least = self.rank_few(smem, tN, tL, need, lane)
            for r in cutlass.range_constexpr(self.ranks):
                if r < rank:
                    more = cute.arch.popc(cute.arch.vote_ballot_sync(tN[r] != 0 and tN[r] >= least))
                    before = before + so.load_i32(smem + self.shares + r * 4) + more
            if mine >= least:  # 0 where there is none
                taken = taken | (same & -same)
            rest = same & (same - 1)
            while rest != 0:
                lowest = rest & -rest
                if self.reread(logits, lowest, first, visible) >= least:
                    taken = taken | lowest
                rest = rest & (rest - 1)
        else:
            least = self.refine(smem, logits, same, need, visible, first, tid)
            more = Int32(0)
            rest = same
            while rest != 0:
                lowest = rest & -rest
                if self.reread(logits, lowest, first, visible) >= least:
                    more = more | lowest
                rest = rest & (rest - 1)
            taken = taken | more
            self.add_share(smem, cute.arch.warp_redux_sync(Int32(cute.arch.popc(more)), "add"), rank, lane)
            self.sync_all()
            for r in cutlass.range_constexpr(self.ranks):
                if r < rank:
                    before = before + so.load_i32(smem + self.shares + r * 4)
        if ranked != 0:
            self.emit_best(smem, logits, out, taken, first, before, visible, seen, rank, expand, tid)
        else:
            self.emit(smem, out, taken, first, before, seen, rank, expand, tid)

    def bit(self, j: int) -> Int32:
        return Int32((1 << j) - (1 << 32 if j == 31 else 0))

    @cute.jit
    def span(self, smem: Int32, tV: cute.Tensor, visible: Int32, rank: Int32, tid: Int32):
        """(scale, bias) of the span: fma(value, scale, bias) is the value's place in it."""
        top = tV[0]
        for j in cutlass.range_constexpr(1, self.held):
            top = cute.arch.fmax(top, tV[j])
        key = so.order_key(top)
        high = cute.arch.warp_redux_sync(key, "umax")
        low = cute.arch.warp_redux_sync(key - 1, "umin")  # no value's key, 0, becomes the highest
        self.share_extremes(smem, low, high, rank, Int32(self.ranks), tid)
        low = Uint32(NONE)
        high = Uint32(0)
        lane = tid % 32
        for i in cutlass.range_constexpr(0, self.ranks * self.warps, 32):
            if lane + i < self.ranks * self.warps:
                low = so.least(low, so.load_u32(smem + self.extremes + (lane + i) * 8))
                high = so.largest(high, so.load_u32(smem + self.extremes + (lane + i) * 8 + 4))
        low = cute.arch.warp_redux_sync(low, "umin")
        high = cute.arch.warp_redux_sync(high, "umax")
        lowest = so.key_value(low + 1)
        width = so.key_value(high) - lowest
        if visible < 192 * self.held:  # too few maxima for their least to be below the 512th
            lowest = lowest - width
            width = width + width
        scale = cute.arch.rcp_approx(width)
        return scale, -(lowest * scale)

    @cute.jit
    def scan(self, smem: Int32, need: Int32, tid: Int32):
        """Find, from the highest bin down, the one that holds the need-th count, bin 0 when those above do not. Words
        0, 1, 2: the bin, the counts above it, its own. The histograms are complete; all threads return after the
        words are."""
        per = BINS // self.scanners
        step = min(per, 4)
        warp = tid // 32
        lane = tid % 32
        first = BINS - (tid + 1) * per
        if cutlass.const_expr(self.scanners < self.threads):
            first = cutlass.max(first, Int32(0))
        tC = cute.make_rmem_tensor((per,), Int32)
        for i in cutlass.range_constexpr(per):
            tC[i] = Int32(0)
        for r in cutlass.range_constexpr(self.ranks):
            hist = self.at_rank(smem + self.hist + first * 4, r)
            for i in cutlass.range_constexpr(per // step):
                c = so.load_i32_vector(hist + i * step * 4, step, self.space)
                for k in cutlass.range_constexpr(step):
                    tC[i * step + k] = tC[i * step + k] + c[k]
        if cutlass.const_expr(self.scanners < self.threads):
            for i in cutlass.range_constexpr(per):
                tC[i] = tC[i] if tid < self.scanners else Int32(0)
        mine = Int32(0)
        for i in cutlass.range_constexpr(per):
            mine = mine + tC[i]
        before = self.warp_prefix(mine)
        if lane == 31:
            ops.store_shared_i32(smem + self.totals + warp * 4, before + mine)
        cute.arch.sync_threads()
        other = Int32(0)
        if lane < warp:
            other = so.load_i32(smem + self.totals + lane * 4)
        before = before + cute.arch.warp_redux_sync(other, "add")
        if before < need and (need <= before + mine or tid == self.scanners - 1):
            place = Int32(0)
            above = before + mine
            count = Int32(0)
            for j in cutlass.range_constexpr(per):
                i = per - 1 - j
                if before < need and need <= before + tC[i]:
                    place = first + i
                    above = before
                    count = tC[i]
                before = before + tC[i]
            ops.store_shared_i32(smem + self.words, place)
            ops.store_shared_i32(smem + self.words + 4, above)
            ops.store_shared_i32(smem + self.words + 8, count)
        cute.arch.sync_threads()

    @cute.jit
    def publish(self, smem: Int32, tV: cute.Tensor, taken: Int32, same: Int32, first: Int32, rank: Int32, lane: Int32):
        """Give all ranks this warp's count of chosen elements, and the numbers of the 512th's bin. The number of this
        thread's first of these, or 0."""
        self.add_share(smem, cute.arch.warp_redux_sync(Int32(cute.arch.popc(taken)), "add"), rank, lane)
        mine = Uint64(0)
        rest = same
        while rest != 0:
            lowest = rest & -rest
            number = self.number(tV, lowest, first)
            if rest == same:
                mine = number
            slot = so.atomic_add(smem + self.words + 12, Int32(1), "shared")
            rest = rest & (rest - 1)
            if slot >= FEW:
                rest = Int32(0)
            else:
                for r in cutlass.range_constexpr(self.ranks):
                    so.store_u64_at(self.at_rank(smem + self.few + (rank * FEW + slot) * 8, r), number, self.space)
        return mine

    @cute.jit
    def number(self, tV: cute.Tensor, single: Int32, first: Int32) -> Uint64:
        """Of the element whose bit `single` is."""
        value = tV[0]
        for j in cutlass.range_constexpr(1, self.held):
            if single == self.bit(j):
                value = tV[j]
        j = 31 - Int32(cute.arch.clz(single))
        return so.rank_number(value, first + j // 4 * CHUNK + j % 4)

    @cute.jit
    def add_share(self, smem: Int32, count: Int32, rank: Int32, lane: Int32):
        if lane == 0:
            for r in cutlass.range_constexpr(self.ranks):
                so.add(self.at_rank(smem + self.shares + rank * 4, r), count, self.space)

    @cute.jit
    def rank_few(self, smem: Int32, tN: cute.Tensor, tL: cute.Tensor, need: Int32, lane: Int32) -> Uint64:
        """The need-th largest of all ranks' few; every warp finds it by itself."""
        tA = cute.make_rmem_tensor((self.ranks,), Int32)
        for r in cutlass.range_constexpr(self.ranks):
            tA[r] = Int32(1)
        for q in cutlass.range_constexpr(self.ranks):
            for k in cutlass.range(0, tL[q], 4, unroll=1):  # four at once: past the last they are 0
                at = smem + self.few + (q * FEW + k) * 8
                others = (*so.load_u64x2(at), *so.load_u64x2(at + 16))
                for other in others:
                    for r in cutlass.range_constexpr(self.ranks):
                        tA[r] = tA[r] + Int32(other > tN[r])
        least = Uint64(0)
        for r in cutlass.range_constexpr(self.ranks):
            if tN[r] != 0 and tA[r] == need:
                least = tN[r]
        high = cute.arch.warp_redux_sync(Uint32(least >> 32), "umax")
        low = cute.arch.warp_redux_sync(Uint32(least & 0xFFFFFFFF), "umax")
        return (Uint64(high) << 32) | Uint64(low)

    @cute.jit
    def refine(
        self, smem: Int32, logits: Int64, same: Int32, need: Int32, visible: Int32, first: Int32, tid: Int32
    ) -> Uint64:
        """The need-th largest number of the elements with a bit in `same`, by 11 bits at a time. They are read again:
        kept in registers on this rare way, they would cost the others a block an SM."""
        lane = tid % 32
        self.clear(smem, tid)
        if tid == 0:
            ops.store_shared_i32(smem + self.words + 16, Int32(-1))
            ops.store_shared_i32(smem + self.words + 20, Int32(0))
        self.sync_all()
        lowest = Uint32(NONE)
        highest = Uint32(0)
        rest = same
        while rest != 0:
            key = Uint32(self.reread(logits, rest & -rest, first, visible) >> 32)
            lowest = so.least(lowest, key)
            highest = so.largest(highest, key)
            rest = rest & (rest - 1)
        lowest = cute.arch.warp_redux_sync(lowest, "umin")
        highest = cute.arch.warp_redux_sync(highest, "umax")
        if lane == 0:
            for r in cutlass.range_constexpr(self.ranks):
                so.atomic_min(self.at_rank(smem + self.words + 16, r), lowest, self.space)
                so.atomic_max(self.at_rank(smem + self.words + 20, r), highest, self.space)
        self.sync_all()
        low = (Uint64(so.load_u32(smem + self.words + 16)) << 32) | Uint64(Uint32(~visible))
        high = (Uint64(so.load_u32(smem + self.words + 20)) << 32) | Uint64(NONE)
        width = cutlass.max(64 - Int32(cute.arch.clz(high - low)) - BITS, Int32(0))
        limit = Uint64(BINS)  # places of the range that is left
        done = Int32(0)
        while done == 0:
            rest = same
            while rest != 0:
                number = self.reread(logits, rest & -rest, first, visible)
                place = (number - low) >> Uint64(width)
                if number >= low and place < limit:
                    so.count_one(smem + self.hist + Int32(place) * 4, "shared")
                rest = rest & (rest - 1)
            self.sync_all()
            self.scan(smem, need, tid)
            low = low + (Uint64(so.load_u32(smem + self.words)) << Uint64(width))
            need = need - so.load_i32(smem + self.words + 4)
            if so.load_i32(smem + self.words + 8) == need or width == 0:
                done = Int32(1)
            limit = Uint64(1) << Uint64(cutlass.min(width, Int32(BITS)))
            width = cutlass.max(width - BITS, Int32(0))
            self.clear(smem, tid)
        return low

    @cute.jit
    def reread(self, logits: Int64, single: Int32, first: Int32, visible: Int32) -> Uint64:
        """The number of the element whose bit `single` is, from memory."""
        j = 31 - Int32(cute.arch.clz(single))
        index = first + j // 4 * CHUNK + j % 4
        value = so.load_f32_if(Int32(index < visible), logits + Int64(index) * 4, Float32(float("nan")))
        return so.rank_number(value, index)

    @cute.jit
    def zero(self, smem: Int32) -> Int32:
        """A zero that the compiler does not know: what is made with it is not kept in registers for later."""
        return so.load_i32(smem + self.words + 28)

    @cute.jit
    def clear(self, smem: Int32, tid: Int32):
        """Zero the histogram after all have read it; complete when this returns."""
        self.sync_all()
        self.zero_bins(smem, tid)
        cute.arch.sync_threads()

    @cute.jit
    def zero_bins(self, smem: Int32, tid: Int32):
        for i in cutlass.range_constexpr(BINS // 2 // self.scanners):
            if cutlass.const_expr(self.scanners == self.threads):
                ops.store_shared_64(smem + self.hist + (tid + i * self.threads) * 8, Uint64(0))
            elif tid < self.scanners:
                ops.store_shared_64(smem + self.hist + (tid + i * self.scanners) * 8, Uint64(0))
