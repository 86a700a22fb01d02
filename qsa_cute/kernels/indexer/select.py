"""Selection of the 512 best blocks of a row (B3, and K4's expansion): exact, stable, each logit read once.

The order is total: value descending, lower block first among equals; NaN is lowest and -0 equals +0. What is
selected is a function of the row's visible logits alone. Rows that see <= 512 blocks select all, unread.

Grid: (rows). One block a row:
1. The row goes to registers (a strided sample of it when it is longer), and 1024 groups of its elements give
   their maxima. The 512th largest maximum bounds the threshold from below, since 512 elements reach it; a
   2048-bin histogram over the maxima's range finds it to a bin's width.
2. Elements that reach the bound, typically 600 to 1500, are appended to a list in shared memory as they come;
   what was not in registers streams past once.
3. A radix select over (value, ~index), 11 bits a pass within the range that is left, finds the 512th of the
   list. The numbers are distinct, so ties need no care. Usually one pass, then a few numbers ranked directly.
4. A bitmap puts the winners in ascending order; they are stored as they are, ranked, or expanded to tokens.
A row that fits neither bound nor list (most of it equal, say) is read again in pieces, and the list is cut to
the best 512 whenever it fills: slower, the same result.

Row r sees visible = (p + 1) // 4 blocks. Prefill (from_end = 0): p = query_starts[b] + t, t = r % seq_len; rows
with p >= context_lengths[b] are padding: all -1. Decode (from_end = 1): p = context_lengths[b] - seq_len + t.
Output: expand = 0 512 block ids, expand = 1 the 2051 tokens (4 a block, then the open tail), -1 at the end;
ascending, or best first with ranked = 1 (ascending where all are selected). `split_counters`, when given, are
zeroed: num_kv_heads a row.

Baked: threads, elements a thread holds. Any alignment of rows. Blocks up to 2^31; elements past `visible` are not read.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from qsa_cute.geometry import BLOCK_TOKENS, TOP_BLOCKS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.indexer import select_ops as so
from qsa_cute.kernels.indexer.select_list import BINS, BITS, FEW, NONE, SelectList

PARAMS = (
    ptr("logits_ptr", "f32", 16),
    ptr("out_ptr", "i32"),
    ptr("context_lengths", "i32"),
    ptr("query_starts", "i32"),
    ptr("split_counters", "i32"),
    i32("seq_len"),
    i32("from_end"),
    i32("row_start"),
    i32("num_blocks"),
    i32("ranked"),
    i32("expand"),
    i32("num_kv_heads"),
    i64("logits_stride_row"),
    i64("out_stride_row"),
)

GROUPS = 1024  # twice TOP_BLOCKS: the bound is their median
MAX_LIST = 4096  # a list that cannot take 512 numbers and one more chunk is longer


class Select(SelectList):
    early_launch = early.SUPPORTED
    space = "shared"  # where the list and the first histogram are

    def __init__(self, head_dim: int, dtype: str, threads: int, held: int):
        self.threads, self.held = threads, held
        self.warps = threads // 32
        self.chunk = threads * 4  # elements that a block reads at once
        self.list_size = max(min(MAX_LIST, threads * held), self.chunk + 2 * TOP_BLOCKS)
        self.hist_a = self.list_size * 8
        self.hist_b = self.hist_a + BINS * 4
        self.chosen = self.hist_b + BINS * 4
        self.few = self.chosen + TOP_BLOCKS * 4
        self.totals = self.few + FEW * 8
        self.words = self.totals + 128  # bin, above, count, list length, few's length, list's maximum
        self.result = self.words + 32  # one number
        self.extremes = self.result + 32  # [rank][warp] (min, max)
        self.smem_bytes = self.extremes + 8 * self.warps * self.max_ranks()
        self.min_blocks = max(1, min(65536 // (threads * max(40 + held, 56)), 227 * 1024 // (self.smem_bytes + 1024)))

    def max_ranks(self) -> int:
        return 1

    @cute.jit
    def __call__(
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
        stream: cuda.CUstream,
    ):
        self.kernel(
            logits_ptr,
            out_ptr,
            context_lengths,
            query_starts,
            split_counters,
            seq_len,
            from_end,
            row_start,
            num_blocks,
            ranked,
            expand,
            num_kv_heads,
            logits_stride_row,
            out_stride_row,
        ).launch(
            grid=(1, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=self.min_blocks,
            preferred_smem_carveout=100,
        )

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
        _, ranks, _ = cute.arch.grid_dim()
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
        if from_end != 0:
            start = length - seq_len
        position = start + (row_start + row) - sequence * seq_len
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
            logits = logits_ptr.toint() + Int64(row) * logits_stride_row * 4
            found = self.collect(smem, logits, visible, rank, ranks, tid)
            if rank == 0:
                self.finish(smem, logits, visible, found, ranked, tid)
                self.output(smem, out, Int32(TOP_BLOCKS), seen, expand, tid)

    # ---- reading -------------------------------------------------------------------------------------

    @cute.jit
    def prepare(self, smem: Int32, tid: Int32):
        """Zero both histograms and the words; no bin found."""
        for i in cutlass.range_constexpr(2 * BINS // self.threads):
            ops.store_shared_i32(smem + self.hist_a + (tid + i * self.threads) * 4, Int32(0))
        if tid > 0 and tid < 8:
            ops.store_shared_i32(smem + self.words + tid * 4, Int32(0))
        if tid == 0:
            ops.store_shared_i32(smem + self.words, Int32(-1))

    @cute.jit
    def read_4(self, logits: Int64, first: Int32, visible: Int32):
        """Elements first .. first + 3 of the row; NaN for those outside [0, visible), which are not read."""
        at = logits + Int64(first) * 4
        v = so.load_f32x4_if(Int32(first >= 0 and first + 4 <= visible), at)
        v0, v1, v2, v3 = v[0], v[1], v[2], v[3]
        if (first < 0 and first > -4) or (first < visible and first + 4 > visible):
            v0 = so.load_f32_if(Int32(first >= 0 and first < visible), at, v0)
            v1 = so.load_f32_if(Int32(first + 1 >= 0 and first + 1 < visible), at + 4, v1)
            v2 = so.load_f32_if(Int32(first + 2 >= 0 and first + 2 < visible), at + 8, v2)
            v3 = so.load_f32_if(Int32(first + 3 >= 0 and first + 3 < visible), at + 12, v3)
        return v0, v1, v2, v3

    @cute.jit
    def collect(self, smem: Int32, logits: Int64, visible: Int32, rank: Int32, ranks: Int32, tid: Int32):
        """Put every element that reaches the bound on the list. The list's length (which may exceed its size) is
        in the words; returns the bound's key."""
        shift = Int32((logits % 16) // 4)  # elements from the aligned address below the row to the row
        chunks = (visible + shift + self.chunk - 1) // self.chunk
        mine = (chunks + ranks - 1) // ranks
        stride = (mine + self.held // 4 - 1) // (self.held // 4)
        origin = tid * 4 - shift

        tV = cute.make_rmem_tensor((self.held,), Float32)
        for i in cutlass.range_constexpr(self.held // 4):
            first = (i * stride * ranks + rank) * self.chunk + origin
            v = self.read_4(logits, first, visible)
            for e in cutlass.range_constexpr(4):
                tV[4 * i + e] = v[e]

        bound = self.find_bound(smem, tV, visible, rank, ranks, tid)
        limit = so.key_value(bound)
        tI = cute.make_rmem_tensor((self.held // 4,), Int32)
        for i in cutlass.range_constexpr(self.held // 4):
            tI[i] = (i * stride * ranks + rank) * self.chunk + origin
        self.append(smem, tV, tI, self.held, limit)
        if stride > 1:
            self.stream(smem, logits, visible, mine, stride, rank, ranks, origin, limit, tid)
        self.sync_all()
        return bound

    @cute.jit
    def stream(
        self,
        smem: Int32,
        logits: Int64,
        visible: Int32,
        mine: Int32,
        stride: Int32,
        rank: Int32,
        ranks: Int32,
        origin: Int32,
        limit: Float32,
        tid: Int32,
    ):
        """The chunks that are not in registers, four at a time."""
        shift = tid * 4 - origin
        whole = ((visible + shift) // self.chunk - rank + ranks - 1) // ranks  # of this rank's chunks: before the last
        tV = cute.make_rmem_tensor((16,), Float32)
        tI = cute.make_rmem_tensor((4,), Int32)
        step = ranks * self.chunk
        first = rank * self.chunk + origin
        chunk = Int32(0)
        passed = Int32(0)
        while chunk < mine:
            for i in cutlass.range_constexpr(4):
                passed = passed + 1
                by = Int32(1)
                if passed == stride:  # this one is in registers
                    by, passed = Int32(2), Int32(1)
                chunk, first = chunk + by, first + by * step
                tI[i] = first
            if chunk < whole:
                for i in cutlass.range_constexpr(4):
                    v = so.load_f32x4_if(Int32(1), logits + Int64(tI[i]) * 4)
                    for e in cutlass.range_constexpr(4):
                        tV[4 * i + e] = v[e]
            else:  # chunks past the last begin past `visible`, too
                for i in cutlass.range_constexpr(4):
                    v = self.read_4(logits, tI[i], visible)
                    for e in cutlass.range_constexpr(4):
                        tV[4 * i + e] = v[e]
            self.append(smem, tV, tI, 16, limit)

    @cute.jit
    def find_bound(self, smem: Int32, tV: cute.Tensor, visible: Int32, rank: Int32, ranks: Int32, tid: Int32):
        """The key of a value that at least 512 groups reach (-inf where there are fewer groups); fewer groups of a long
        row, so that some 1536 elements reach it."""
        groups = GROUPS // self.threads
        tG = cute.make_rmem_tensor((groups,), Uint32)
        low = Uint32(NONE)
        high = Uint32(0)
        for g in cutlass.range_constexpr(groups):
            size = 4 // groups
            top = tV[g * size]
            for i in cutlass.range_constexpr(self.held // 4):
                for e in cutlass.range_constexpr(size):
                    if cutlass.const_expr(i + e > 0):
                        top = cute.arch.fmax(top, tV[4 * i + g * size + e])
            key = so.order_key(top)
            tG[g] = key
            high = so.largest(high, key)
            low = so.least(low, key - 1)  # no value's key, 0, becomes the highest
        low = cute.arch.warp_redux_sync(low, "umin")
        high = cute.arch.warp_redux_sync(high, "umax")
        self.share_extremes(smem, low, high, rank, ranks, tid)
        low = Uint32(NONE)
        high = Uint32(0)
        for i in cutlass.range(tid % 32, ranks * self.warps, 32, unroll=1):
            low = so.least(low, so.load_u32(smem + self.extremes + i * 8))
            high = so.largest(high, so.load_u32(smem + self.extremes + i * 8 + 4))
        low = cute.arch.warp_redux_sync(low, "umin")
        high = cute.arch.warp_redux_sync(high, "umax")
        low = low + 1  # 0 when there is no value at all

        width = Int32(0)
        if high > low:
            width = cutlass.max(32 - Int32(cute.arch.clz(high - low)) - BITS, Int32(0))
        root = self.at_root(smem + self.hist_a)
        for g in cutlass.range_constexpr(groups):
            if tG[g] != 0:
                so.count_one(root + Int32((tG[g] - low) >> Uint32(width)) * 4, self.space)
        self.sync_all()
        need = cutlass.min(self.held * self.threads * (3 * TOP_BLOCKS) * ranks // visible, Int32(TOP_BLOCKS))
        self.scan(smem, root, self.space, cutlass.max(need, Int32(1)), tid)
        place = so.load_i32(smem + self.words)
        bound = Uint32(0x007FFFFF)  # -inf
        if place >= 0:
            bound = low + (Uint32(place) << Uint32(width))
        return bound

    @cute.jit
    def append(self, smem: Int32, tV: cute.Tensor, tI: cute.Tensor, n: cutlass.Constexpr[int], limit: Float32):
        """Append this thread's elements that reach `limit` to the list, or none of the warp's where they do not fit: a
        list that is longer than its size is not read. tI: the places of each four."""
        less = Int32(0)
        for i in cutlass.range_constexpr(n):
            less = less + so.minus_one_if(tV[i], limit)
        count = -less
        before = self.warp_prefix(count)
        base = Int32(0)
        if cute.arch.lane_idx() == 31:
            base = so.atomic_add(self.at_root(smem + self.words + 12), before + count, self.space)
        base = cute.arch.shuffle_sync(base, offset=31)
        total = cute.arch.shuffle_sync(before + count, offset=31)
        if base + total <= self.list_size:
            at = self.at_root(smem) + (base + before) * 8
            for i in cutlass.range_constexpr(n):
                at = so.push_if(tV[i], limit, tI[i // 4] + i % 4, at, self.space)

    @cute.jit
    def warp_prefix(self, count: Int32) -> Int32:
        """The sum of the lower lanes' counts."""
        lane = cute.arch.lane_idx()
        total = count
        for d in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(total, offset=1 << d)
            total = total + (other if lane >= (1 << d) else Int32(0))
        return total - count

    # ---- where the list is: this block; the cluster kernel's root ---------------------------------------

    @cute.jit
    def at_root(self, addr: Int32) -> Int32:
        return addr

    @cute.jit
    def sync_all(self):
        cute.arch.sync_threads()

    @cute.jit
    def leave(self):
        """Instead of `collect`."""

    @cute.jit
    def share_extremes(self, smem: Int32, low: Uint32, high: Uint32, rank: Int32, ranks: Int32, tid: Int32):
        if tid % 32 == 0:
            so.store_u32x2(smem + self.extremes + (tid // 32) * 8, low, high, "shared")
        cute.arch.sync_threads()
