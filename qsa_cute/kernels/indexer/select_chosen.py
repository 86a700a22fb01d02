"""The chosen of `select_held.py`, a bit an element in registers: put in order in shared memory and stored, by one block
or by the blocks of a cluster, each its own."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from qsa_cute.geometry import BLOCK_TOKENS, INDEX_WIDTH, TOP_BLOCKS
from qsa_cute.kernels.common import ops
from qsa_cute.kernels.indexer import select_ops as so

CHUNK = 128  # elements that a warp reads at once


class SelectChosen:
    # ---- the chosen ----------------------------------------------------------------------------------

    @cute.jit
    def lay_out(self, smem: Int32, taken: Int32, tS: cute.Tensor, tid: Int32) -> Int32:
        """Into tS, how many of this block's chosen elements come before this thread's of each chunk; their number."""
        lane = tid % 32
        warp = tid // 32
        pairs = taken - ((taken >> 1) & 0x55555555)
        pairs = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
        words = 2 if self.chunks > 4 else 1
        tP = cute.make_rmem_tensor((words,), Int32)  # counts of chunks, a byte each
        if cutlass.const_expr(words == 2):
            tP[0] = pairs & 0x0F0F0F0F
            tP[1] = (pairs >> 4) & 0x0F0F0F0F
        else:
            tP[0] = (pairs & 0x0F0F) | (((pairs >> 4) & 0x0F0F) << 16)
        total = cute.arch.warp_redux_sync(Int32(cute.arch.popc(taken)), "add")
        if lane == 0:
            ops.store_shared_i32(smem + self.totals + warp * 4, total)
        tI = cute.make_rmem_tensor((words,), Int32)
        for w in cutlass.range_constexpr(words):
            tI[w] = tP[w]
        for d in cutlass.range_constexpr(5):
            for w in cutlass.range_constexpr(words):
                other = cute.arch.shuffle_sync_up(tI[w], offset=1 << d)
                tI[w] = tI[w] + (other if lane >= (1 << d) else Int32(0))
        tT = cute.make_rmem_tensor((words,), Int32)
        for w in cutlass.range_constexpr(words):
            tT[w] = cute.arch.shuffle_sync(tI[w], offset=31)
        cute.arch.sync_threads()
        other = Int32(0)
        if lane < self.warps:
            other = so.load_i32(smem + self.totals + lane * 4)
        start = cute.arch.warp_redux_sync(other if lane < warp else Int32(0), "add")
        for c in cutlass.range_constexpr(self.chunks):
            w = c % 2 if words == 2 else 0
            byte = c // 2 if words == 2 else c % 2 * 2 + c // 2
            tS[c] = start + (((tI[w] - tP[w]) >> (8 * byte)) & 0xFF)
            start = start + ((tT[w] >> (8 * byte)) & 0xFF)
        return cute.arch.warp_redux_sync(other, "add")

    @cute.jit
    def emit(
        self,
        smem: Int32,
        out: Int64,
        taken: Int32,
        first: Int32,
        before: Int32,
        seen: Int32,
        rank: Int32,
        expand: Int32,
        tid: Int32,
    ):
        """Ids of the chosen, ascending."""
        tS = cute.make_rmem_tensor((self.chunks,), Int32)
        count = self.lay_out(smem, taken, tS, tid)
        for c in cutlass.range_constexpr(self.chunks):
            at = smem + self.chosen + tS[c] * 4
            for e in cutlass.range_constexpr(4):
                at = so.store_id_if(taken, 1 << (4 * c + e), first + c * CHUNK + e, at)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.ranks == 1):
            self.output_all(smem, out, seen, expand, tid)
        else:
            self.output_part(smem, out, before, count, seen, rank, expand, tid)

    @cute.jit
    def emit_best(
        self,
        smem: Int32,
        logits: Int64,
        out: Int64,
        taken: Int32,
        first: Int32,
        before: Int32,
        visible: Int32,
        seen: Int32,
        rank: Int32,
        expand: Int32,
        tid: Int32,
    ):
        """Ids of the chosen, best first: all numbers go to rank 0, which ranks them."""
        tS = cute.make_rmem_tensor((self.chunks,), Int32)
        self.lay_out(smem, taken, tS, tid)
        best = self.at_rank(smem + self.hist, 0)
        for c in cutlass.range_constexpr(self.chunks):
            at = before + tS[c]
            for e in cutlass.range_constexpr(4):
                if (taken & self.bit(4 * c + e)) != 0:
                    number = self.reread(logits, self.bit(4 * c + e), first, visible)
                    so.store_u64_at(best + at * 8, number, self.space)
                    at = at + 1
        self.sync_all()
        if rank == 0:
            for i in cutlass.range(tid, TOP_BLOCKS, self.threads, unroll=1):
                number = so.load_u64(smem + self.hist + i * 8)
                above = Int32(0)
                for j in cutlass.range(TOP_BLOCKS, unroll=8):
                    above = above + Int32(so.load_u64(smem + self.hist + j * 8) > number)
                ops.store_shared_i32(smem + self.chosen + above * 4, so.number_index(number))
            cute.arch.sync_threads()
            self.output_all(smem, out, seen, expand, tid)

    @cute.jit
    def output_all(self, smem: Int32, out: Int64, seen: Int32, expand: Int32, tid: Int32):
        if expand == 0:
            for k in cutlass.range_constexpr((TOP_BLOCKS + self.threads - 1) // self.threads):
                i = tid + k * self.threads
                if i < TOP_BLOCKS:
                    ops.store_global_i32(out + Int64(i) * 4, so.load_i32(smem + self.chosen + i * 4))
        else:
            chosen = smem + self.chosen + tid // BLOCK_TOKENS * 4
            at = out + Int64(tid) * 4
            whole, rest = divmod(TOP_BLOCKS * BLOCK_TOKENS, self.threads)
            for k in cutlass.range_constexpr(whole):
                self.output_token(chosen, at, k, tid)
            if cutlass.const_expr(rest > 0):
                if tid < rest:
                    self.output_token(chosen, at, whole, tid)
            self.output_tail(out, seen, tid)

    def output_token(self, chosen: Int32, at: Int64, k: int, tid: Int32) -> None:
        block = so.load_i32(chosen + k * self.threads // BLOCK_TOKENS * 4)
        ops.store_global_i32(at + k * self.threads * 4, block * BLOCK_TOKENS + tid % BLOCK_TOKENS)

    @cute.jit
    def output_tail(self, out: Int64, seen: Int32, tid: Int32):
        if tid < INDEX_WIDTH - TOP_BLOCKS * BLOCK_TOKENS:
            tail = seen % BLOCK_TOKENS
            token = seen - tail + tid
            if tid >= tail:
                token = Int32(-1)
            ops.store_global_i32(out + Int64(TOP_BLOCKS * BLOCK_TOKENS + tid) * 4, token)

    @cute.jit
    def output_part(
        self, smem: Int32, out: Int64, before: Int32, count: Int32, seen: Int32, rank: Int32, expand: Int32, tid: Int32
    ):
        """This block's chosen, `before` of them being other blocks'."""
        if expand == 0:
            for i in cutlass.range(tid, count, self.threads, unroll=1):
                ops.store_global_i32(out + Int64(before + i) * 4, so.load_i32(smem + self.chosen + i * 4))
        else:
            for i in cutlass.range(tid, count * BLOCK_TOKENS, self.threads, unroll=1):
                token = so.load_i32(smem + self.chosen + (i // BLOCK_TOKENS) * 4) * BLOCK_TOKENS + i % BLOCK_TOKENS
                ops.store_global_i32(out + Int64(before * BLOCK_TOKENS + i) * 4, token)
            if rank == 0:
                self.output_tail(out, seen, tid)

    # ---- one block, or a cluster ---------------------------------------------------------------------

    @cute.jit
    def at_rank(self, addr: Int32, rank: cutlass.Constexpr[int]) -> Int32:
        if cutlass.const_expr(self.ranks > 1):
            addr = so.map_cluster(addr, Int32(rank))
        return addr

    @cute.jit
    def sync_all(self):
        if cutlass.const_expr(self.ranks > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def leave(self):
        if cutlass.const_expr(self.ranks > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def share_extremes(self, smem: Int32, low: Uint32, high: Uint32, rank: Int32, ranks: Int32, tid: Int32):
        at = smem + self.extremes + (rank * self.warps + tid // 32) * 8
        if cutlass.const_expr(self.ranks > 1):
            cute.arch.cluster_wait()
            if tid % 32 < ranks:
                so.store_u32x2(so.map_cluster(at, tid % 32), low, high, self.space)
        elif tid % 32 == 0:
            so.store_u32x2(at, low, high, "shared")
        self.sync_all()
