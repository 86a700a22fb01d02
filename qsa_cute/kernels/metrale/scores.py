"""What the exact score kernels share: one order of products and sums, so that a decode step and a prefill give a
(query, block) pair the same bits.

    score = scale * sum_h relu(q_h . k),   each dot product one FP32 fma chain over the dims, heads in ascending order

Queries are FP32, keys of the variant's type; heads go four at a time, dims 128 at a time, through shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

HEADS = 4  # heads a pass
PIECE = 128  # dims a pass
KEY_BYTES = PIECE * 2
KEY_CHUNKS = KEY_BYTES // 16
QUERY_BYTES = PIECE * 4
QUERY_CHUNKS = QUERY_BYTES // 16


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def load_shared_i32x2(addr: Int32) -> tuple:
    return cute.arch.inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32] * 2, read_only_args=[addr]
    )


def load_shared_i32x4(addr: Int32) -> tuple:
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4, read_only_args=[addr]
    )


@cute.jit
def complete_blocks(row: Int32, first_pos: Int32, ratio: Int32, n_blocks: Int32) -> Int32:
    """How many blocks a row sees: those whose last token is at or before the row's own position."""
    return cutlass.min((first_pos + row + 1) // ratio, n_blocks)
