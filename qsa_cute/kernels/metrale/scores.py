"""What the exact score kernels share: one order of products and sums, so that a decode step and a prefill give a
(query, block) pair the same bits.

    score = scale * sum_h relu(q_h . k),   each dot product one FP32 fma chain over the dims, heads in ascending order

Queries are FP32, keys of the variant's type; heads go four at a time, dims 128 at a time, through shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

HEADS = 4  # heads a pass
PIECE = 128  # dims a pass
KEY_BYTES = PIECE * 2
KEY_CHUNKS = KEY_BYTES // 16
QUERY_BYTES = PIECE * 4
QUERY_CHUNKS = QUERY_BYTES // 16


@cute.jit
def complete_blocks(row: Int32, first_pos: Int32, ratio: Int32, n_blocks: Int32) -> Int32:
    """How many blocks a row sees: those whose last token is at or before the row's own position."""
    return cutlass.min((first_pos + row + 1) // ratio, n_blocks)
