"""The instructions of the selection kernels, on plain addresses: `common/ops.py`'s conventions.

`space` is "shared" or "shared::cluster"; with the latter an address may lie in a peer's shared memory.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from qsa_cute.kernels.common.ops import map_cluster as map_cluster


def load_f32x4_if(wanted: Int32, addr: Int64) -> tuple:
    """Four floats, or NaNs without a read when `wanted` is 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, 0x7fffffff; mov.b32 {$w1}, 0x7fffffff; "
        "mov.b32 {$w2}, 0x7fffffff; mov.b32 {$w3}, 0x7fffffff; "
        "@p ld.global.L1::no_allocate.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r1}]; }",
        write_only_types=[Float32] * 4,
        read_only_args=[wanted, addr],
    )


def load_f32_if(wanted: Int32, addr: Int64, other: Float32) -> Float32:
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, {$r2}; @p ld.global.f32 {$w0}, [{$r1}]; }",
        write_only_types=[Float32],
        read_only_args=[wanted, addr, other],
    )


def order_key(value: Float32) -> Uint32:
    """An unsigned that orders as the selection does: NaN lowest (0), -0 equal to +0, otherwise the value."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 t; .reg .b32 m, b; .reg .pred p; add.rn.f32 t, {$r0}, 0f00000000; mov.b32 b, t; "
        "shr.s32 m, b, 31; or.b32 m, m, 0x80000000; xor.b32 b, b, m; setp.nan.f32 p, t, t; selp.b32 {$w0}, 0, b, p; }",
        write_only_types=[Uint32],
        read_only_args=[value],
    )


def least(a: Uint32, b: Uint32) -> Uint32:
    """Of unsigned numbers; `cutlass.min` compares results of inline PTX as signed ones."""
    return cute.arch.inline_ptx("min.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def largest(a: Uint32, b: Uint32) -> Uint32:
    return cute.arch.inline_ptx("max.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def key_value(key: Uint32) -> Float32:
    """The float whose `order_key` is `key`."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 m; shr.s32 m, {$r0}, 31; not.b32 m, m; or.b32 m, m, 0x80000000; xor.b32 m, {$r0}, m; "
        "mov.b32 {$w0}, m; }",
        write_only_types=[Float32],
        read_only_args=[key],
    )


def minus_one_if(value: Float32, bound: Float32) -> Int32:
    """-1 when value >= bound, else 0; by another instruction than `push_if`'s, so that no predicate need be kept."""
    return cute.arch.inline_ptx(
        "set.ge.u32.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[value, bound]
    )


def push_if(value: Float32, bound: Float32, index: Int32, addr: Int32, space: str) -> Int32:
    """When value >= bound: append (value, index) at `addr`. The next address."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ge.f32 p, {$r0}, {$r1}; "
        f"@p st.{space}.v2.b32 [{{$r3}}], {{{{$r0}}, {{$r2}}}}; "
        "mov.b32 {$w0}, {$r3}; @p add.s32 {$w0}, {$w0}, 8; }",
        write_only_types=[Int32],
        read_only_args=[value, bound, index, addr],
    )


def atomic_add(addr: Int32, value: Int32, space: str) -> Int32:
    """The value before."""
    scope = "cluster" if space == "shared::cluster" else "cta"
    return cute.arch.inline_ptx(
        f"atom.relaxed.{scope}.{space}.add.u32 {{$w0}}, [{{$r0}}], {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[addr, value],
    )


def count_one(addr: Int32, space: str) -> None:
    scope = "cluster" if space == "shared::cluster" else "cta"
    cute.arch.inline_ptx(f"red.relaxed.{scope}.{space}.add.u32 [{{$r0}}], 1;", read_only_args=[addr])


def atomic_max(addr: Int32, value: Uint32, space: str) -> None:
    scope = "cluster" if space == "shared::cluster" else "cta"
    cute.arch.inline_ptx(f"red.relaxed.{scope}.{space}.max.u32 [{{$r0}}], {{$r1}};", read_only_args=[addr, value])


def atomic_or(addr: Int32, value: Int32) -> None:
    cute.arch.inline_ptx("red.relaxed.cta.shared.or.b32 [{$r0}], {$r1};", read_only_args=[addr, value])


def load_u32(addr: Int32) -> Uint32:
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr])


def load_u64(addr: Int32) -> Uint64:
    return cute.arch.inline_ptx("ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Uint64], read_only_args=[addr])


def load_u64x2(addr: Int32) -> tuple:
    return cute.arch.inline_ptx(
        "ld.shared.v2.b64 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint64] * 2, read_only_args=[addr]
    )


def load_i32(addr: Int32, space: str = "shared") -> Int32:
    return cute.arch.inline_ptx(f"ld.{space}.b32 {{$w0}}, [{{$r0}}];", write_only_types=[Int32], read_only_args=[addr])


def store_u32x2(addr: Int32, v0: Uint32, v1: Uint32, space: str) -> None:
    cute.arch.inline_ptx(f"st.{space}.v2.b32 [{{$r0}}], {{{{$r1}}, {{$r2}}}};", read_only_args=[addr, v0, v1])


def store_u64_at(addr: Int32, value: Uint64, space: str) -> None:
    cute.arch.inline_ptx(f"st.{space}.b64 [{{$r0}}], {{$r1}};", read_only_args=[addr, value])


def add(addr: Int32, value: Int32, space: str) -> None:
    scope = "cluster" if space == "shared::cluster" else "cta"
    cute.arch.inline_ptx(f"red.relaxed.{scope}.{space}.add.u32 [{{$r0}}], {{$r1}};", read_only_args=[addr, value])


def atomic_min(addr: Int32, value: Uint32, space: str) -> None:
    scope = "cluster" if space == "shared::cluster" else "cta"
    cute.arch.inline_ptx(f"red.relaxed.{scope}.{space}.min.u32 [{{$r0}}], {{$r1}};", read_only_args=[addr, value])


def load_i32_vector(addr: Int32, n: int, space: str) -> tuple:
    """2 or 4 neighbours."""
    names = ", ".join(f"{{$w{i}}}" for i in range(n))
    return cute.arch.inline_ptx(
        f"ld.{space}.v{n}.b32 {{{names}}}, [{{$r0}}];", write_only_types=[Int32] * n, read_only_args=[addr]
    )


# A value's bin is the low bits of a float from 2^23 to 2^23 + 2047: the value's place in the span, from 0 to 1, is
# scaled. NaN, infinities less infinities and what lies below the span are in bin 0.
_PLACE = "fma.rn.sat.f32 t, {$r0}, {$r1}, {$r2}; fma.rn.f32 t, t, 0f44FFE000, 0f4B000000;"


def count_place(value: Float32, scale: Float32, bias: Float32, base: Int32, other: Int32, one: Int32) -> None:
    """Add `one` at base + 4 * (the bin's float's bits); bin 0 goes to `other`, as lanes that skip cost a branch."""
    cute.arch.inline_ptx(
        "{ .reg .f32 t; .reg .b32 a; .reg .pred p; " + _PLACE + " setp.gt.f32 p, t, 0f4B000000; mov.b32 a, t; "
        "shl.b32 a, a, 2; add.s32 a, a, {$r3}; selp.b32 a, a, {$r4}, p; red.relaxed.cta.shared.add.u32 [a], {$r5}; }",
        read_only_args=[value, scale, bias, base, other, one],
    )


def place_value(place: Int32) -> Float32:
    """The float of a bin."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 a; or.b32 a, {$r0}, 0x4B000000; mov.b32 {$w0}, a; }",
        write_only_types=[Float32],
        read_only_args=[place],
    )


def sift(value: Float32, scale: Float32, bias: Float32, edge: Float32, above: Int32, same: Int32, bit: int) -> tuple:
    """(above, same) with `bit` added to the first if the value's bin is above `edge`, to the second if it is that."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 t; .reg .pred p, q; " + _PLACE + " setp.gt.f32 p, t, {$r3}; setp.eq.f32 q, t, {$r3}; "
        "mov.b32 {$w0}, {$r4}; mov.b32 {$w1}, {$r5}; "
        f"@p or.b32 {{$w0}}, {{$w0}}, {bit:#x}; @q or.b32 {{$w1}}, {{$w1}}, {bit:#x}; }}",
        write_only_types=[Int32, Int32],
        read_only_args=[value, scale, bias, edge, above, same],
    )


def store_id_if(bits: Int32, bit: int, index: Int32, addr: Int32) -> Int32:
    """Store `index` if `bits` has the bit. The next address."""
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 t; .reg .pred p; and.b32 t, {{$r0}}, {bit:#x}; setp.ne.s32 p, t, 0; "
        "@p st.shared.b32 [{$r1}], {$r2}; mov.b32 {$w0}, {$r1}; @p add.s32 {$w0}, {$w0}, 4; }",
        write_only_types=[Int32],
        read_only_args=[bits, addr, index],
    )


def candidate(addr: Int32) -> Uint64:
    """Read a pushed (value, index) as one number that orders as the selection does: key, then lower index first."""
    value, index = cute.arch.inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32, Int32], read_only_args=[addr]
    )
    return rank_number(value, index)


def float_of(bits: Int32) -> Float32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def rank_number(value: Float32, index: Int32) -> Uint64:
    return (Uint64(order_key(value)) << 32) | Uint64(Uint32(~index))


def number_index(number: Uint64) -> Int32:
    return ~Int32(Uint32(number & 0xFFFFFFFF))
