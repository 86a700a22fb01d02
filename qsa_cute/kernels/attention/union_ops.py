"""The SM90 instructions of the union kernels that CuTe DSL has no short form for, on plain addresses.

As in `common.ops`: global addresses are Int64, shared addresses Int32, one instruction a function.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

TENSOR_MAP_BYTES = 128


def cp_async_16(dst: Int32, src: Int64, size: Int32) -> None:
    """16 bytes global -> shared; with size 0 zeros are written and nothing is read."""
    cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[dst, src, size])


def bulk_load(dst: Int32, src: Int64, size: Int32, barrier: Int32) -> None:
    """`size` bytes (a multiple of 16, 16-byte aligned) to shared memory; they complete on `barrier`."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[dst, src, size, barrier],
    )


def acquire_tensor_map(tensor_map: Int64) -> None:
    """Make a tensor map that a kernel wrote visible to this thread's TMA copies."""
    cute.arch.inline_ptx("fence.proxy.tensormap::generic.acquire.gpu [{$r0}], 128;", read_only_args=[tensor_map])


def replace_map_field(tensor_map: Int32, field: str, value) -> None:
    """Set a field of the tensor map at a shared address: `.field, ordinal` or `.field` of tensormap.replace."""
    width = "b64" if field.startswith(("global_address", "global_stride")) else "b32"
    name, _, ordinal = field.partition(" ")
    operand = f"{ordinal}, " if ordinal else ""
    cute.arch.inline_ptx(
        f"tensormap.replace.tile.{name}.shared::cta.b1024.{width} [{{$r0}}], {operand}{{$r1}};",
        read_only_args=[tensor_map, value],
    )


def publish_tensor_map(dst: Int64, src: Int32) -> None:
    """Copy a tensor map shared -> global and release it to the tensor-map proxy; by a whole warp."""
    cute.arch.inline_ptx(
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [{$r0}], [{$r1}], 128;",
        read_only_args=[dst, src],
    )


def load_i32(addr: Int64) -> Int32:
    """A word that nothing writes while this kernel runs."""
    return cute.arch.inline_ptx("ld.global.nc.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[addr])


def load_i32x2(addr: Int64) -> tuple:
    return cute.arch.inline_ptx(
        "ld.global.nc.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32] * 2, read_only_args=[addr]
    )


def load_i32x4_if(wanted: Int32, addr: Int64) -> tuple:
    """16 aligned bytes, or anything without a read when `wanted` is 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; "
        "mov.b32 {$w3}, 0; @p ld.global.nc.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r1}]; }",
        write_only_types=[Int32] * 4,
        read_only_args=[wanted, addr],
    )


def load_stream_x4_if(place: Int32, addr: Int64, offset: int) -> tuple:
    """16 aligned bytes at `addr + offset` that are read once, past the L1; zeros without a read when `place` < 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ge.s32 p, {$r0}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; "
        "mov.b32 {$w3}, 0; "
        f"@p ld.global.nc.L1::no_allocate.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r1}}+{offset}]; }}",
        write_only_types=[Int32] * 4,
        read_only_args=[place, addr],
    )


def load_i32_if(wanted: Int32, addr: Int64, other: Int32) -> Int32:
    """The word at `addr`, or `other` without a read when `wanted` is 0; branch-free, so that loads overlap."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, {$r2}; @p ld.global.nc.b32 {$w0}, [{$r1}]; }",
        write_only_types=[Int32],
        read_only_args=[wanted, addr, other],
    )


def load_list_x4_if(wanted: Int32, aligned: Int32, addr: Int64, other: Int32) -> tuple:
    """Four words, in one read where the address is known to be aligned; `other` without a read when `wanted` is 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p, q, one, four; setp.ne.s32 p, {$r0}, 0; setp.ne.s32 q, {$r1}, 0; and.pred one, p, q; "
        "not.pred q, q; and.pred four, p, q; mov.b32 {$w0}, {$r3}; mov.b32 {$w1}, {$r3}; mov.b32 {$w2}, {$r3}; "
        "mov.b32 {$w3}, {$r3}; @one ld.global.nc.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r2}]; "
        "@four ld.global.nc.b32 {$w0}, [{$r2}]; @four ld.global.nc.b32 {$w1}, [{$r2}+4]; "
        "@four ld.global.nc.b32 {$w2}, [{$r2}+8]; @four ld.global.nc.b32 {$w3}, [{$r2}+12]; }",
        write_only_types=[Int32] * 4,
        read_only_args=[wanted, aligned, addr, other],
    )


def exit_if_negative(value: Int32) -> None:
    """Ends the thread; a boundary that ptxas moves no memory access over, at one instruction where nothing ends."""
    cute.arch.inline_ptx("{ .reg .pred p; setp.lt.s32 p, {$r0}, 0; @p exit; }", read_only_args=[value])


def clear_shared_16(addr: Int32) -> None:
    cute.arch.inline_ptx(
        "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [{$r0}], {z, z, z, z}; }", read_only_args=[addr]
    )


def or_shared(addr: Int32, bits: Int32) -> None:
    cute.arch.inline_ptx("red.shared.or.b32 [{$r0}], {$r1};", read_only_args=[addr, bits])


def fetch_or_shared(addr: Int32, bits: Int32) -> Int32:
    """Or into shared memory; the word before."""
    return cute.arch.inline_ptx(
        "atom.shared.or.b32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[addr, bits]
    )


def fetch_add_shared(addr: Int32, value: Int32) -> Int32:
    return cute.arch.inline_ptx(
        "atom.shared.add.s32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[addr, value]
    )


def max_shared(addr: Int32, value: Int32) -> None:
    cute.arch.inline_ptx("red.shared.max.s32 [{$r0}], {$r1};", read_only_args=[addr, value])
