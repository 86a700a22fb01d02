"""Ids fill: ids[r, c] = c, the values that a segmented sort of logits carries along.

Grid: (rows * ceil(num_blocks / 1024)); a block of threads fills 1024 columns of a row.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr

PARAMS = (ptr("ids_ptr", "i32"), i32("num_blocks"), i64("ids_stride_row"))

COLUMNS = 1024


class IdsFill:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.threads = 256
        self.smem_bytes = 0

    @cute.jit
    def __call__(self, ids_ptr: cute.Pointer, num_blocks: Int32, ids_stride_row: Int64, stream: cuda.CUstream):
        self.kernel(ids_ptr, num_blocks, ids_stride_row).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream
        )

    @cute.kernel
    def kernel(self, ids_ptr: cute.Pointer, num_blocks: Int32, ids_stride_row: Int64):
        early.begin()
        group, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        groups = (num_blocks + COLUMNS - 1) // COLUMNS
        row = group // groups
        first = group % groups * COLUMNS + tid
        out = ids_ptr.toint() + (Int64(row) * ids_stride_row + Int64(first)) * 4
        for step in cutlass.range_constexpr(COLUMNS // 256):
            if first + step * 256 < num_blocks:
                ops.store_global_i32(out + step * 1024, first + step * 256)
