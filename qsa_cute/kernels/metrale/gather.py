"""Selected tokens' K and V rows from a paged cache to contiguous scratch: slot i of k_out and v_out is token sel[i].

Caches are [pages, block_size, nkv, hd] of 16-bit elements, one sequence's pages by block_table. Slots whose token or
page is negative are left as they are, and nothing is read for them.

Grid: a thread copies one 16-byte chunk of K and the same of V; a thread block 256 consecutive ones, of consecutive
slots. Baked: nothing. The caller guarantees: 16-byte aligned rows of row_chunks * 16 bytes; block_table covers the
tokens.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.metrale.division import Divisor

PARAMS = (
    ptr("k_cache", "elem", 16),
    ptr("v_cache", "elem", 16),
    ptr("block_table", "i32"),
    ptr("sel", "i32"),
    ptr("k_out", "elem", 16),
    ptr("v_out", "elem", 16),
    i32("n_sel"),
    i32("block_size"),
    i64("page_magic"),
    i32("page_shift"),
    i32("row_chunks"),
    i64("row_magic"),
    i32("row_shift"),
)

THREADS = 256


def load_global_i32x4(addr: Int64) -> tuple:
    return cute.arch.inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4, read_only_args=[addr]
    )


class Gather:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.threads = THREADS
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self,
        k_cache: cute.Pointer,
        v_cache: cute.Pointer,
        block_table: cute.Pointer,
        sel: cute.Pointer,
        k_out: cute.Pointer,
        v_out: cute.Pointer,
        n_sel: Int32,
        block_size: Int32,
        page_magic: Int64,
        page_shift: Int32,
        row_chunks: Int32,
        row_magic: Int64,
        row_shift: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            k_cache,
            v_cache,
            block_table,
            sel,
            k_out,
            v_out,
            n_sel,
            block_size,
            page_magic,
            page_shift,
            row_chunks,
            row_magic,
            row_shift,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        k_cache: cute.Pointer,
        v_cache: cute.Pointer,
        block_table: cute.Pointer,
        sel: cute.Pointer,
        k_out: cute.Pointer,
        v_out: cute.Pointer,
        n_sel: Int32,
        block_size: Int32,
        page_magic: Int64,
        page_shift: Int32,
        row_chunks: Int32,
        row_magic: Int64,
        row_shift: Int32,
    ):
        early.begin()
        tid, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        at = group * THREADS + tid
        slot, chunk = Divisor(row_chunks, row_magic, row_shift).divide(at)
        if slot < n_sel:
            token = ops.load_global_i32(sel.toint() + Int64(slot) * 4)
            entry, place = Divisor(block_size, page_magic, page_shift).divide(cutlass.max(token, Int32(0)))
            page = ops.load_global_i32_if(Int32(token >= 0), block_table.toint() + Int64(entry) * 4, Int32(-1))
            if page >= 0:
                source = ((Int64(page) * block_size + place) * row_chunks + chunk) * 16
                k = load_global_i32x4(k_cache.toint() + source)
                v = load_global_i32x4(v_cache.toint() + source)
                ops.store_global_i32x4(k_out.toint() + Int64(at) * 16, k)
                ops.store_global_i32x4(v_out.toint() + Int64(at) * 16, v)
