"""Scores of prefill rows on the CUDA cores, exact: the same bits as `score.py` gives each row by itself.

    scores[r, b] = scale * sum_h relu(q[r, h] . block_keys[b])   for b < (first_pos + r + 1) // ratio, else -inf

for the columns b < n_blocks_max; rows of scores are score_stride floats apart and are left alone past the columns.

Grid: (tiles of 16 rows) x (tiles of 128 blocks), rows fastest, flattened on x. 128 threads; a thread owns 2 rows, 4
heads and 8 blocks, so that all heads of its scores meet in its registers. A tile of FP32 queries and one of keys lie
in shared memory, swizzled by the lane that reads them; the thread blocks of an SM hide each other's copies.

Baked: type, thread blocks an SM. Run-time: rows, blocks, heads, key length, ratio. The caller guarantees: contiguous
rows of q and of block_keys, 16-byte aligned; hd a multiple of 8. A block that no row of the tile sees is not read.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common import rope_norm as rn
from qsa_cute.kernels.common.params import f32, i32, i64, ptr
from qsa_cute.kernels.metrale.scores import (
    HEADS,
    KEY_BYTES,
    KEY_CHUNKS,
    PIECE,
    QUERY_BYTES,
    QUERY_CHUNKS,
    complete_blocks,
)

PARAMS = (
    ptr("q", "f32", 16),
    ptr("block_keys", "elem", 16),
    ptr("scores", "f32"),
    i32("rows"),
    i32("n_blocks_max"),
    i32("first_pos"),
    i32("ratio"),
    i32("n_heads"),
    i32("hd"),
    i64("score_stride"),
    f32("scale"),
)

TILE_ROWS = 16
TILE_BLOCKS = 128
THREADS = 128
ROWS = 2  # of a thread
BLOCKS = 8  # of a thread, consecutive
KEYS = TILE_ROWS * HEADS * QUERY_BYTES  # where the keys begin in shared memory


class ScoreRows:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str, blocks_per_sm: int):
        self.dtype, self.blocks_per_sm = dtype, blocks_per_sm
        self.dims = 4 if blocks_per_sm == 3 else 2  # multiplied at once
        self.threads = THREADS
        self.smem_bytes = KEYS + TILE_BLOCKS * KEY_BYTES

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        block_keys: cute.Pointer,
        scores: cute.Pointer,
        rows: Int32,
        n_blocks_max: Int32,
        first_pos: Int32,
        ratio: Int32,
        n_heads: Int32,
        hd: Int32,
        score_stride: Int64,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q, block_keys, scores, rows, n_blocks_max, first_pos, ratio, n_heads, hd, score_stride, scale
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
        block_keys: cute.Pointer,
        scores: cute.Pointer,
        rows: Int32,
        n_blocks_max: Int32,
        first_pos: Int32,
        ratio: Int32,
        n_heads: Int32,
        hd: Int32,
        score_stride: Int64,
        scale: Float32,
    ):
        early.begin()
        tid, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        row_tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
        row0 = tile % row_tiles * TILE_ROWS
        block0 = tile // row_tiles * TILE_BLOCKS
        last = cutlass.min(row0 + TILE_ROWS, rows) - 1
        seen = complete_blocks(last, first_pos, ratio, n_blocks_max)

        total = cute.make_rmem_tensor((ROWS * BLOCKS,), Float32)
        total.fill(0.0)
        acc = cute.make_rmem_tensor((ROWS * HEADS * BLOCKS,), Float32)
        if block0 < seen:
            for head in cutlass.range(0, n_heads, HEADS, unroll=1):
                acc.fill(0.0)
                for d in cutlass.range(0, hd, PIECE, unroll=1):
                    if head + d > 0:
                        cute.arch.sync_threads()  # the last pass has been read
                    self.copy_queries(smem, q.toint(), row0, rows, head, n_heads, d, hd, tid)
                    self.copy_keys(smem + KEYS, block_keys.toint(), block0, seen, d, hd, tid)
                    cute.arch.cp_async_commit_group()
                    cute.arch.cp_async_wait_group(0)
                    cute.arch.sync_threads()
                    self.multiply(smem, acc, cutlass.min(hd - d, Int32(PIECE)) // 4, tid)
                for i in cutlass.range_constexpr(ROWS):
                    for h in cutlass.range_constexpr(HEADS):
                        for j in cutlass.range_constexpr(BLOCKS):
                            score = acc[(i * HEADS + h) * BLOCKS + j]
                            at = i * BLOCKS + j
                            total[at] = total[at] + cute.arch.fmax(score, Float32(0.0))
        for i in cutlass.range_constexpr(ROWS):
            row = row0 + self.thread_row(tid) + i
            if row < rows:
                limit = complete_blocks(row, first_pos, ratio, n_blocks_max)
                self.store(
                    total, i, scores.toint() + Int64(row) * score_stride * 4, block0, limit, n_blocks_max, scale, tid
                )

    def thread_row(self, tid: Int32):
        """The first of the thread's two rows in the tile: warps 0 and 2 have the first 8, 4 lanes 2 each."""
        return (tid // 32) % 2 * 8 + (tid % 32) // 8 * ROWS

    def thread_block(self, tid: Int32):
        """The first of the thread's eight blocks in the tile: warps 0 and 1 have the first 64, 8 lanes 8 each."""
        return tid // 64 * 64 + tid % 8 * BLOCKS

    @cute.jit
    def copy_queries(
        self,
        sQ: Int32,
        q: Int64,
        row0: Int32,
        rows: Int32,
        head: Int32,
        n_heads: Int32,
        d: Int32,
        hd: Int32,
        tid: Int32,
    ):
        """Start copying 128 dims of 4 heads of the tile's rows; what is not there becomes zeros. Chunk c of a row sits
        at c ^ (its pair of rows % 4): the 4 pairs that a warp reads at once lie in different banks."""
        chunk = tid % QUERY_CHUNKS
        at = d + chunk * 4
        for i in cutlass.range_constexpr(TILE_ROWS * HEADS * QUERY_CHUNKS // THREADS):
            line = i * (THREADS // QUERY_CHUNKS) + tid // QUERY_CHUNKS
            row = row0 + line // HEADS
            mine = head + line % HEADS
            live = row < rows and mine < n_heads and at < hd
            source = (Int64(row) * n_heads + mine) * hd + at if live else Int64(0)
            dst = sQ + line * QUERY_BYTES + (chunk ^ (line // (HEADS * ROWS) % 4)) * 16
            ops.cp_async_16(dst, q + source * 4, Int32(16) if live else Int32(0))

    @cute.jit
    def copy_keys(self, sK: Int32, keys: Int64, block0: Int32, seen: Int32, d: Int32, hd: Int32, tid: Int32):
        """Start copying 128 dims of the tile's keys; blocks that no row sees become zeros, unread. Chunk c of a row
        sits at c ^ (its eight of rows % 8): the 8 lanes of a warp that read at once lie in different banks."""
        chunk = tid % KEY_CHUNKS
        at = d + chunk * 8
        for i in cutlass.range_constexpr(TILE_BLOCKS * KEY_CHUNKS // THREADS):
            row = i * (THREADS // KEY_CHUNKS) + tid // KEY_CHUNKS
            live = block0 + row < seen and at < hd
            source = Int64(block0 + row) * hd + at if live else Int64(0)
            dst = sK + row * KEY_BYTES + (chunk ^ (row // BLOCKS % 8)) * 16
            ops.cp_async_16(dst, keys + source * 2, Int32(16) if live else Int32(0))

    @cute.jit
    def multiply(self, smem: Int32, acc: cute.Tensor, steps: Int32, tid: Int32):
        """Go on with the thread's 64 dot products, 4 dims a step."""
        pair = (tid % 32) // 8
        sQ = smem + self.thread_row(tid) * (HEADS * QUERY_BYTES)
        sK = smem + KEYS + self.thread_block(tid) * KEY_BYTES
        for step in cutlass.range(steps, unroll=1):
            q_at = sQ + (step ^ pair) * 16
            k_at = sK + ((step // 2) ^ (tid % 8)) * 16 + step % 2 * 8
            for part in cutlass.range_constexpr(4 // self.dims):
                self.multiply_dims(q_at + part * self.dims * 4, k_at + part * self.dims * 2, acc)

    @cute.jit
    def multiply_dims(self, q_at: Int32, k_at: Int32, acc: cute.Tensor):
        """4 dims, or 2: where registers are short, fewer of them at once."""
        k = []
        for j in cutlass.range_constexpr(BLOCKS):
            if cutlass.const_expr(self.dims == 4):
                words = ops.load_shared_i32x2(k_at + j * KEY_BYTES)
                k = k + [rn.unpack_2(self.dtype, words[0]) + rn.unpack_2(self.dtype, words[1])]
            else:
                k = k + [rn.unpack_2(self.dtype, ops.load_shared_i32(k_at + j * KEY_BYTES))]
        for line in cutlass.range_constexpr(ROWS * HEADS):
            if cutlass.const_expr(self.dims == 4):
                query = ops.load_shared_f32x4(q_at + line * QUERY_BYTES)
            else:
                query = ops.load_shared_f32x2(q_at + line * QUERY_BYTES)
            for i in cutlass.range_constexpr(self.dims):
                for j in cutlass.range_constexpr(BLOCKS):
                    at = line * BLOCKS + j
                    acc[at] = ops.fma(query[i], k[j][i], acc[at])

    @cute.jit
    def store(
        self,
        total: cute.Tensor,
        i: cutlass.Constexpr[int],
        out: Int64,
        block0: Int32,
        limit: Int32,
        n_blocks: Int32,
        scale: Float32,
        tid: Int32,
    ):
        """The thread's 8 scores of row i: -inf from `limit` on, nothing past the columns."""
        block = block0 + self.thread_block(tid)
        at = out + Int64(block) * 4
        values = []
        for j in cutlass.range_constexpr(BLOCKS):
            values = values + [total[i * BLOCKS + j] * scale if block + j < limit else -Float32.inf]
        if block + BLOCKS <= n_blocks and at % 16 == 0:
            ops.store_global_f32x4(at, (values[0], values[1], values[2], values[3]))
            ops.store_global_f32x4(at + 16, (values[4], values[5], values[6], values[7]))
        else:
            for j in cutlass.range_constexpr(BLOCKS):
                if block + j < n_blocks:
                    ops.store_global_f32(at + j * 4, values[j])
