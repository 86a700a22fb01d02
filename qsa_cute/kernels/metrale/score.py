"""Scores of one decode query: scores[b] = scale * sum_h relu(q_h . block_keys[b]), FP32 queries, exact (`scores.py`).

Grid: a thread block of 4 warps per 64 blocks. A warp copies the keys of its 16 blocks to shared memory (cp.async, 16
bytes a lane), all started at once, and works on a quarter of the dims while the next ones are still on their way. Two
lanes share a block, two heads each: a key's chunks are swizzled so that the rows are read without bank conflicts, the
query is broadcast.

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
WARP_BLOCKS = 16
LANE_HEADS = HEADS * WARP_BLOCKS // 32
GROUPS = 4  # of chunks that arrive one after another
GROUP_CHUNKS = KEY_CHUNKS // GROUPS
KEYS = HEADS * QUERY_BYTES  # where the keys begin in shared memory
WARP_KEYS = WARP_BLOCKS * KEY_BYTES


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
        first = (group * WARPS + warp) * WARP_BLOCKS

        total = Float32(0.0)
        acc = cute.make_rmem_tensor((LANE_HEADS,), Float32)
        for head in cutlass.range(0, n_heads, HEADS, unroll=1):
            acc.fill(0.0)
            for d in cutlass.range(0, hd, PIECE, unroll=1):
                if head + d > 0:
                    cute.arch.sync_threads()  # the last pass has been read
                self.copy_query(smem, q.toint(), head, n_heads, d, hd, tid)
                for g in cutlass.range_constexpr(GROUPS):
                    self.copy_keys(sK, block_keys.toint(), first, n_blocks, g, d, hd, lane)
                    cute.arch.cp_async_commit_group()
                for g in cutlass.range_constexpr(GROUPS):
                    cute.arch.cp_async_wait_group(GROUPS - 1 - g)
                    if cutlass.const_expr(g == 0):
                        cute.arch.sync_threads()
                    else:
                        cute.arch.sync_warp()
                    self.multiply(smem, sK, acc, g, lane)
            total = self.add_heads(total, acc, lane)
        block = first + lane
        if lane < WARP_BLOCKS and block < n_blocks:
            ops.store_global_f32(scores.toint() + Int64(block) * 4, total * scale)

    @cute.jit
    def copy_query(self, sQ: Int32, q: Int64, head: Int32, n_heads: Int32, d: Int32, hd: Int32, tid: Int32):
        """Start copying 128 dims of 4 heads, 16 bytes a thread; heads and dims that are not there become zeros."""
        at = d + (tid % QUERY_CHUNKS) * 4
        mine = head + tid // QUERY_CHUNKS
        live = mine < n_heads and at < hd
        source = Int64(mine) * hd + at if live else Int64(0)
        ops.cp_async_16(sQ + tid * 16, q + source * 4, Int32(16) if live else Int32(0))

    @cute.jit
    def copy_keys(
        self,
        sK: Int32,
        keys: Int64,
        first: Int32,
        n_blocks: Int32,
        g: cutlass.Constexpr[int],
        d: Int32,
        hd: Int32,
        lane: Int32,
    ):
        """Start copying a group of chunks of the warp's keys; blocks and dims that are not there become zeros."""
        chunk = g * GROUP_CHUNKS + lane % GROUP_CHUNKS
        at = d + chunk * 8
        for i in cutlass.range_constexpr(WARP_BLOCKS * GROUP_CHUNKS // 32):
            row = i * (32 // GROUP_CHUNKS) + lane // GROUP_CHUNKS
            live = first + row < n_blocks and at < hd
            source = Int64(first + row) * hd + at if live else Int64(0)
            dst = sK + row * KEY_BYTES + (chunk ^ (row % 8)) * 16
            ops.cp_async_16(dst, keys + source * 2, Int32(16) if live else Int32(0))

    @cute.jit
    def multiply(self, sQ: Int32, sK: Int32, acc: cute.Tensor, g: cutlass.Constexpr[int], lane: Int32):
        """Go on with the lane's dot products, 8 dims a chunk; dims that are not there are zeros and change nothing."""
        row = lane % WARP_BLOCKS
        sQ = sQ + lane // WARP_BLOCKS * (LANE_HEADS * QUERY_BYTES)
        for j in cutlass.range_constexpr(GROUP_CHUNKS):
            c = g * GROUP_CHUNKS + j
            words = ops.load_shared_i32x4(sK + row * KEY_BYTES + (c ^ (row % 8)) * 16)
            k = []
            for i in cutlass.range_constexpr(4):
                k = k + list(rn.unpack_2(self.dtype, words[i]))
            for h in cutlass.range_constexpr(LANE_HEADS):
                low = ops.load_shared_f32x4(sQ + h * QUERY_BYTES + c * 32)
                high = ops.load_shared_f32x4(sQ + h * QUERY_BYTES + c * 32 + 16)
                for i in cutlass.range_constexpr(4):
                    acc[h] = ops.fma(low[i], k[i], acc[h])
                for i in cutlass.range_constexpr(4):
                    acc[h] = ops.fma(high[i], k[4 + i], acc[h])

    @cute.jit
    def add_heads(self, total: Float32, acc: cute.Tensor, lane: Int32) -> Float32:
        """`total` and the four heads' ReLUs in ascending order, in the lower lane of each two."""
        for half in cutlass.range_constexpr(HEADS // LANE_HEADS):
            for h in cutlass.range_constexpr(LANE_HEADS):
                score = cute.arch.fmax(acc[h], Float32(0.0))
                total = total + cute.arch.shuffle_sync(score, lane % WARP_BLOCKS + half * WARP_BLOCKS)
        return total
