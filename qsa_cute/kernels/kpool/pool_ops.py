"""What the kpool kernels share: index loads, the pool's softmax, Hadamard-128 and the e4m3 quantisation.

Every product and sum is rounded by itself and in a fixed order, so that a pool's bytes depend on its tokens alone and
not on the kernel (prefill's or decode's) that this is compiled into. The order is that of the definition: slots
ascending, butterflies from stride 1 to 64. Values of a lane are Python lists, indexed when the kernel is traced.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import INDEX_HEAD_DIM
from qsa_cute.kernels.common import ops
from qsa_cute.kernels.common import rope_norm as rn

HEAD_BYTES = INDEX_HEAD_DIM * 2  # one token's key or gate scores, bf16
FP8_MAX = 448.0
FP8_MAX_INVERSE = 1.0 / 448.0
LEAST_ABSMAX = 1e-4
HADAMARD_SCALE = INDEX_HEAD_DIM**-0.5


# ---- loads -------------------------------------------------------------------------------------------


def load_i32x4_if(wanted: Int32, addr: Int64) -> tuple:
    """16 bytes that nothing writes while this kernel runs, or zeros without a read when `wanted` is 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; "
        "mov.b32 {$w3}, 0; @p ld.global.nc.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r1}]; }",
        write_only_types=[Int32] * 4,
        read_only_args=[wanted, addr],
    )


def load_u8_if(wanted: Int32, addr: Int64, other: Int32) -> Int32:
    """The byte at `addr`, or `other` without a read when `wanted` is 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, {$r2}; @p ld.global.u8 {$w0}, [{$r1}]; }",
        write_only_types=[Int32],
        read_only_args=[wanted, addr, other],
    )


@cute.jit
def load_index(wanted: Int32, addr: Int64, words: Int32) -> Int32:
    """An index of `words` 32-bit words (1: int32, 2: int64) as int32; -1 when not wanted or when it does not fit."""
    low = ops.load_global_i32_if(wanted, addr, Int32(-1))
    wide = Int32(0)
    if wanted != 0 and words == 2:
        wide = Int32(1)
    high = ops.load_global_i32_if(wide, addr + 4, low >> 31)
    return low if high == low >> 31 else Int32(-1)


# ---- arithmetic --------------------------------------------------------------------------------------


def maximum(a: Float32, b: Float32) -> Float32:
    """The larger; the other one where one is NaN."""
    return cute.arch.inline_ptx("max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def exp2(a: Float32) -> Float32:
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def divide(a: Float32, b: Float32) -> Float32:
    """To 2 ulp over the full range."""
    return cute.arch.inline_ptx("div.full.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def as_int(a: Float32) -> Int32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[a])


def as_float(a: Int32) -> Float32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def max_abs_bf16x2(a: Int32, b: Int32) -> Int32:
    """max(a, |b|) of two packed bf16; NaN loses."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 s, t; mov.b32 s, {$r0}; and.b32 t, {$r1}, 0x7fff7fff; max.bf16x2 s, s, t; mov.b32 {$w0}, s; }",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


def pack_e4m3x4(x: list) -> Int32:
    """Four FP32 to e4m3, rounded to nearest even, saturated at +-448, the first in the low byte; NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 h, {$r3}, {$r2}; "
        "mov.b32 {$w0}, {l, h}; }",
        write_only_types=[Int32],
        read_only_args=x,
    )


# ---- a pool ------------------------------------------------------------------------------------------


def unpack(words: tuple) -> list:
    """The elements of packed bf16 words as FP32."""
    values = []
    for word in words:
        values += rn.unpack_2("bf16", word)
    return values


def weighted_sum(keys: list, scores: list) -> list:
    """sum_j k_j softmax_j(s_j) in each dimension, FP32; keys and biased scores are lists over slots of the lane's dims.

    The three approximations (exp2, and its argument's one rounding; a division to 2 ulp) are those of the definition's
    FP32 form as GPUs compute it.
    """
    sums = []
    for d in range(len(keys[0])):
        most = scores[0][d]
        for j in range(1, len(keys)):
            most = maximum(most, scores[j][d])
        total, weights = Float32(0.0), Float32(0.0)
        for j in range(len(keys)):
            weight = exp2((scores[j][d] - most) * Float32(ops.LOG2_E))
            weights = weights + weight
            total = ops.fma(keys[j][d], weight, total)
        sums.append(divide(total, weights))
    return sums


def round_bf16(x: list) -> tuple:
    """Packed bf16 words of pairs."""
    return tuple(ops.pack_2("bf16", x[i], x[i + 1]) for i in range(0, len(x), 2))


def hadamard(x: list, bits: tuple, lane: Int32) -> list:
    """Hadamard-128 / sqrt(128) of vectors that lie across lanes.

    Args:
        bits: what each bit of a dimension's number is, lowest first: b >= 0 for bit b of the register's number, ~b for
            bit b of the lane's.
    """
    x = list(x)
    for bit in bits:
        if bit >= 0:
            step = 1 << bit
            for i in range(len(x)):
                if i & step == 0:
                    x[i], x[i + step] = x[i] + x[i + step], x[i] - x[i + step]
        else:
            offset = 1 << ~bit
            upper = (lane // offset) % 2
            sign = (1 - 2 * upper).to(Float32)
            for i in range(len(x)):
                x[i] = ops.fma(x[i], sign, cute.arch.shuffle_sync_bfly(x[i], offset=offset))
    return [value * Float32(HADAMARD_SCALE) for value in x]


def absmax(words: tuple, lanes: int) -> Float32:
    """max(1e-4, largest magnitude) of packed bf16 over the lane's words and `lanes` neighbouring lanes."""
    most = Int32(0)
    for word in words:
        most = max_abs_bf16x2(most, word)
    offset = 1
    while offset < lanes:
        most = max_abs_bf16x2(most, cute.arch.shuffle_sync_bfly(most, offset=offset))
        offset *= 2
    low, high = rn.unpack_2("bf16", most)
    return maximum(maximum(low, high), Float32(LEAST_ABSMAX))


@cute.jit
def power_scale(most: Float32):
    """(2^ceil(log2(most / 448)), its inverse), exactly, from the bits: 448 is 1.75 x 2^8, so a mantissa above 1.75
    carries into the exponent. Infinity has scale infinity."""
    exponent = (as_int(most) + Int32(0x7FFFFF - 0x600000)) >> 23
    finite = as_int(most) < Int32(0x7F800000)
    scale = ((exponent - 8) << 23) if finite else Int32(0x7F800000)
    inverse = ((262 - exponent) << 23) if finite else Int32(0)
    return as_float(scale), as_float(inverse)


def pack_e4m3(x: list) -> tuple:
    """Words of four e4m3."""
    return tuple(pack_e4m3x4(x[i : i + 4]) for i in range(0, len(x), 4))


@cute.jit
def quantise(words: tuple, lanes: cutlass.Constexpr[int], round_scale: Int32):
    """(scale, e4m3 words...) of a vector in packed bf16: x / scale, scale its absmax / 448 or the next power of two."""
    most = absmax(words, lanes)
    x = unpack(words)
    scale, inverse = power_scale(most)
    result = (scale, *pack_e4m3([value * inverse for value in x]))
    if round_scale == 0:
        exact = most * Float32(FP8_MAX_INVERSE)
        result = (exact, *pack_e4m3([ops.divide(value, exact) for value in x]))
    return result


@cute.jit
def cache_entry(slot: Int32, page_size: Int32, num_pages: Int32):
    """(page, place in it) of a flat slot; page -1 where the cache has no such slot."""
    safe = cutlass.max(slot, Int32(0))
    page = safe // page_size
    place = safe - page * page_size
    return page if slot >= 0 and page < num_pages else Int32(-1), place
