"""Block scores of decode rows (B2): keys gathered from the pool's V-tails, every SM from 80 up.

    logits[r, g] = 1 / sqrt(128) * sum_h relu(q[r, h] . kbar[b, g]),   h ascending, FP32

for the blocks g < (p + 1) // 4 that row r = b * query_len + j at position p = context_lengths[b] - query_len + j
sees. What a row does not see is not written. Block g's key lies in the V plane, page v_page_table[b][g // 32],
at token 4 * (g % 32), `tail_offset` elements into it; an unused page (-1) or one outside the pool reads nothing
and counts as zeros.

Grid: (column shares, sequences). Every warp works alone: a step is one page, 32 block keys, gathered by cp.async
into the warp's ring; keys are A of m16n8k16 and the queries, kept in registers, are B. The products and their
order are those of the prefill kernel. Rows in the ring are ordered so that a thread ends with all heads of four
consecutive blocks of one row.

Right after the fused pre-decode (B1), which writes the queries and the step's new keys only, `follows_prepare` lets
the first keys be on their way before that kernel is done: page table, lengths and old keys are there when this one
starts. It must be 0 after any other kernel.

Baked: type, query rows a sequence (the registers they take), warps, stages. The caller guarantees: 16-byte
aligned keys; query_len <= the baked rows.

Few warps ask for their first keys before they wait for the kernels before, by the page table as it is then: for the L2
alone, no result depends on it.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS, INDEX_HEADS, PAGE_TOKENS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.indexer.scores_ops import CHUNKS, ROW_BYTES, logit

PARAMS = (
    ptr("q_normed_ptr", "elem", 16),
    ptr("pool_ptr", "elem", 16),
    ptr("v_page_table", "i32"),
    ptr("context_lengths", "i32"),
    ptr("logits_ptr", "f32", 16),
    i32("query_len"),
    i32("num_flat_pages"),
    i32("max_pages_per_seq"),
    i32("max_blocks"),
    i32("follows_prepare"),
    i64("page_table_stride"),
    i64("page_stride"),
    i64("token_stride"),
    i64("tail_offset"),
    i64("logits_stride_row"),
)

STEP = PAGE_TOKENS // BLOCK_TOKENS  # block keys of a page
UNIT = STEP * ROW_BYTES  # bytes of a ring slot


class ScoresDecode:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str, rows: int, warps: int, stages: int):
        self.dtype, self.rows, self.warps, self.stages = dtype, rows, warps, stages
        self.threads = 32 * warps
        self.smem_bytes = warps * stages * UNIT

    @cute.jit
    def __call__(
        self,
        q_normed_ptr: cute.Pointer,
        pool_ptr: cute.Pointer,
        v_page_table: cute.Pointer,
        context_lengths: cute.Pointer,
        logits_ptr: cute.Pointer,
        query_len: Int32,
        num_flat_pages: Int32,
        max_pages_per_seq: Int32,
        max_blocks: Int32,
        follows_prepare: Int32,
        page_table_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        tail_offset: Int64,
        logits_stride_row: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_normed_ptr,
            pool_ptr,
            v_page_table,
            context_lengths,
            logits_ptr,
            query_len,
            num_flat_pages,
            max_pages_per_seq,
            max_blocks,
            follows_prepare,
            page_table_stride,
            page_stride,
            token_stride,
            tail_offset,
            logits_stride_row,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        q_normed_ptr: cute.Pointer,
        pool_ptr: cute.Pointer,
        v_page_table: cute.Pointer,
        context_lengths: cute.Pointer,
        logits_ptr: cute.Pointer,
        query_len: Int32,
        num_flat_pages: Int32,
        max_pages_per_seq: Int32,
        max_blocks: Int32,
        follows_prepare: Int32,
        page_table_stride: Int64,
        page_stride: Int64,
        token_stride: Int64,
        tail_offset: Int64,
        logits_stride_row: Int64,
    ):
        early.let_next_start()
        share, sequence, _ = cute.arch.block_idx()
        shares, sequences, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        ring = smem + warp * (self.stages * UNIT)
        first = share * self.warps + warp
        step = shares * self.warps
        table = v_page_table.toint() + Int64(sequence) * page_table_stride * 4
        keys = pool_ptr.toint() + tail_offset * 2
        block_bytes = token_stride * (BLOCK_TOKENS * 2)
        if follows_prepare == 0:
            if cutlass.const_expr(early.SUPPORTED) and step * sequences <= early.FEW_WARPS:
                self.prefetch(table, first, max_pages_per_seq, keys, page_stride * 2, block_bytes, num_flat_pages, lane)
            early.wait()

        page = self.fetch_page(table, first, max_pages_per_seq)
        length = ops.load_global_i32(context_lengths.toint() + Int64(sequence) * 4)
        seen = cutlass.min(length // BLOCK_TOKENS, max_blocks)
        pages = (seen + STEP - 1) // STEP
        old = cutlass.min((length - query_len) // BLOCK_TOKENS, max_blocks)  # blocks that this step does not write
        out = logits_ptr.toint() + Int64(sequence) * query_len * logits_stride_row * 4
        early_gather = Int32(follows_prepare != 0 and (first + (self.stages - 2) * step + 1) * STEP <= old)
        if early_gather == 0:
            early.wait()
        for s in cutlass.range_constexpr(self.stages - 1):
            self.gather(
                ring + s * UNIT,
                keys,
                page_stride * 2,
                block_bytes,
                page,
                num_flat_pages,
                seen - (first + s * step) * STEP,
                lane,
            )
            page = self.fetch_page(table, first + (s + 1) * step, max_pages_per_seq)
        if early_gather != 0:
            early.wait()
        q = q_normed_ptr.toint() + Int64(sequence) * query_len * (INDEX_HEADS * ROW_BYTES)
        tQ = cute.make_rmem_tensor((8 * self.rows,), Int32)
        self.read_q(tQ, q, query_len, lane)
        slot = Int32(0)
        ahead = Int32(self.stages - 1)
        for at in cutlass.range(first, pages, step, unroll=1):
            coming = at + (self.stages - 1) * step
            self.gather(
                ring + ahead * UNIT,
                keys,
                page_stride * 2,
                block_bytes,
                page,
                num_flat_pages,
                seen - coming * STEP,
                lane,
            )
            page = self.fetch_page(table, coming + step, max_pages_per_seq)
            cute.arch.cp_async_wait_group(self.stages - 1)
            cute.arch.sync_warp()
            self.score(
                ring + slot * UNIT,
                tQ,
                out,
                logits_stride_row * 4,
                at * STEP,
                length - query_len,
                query_len,
                max_blocks,
                lane,
            )
            cute.arch.sync_warp()
            slot = slot + 1 if slot + 1 < self.stages else Int32(0)
            ahead = ahead + 1 if ahead + 1 < self.stages else Int32(0)
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def prefetch(
        self,
        table: Int64,
        slot: Int32,
        max_pages: Int32,
        keys: Int64,
        page_bytes: Int64,
        block_bytes: Int64,
        num_pages: Int32,
        lane: Int32,
    ):
        """Before `early.wait`: ask for the keys of a page, a block a lane, as the table has it now."""
        page = early.peek(Int32(slot < max_pages), table + Int64(slot) * 4, Int32(-1))
        if page >= 0 and page < num_pages:
            key = keys + Int64(page) * page_bytes + Int64(lane) * block_bytes
            for line in cutlass.range_constexpr(0, ROW_BYTES, early.LINE):
                early.prefetch(key + line)

    @cute.jit
    def fetch_page(self, table: Int64, slot: Int32, max_pages: Int32) -> Int32:
        return ops.load_global_i32_if(Int32(slot < max_pages), table + Int64(slot) * 4, Int32(-1))

    @cute.jit
    def read_q(self, tQ: cute.Tensor, q: Int64, query_len: Int32, lane: Int32):
        """B fragments: n-tile i of rows 4m.. has heads 2i and 2i + 1 of row 4m + c in columns 2c and 2c + 1."""
        n = lane // 4
        for m in cutlass.range_constexpr(self.rows // 4):
            row = 4 * m + n // 2
            for i in cutlass.range_constexpr(2):
                at = q + Int64((row * INDEX_HEADS + 2 * i + n % 2) * ROW_BYTES + (lane % 4) * 4)
                for k in cutlass.range_constexpr(8):
                    for half in cutlass.range_constexpr(2):
                        tQ[((m * 2 + i) * 8 + k) * 2 + half] = ops.load_global_i32_if(
                            Int32(row < query_len), at + (32 * k + 16 * half), Int32(0)
                        )

    @cute.jit
    def gather(
        self,
        slot: Int32,
        keys: Int64,
        page_bytes: Int64,
        block_bytes: Int64,
        page: Int32,
        num_pages: Int32,
        seen: Int32,
        lane: Int32,
    ):
        """Start copying a page's keys, block 4l + 2t + e to row 16t + 8e + l; those not seen become zeros, unread."""
        chunk = lane % CHUNKS
        e = lane // CHUNKS
        mapped = page >= 0 and page < num_pages
        source = keys + Int64(chunk * 16)
        if mapped:
            source = source + Int64(page) * page_bytes
        if seen > 0:
            for i in cutlass.range_constexpr(STEP // 2):
                block = 2 * i + e
                live = mapped and block < seen
                dst = slot + (16 * (i % 2) + 8 * e + i // 2) * ROW_BYTES + (chunk ^ (i // 2)) * 16
                src = source + Int64(block if live else 0) * block_bytes
                ops.cp_async_16(dst, src, Int32(16) if live else Int32(0))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def score(
        self,
        slot: Int32,
        tQ: cute.Tensor,
        out: Int64,
        row_bytes: Int64,
        block0: Int32,
        before: Int32,
        query_len: Int32,
        max_blocks: Int32,
        lane: Int32,
    ):
        """Multiply a page's keys with all rows and store; `before` is the position of row 0."""
        acc = cute.make_rmem_tensor((4 * self.rows,), Float32)  # [m-tile 2][n-tile rows/2][4]
        acc.fill(0.0)
        at = slot + (lane % 16) * ROW_BYTES
        tiles = self.rows // 2
        for k in cutlass.range_constexpr(8):
            chunk = (2 * k + lane // 16) ^ (lane % 8)
            for t in cutlass.range_constexpr(2):
                a = ops.ldmatrix_x4(at + 16 * t * ROW_BYTES + chunk * 16)
                for n in cutlass.range_constexpr(tiles):
                    ops.add_mma_16816(
                        self.dtype, acc, 4 * (t * tiles + n), a, (tQ[(n * 8 + k) * 2], tQ[(n * 8 + k) * 2 + 1])
                    )
        block = block0 + (lane // 4) * 4
        for m in cutlass.range_constexpr(self.rows // 4):
            row = 4 * m + lane % 4
            values = []
            for t in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    v = 4 * (t * tiles + 2 * m) + 2 * e
                    values.append(logit(acc[v], acc[v + 1], acc[v + 4], acc[v + 5]))
            if row < query_len:
                limit = cutlass.min((before + row + 1) // BLOCK_TOKENS, max_blocks)
                to = out + Int64(row) * row_bytes + Int64(block) * 4
                if block + 4 <= limit and to % 16 == 0:
                    ops.store_global_f32x4(to, (values[0], values[1], values[2], values[3]))
                else:
                    for i in cutlass.range_constexpr(4):
                        if block + i < limit:
                            ops.store_global_f32(to + i * 4, values[i])
