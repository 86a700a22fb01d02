"""What decode over the dense pool adds to `box_gather.py`: padded lists, and page tables of K and of V.

A padded list does not say how much of it counts. The warps that multiply survey it, for the last entry with an id,
while those that gather begin with the first step, which is as long as that of a full list.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS, PAGE_TOKENS
from qsa_cute.kernels.attention.box_gather import TABLES
from qsa_cute.kernels.attention.box_merge import BoxMerge
from qsa_cute.kernels.attention.box_products import STAGE_GROUPS, STEP_STAGES, TABLE_PAGES, BoxShare
from qsa_cute.kernels.attention.sparse_decode import PagedTokens
from qsa_cute.kernels.common import ops

PAGE_SHIFT = PAGE_TOKENS.bit_length() - 1  # place -1 lies on page -1: out of bounds, zeros
SURVEYED = 3  # entries of a list that a thread looks at at once
COUNTS = 5  # a barrier


@dataclass(frozen=True)
class StagedTokens(PagedTokens):
    """A `BoxSource`: `PagedTokens` whose page tables lie in shared memory when there is room for them."""

    staged: Int32  # shared address of K's table, V's after it; 0: they are in global memory alone
    pool: Int64  # address of the tensor map
    kv_head: Int32

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

    def places(self, token: Int32, pages):
        return self.slots(token, pages)

    @cute.jit
    def whole(self, first: Int32, last: Int32):
        return first >= 0 and last < self.length

    def tensor_map(self, of_v: Int32) -> Int64:
        return self.pool

    def box(self, place: Int32) -> tuple:
        return Int32(0), place & (PAGE_TOKENS - 1), Int32(0), self.kv_head, place >> PAGE_SHIFT


class PaddedBoxes(BoxMerge):
    tables = 2
    surveys = True

    def __init__(self, head_dim: int, dtype: str, stages: int):
        super().__init__(head_dim, dtype, stages)
        self.sizes["counts"] = self.warps * 4
        self.lay_out()

    @cute.jit
    def settle(self, smem: Int32, top_k: Int32, share: BoxShare, lane: Int32):
        groups = self.count(smem, lane)
        return groups, cutlass.min(self.most_stages(top_k, share), Int32(STEP_STAGES))

    @cute.jit
    def await_groups(self, smem: Int32, lane: Int32) -> Int32:
        self.wait_for_counts()
        return self.count(smem, lane)

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

    @cute.jit
    def entry_at(self, ids: Int64, top_k: Int32, at: Int32) -> Int32:
        """-1 past the end of the list."""
        return ops.load_global_i32_if(Int32(at < top_k), ids + Int64(at) * 4, Int32(-1))

    @cute.jit
    def survey(self, smem: Int32, ids: Int64, top_k: Int32, share: BoxShare, tid: Int32):
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
    def count(self, smem: Int32, lane: Int32) -> Int32:
        """Groups of the split, after `survey`."""
        return cute.arch.warp_redux_sync(
            ops.load_shared_i32(smem + self.at["counts"] + (lane & (self.warps - 1)) * 4), "max"
        )

    @cute.jit
    def most_stages(self, top_k: Int32, share: BoxShare) -> Int32:
        """Of a list that is full; one at least."""
        groups = (top_k + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS - share.split
        stride = STAGE_GROUPS * share.num_splits
        return cutlass.max(share.divide(groups + stride - 1) >> 3, Int32(1))
