"""Where the indexer's state lies in the widened pool: raw keys in the K plane's tails, block keys in the V plane's.

The tail of token t of a sequence: page = table[t // 128], row t % 128, head 0, `tail_offset` elements into the row.
A page outside [0, num_flat_pages), unused (-1) or past the table is unmapped: nothing is read or written there.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS, INDEX_HEADS, PAGE_TOKENS
from qsa_cute.kernels.common import ops
from qsa_cute.kernels.common import rope_norm as rn

RAW_KEY = INDEX_HEADS * rn.ROW_BYTES  # bytes before the raw key in a row of index_qk


@dataclass(frozen=True)
class Tails:
    """One plane's tails of one sequence, and where this lane's 8 bytes of each lie. Strides in bytes."""

    pool: Int64
    table: Int64
    page_stride: Int64
    token_stride: Int64
    num_pages: Int32
    max_pages: Int32

    @cute.jit
    def page(self, token: Int32) -> Int32:
        """The page of a token's block; -1 when unmapped. `token` < 0 is unmapped."""
        at = token // PAGE_TOKENS
        listed = Int32(0)
        if token >= 0 and at < self.max_pages:
            listed = Int32(1)
        page = ops.load_global_i32_if(listed, self.table + Int64(at) * 4, Int32(-1))
        return page if page >= 0 and page < self.num_pages else Int32(-1)

    @cute.jit
    def address(self, page: Int32, token: Int32) -> Int64:
        return self.pool + Int64(page) * self.page_stride + Int64(token % PAGE_TOKENS) * self.token_stride


def tails_of(
    sequence: Int32,
    lane_bytes: Int32,
    page_table: cute.Pointer,
    pool_ptr: cute.Pointer,
    num_flat_pages: Int32,
    max_pages_per_seq: Int32,
    page_table_stride: Int64,
    page_stride: Int64,
    token_stride: Int64,
    tail_offset: Int64,
) -> Tails:
    """One plane's tails of a sequence, from kernel parameters; without a pool, max_pages_per_seq is 0."""
    return Tails(
        pool_ptr.toint() + tail_offset * 2 + Int64(lane_bytes),
        page_table.toint() + Int64(sequence) * page_table_stride * 4,
        page_stride * 2,
        token_stride * 2,
        num_flat_pages,
        max_pages_per_seq,
    )


@cute.jit
def load_raw_keys(wanted: Int32, rows: Int64, row_bytes: Int64, start: Int32, first: Int32, tails: Tails, page: Int32):
    """The lane's two words of the raw keys of tokens first .. first + 3, token by token; zeros when not wanted.

    Args:
        rows: the lane's place in the raw key of the new row of token `start`; later rows follow.
        tails, page: the K plane and the block's page, for tokens before `start`.
    """
    words = ()
    for j in cutlass.range_constexpr(BLOCK_TOKENS):
        token = first + j
        stored = tails.address(page, token)
        words = words + rn.load_i32x2_if(wanted, rows + Int64(token - start) * row_bytes if token >= start else stored)
    return words
