"""What decode over vLLM's paged cache adds to `box_gather.py`: counted lists, one block table, gates.

K and V have a tensor map each, over pages of run-time length. A whole block's place, the same in both, is its page and
its block within the page, in one word.

The table that a row's list is looked up in depends on `token_to_req`. The warps that multiply copy the one that the row
is likely to have to shared memory before they know, so that no look-up waits for two trips to memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.attention.box_gather import TABLES
from qsa_cute.kernels.attention.box_products import TABLE_PAGES, BoxShare
from qsa_cute.kernels.attention.fp8_boxes import Fp8Boxes
from qsa_cute.kernels.attention.paged_rows import GatedOutput, PagedOutput, PagedTokens
from qsa_cute.kernels.attention.row_gather import ROWS
from qsa_cute.kernels.common import ops
from qsa_cute.kernels.common.rope_norm import unpack_2

GATE_GROUP_BYTES = ROWS * 16  # gates of a group of 8 columns


@dataclass(frozen=True)
class BoxedTokens(PagedTokens):
    """A `BoxSource`: `PagedTokens` whose table lies in shared memory when there is room for it."""

    staged: Int32  # shared address of the table; 0: it is in global memory alone
    k_map: Int64
    v_map: Int64
    kv_head: Int32
    block_bits: Int32  # of a place, that name a block of a page

    @cute.jit
    def look_up(self, token: Int32):
        at, mapped = self.page_of(token)
        page = Int32(-1)
        if self.staged != 0:
            page = ops.load_shared_i32(self.staged + (at if mapped != 0 else Int32(0)) * 4)
            page = page if mapped != 0 else Int32(-1)
        else:
            page = ops.load_global_i32_if(mapped, self.table + Int64(at) * 4, Int32(-1))
        return page, at

    @cute.jit
    def places(self, token: Int32, looked_up):
        page, at = looked_up
        place = Int32(-1)
        if page >= 0 and page < self.num_pages:
            place = (page << self.block_bits) | ((token - at * self.divisor.size) >> 2)
        return place, place

    def whole(self, first: Int32, last: Int32):
        return first >= 0

    @cute.jit
    def tensor_map(self, of_v: Int32) -> Int64:
        return self.v_map if of_v != 0 else self.k_map

    @cute.jit
    def box(self, place: Int32) -> tuple:
        token = (place & ((Int32(1) << self.block_bits) - 1)) * BLOCK_TOKENS
        return Int32(0), token, Int32(0), self.kv_head, place >> self.block_bits


class PagedBoxes(GatedOutput, Fp8Boxes):
    """`counted` and `settle` say how much a block has to do."""

    def __init__(self, head_dim: int, dtype: str, stages: int):
        super().__init__(head_dim, dtype, stages)
        self.sizes["gate"] = self.groups * GATE_GROUP_BYTES
        self.lay_out()

    # ---- the list ------------------------------------------------------------------------------------

    @cute.jit
    def split_groups(self, top_k: Int32, share: BoxShare) -> Int32:
        """Groups of the split in a list of so many entries."""
        groups = (top_k + (BLOCK_TOKENS - 1)) >> 2
        return share.divide(groups + (share.num_splits - 1 - share.split))

    def settle(self, smem: Int32, top_k: Int32, share: BoxShare, lane: Int32):
        return self.split_groups(top_k, share), Int32(0)

    @cute.jit
    def counted(self, entries: tuple, top_k: Int32, share: BoxShare, warp: Int32, lane: Int32):
        """This lane's entries of the first step, which were read before it was known how many count."""
        at = self.first_at(share, Int32(0), warp, lane)
        return tuple([entries[t] if at + t < top_k else Int32(-1) for t in range(BLOCK_TOKENS)])

    @cute.jit
    def read_table(self, pages: cute.Tensor, table: Int64, width: Int32, tid: Int32):
        """Start reading this thread's pages of a table, if that fits in shared memory."""
        for j in cutlass.range_constexpr(TABLE_PAGES // self.workers):
            at = tid + j * self.workers
            wanted = Int32(at < width and width <= TABLE_PAGES and tid < self.workers)
            pages[j] = ops.load_global_i32_if(wanted, table + Int64(at) * 4, Int32(-1))

    @cute.jit
    def stage_table(self, smem: Int32, pages: cute.Tensor, width: Int32, tid: Int32):
        """Leave them for the warps that `wait_for_tables`."""
        for j in cutlass.range_constexpr(TABLE_PAGES // self.workers):
            if j * self.workers < width:
                ops.store_shared_i32(smem + self.at["table"] + (tid + j * self.workers) * 4, pages[j])
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=TABLES, number_of_threads=self.threads)

    # ---- output --------------------------------------------------------------------------------------

    @cute.jit
    def stage_gate(self, smem: Int32, gate: Int64, gate_head: Int64, share: BoxShare, tid: Int32) -> Int64:
        """Start copying the gates of the columns that this block stores, [group of 8 columns][row][8]."""
        staged = Int64(0)
        if gate != 0:
            staged = Int64(smem + self.at["gate"])
            for i in cutlass.range(tid, self.owned(share) * ROWS, self.workers, unroll=1):
                row, group = i & (ROWS - 1), (i >> 4) * share.num_splits + share.split
                live = row < share.group
                src = gate + Int64(row if live else Int32(0)) * gate_head + Int64(group * 16)
                dst = smem + self.at["gate"] + group * GATE_GROUP_BYTES + row * 16
                ops.cp_async_16(dst, src, Int32(16) if live else Int32(0))
        cute.arch.cp_async_commit_group()
        return staged

    @cute.jit
    def load_gate_quad(self, out: PagedOutput, row: Int32, col: Int32):
        return ops.load_shared_i32x2(Int32(out.gate) + (col >> 3) * GATE_GROUP_BYTES + row * 16 + (col & 7) * 2)

    @cute.jit
    def load_gates(self, out: PagedOutput, row: Int32, column: Int32, tGate: cute.Tensor):
        """The sigmoids."""
        if out.gate != 0:
            words = self.load_gate_quad(out, row, column)
            for pair in cutlass.range_constexpr(2):
                low, high = unpack_2("bf16", words[pair])
                tGate[2 * pair], tGate[2 * pair + 1] = ops.sigmoid(low), ops.sigmoid(high)

    @cute.jit
    def store_gated(self, out: PagedOutput, row: Int32, column: Int32, o: tuple, tGate: cute.Tensor):
        low, high = self.round_quad(out, o)
        if out.gate != 0:
            low, high = self.passed_pair(low, tGate[0], tGate[1]), self.passed_pair(high, tGate[2], tGate[3])
        ops.store_global_i32x2(out.o + Int64(row) * out.o_head + Int64(column) * 2, low, high)

    @cute.jit
    def passed_pair(self, word: Int32, low_share: Float32, high_share: Float32) -> Int32:
        low, high = unpack_2("bf16", word)
        return ops.pack_2("bf16", self.passed(low, low_share), self.passed(high, high_share))

    @cute.jit
    def store_row(
        self, out: PagedOutput, group: Int32, tO: cute.Tensor, tMax: cute.Tensor, tSum: cute.Tensor, tid: Int32
    ):
        for r in cutlass.range_constexpr(2):
            inverse = self.inverse(tSum[r])
            for n in cutlass.range_constexpr(self.warp_groups):
                tO[4 * n + 2 * r] = tO[4 * n + 2 * r] * inverse
                tO[4 * n + 2 * r + 1] = tO[4 * n + 2 * r + 1] * inverse
        rows, places, quads = self.lane_rows(tid & 31), self.lane_places(tid), self.lane_quads(tO, tid & 31)
        for r in cutlass.range_constexpr(len(rows)):
            if rows[r] < group:
                for n in cutlass.range_constexpr(len(places[r])):
                    columns, half = places[r][n]
                    self.store_quad(out, rows[r], columns * 8 + half * 4, tuple(quads[r][n]))
