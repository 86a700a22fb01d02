"""What the union's pre-kernels share: how a tile is cut, which of its rows count, a prefix sum over their threads."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.common import ops
from qsa_cute.union_layout import HALF

FAR = 1 << 30  # past any token that exists


def position_of(row: Int32, query_start: Int32) -> Int32:
    """The position of a row of a sequence whose first row is at `query_start`; of what wraps around, one past any
    token."""
    return row + cutlass.max(cutlass.min(query_start, FAR), Int32(-FAR))


def rows_before(context: Int32, row: Int32, query_start: Int32, rows: Int32) -> Int32:
    """How many of `rows` rows from `row` on lie before the context's end, whatever it and the start hold."""
    before = cutlass.min(Int64(context) - query_start - row, Int64(rows))
    return Int32(cutlass.max(before, Int64(0)))


def open_block(position: Int32):
    """The block that a position leaves open, and a bit for each of its tokens so far: none before a sequence."""
    end = cutlass.max(position + 1, Int32(0))
    return end // BLOCK_TOKENS, (1 << (end % BLOCK_TOKENS)) - 1


class BlockScan:
    """Needs `threads` and `blocks`, of a chunk, of the kernel that inherits it."""

    @cute.jit
    def cut(self, start: Int32, tile_pairs: Int32, seq_len: Int32, group_size: Int32):
        """Of the tile that begins at pair `start` of a sequence: its first row, its rows, and (a, b), where rows [0, a)
        are warpgroup 0's and rows from b on warpgroup 1's."""
        end = cutlass.min(start + tile_pairs, seq_len * group_size)
        row0 = start // group_size
        rows = (end - 1) // group_size - row0 + 1
        a_rows = (cutlass.min(start + HALF, end) - 1) // group_size - row0 + 1
        first_b = (start + HALF) // group_size - row0
        first_b = first_b if start + HALF < end else rows
        return row0, rows, (a_rows, first_b)

    @cute.jit
    def scan(self, at: Int32, c0: Int32, c1: Int32, twice: Int32, tid: Int32):
        """Sums before this thread and over the block of c0 and c1, and the block's sum of `twice`.

        Shared memory at `at`: 16 bytes a warp.
        """
        lane = tid % 32
        warp = tid // 32
        s0 = c0
        s1 = c1
        for k in cutlass.range_constexpr(5):
            y0 = cute.arch.shuffle_sync_up(s0, offset=1 << k, mask_and_clamp=0)
            y1 = cute.arch.shuffle_sync_up(s1, offset=1 << k, mask_and_clamp=0)
            if lane >= 1 << k:
                s0 = s0 + y0
                s1 = s1 + y1
        warp_twice = cute.arch.warp_redux_sync(twice, "add")
        if lane == 31:
            ops.store_shared_i32x2(at + warp * 16, s0, s1)
            ops.store_shared_i32x2(at + warp * 16 + 8, warp_twice, Int32(0))
        cute.arch.sync_threads()
        before0 = s0 - c0
        before1 = s1 - c1
        total0 = Int32(0)
        total1 = Int32(0)
        twice = Int32(0)
        for k in cutlass.range_constexpr(self.threads // 32):
            x0 = ops.load_shared_i32(at + k * 16)
            x1 = ops.load_shared_i32(at + k * 16 + 4)
            twice = twice + ops.load_shared_i32(at + k * 16 + 8)
            if k < warp:
                before0 = before0 + x0
                before1 = before1 + x1
            total0 = total0 + x0
            total1 = total1 + x1
        return before0, total0, before1, total1, twice

    def divide_blocks(self, total0: Int32, total1: Int32):
        """How a tile's blocks divide, from the sums of `scan` (shared | only warpgroup 0's << 16, only 1's | those with
        records << 16): shared chunks, pairs of exclusive ones, blocks of the shared chunks, blocks with records."""
        only_a_blocks = (total0 >> 16) & 0xFFFF
        only_b_blocks = total1 & 0xFFFF
        partial_blocks = (total1 >> 16) & 0xFFFF
        pairs = cutlass.min(only_a_blocks, only_b_blocks) // self.blocks
        limit = pairs * self.blocks
        shared_blocks = (total0 & 0xFFFF) + only_a_blocks + only_b_blocks + partial_blocks - 2 * limit
        ns = cutlass.max((shared_blocks + self.blocks - 1) // self.blocks, Int32(1))
        return ns, pairs, shared_blocks, partial_blocks
