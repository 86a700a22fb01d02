"""Norm, rope and block mean of one 128-vector by one warp: the one implementation that prefill and decode share.

Lane l holds dims 4l .. 4l + 3. Every product and sum is rounded by itself and in a fixed order (explicit .rn: the
compiler may not fuse them), so the bits depend on the values alone, not on the kernel that this is compiled into.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS, INDEX_HEAD_DIM, ROPE_DIM
from qsa_cute.kernels.common import ops

LANE_DIMS = INDEX_HEAD_DIM // 32
LANE_BYTES = LANE_DIMS * 2
ROW_BYTES = INDEX_HEAD_DIM * 2
HALF_LANES = ROPE_DIM // 2 // LANE_DIMS  # dim d rotates with d + 32: the lane 8 further on


def multiply(a: Float32, b: Float32) -> Float32:
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def add(a: Float32, b: Float32) -> Float32:
    return cute.arch.inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def inverse_root(a: Float32) -> Float32:
    return cute.arch.inline_ptx("rsqrt.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def load_i32x2_if(wanted: Int32, addr: Int64) -> tuple:
    """Two words, or zeros without a read when `wanted` is 0. Branch-free, so loads overlap."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; "
        "@p ld.global.v2.b32 {{$w0}, {$w1}}, [{$r1}]; }",
        write_only_types=[Int32] * 2,
        read_only_args=[wanted, addr],
    )


def load_f32x4_if(wanted: Int32, addr: Int64) -> tuple:
    """Four floats, or zeros without a read when `wanted` is 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; "
        "mov.b32 {$w3}, 0; @p ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r1}]; }",
        write_only_types=[Float32] * 4,
        read_only_args=[wanted, addr],
    )


def unpack_2(dtype: str, word: Int32) -> tuple:
    """The two elements of a word as FP32, the low half first; exact."""
    if dtype == "bf16":
        code = "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;"
    else:
        code = "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }"
    return cute.arch.inline_ptx(code, write_only_types=[Float32] * 2, read_only_args=[word])


@cute.jit
def lane_rope(wanted: Int32, cos_sin: Int64, position: Int32, lane: Int32):
    """The lane's 4 cosines and 4 sines of a position; FP32 rows of 64 at `cos_sin`. Unread where nothing rotates."""
    rotates = Int32(0)
    if wanted != 0 and lane < 2 * HALF_LANES:
        rotates = Int32(1)
    at = cos_sin + Int64(position) * (ROPE_DIM * 4) + Int64((lane % HALF_LANES) * 16)
    return load_f32x4_if(rotates, at) + load_f32x4_if(rotates, at + ROPE_DIM * 2)


@cute.jit
def norm_rope(dtype: cutlass.Constexpr[str], x: tuple, weight: tuple, rope: tuple, eps: Float32, lane: Int32):
    """rope(x / sqrt(mean(x^2) + eps) * (1 + weight)) of the warp's vector, rounded once, as the lane's two words.

    Args:
        x: the lane's 4 dims, FP32.
        weight: the lane's two words of the stored weight.
        rope: `lane_rope` of the position.
    """
    squares = multiply(x[0], x[0])
    for i in cutlass.range_constexpr(1, LANE_DIMS):
        squares = add(squares, multiply(x[i], x[i]))
    for step in cutlass.range_constexpr(5):
        squares = add(squares, cute.arch.shuffle_sync_bfly(squares, offset=16 >> step))
    factor = inverse_root(add(multiply(squares, Float32(1.0 / INDEX_HEAD_DIM)), eps))
    gamma = unpack_2(dtype, weight[0]) + unpack_2(dtype, weight[1])
    rotated = []
    for i in cutlass.range_constexpr(LANE_DIMS):
        y = multiply(multiply(x[i], factor), add(gamma[i], Float32(1.0)))
        pair = cute.arch.shuffle_sync_bfly(y, offset=HALF_LANES)
        turned = multiply(pair, rope[LANE_DIMS + i])
        turned = -turned if lane < HALF_LANES else turned
        rotated.append(add(multiply(y, rope[i]), turned) if lane < 2 * HALF_LANES else y)
    return ops.pack_2(dtype, rotated[0], rotated[1]), ops.pack_2(dtype, rotated[2], rotated[3])


@cute.jit
def block_mean(dtype: cutlass.Constexpr[str], raw: tuple):
    """The lane's 4 dims of a block's mean: raw keys summed in token order, a quarter of it, rounded to the type.

    Args:
        raw: the lane's two words of each of the 4 raw keys, token by token.
    """
    mean = []
    for half in cutlass.range_constexpr(2):
        total = unpack_2(dtype, raw[half])
        for token in cutlass.range_constexpr(1, BLOCK_TOKENS):
            key = unpack_2(dtype, raw[2 * token + half])
            total = (add(total[0], key[0]), add(total[1], key[1]))
        word = ops.pack_2(dtype, multiply(total[0], Float32(0.25)), multiply(total[1], Float32(0.25)))
        mean = mean + list(unpack_2(dtype, word))
    return mean[0], mean[1], mean[2], mean[3]


@cute.jit
def block_key(dtype: cutlass.Constexpr[str], raw: tuple, weight: tuple, rope: tuple, eps: Float32, lane: Int32):
    """A block's key from its raw keys, as the lane's two words; arguments as for `block_mean` and `norm_rope`."""
    return norm_rope(dtype, block_mean(dtype, raw), weight, rope, eps, lane)
