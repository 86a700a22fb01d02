"""Norm and rope of vectors of run-time length, one warp each, with angles computed from theta: what the block pool
and the query preparation share. The arithmetic and its order are `common/rope_norm.py`'s, for any length and rotation.

The angle of (position, pair i) is position * theta^(-2i / rot). FP32 would lose it: at position 10^6 a frequency's
rounding alone is 0.03 rad. Here a frequency is a fraction of a turn in 64 fixed-point bits; the product with the
position drops whole turns by itself, exactly, and what is left is within 2^-30 of a turn, at any position and on any
SM, without FP64. `rope_step` is theta^(-2 / rot) in the same form; frequency i is its i-th power over 2 pi.

Shared memory of a block: frequencies (8 bytes each), then one FP32 row a warp. A launch asks for what its hd and rot
take (`frequency_bytes(rot)` + 4 hd a warp), so that short vectors leave room for all the warps that an SM holds.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.common import ops
from qsa_cute.kernels.common import rope_norm as rn

MAX_HEAD_DIM = 1024  # 32 lanes of 4 dims, 8 times
LANE_DIMS = 4  # consecutive dims a lane loads at a time
PIECE = 32 * LANE_DIMS
WARPS = 4
INVERSE_TURN = 0x28BE60DB9391054A  # 2^64 / (2 pi)
ANGLE_UNIT = 1.4629180792671596e-09  # 2 pi / 2^32: radians of the high word's last bit


def frequency_bytes(rot):
    """Of rot / 2 frequencies, in whole 16 bytes."""
    return (rot * 4 + 15) // 16 * 16


def multiply_high(a: Int64, b: Int64) -> Int64:
    """The upper 64 bits of the unsigned product."""
    return cute.arch.inline_ptx("mul.hi.u64 {$w0}, {$r0}, {$r1};", write_only_types=[Int64], read_only_args=[a, b])


def cosine(a: Float32) -> Float32:
    """Within 2^-20 for |a| <= pi."""
    return cute.arch.inline_ptx("cos.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def sine(a: Float32) -> Float32:
    return cute.arch.inline_ptx("sin.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def load_shared_i64(addr: Int32) -> Int64:
    return cute.arch.inline_ptx("ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[addr])


def store_shared_f32x4(addr: Int32, v: tuple) -> None:
    cute.arch.inline_ptx("st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *v])


class VectorNorm:
    """Static configuration and the device-side steps; kernels inherit and add where vectors come from and go to."""

    def __init__(self, head_dim: int, dtype: str):
        self.dtype = dtype
        self.threads = 32 * WARPS
        self.smem_bytes = frequency_bytes(MAX_HEAD_DIM) + WARPS * MAX_HEAD_DIM * 4

    @cute.jit
    def frequencies(self, smem: Int32, rope_step: Int64, rot: Int32, tid: Int32):
        """Frequency i of the pairs, in turns a position, to shared memory: rope_step^i by squaring."""
        for i in cutlass.range(tid, rot // 2, self.threads, unroll=1):
            power = Int64(-1)  # 1 - 2^-64
            square = rope_step
            left = i
            while left > 0:
                if left % 2 == 1:
                    power = multiply_high(power, square)
                square = multiply_high(square, square)
                left = left // 2
            ops.store_shared_64(smem + i * 8, multiply_high(power, Int64(INVERSE_TURN)))
        cute.arch.sync_threads()

    @cute.jit
    def norm_rope(
        self,
        frequencies: Int32,
        row: Int32,
        squares: Float32,
        weight: Int64,
        hd: Int32,
        rot: Int32,
        position: Int32,
        eps: Float32,
        lane: Int32,
    ):
        """The warp's vector in its shared row, in place: rope(x / sqrt(mean(x^2) + eps) * (1 + weight)).

        Args:
            squares: the lane's sum of squares, of the dims 4 lane .. 4 lane + 3 of every piece of 128, in order.
            weight: address of the stored weight.
        """
        for step in cutlass.range_constexpr(5):
            squares = rn.add(squares, cute.arch.shuffle_sync_bfly(squares, offset=16 >> step))
        factor = rn.inverse_root(rn.add(ops.divide(squares, Float32(hd)), eps))
        for d in cutlass.range(lane * LANE_DIMS, hd, PIECE, unroll=1):
            x = ops.load_shared_f32x4(row + d * 4)
            words = rn.load_i32x2_if(Int32(1), weight + Int64(d) * 2)
            gamma = rn.unpack_2(self.dtype, words[0]) + rn.unpack_2(self.dtype, words[1])
            y = []
            for i in cutlass.range_constexpr(LANE_DIMS):
                y.append(rn.multiply(rn.multiply(x[i], factor), rn.add(gamma[i], Float32(1.0))))
            store_shared_f32x4(row + d * 4, (y[0], y[1], y[2], y[3]))
        cute.arch.sync_warp()
        half = rot // 2
        for i in cutlass.range(lane, half, 32, unroll=1):
            turns = load_shared_i64(frequencies + i * 8) * Int64(position)
            angle = Float32(Int32(turns >> 32)) * Float32(ANGLE_UNIT)
            cos = cosine(angle)
            sin = sine(angle)
            low = ops.load_shared_f32(row + i * 4)
            high = ops.load_shared_f32(row + (i + half) * 4)
            ops.store_shared_f32(row + i * 4, rn.add(rn.multiply(low, cos), -rn.multiply(high, sin)))
            ops.store_shared_f32(row + (i + half) * 4, rn.add(rn.multiply(high, cos), rn.multiply(low, sin)))
        cute.arch.sync_warp()
