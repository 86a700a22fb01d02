"""Scores of one decode query: scores[b] = scale * sum_h relu(q_h . block_keys[b]), FP32 queries, exact (`scores.py`).

Grid: a thread block of 4 warps per 128 blocks. A warp copies the keys of its 32 blocks to shared memory (cp.async, 16
bytes a lane, half a warp a row), all at once; then each lane runs the dot products of one block, its key's chunks
swizzled so that 32 rows are read without bank conflicts, the query's broadcast.

Baked: type. Run-time: blocks, heads, key length. The caller guarantees: contiguous rows, 16-byte aligned; hd a
multiple of 8.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common import rope_norm as rn
from qsa_cute.kernels.common.params import f32, i32, ptr
from qsa_cute.kernels.metrale.scores import (
    HEADS,
    KEY_BYTES,
    KEY_CHUNKS,
    PIECE,
    QUERY_BYTES,
    QUERY_CHUNKS,
    fma,
    load_shared_i32x4,
)

PARAMS = (
    ptr("q", "f32", 16),
    ptr("block_keys", "elem", 16),
    ptr("scores", "f32"),
    i32("n_blocks"),
    i32("n_heads"),
    i32("hd"),
    f32("scale"),
)

WARPS = 4
KEYS = HEADS * QUERY_BYTES  # where the keys begin in shared memory
WARP_KEYS = 32 * KEY_BYTES


class Score:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.dtype = dtype
        self.threads = 32 * WARPS
        self.smem_bytes = KEYS + WARPS * WARP_KEYS

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        block_keys: cute.Pointer,
        scores: cute.Pointer,
        n_blocks: Int32,
        n_heads: Int32,
        hd: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(q, block_keys, scores, n_blocks, n_heads, hd, scale).launch(
            grid=(1, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,
        block_keys: cute.Pointer,
        scores: cute.Pointer,
        n_blocks: Int32,
        n_heads: Int32,
        hd: Int32,
        scale: Float32,
    ):
        early.begin()
        tid, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        sK = smem + KEYS + warp * WARP_KEYS
        first = (group * WARPS + warp) * 32

        total = Float32(0.0)
        acc = cute.make_rmem_tensor((HEADS,), Float32)
        for head in cutlass.range(0, n_heads, HEADS, unroll=1):
            acc.fill(0.0)
            for d in cutlass.range(0, hd, PIECE, unroll=1):
                if head + d > 0:
                    cute.arch.sync_threads()  # the last pass has been read
                self.copy_query(smem, q.toint(), head, n_heads, d, hd, tid)
                self.copy_keys(sK, block_keys.toint(), first, n_blocks, d, hd, lane)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()
                self.multiply(smem, sK, acc, cutlass.min(hd - d, Int32(PIECE)) // 8, lane)
            for h in cutlass.range_constexpr(HEADS):
                total = total + cute.arch.fmax(acc[h], Float32(0.0))
        if first + lane < n_blocks:
            ops.store_global_f32(scores.toint() + Int64(first + lane) * 4, total * scale)

    @cute.jit
    def copy_query(self, sQ: Int32, q: Int64, head: Int32, n_heads: Int32, d: Int32, hd: Int32, tid: Int32):
        """Start copying 128 dims of 4 heads, 16 bytes a thread; heads and dims that are not there become zeros."""
        at = d + (tid % QUERY_CHUNKS) * 4
        mine = head + tid // QUERY_CHUNKS
        live = mine < n_heads and at < hd
        source = Int64(mine) * hd + at if live else Int64(0)
        ops.cp_async_16(sQ + tid * 16, q + source * 4, Int32(16) if live else Int32(0))

    @cute.jit
    def copy_keys(self, sK: Int32, keys: Int64, first: Int32, n_blocks: Int32, d: Int32, hd: Int32, lane: Int32):
        """Start copying 128 dims of the warp's 32 keys; blocks and dims that are not there become zeros, unread."""
        chunk = lane % KEY_CHUNKS
        at = d + chunk * 8
        for i in cutlass.range_constexpr(32 * KEY_CHUNKS // 32):
            row = 2 * i + lane // KEY_CHUNKS
            live = first + row < n_blocks and at < hd
            source = Int64(first + row) * hd + at if live else Int64(0)
            dst = sK + row * KEY_BYTES + (chunk ^ (row % 8)) * 16
            ops.cp_async_16(dst, keys + source * 2, Int32(16) if live else Int32(0))

    @cute.jit
    def multiply(self, sQ: Int32, sK: Int32, acc: cute.Tensor, chunks: Int32, lane: Int32):
        """Go on with the lane's four dot products over 8 dims a chunk."""
        for c in cutlass.range(chunks, unroll=2):
            words = load_shared_i32x4(sK + lane * KEY_BYTES + (c ^ (lane % 8)) * 16)
            k = []
            for i in cutlass.range_constexpr(4):
                k = k + list(rn.unpack_2(self.dtype, words[i]))
            for h in cutlass.range_constexpr(HEADS):
                low = ops.load_shared_f32x4(sQ + h * QUERY_BYTES + c * 32)
                high = ops.load_shared_f32x4(sQ + h * QUERY_BYTES + c * 32 + 16)
                for i in cutlass.range_constexpr(4):
                    acc[h] = fma(low[i], k[i], acc[h])
                for i in cutlass.range_constexpr(4):
                    acc[h] = fma(high[i], k[4 + i], acc[h])
