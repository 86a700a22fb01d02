"""Decode update: the new tokens of each request into its tail ring, and each pool that they complete into the cache.

For token t of a request, in order, at position p with cache slot c and tail slot s (block s // ring):
1. when p is a pool's last position and c >= 0: the pool's earlier tokens are read from the ring, compressed with the
   token's own key and scores (as `compress_write`, bit for bit) and written at slot c;
2. when p >= 0 and s >= 0: the token's key and scores go to place p % ring of its block.

A block below 0 counts as block 0 in step 1; a block or a cache slot past its cache reads and writes nothing.

Grid: (num_requests); a warp a request, 4 dims a lane: what a lane reads from the ring, the same lane wrote. All tokens'
indices are loaded at once, keys and scores one token ahead; only a completed pool waits for memory again.

Baked: tokens of a pool. The caller guarantees: 8-byte aligned rows, 16-byte aligned ape (contiguous), a ring that is a
multiple of the pool, and that no two requests share a tail block.
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
    ptr("tail_ptr", "elem", 8),
    ptr("tail_slots_ptr", "i32"),
    ptr("key_ptr", "elem", 8),
    ptr("slot_score_ptr", "elem", 8),
    ptr("ape_ptr", "f32", 16),
    ptr("slots_ptr", "i32"),
    ptr("positions_ptr", "i32"),
    i32("next_n"),
    i32("tail_slot_words"),
    i32("slot_words"),
    i32("position_words"),
    i32("ring"),
    i32("num_tail_blocks"),
    i32("page_size"),
    i32("num_pages"),
    i32("round_scale"),
    i64("page_stride"),
    i64("tail_stride_block"),
    i64("tail_stride_half"),
    i64("key_stride_request"),
    i64("key_stride_token"),
    i64("score_stride_request"),
    i64("score_stride_token"),
)

BITS = (0, 1, ~0, ~1, ~2, ~3, ~4)


class DecodeUpdate:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str, pool: int):
        self.pool = pool
        self.threads = 32
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self,
        cache_ptr: cute.Pointer,
        tail_ptr: cute.Pointer,
        tail_slots_ptr: cute.Pointer,
        key_ptr: cute.Pointer,
        slot_score_ptr: cute.Pointer,
        ape_ptr: cute.Pointer,
        slots_ptr: cute.Pointer,
        positions_ptr: cute.Pointer,
        next_n: Int32,
        tail_slot_words: Int32,
        slot_words: Int32,
        position_words: Int32,
        ring: Int32,
        num_tail_blocks: Int32,
        page_size: Int32,
        num_pages: Int32,
        round_scale: Int32,
        page_stride: Int64,
        tail_stride_block: Int64,
        tail_stride_half: Int64,
        key_stride_request: Int64,
        key_stride_token: Int64,
        score_stride_request: Int64,
        score_stride_token: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            cache_ptr,
            tail_ptr,
            tail_slots_ptr,
            key_ptr,
            slot_score_ptr,
            ape_ptr,
            slots_ptr,
            positions_ptr,
            next_n,
            tail_slot_words,
            slot_words,
            position_words,
            ring,
            num_tail_blocks,
            page_size,
            num_pages,
            round_scale,
            page_stride,
            tail_stride_block,
            tail_stride_half,
            key_stride_request,
            key_stride_token,
            score_stride_request,
            score_stride_token,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        cache_ptr: cute.Pointer,
        tail_ptr: cute.Pointer,
        tail_slots_ptr: cute.Pointer,
        key_ptr: cute.Pointer,
        slot_score_ptr: cute.Pointer,
        ape_ptr: cute.Pointer,
        slots_ptr: cute.Pointer,
        positions_ptr: cute.Pointer,
        next_n: Int32,
        tail_slot_words: Int32,
        slot_words: Int32,
        position_words: Int32,
        ring: Int32,
        num_tail_blocks: Int32,
        page_size: Int32,
        num_pages: Int32,
        round_scale: Int32,
        page_stride: Int64,
        tail_stride_block: Int64,
        tail_stride_half: Int64,
        key_stride_request: Int64,
        key_stride_token: Int64,
        score_stride_request: Int64,
        score_stride_token: Int64,
    ):
        early.begin()
        request, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        lane_bytes = Int64(lane * rn.LANE_BYTES)
        keys = key_ptr.toint() + Int64(request) * key_stride_request * 2 + lane_bytes
        scores = slot_score_ptr.toint() + Int64(request) * score_stride_request * 2 + lane_bytes
        ape = []
        for j in cutlass.range_constexpr(self.pool):
            ape.append(rn.load_f32x4_if(Int32(1), ape_ptr.toint() + Int64(lane * 16) + j * 512))

        for first in cutlass.range(0, next_n, 32, unroll=1):
            count = cutlass.min(next_n - first, Int32(32))
            # Lane i works out where token first + i goes; the tokens then take turns, each loaded one ahead.
            live = Int32(lane < count)
            index = Int64(request) * Int64(next_n) + Int64(first + lane)
            slot = po.load_index(live, slots_ptr.toint() + index * Int64(slot_words * 4), slot_words)
            position = po.load_index(live, positions_ptr.toint() + index * Int64(position_words * 4), position_words)
            tail_slot = po.load_index(
                live, tail_slots_ptr.toint() + index * Int64(tail_slot_words * 4), tail_slot_words
            )
            next_key = rn.load_i32x2_if(Int32(1), keys + Int64(first) * key_stride_token * 2)
            next_score = rn.load_i32x2_if(Int32(1), scores + Int64(first) * score_stride_token * 2)
            page, entry = po.cache_entry(slot, page_size, num_pages)
            block = cutlass.max(tail_slot, Int32(0)) // ring
            known = position >= 0 and block < num_tail_blocks
            if not (known and page >= 0 and position % self.pool == self.pool - 1):
                page = Int32(-1)
            stashed = Int32(1) if known and tail_slot >= 0 else Int32(0)
            row = tail_ptr.toint() + Int64(block) * tail_stride_block * 2 + Int64(position % ring * po.HEAD_BYTES)
            row_low, row_high = row.to(Int32), (row >> 32).to(Int32)

            for i in cutlass.range(count, unroll=1):
                key, score = next_key, next_score
                t = Int64(first + i + 1)
                next_key = rn.load_i32x2_if(Int32(i + 1 < count), keys + t * key_stride_token * 2)
                next_score = rn.load_i32x2_if(Int32(i + 1 < count), scores + t * score_stride_token * 2)
                to_page = cute.arch.shuffle_sync(page, i)
                low, high = cute.arch.shuffle_sync(row_low, i), cute.arch.shuffle_sync(row_high, i)
                at = (Int64(high) << 32 | (Int64(low) & 0xFFFFFFFF)) + lane_bytes
                if to_page >= 0:
                    first_of_pool = at - Int64((self.pool - 1) * po.HEAD_BYTES)
                    packed = self.compress(first_of_pool, tail_stride_half * 2, key, score, ape, lane, round_scale)
                    place = cute.arch.shuffle_sync(entry, i)
                    base = cache_ptr.toint() + Int64(to_page) * page_stride
                    ops.store_global_i32(base + Int64(place * 128 + lane * 4), packed[1])
                    if lane == 0:
                        ops.store_global_f32(base + Int64(page_size * 128 + place * 4), packed[0])
                if cute.arch.shuffle_sync(stashed, i) != 0:
                    ops.store_global_i32x2(at, key[0], key[1])
                    ops.store_global_i32x2(at + tail_stride_half * 2, score[0], score[1])

    @cute.jit
    def compress(self, ring: Int64, half: Int64, key: tuple, score: tuple, ape: list, lane: Int32, round_scale: Int32):
        """(scale, word) of the pool whose earlier tokens lie from `ring` on and whose last is given."""
        keys, scores = [], []
        for j in cutlass.range_constexpr(self.pool - 1):
            keys.append(rn.load_i32x2_if(Int32(1), ring + j * po.HEAD_BYTES))
            scores.append(rn.load_i32x2_if(Int32(1), ring + half + j * po.HEAD_BYTES))
        keys.append(key)
        scores.append(score)
        biased = []
        for j in cutlass.range_constexpr(self.pool):
            gate = po.unpack(scores[j])
            biased.append([gate[d] + ape[j][d] for d in range(rn.LANE_DIMS)])
        pooled = po.round_bf16(po.weighted_sum([po.unpack(words) for words in keys], biased))
        turned = po.round_bf16(po.hadamard(po.unpack(pooled), BITS, lane))
        return po.quantise(turned, 32, round_scale)
