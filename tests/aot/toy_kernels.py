"""Kernels small enough to compile in a test: one that is right, and one for each way to be wrong."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.common.params import f32, i32, i64, ptr

PARAMS = (ptr("out", "f32"), i32("count"), i64("start"), f32("value"))


class Fill:
    """out[start + i] = value for i < count, `warps` warps."""

    def __init__(self, head_dim: int, dtype: str, warps: int):
        self.threads = 32 * warps
        self.smem_bytes = 0

    @cute.jit
    def __call__(self, out: cute.Pointer, count: Int32, start: Int64, value: Float32, stream: cuda.CUstream):
        self.kernel(out, count, start, value).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream
        )

    @cute.kernel
    def kernel(self, out: cute.Pointer, count: Int32, start: Int64, value: Float32):
        tid, _, _ = cute.arch.thread_idx()
        if tid < count:
            cells = cute.make_tensor(out, cute.make_layout(1 << 30))
            cells[start + tid] = value


class Greedy(Fill):
    """More shared memory than any SM gives a block."""

    def __init__(self, head_dim: int, dtype: str, warps: int):
        super().__init__(head_dim, dtype, warps)
        self.smem_bytes = 300 * 1024


class Broken(Fill):
    """Does not get as far as a compiler."""

    def __init__(self, head_dim: int, dtype: str, warps: int):
        raise RuntimeError("this kernel is broken on purpose")
