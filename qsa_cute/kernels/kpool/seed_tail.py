"""Tail seed of prefill: each request's last `pool` tokens of the batch to its ring in the tail cache, bit by bit.

Token i has slot t = tail_slots[i] = block * ring + position % ring; it is one of the last when token i + pool is
another block's, padding (t < 0), or past the batch. Its key goes to tail[block, 0, t % ring], its gate scores to
tail[block, 1, t % ring]. Other tokens, and slots outside the tail cache, read and write nothing.

Grid: (ceil(num_tokens / 8)); a warp a token, 8 bytes a lane. The caller guarantees: 8-byte aligned rows.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common import rope_norm as rn
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.kpool import pool_ops as po

PARAMS = (
    ptr("tail_ptr", "elem", 8),
    ptr("key_ptr", "elem", 8),
    ptr("gate_score_ptr", "elem", 8),
    ptr("tail_slots_ptr", "i32"),
    i32("num_tokens"),
    i32("slot_words"),
    i32("pool_size"),
    i32("ring"),
    i32("num_tail_blocks"),
    i64("tail_stride_block"),
    i64("tail_stride_half"),
    i64("key_stride_token"),
    i64("score_stride_token"),
)

WARPS = 8


class SeedTail:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.threads = 32 * WARPS
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self,
        tail_ptr: cute.Pointer,
        key_ptr: cute.Pointer,
        gate_score_ptr: cute.Pointer,
        tail_slots_ptr: cute.Pointer,
        num_tokens: Int32,
        slot_words: Int32,
        pool_size: Int32,
        ring: Int32,
        num_tail_blocks: Int32,
        tail_stride_block: Int64,
        tail_stride_half: Int64,
        key_stride_token: Int64,
        score_stride_token: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            tail_ptr,
            key_ptr,
            gate_score_ptr,
            tail_slots_ptr,
            num_tokens,
            slot_words,
            pool_size,
            ring,
            num_tail_blocks,
            tail_stride_block,
            tail_stride_half,
            key_stride_token,
            score_stride_token,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        tail_ptr: cute.Pointer,
        key_ptr: cute.Pointer,
        gate_score_ptr: cute.Pointer,
        tail_slots_ptr: cute.Pointer,
        num_tokens: Int32,
        slot_words: Int32,
        pool_size: Int32,
        ring: Int32,
        num_tail_blocks: Int32,
        tail_stride_block: Int64,
        tail_stride_half: Int64,
        key_stride_token: Int64,
        score_stride_token: Int64,
    ):
        early.begin()
        group, _, _ = cute.arch.block_idx()
        token = group * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane_bytes = Int64(cute.arch.lane_idx() * rn.LANE_BYTES)
        at = tail_slots_ptr.toint() + Int64(token) * Int64(slot_words * 4)
        slot = po.load_index(Int32(token < num_tokens), at, slot_words)
        ahead = po.load_index(
            Int32(Int64(token) + Int64(pool_size) < Int64(num_tokens)),
            at + Int64(pool_size) * Int64(slot_words * 4),
            slot_words,
        )
        block, place = po.cache_entry(slot, ring, num_tail_blocks)
        followed = Int32(0)
        if ahead >= 0 and ahead // ring == block:
            followed = Int32(1)
        if block >= 0 and followed == 0:
            key = rn.load_i32x2_if(Int32(1), key_ptr.toint() + Int64(token) * key_stride_token * 2 + lane_bytes)
            score = rn.load_i32x2_if(
                Int32(1), gate_score_ptr.toint() + Int64(token) * score_stride_token * 2 + lane_bytes
            )
            to = tail_ptr.toint() + Int64(block) * tail_stride_block * 2 + Int64(place * po.HEAD_BYTES) + lane_bytes
            ops.store_global_i32x2(to, key[0], key[1])
            ops.store_global_i32x2(to + tail_stride_half * 2, score[0], score[1])
