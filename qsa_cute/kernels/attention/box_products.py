"""The products of decode over a ring of gathered blocks (`box_gather.py`): scores, softmax, P V (SM90).

The same sum as `row_gather.py`, with other hands. Warps 0 .. 7 multiply, warps 8 .. 11 gather. A block's part of the
list is cut in groups of four entries; its groups go eight to a stage of 32 tokens, its stages to steps of four (five,
where that is what is left). A ring of stages is filled in order: K of a step, V of the step, K of the next. In a step

    each warp scores up to three times 8 tokens, S = Q K^T;
    the warps agree on the running maximum through shared memory                                  (barrier)
    each warp writes its P to shared memory, in the type of the products                          (barrier)
    each warp multiplies the whole P by its own head_dim / 8 columns of V.

A stage in shared memory: 8 places of [parts of a row][4 tokens][128 bytes], the 16-byte chunks of a line of 128 bytes
swizzled as TMA does it: chunk c of the line at address a sits at c ^ a / 128 % 8. Places p and p + 4, groups 2 p and
2 p + 1 of the stage, make up the 8 tokens of one MMA; places 4 .. 7 lie 512 bytes further than they would without a
gap, so that the two meet no bank conflict. A gather warp fills both of some pairs.

What a place may hold: of K anything where no entry is valid, since a bit an entry masks S before the softmax; of V
zeros, except in 16 tokens past the end of the list, which nobody multiplies.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.attention.row_gather import EMPTY_MAX, RESCALE_THRESHOLD, ROWS, RowGather, Share
from qsa_cute.kernels.common import ops, tma

WARPS = 8  # that multiply
GATHER_WARPS = 4
STAGE_GROUPS = 8
STEP_STAGES = 4
PASSES = 3  # times 8 tokens that a warp scores in a step at most: five stages over 8 warps
LAST_STAGES = 5  # of a list's last step: one sequence in 16 blocks leaves 129 tokens to one of them
LINE = 128  # bytes of a token's part in a box
GAP = BLOCK_TOKENS * LINE  # see above
DIVIDED = 4095  # the largest number that `BoxShare.divide` takes, for up to 16 shares
TABLE_PAGES = 1024  # of a sequence whose page tables are kept in shared memory


@dataclass(frozen=True)
class BoxShare(Share):
    reciprocal: Int32  # of num_splits: 2^16 over it, rounded up

    @staticmethod
    def of(split: Int32, num_splits: Int32, group: Int32) -> "BoxShare":
        return BoxShare(split, num_splits, group, ops.forget(65535 // num_splits + 1))

    def divide(self, number: Int32) -> Int32:
        """number // num_splits, for numbers from 0 to `DIVIDED`: a tenth of a division, for which all would wait."""
        return (number * self.reciprocal) >> 16


class BoxProducts(RowGather):
    """Static configuration and what the warps that multiply do. Kernels say, in `settle`, how much there is to do."""

    tables = 1  # page tables of a sequence

    def __init__(self, head_dim: int, dtype: str, stages: int):
        if stages < 2 * LAST_STAGES:
            raise ValueError(f"{stages} stages: a list's last step takes {LAST_STAGES} of K and {LAST_STAGES} of V")
        RowGather.__init__(self, head_dim, dtype, WARPS, k_stages=1, v_stages=1, blocks_per_sm=1)
        self.chains, self.ring = 4, stages
        self.threads = self.workers + 32 * GATHER_WARPS
        # Groups of a stage that a gather warp fills at a time, and the warps that share a stage so. On the H200 a fill
        # of two boxes takes a warp 380 clocks, one of eight 500; the copies of a stage take 265 at 2 KB a box, half of
        # it at 1 KB (docs/performance.md, boxes 13 and 16). By twos the first stage is there sooner, by fours all are.
        self.fill_groups = 4 if self.fp8 else 2
        self.stage_warps = STAGE_GROUPS // self.fill_groups
        self.fill_stages = GATHER_WARPS // self.stage_warps  # of so many in turn, one is this warp's
        self.warp_chunks = self.pitch // 16 // self.warps  # of V, 16 bytes each
        self.group_bytes = BLOCK_TOKENS * self.pitch
        self.stage_bytes = STAGE_GROUPS * self.group_bytes + GAP
        self.p_pitch = (2 * PASSES * 32 + 8) * 2  # an odd number of chunks: no bank conflicts
        self.sizes = {
            "ring": self.ring * self.stage_bytes,
            "q": max(ROWS * self.q_pitch, ROWS * self.p_pitch),
            "table": self.tables * TABLE_PAGES * 4,
            "full": self.ring * 8,
            "empty": self.ring * 8,
            "masks": self.ring * 4,
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
            cute.arch.mbarrier_init(ops.shared_barrier(smem + self.at["full"] + 8 * s), self.stage_warps)
            cute.arch.mbarrier_init(ops.shared_barrier(smem + self.at["empty"] + 8 * s), self.warps)

    # ---- multiplying ---------------------------------------------------------------------------------

    @cute.jit
    def consume(
        self,
        smem: Int32,
        scale_log2: Float32,
        top_k: Int32,
        share: BoxShare,
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
        groups, least = self.settle(smem, top_k, share, lane)
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
    def step_stages(self, left: Int32, first: Int32) -> Int32:
        """Of the step that begins when `left` stages are left, `first` at least: the first step, which begins before it
        is known what the list holds, has so many in any case."""
        return cutlass.max(left if left <= LAST_STAGES else Int32(STEP_STAGES), first)

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
            for k in cutlass.range_constexpr(self.pitch // 64):
                b = ops.ldmatrix_x4(line + k // 2 * (BLOCK_TOKENS * LINE) + (chunk ^ (64 * ((k % 2) ^ (k // 2 % 2)))))
                self.multiply_k(acc, tQ, k, b)
        self.sum_chains(acc, acc)
        bits = valid >> ((lane & 3) * 2)
        for j in cutlass.range_constexpr(4):
            tS[4 * i + j] = acc[j] * scale_log2 if (bits >> (j % 2)) & 1 != 0 else -Float32.inf

    def multiply_k(self, acc: cute.Tensor, tQ: cute.Tensor, k: int, b: tuple):
        """acc += Q K^T over the columns of 64 bytes of K: the lane's four words of 8 tokens."""
        for n in range(2):
            a = (tQ[8 * k + 4 * n], tQ[8 * k + 4 * n + 1], tQ[8 * k + 4 * n + 2], tQ[8 * k + 4 * n + 3])
            ops.add_mma_16816(self.mma_dtype, acc, 4 * ((2 * k + n) % self.chains), a, (b[2 * n], b[2 * n + 1]))

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
        chunk0 = warp * self.warp_chunks
        sP = smem + self.at["p"] + row * self.p_pitch + (lane >> 4) * 16
        row = row & 7
        place = (lane >> 3 & 1) * self.group_bytes + (row & 3) * LINE
        place = (
            place + (row >> 2) * (STAGE_GROUPS // 2 * self.group_bytes + GAP) + (chunk0 >> 3) * (BLOCK_TOKENS * LINE)
        )
        chunk = chunk0 & 7
        if cutlass.const_expr(self.warp_chunks > 1):
            chunk = chunk + (lane >> 4)
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
