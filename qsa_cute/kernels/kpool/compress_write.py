"""Pool compression: `pool` tokens into one e4m3 key and its scale, in the cache, a dense output, or both.

    x = bf16(sum_j k_j softmax_j(gate_j + ape_j))  per dimension, FP32
    y = bf16(H_128 x / sqrt(128));  scale from max(absmax(y), 1e-4) / 448;  key = e4m3(y / scale)

Memory bound: 2 x pool x 256 bytes read, 132 written. Sixteen lanes hold a pool, 8 dims each: every load is 16 bytes a
lane, all of a pool's are under way at once, three of the seven butterfly stages are in registers.

Grid: (ceil(num_pools / 8)). Pools whose write_mask is 0 are neither read nor written; so are those whose slot lies
outside the cache, where only the cache is written. Cache page: page_size keys of 128 bytes, then page_size FP32 scales.

Baked: tokens of a pool. Null pointers: no mask, no cache, no dense output. The caller guarantees: 16-byte aligned keys
and ape (contiguous), gate scores of bf16 (16-byte aligned) or FP32 (likewise), a 4-byte aligned cache and page stride.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common import rope_norm as rn
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.kpool import pool_ops as po

PARAMS = (
    ptr("cache_ptr", "i32"),
    ptr("slot_k_ptr", "elem", 16),
    ptr("slot_score_ptr", "elem", 16),
    ptr("ape_ptr", "f32", 16),
    ptr("loc_ptr", "i32"),
    ptr("write_mask_ptr", "u8", 1),
    ptr("dense_k_ptr", "i32", 8),
    ptr("dense_scale_ptr", "f32"),
    i32("num_pools"),
    i32("loc_words"),
    i32("score_words"),
    i32("page_size"),
    i32("num_pages"),
    i32("round_scale"),
    i64("page_stride"),
    i64("k_stride_pool"),
    i64("k_stride_token"),
    i64("score_stride_pool"),
    i64("score_stride_token"),
)

WARPS = 4
LANES = 16  # that hold a pool
BITS = (0, 1, 2, ~0, ~1, ~2, ~3)


class CompressWrite:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str, pool: int):
        self.pool = pool
        self.threads = 32 * WARPS
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self,
        cache_ptr: cute.Pointer,
        slot_k_ptr: cute.Pointer,
        slot_score_ptr: cute.Pointer,
        ape_ptr: cute.Pointer,
        loc_ptr: cute.Pointer,
        write_mask_ptr: cute.Pointer,
        dense_k_ptr: cute.Pointer,
        dense_scale_ptr: cute.Pointer,
        num_pools: Int32,
        loc_words: Int32,
        score_words: Int32,
        page_size: Int32,
        num_pages: Int32,
        round_scale: Int32,
        page_stride: Int64,
        k_stride_pool: Int64,
        k_stride_token: Int64,
        score_stride_pool: Int64,
        score_stride_token: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            cache_ptr,
            slot_k_ptr,
            slot_score_ptr,
            ape_ptr,
            loc_ptr,
            write_mask_ptr,
            dense_k_ptr,
            dense_scale_ptr,
            num_pools,
            loc_words,
            score_words,
            page_size,
            num_pages,
            round_scale,
            page_stride,
            k_stride_pool,
            k_stride_token,
            score_stride_pool,
            score_stride_token,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        cache_ptr: cute.Pointer,
        slot_k_ptr: cute.Pointer,
        slot_score_ptr: cute.Pointer,
        ape_ptr: cute.Pointer,
        loc_ptr: cute.Pointer,
        write_mask_ptr: cute.Pointer,
        dense_k_ptr: cute.Pointer,
        dense_scale_ptr: cute.Pointer,
        num_pools: Int32,
        loc_words: Int32,
        score_words: Int32,
        page_size: Int32,
        num_pages: Int32,
        round_scale: Int32,
        page_stride: Int64,
        k_stride_pool: Int64,
        k_stride_token: Int64,
        score_stride_pool: Int64,
        score_stride_token: Int64,
    ):
        early.begin()
        group, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        number = (group * WARPS + cute.arch.warp_idx()) * (32 // LANES) + lane // LANES
        part = lane % LANES
        cache = cache_ptr.toint()
        dense = dense_k_ptr.toint()
        mask = write_mask_ptr.toint()

        known = Int32(number < num_pools)
        masked = Int32(0)
        if known != 0 and mask != 0:
            masked = Int32(1)
        live = known & Int32(po.load_u8_if(masked, mask + Int64(number), known) != 0)
        placed = live if cache != 0 else Int32(0)
        slot = po.load_index(placed, loc_ptr.toint() + Int64(number) * Int64(loc_words * 4), loc_words)
        page, place = po.cache_entry(slot, page_size, num_pages)
        if dense == 0 and page < 0:
            live = Int32(0)

        k = slot_k_ptr.toint() + (Int64(number) * k_stride_pool + Int64(part * 8)) * 2
        keys = []
        for j in cutlass.range_constexpr(self.pool):
            keys.append(po.load_i32x4_if(live, k + k_stride_token * (2 * j)))
        raw = self.load_scores(
            live,
            slot_score_ptr.toint(),
            Int64(number) * score_stride_pool + Int64(part * 8),
            score_stride_token,
            score_words,
        )
        ape = ape_ptr.toint() + Int64(part * 32)
        biased = []
        for j in cutlass.range_constexpr(self.pool):
            bias = rn.load_f32x4_if(live, ape + j * 512) + rn.load_f32x4_if(live, ape + j * 512 + 16)
            biased.append([raw[8 * j + d] + bias[d] for d in range(8)])
        pooled = po.round_bf16(po.weighted_sum([po.unpack(words) for words in keys], biased))
        turned = po.round_bf16(po.hadamard(po.unpack(pooled), BITS, lane))
        scale, low, high = po.quantise(turned, LANES, round_scale)

        if live != 0 and page >= 0:
            base = cache + Int64(page) * page_stride
            at = base + Int64(place * 128 + part * 8)
            ops.store_global_i32(at, low)
            ops.store_global_i32(at + 4, high)
            if part == 0:
                ops.store_global_f32(base + Int64(page_size * 128 + place * 4), scale)
        if live != 0 and dense != 0:
            ops.store_global_i32x2(dense + Int64(number) * 128 + Int64(part * 8), low, high)
            if part == 0:
                ops.store_global_f32(dense_scale_ptr.toint() + Int64(number) * 4, scale)

    @cute.jit
    def load_scores(self, live: Int32, scores: Int64, at: Int64, stride: Int64, words: Int32):
        """The lane's 8 gate scores of each token as FP32, from bf16 (`words` 1) or FP32 (2)."""
        half = Int32(0)
        if words == 1:
            half = live
        loaded = []
        for j in cutlass.range_constexpr(self.pool):
            loaded.append(po.load_i32x4_if(half, scores + (at + stride * j) * 2))
        raw = ()
        for j in cutlass.range_constexpr(self.pool):
            raw = raw + tuple(po.unpack(loaded[j]))
        if words == 2:
            full = ()
            for j in cutlass.range_constexpr(self.pool):
                source = scores + (at + stride * j) * 4
                full = full + rn.load_f32x4_if(live, source) + rn.load_f32x4_if(live, source + 16)
            raw = full
        return raw
