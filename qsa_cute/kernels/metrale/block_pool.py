"""Block keys of newly complete blocks, at any ratio and key length, with angles computed from theta.

    block_keys[g] = rope(norm(cast(mean of raw_keys[g * ratio .. g * ratio + ratio - 1]), w), position g * ratio)

for the blocks g = first_block .. first_block + n_new - 1. The mean sums in token order; rounding to the type between
mean and norm is the model's. At ratio 4 and 128 dims only the angles differ from `indexer/compress.py`'s.

Grid: thread blocks of 4 warps, which take the new blocks in turn, one a warp (`vectors.py`).

Baked: type. The caller guarantees: contiguous rows of hd elements, 8-byte aligned; hd a multiple of 4 up to 1024, rot
even and at most hd; raw_keys and block_keys begin at token 0 and block 0 of the sequence.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common import rope_norm as rn
from qsa_cute.kernels.common.params import f32, i32, i64, ptr
from qsa_cute.kernels.metrale.vectors import (
    LANE_DIMS,
    PIECE,
    WARPS,
    VectorNorm,
    frequency_bytes,
    store_shared_f32x4,
)

PARAMS = (
    ptr("raw_keys", "elem", 8),
    ptr("k_norm_w", "elem", 8),
    ptr("block_keys", "elem", 8),
    i32("first_block"),
    i32("n_new"),
    i32("ratio"),
    i32("hd"),
    i32("rot"),
    i64("rope_step"),
    f32("eps"),
)


class BlockPool(VectorNorm):
    early_launch = early.SUPPORTED

    @cute.jit
    def __call__(
        self,
        raw_keys: cute.Pointer,
        k_norm_w: cute.Pointer,
        block_keys: cute.Pointer,
        first_block: Int32,
        n_new: Int32,
        ratio: Int32,
        hd: Int32,
        rot: Int32,
        rope_step: Int64,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(raw_keys, k_norm_w, block_keys, first_block, n_new, ratio, hd, rot, rope_step, eps).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        raw_keys: cute.Pointer,
        k_norm_w: cute.Pointer,
        block_keys: cute.Pointer,
        first_block: Int32,
        n_new: Int32,
        ratio: Int32,
        hd: Int32,
        rot: Int32,
        rope_step: Int64,
        eps: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        groups, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        row = smem + frequency_bytes(rot) + warp * hd * 4
        self.frequencies(smem, rope_step, rot, tid)
        early.begin()
        for new in cutlass.range(group * WARPS + warp, n_new, groups * WARPS, unroll=1):
            block = first_block + new
            position = block * ratio
            squares = Float32(0.0)
            for d in cutlass.range(lane * LANE_DIMS, hd, PIECE, unroll=1):
                x = self.mean(raw_keys.toint() + (Int64(position) * hd + d) * 2, Int64(hd) * 2, ratio)
                store_shared_f32x4(row + d * 4, x)
                for i in cutlass.range_constexpr(LANE_DIMS):
                    squares = rn.add(squares, rn.multiply(x[i], x[i]))
            self.norm_rope(smem, row, squares, k_norm_w.toint(), hd, rot, position, eps, lane)
            to = block_keys.toint() + Int64(block) * hd * 2
            for d in cutlass.range(lane * LANE_DIMS, hd, PIECE, unroll=1):
                v = ops.load_shared_f32x4(row + d * 4)
                ops.store_global_i32x2(
                    to + Int64(d) * 2, ops.pack_2(self.dtype, v[0], v[1]), ops.pack_2(self.dtype, v[2], v[3])
                )

    @cute.jit
    def mean(self, key: Int64, row_bytes: Int64, ratio: Int32):
        """4 dims of a block's mean, rounded to the type: keys summed in token order, divided by their number."""
        words = rn.load_i32x2_if(Int32(1), key)
        a, b = rn.unpack_2(self.dtype, words[0])
        c, d = rn.unpack_2(self.dtype, words[1])
        for token in cutlass.range(1, ratio, unroll=4):
            words = rn.load_i32x2_if(Int32(1), key + Int64(token) * row_bytes)
            low = rn.unpack_2(self.dtype, words[0])
            high = rn.unpack_2(self.dtype, words[1])
            a, b, c, d = rn.add(a, low[0]), rn.add(b, low[1]), rn.add(c, high[0]), rn.add(d, high[1])
        count = Float32(ratio)
        first = rn.unpack_2(self.dtype, ops.pack_2(self.dtype, ops.divide(a, count), ops.divide(b, count)))
        last = rn.unpack_2(self.dtype, ops.pack_2(self.dtype, ops.divide(c, count), ops.divide(d, count)))
        return first[0], first[1], last[0], last[1]
