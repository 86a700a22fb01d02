"""Hadamard-128 and e4m3: each bf16 row of 128, rotated, rounded to bf16 and quantised with a power-of-two scale.

    y = bf16(H_128 x / sqrt(128));  scale = 2^ceil(log2(max(absmax(y), 1e-4) / 448));  out = e4m3(y / scale)

Memory bound: 388 bytes a row. Four lanes hold a row, four 16-byte pieces each (piece p of lane c is dims 32p + 8c
onwards), so two of the seven butterfly stages are shuffles and a warp turns 8 rows at once.

Grid: (ceil(num_rows / 32)). The caller guarantees: contiguous rows, 16-byte aligned input, 8-byte aligned output.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, ptr
from qsa_cute.kernels.kpool import pool_ops as po

PARAMS = (
    ptr("q_ptr", "elem", 16),
    ptr("out_ptr", "i32", 8),
    ptr("scale_ptr", "f32"),
    i32("num_rows"),
)

WARPS = 4
WARP_ROWS = 8
LANES = 4  # that hold a row
PIECES = 4
BITS = (0, 1, 2, ~0, ~1, 3, 4)


class HadamardQuant:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.threads = 32 * WARPS
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        out_ptr: cute.Pointer,
        scale_ptr: cute.Pointer,
        num_rows: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(q_ptr, out_ptr, scale_ptr, num_rows).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream
        )

    @cute.kernel
    def kernel(self, q_ptr: cute.Pointer, out_ptr: cute.Pointer, scale_ptr: cute.Pointer, num_rows: Int32):
        early.begin()
        group, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        row = (group * WARPS + cute.arch.warp_idx()) * WARP_ROWS + lane // LANES
        live = Int32(row < num_rows)
        piece = Int64(row) * po.HEAD_BYTES + Int64((lane % LANES) * 16)
        words = ()
        for p in cutlass.range_constexpr(PIECES):
            words = words + tuple(po.load_i32x4_if(live, q_ptr.toint() + piece + p * (LANES * 16)))
        turned = po.round_bf16(po.hadamard(po.unpack(words), BITS, lane))
        most = po.absmax(turned, LANES)
        scale, inverse = po.power_scale(most)
        packed = po.pack_e4m3([value * inverse for value in po.unpack(turned)])
        if live != 0:
            out = out_ptr.toint() + Int64(row) * 128 + Int64((lane % LANES) * 8)
            for p in cutlass.range_constexpr(PIECES):
                ops.store_global_i32x2(out + p * (LANES * 8), packed[2 * p], packed[2 * p + 1])
            if lane % LANES == 0:
                ops.store_global_f32(scale_ptr.toint() + Int64(row) * 4, scale)
