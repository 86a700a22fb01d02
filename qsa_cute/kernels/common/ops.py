"""The few PTX instructions that CuTe DSL has no short form for, on plain addresses.

Global addresses are Int64, shared addresses Int32 (the 32-bit shared window). Each function is one
instruction; the numerics and layouts are PTX's own.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

ELEMENTS = {"bf16": BFloat16, "fp16": cute.Float16, "fp8_e4m3": Float8E4M3FN}
ELEM_BYTES = {"bf16": 2, "fp16": 2, "fp8_e4m3": 1}
PTX_TYPES = {"bf16": "bf16", "fp16": "f16"}


def cp_async_16(dst: Int32, src: Int64, size: Int32) -> None:
    """16 bytes global -> shared, bypassing L1; the bytes past `size` (0 or 16) are written as zeros and not read."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[dst, src, size]
    )


def ldmatrix_x4(addr: Int32) -> tuple:
    """Four 8x8 matrices of 16-bit elements; lane i supplies the address of row i % 8 of matrix i // 8."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[addr],
    )


def ldmatrix_x4_trans(addr: Int32) -> tuple:
    """`ldmatrix_x4`, each matrix transposed on the way."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[addr],
    )


def mma_16816(dtype: str, a: tuple, b: tuple, c: tuple) -> tuple:
    """D = A B + C on one m16n8k16 tile: A 4, B 2 packed registers; C and D 4 FP32."""
    t = PTX_TYPES[dtype]
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def mma_32_bytes(dtype: str, a: tuple, b: tuple, c: tuple) -> tuple:
    """D = A B + C on one m16n8 tile whose K is 32 bytes: `mma_16816`, or m16n8k32 of e4m3 with the same layout in
    bytes (SM89 up)."""
    if dtype != "fp8_e4m3":
        return mma_16816(dtype, a, b, c)
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def add_mma_16816(dtype: str, acc: cute.Tensor, at: int, a: tuple, b: tuple) -> None:
    """Four accumulators of `acc` from `at` on += A B, as `mma_16816`."""
    _put(acc, at, mma_16816(dtype, a, b, (acc[at], acc[at + 1], acc[at + 2], acc[at + 3])))


def add_mma_32_bytes(dtype: str, acc: cute.Tensor, at: int, a: tuple, b: tuple) -> None:
    """As `add_mma_16816`, by `mma_32_bytes`."""
    _put(acc, at, mma_32_bytes(dtype, a, b, (acc[at], acc[at + 1], acc[at + 2], acc[at + 3])))


def _put(acc: cute.Tensor, at: int, values: tuple) -> None:
    for i in range(4):
        acc[at + i] = values[i]


def split_i64(value: Int64) -> tuple:
    """The low and the high word."""
    return cute.arch.inline_ptx("mov.b64 {{$w0}, {$w1}}, {$r0};", write_only_types=[Int32] * 2, read_only_args=[value])


def join_i64(low: Int32, high: Int32) -> Int64:
    return cute.arch.inline_ptx("mov.b64 {$w0}, {{$r0}, {$r1}};", write_only_types=[Int64], read_only_args=[low, high])


def pack_2(dtype: str, low: Float32, high: Float32) -> Int32:
    """Two FP32 rounded to nearest even and packed, `low` in the low half."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{PTX_TYPES[dtype]}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[high, low],
    )


def load_global_i32(addr: Int64) -> Int32:
    return cute.arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[addr])


def load_global_i32_if(wanted: Int32, addr: Int64, other: Int32) -> Int32:
    """The word at `addr`, or `other` without a read when `wanted` is 0. Branch-free, so loads overlap."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, {$r2}; @p ld.global.b32 {$w0}, [{$r1}]; }",
        write_only_types=[Int32],
        read_only_args=[wanted, addr, other],
    )


def load_global_f32(addr: Int64) -> Float32:
    """Coherent: reads what other blocks of this launch wrote."""
    return cute.arch.inline_ptx("ld.global.cg.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[addr])


def load_global_f32_if(wanted: Int32, addr: Int64, other: Float32) -> Float32:
    """As `load_global_i32_if`."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.f32 {$w0}, {$r2}; @p ld.global.f32 {$w0}, [{$r1}]; }",
        write_only_types=[Float32],
        read_only_args=[wanted, addr, other],
    )


def load_global_f32x4(addr: Int64) -> tuple:
    """Coherent: reads what other blocks of this launch wrote."""
    return cute.arch.inline_ptx(
        "ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[addr],
    )


def store_global_i32(addr: Int64, value: Int32) -> None:
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[addr, value])


def store_global_i32x2(addr: Int64, v0: Int32, v1: Int32) -> None:
    cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, v0, v1])


def store_global_f32(addr: Int64, value: Float32) -> None:
    cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[addr, value])


def store_global_f32x2(addr: Int64, v0: Float32, v1: Float32) -> None:
    cute.arch.inline_ptx("st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, v0, v1])


def store_global_f32x4(addr: Int64, v: tuple) -> None:
    cute.arch.inline_ptx("st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *v])


def load_shared_f32(addr: Int32) -> Float32:
    return cute.arch.inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[addr])


def load_shared_f32x2(addr: Int32) -> tuple:
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[addr]
    )


def load_shared_f32x4(addr: Int32) -> tuple:
    return cute.arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[addr],
    )


def store_shared_i32x2(addr: Int32, v0: Int32, v1: Int32) -> None:
    cute.arch.inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, v0, v1])


def load_shared_u8(addr: Int32) -> Int32:
    return cute.arch.inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[addr])


def store_shared_u8(addr: Int32, value: Int32) -> None:
    """The low byte."""
    cute.arch.inline_ptx("st.shared.u8 [{$r0}], {$r1};", read_only_args=[addr, value])


def store_shared_f32(addr: Int32, value: Float32) -> None:
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[addr, value])


def map_cluster(addr: Int32, rank: Int32) -> Int32:
    """The address, in the cluster's shared window, of `addr` in the block of that rank."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[addr, rank]
    )


def store_cluster_async_x2(addr: Int32, v0: Float32, v1: Float32, barrier: Int32) -> None:
    """8 bytes to a peer's shared memory; completes 8 transaction bytes on the peer's mbarrier."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [{$r0}], {{$r1}, {$r2}}, [{$r3}];",
        read_only_args=[addr, v0, v1, barrier],
    )


def store_cluster_async_x4(addr: Int32, v: tuple, barrier: Int32) -> None:
    """16 bytes to a peer's shared memory; completes 16 transaction bytes on the peer's mbarrier."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[addr, *v, barrier],
    )


def shared_barrier(addr: Int32) -> cute.Pointer:
    """An mbarrier at a shared address, for cute.arch's mbarrier functions."""
    return cute.make_ptr(Int64, addr, cute.AddressSpace.smem, assumed_align=8)


def load_shared_i32(addr: Int32) -> Int32:
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[addr])


def store_shared_i32(addr: Int32, value: Int32) -> None:
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[addr, value])


def atomic_add_i32(addr: Int64, value: Int32) -> Int32:
    """Global, device scope; the value before."""
    return cute.arch.inline_ptx(
        "atom.global.acq_rel.gpu.add.s32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[addr, value]
    )


def mul_hi_u32(a: Int32, b: Int32) -> Int32:
    """The high word of the product, both taken as unsigned."""
    return cute.arch.inline_ptx("mul.hi.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def shift_right_u32(a: Int32, by: Int32) -> Int32:
    """Zeros come in from the left."""
    return cute.arch.inline_ptx("shr.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, by])


def prefetch_l2(addr: Int64) -> None:
    """Bring the line to the L2."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[addr])


def load_shared_i32x2(addr: Int32) -> tuple:
    return cute.arch.inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32] * 2, read_only_args=[addr]
    )


def load_global_i32x2(addr: Int64) -> tuple:
    return cute.arch.inline_ptx(
        "ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32] * 2, read_only_args=[addr]
    )


def permute_bytes(a: Int32, selector: int) -> Int32:
    """Byte i of the result is the byte of `a` that nibble i of the selector names."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, {selector:#x};", write_only_types=[Int32], read_only_args=[a]
    )


def e4m3_to_half(word: Int32) -> tuple:
    """Four e4m3 to fp16, exact: bytes 0 and 1 as one packed word, 2 and 3 as the other. SM89 and up."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, l; cvt.rn.f16x2.e4m3x2 {$w1}, h; }",
        write_only_types=[Int32] * 2,
        read_only_args=[word],
    )


def store_global_i32x4(addr: Int64, v: tuple) -> None:
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *v])


def load_shared_i32x4(addr: Int32) -> tuple:
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4, read_only_args=[addr]
    )


def store_shared_i32x4(addr: Int32, v: tuple) -> None:
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *v])


def store_shared_64(addr: Int32, value) -> None:
    """8 bytes, signed or not."""
    cute.arch.inline_ptx("st.shared.b64 [{$r0}], {$r1};", read_only_args=[addr, value])


def count_trailing_zeros(word: Int32) -> Int32:
    """Place of the lowest set bit; 32 for 0."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 r; brev.b32 r, {$r0}; clz.b32 {$w0}, r; }", write_only_types=[Int32], read_only_args=[word]
    )


def forget(value: Int32) -> Int32:
    """The same value, which no compiler knows: what follows from it is not kept in registers from before, and it
    is not made again from special registers."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def divide(a: Float32, b: Float32) -> Float32:
    """Rounded to nearest."""
    return cute.arch.inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def sigmoid(x: Float32) -> Float32:
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * (-LOG2_E), fastmath=True))
