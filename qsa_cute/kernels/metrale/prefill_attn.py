"""Prefill attention over selected blocks and the open tail, read from a paged cache through a block table.

    O[r, h] = sum_i softmax_i(scale * Q[r, h] . K[t_i, h // G]) V[t_i, h // G]

over the tokens t of the blocks in lists[r] and of the row's open block, up to the row's own position p = first_pos + r.
A listed id counts where 0 <= id < (p + 1) // ratio; any other (padding, or what a top-k over masked scores leaves
behind in a short row) is passed over, and one that stands twice counts twice.

Grid: one thread block a (row, KV head), rows fastest, flattened on x. The main loop is `attention/row_gather.py`'s;
its list is made up on the way: entry e is token e % ratio of the open block for e < ratio, else of block
lists[e // ratio - 1]. The tail comes first so that short lists end early.

Baked: head dim, type, pipeline depth. Run-time: rows, heads, top-k, ratio, page size. The caller guarantees: contiguous
q and attn_out [rows, nq, hd], caches [pages, block_size, nkv, hd] and lists [rows, topk]; 16-byte aligned rows; a block
table that covers the rows' positions. A negative page makes its tokens invalid.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention.row_gather import RowGather, RowOutput, Share, TokenSource
from qsa_cute.kernels.common import ops
from qsa_cute.kernels.common.params import f32, i32, i64, ptr
from qsa_cute.kernels.metrale.division import Divisor

PARAMS = (
    ptr("q", "elem", 16),
    ptr("k_cache", "elem", 16),
    ptr("v_cache", "elem", 16),
    ptr("block_table", "i32"),
    ptr("lists", "i32"),
    ptr("attn_out", "elem", 16),
    i32("rows"),
    i32("first_pos"),
    i32("topk"),
    i32("ratio"),
    i64("ratio_magic"),
    i32("ratio_shift"),
    i32("block_size"),
    i64("page_magic"),
    i32("page_shift"),
    i32("nkv"),
    i32("group_size"),
    f32("inv_sqrt_d"),
)


@dataclass(frozen=True)
class BlockRow(Share):
    """A whole row whose entries are the tokens of its open block and of the listed blocks."""

    ratio: Divisor
    length: Int32  # tokens up to the row's own


@dataclass(frozen=True)
class CachedTokens(TokenSource):
    """Rows of one head in the paged caches. A slot is page * block_size + the token's place in its page."""

    k: Int64
    v: Int64
    table: Int64
    in_token: Int32  # bytes
    token_bytes: Int32
    page: Divisor

    @cute.jit
    def look_up(self, token: Int32):
        """The token's page, and its place there."""
        at, place = self.page.divide(cutlass.max(token, Int32(0)))
        return ops.load_global_i32_if(Int32(token >= 0), self.table + Int64(at) * 4, Int32(-1)), place

    @cute.jit
    def slots(self, token: Int32, looked_up):
        slot = looked_up[0] * self.page.value + looked_up[1]
        slot = slot if looked_up[0] >= 0 else Int32(-1)
        return slot, slot

    @cute.jit
    def address(self, slot: Int32, plane: cutlass.Constexpr[int]) -> Int64:
        at = Int64(slot) * Int64(self.token_bytes) + Int64(self.in_token)
        if cutlass.const_expr(plane == 1):
            return self.v + at
        return self.k + at


class PrefillAttention(RowGather):
    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k_cache: cute.Pointer,
        v_cache: cute.Pointer,
        block_table: cute.Pointer,
        lists: cute.Pointer,
        attn_out: cute.Pointer,
        rows: Int32,
        first_pos: Int32,
        topk: Int32,
        ratio: Int32,
        ratio_magic: Int64,
        ratio_shift: Int32,
        block_size: Int32,
        page_magic: Int64,
        page_shift: Int32,
        nkv: Int32,
        group_size: Int32,
        inv_sqrt_d: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q,
            k_cache,
            v_cache,
            block_table,
            lists,
            attn_out,
            rows,
            first_pos,
            topk,
            ratio,
            ratio_magic,
            ratio_shift,
            block_size,
            page_magic,
            page_shift,
            nkv,
            group_size,
            inv_sqrt_d,
        ).launch(
            grid=(1, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,
        k_cache: cute.Pointer,
        v_cache: cute.Pointer,
        block_table: cute.Pointer,
        lists: cute.Pointer,
        attn_out: cute.Pointer,
        rows: Int32,
        first_pos: Int32,
        topk: Int32,
        ratio: Int32,
        ratio_magic: Int64,
        ratio_shift: Int32,
        block_size: Int32,
        page_magic: Int64,
        page_shift: Int32,
        nkv: Int32,
        group_size: Int32,
        inv_sqrt_d: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block % rows
        kv_head = block // rows
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())

        share = BlockRow(Int32(0), Int32(1), group_size, Divisor(ratio, ratio_magic, ratio_shift), first_pos + row + 1)
        source = CachedTokens(
            k_cache.toint(),
            v_cache.toint(),
            block_table.toint(),
            kv_head * self.pitch,
            nkv * self.pitch,
            Divisor(block_size, page_magic, page_shift),
        )
        ids = lists.toint() + Int64(row) * topk * 4
        head = (Int64(row) * nkv + kv_head) * group_size * self.pitch

        tO = cute.make_rmem_tensor((self.warp_cols // 2,), Float32)
        tMax = cute.make_rmem_tensor((2,), Float32)
        tSum = cute.make_rmem_tensor((2,), Float32)
        self.load_q(smem, q.toint() + head, Int64(self.pitch), group_size, tid)
        self.attend(smem, source, ids, (topk + 1) * ratio, inv_sqrt_d * ops.LOG2_E, share, tO, tMax, tSum, tid)
        block, _, _ = cute.arch.block_idx()  # read again rather than kept
        head = (Int64(block % rows) * nkv + block // rows) * group_size * self.pitch
        out = RowOutput(attn_out.toint() + head, Int64(self.pitch), Int64(0))
        self.store_row(out, group_size, tO, tMax, tSum, tid)

    @cute.jit
    def entry(self, ids: Int64, entries: Int32, chunk: Int32, share: BlockRow, tid: Int32) -> Int32:
        """This thread's token of a chunk; -1 where there is none."""
        at = chunk * self.threads + tid
        slot, place = share.ratio.divide(at)
        complete = share.ratio.quotient(share.length)  # blocks; the open one's id, too
        listed = Int32(0)
        if at < entries and slot > 0:
            listed = Int32(1)
        block = ops.load_global_i32_if(listed, ids + Int64(slot - 1) * 4, Int32(-1))
        block = block if block < complete else Int32(-1)
        block = block if slot > 0 else complete
        token = block * share.ratio.value + place
        return token if block >= 0 and token < share.length else Int32(-1)
