"""Device code that the score kernels share: where a tile of query rows lies, and how its logits are stored."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.geometry import BLOCK_TOKENS, INDEX_HEAD_DIM, INDEX_HEADS
from qsa_cute.kernels.common import ops

MASKED = -3.4028234663852886e38  # -FLT_MAX: the logit of a block that a row may not see
SCALE = INDEX_HEAD_DIM**-0.5
ROW_BYTES = INDEX_HEAD_DIM * 2  # one head of one query row, or one block key
CHUNKS = ROW_BYTES // 16


@cute.jit
def logit(s0: Float32, s1: Float32, s2: Float32, s3: Float32) -> Float32:
    """The heads' scores of one (row, block): ReLU each, summed in ascending head order, scaled after the sum."""
    zero = Float32(0.0)
    total = cute.arch.fmax(s0, zero) + cute.arch.fmax(s1, zero)
    total = total + cute.arch.fmax(s2, zero)
    return (total + cute.arch.fmax(s3, zero)) * Float32(SCALE)


@dataclass(frozen=True)
class RowTile:
    """Consecutive query rows of one sequence. Row i of the tile is stored when first <= i < last."""

    q: Int64  # address of row 0, head 0
    kbar: Int64  # address of block 0
    logits: Int64  # address of row 0, block 0
    stride: Int64  # bytes between rows of logits
    first: Int32
    last: Int32
    live: Int32  # rows past it are padding
    position: Int32  # of row 0
    width: Int32  # blocks in a row of logits

    @cute.jit
    def visible(self, row: Int32) -> Int32:
        """How many blocks this row sees; 0 for padding and for rows of other chunks."""
        count = cutlass.min((self.position + row + 1) // BLOCK_TOKENS, self.width)
        return count if row >= self.first and row < self.live else Int32(0)

    @cute.jit
    def store(self, row: Int32, column: Int32, values, fill: Int32):
        """Store some consecutive logits of a row one by one: masked past what the row sees, nothing past the row."""
        limit = self.visible(row)
        end = self.width if fill != 0 else limit
        at = self.logits + Int64(row) * self.stride + Int64(column) * 4
        if row >= self.first and row < self.last:
            for i in cutlass.range_constexpr(len(values)):
                if column + i < end:
                    value = values[i] if column + i < limit else Float32(MASKED)
                    ops.store_global_f32(at + i * 4, value)


@cute.jit
def locate_rows(
    index: Int32,
    rows: cutlass.Constexpr[int],
    q: Int64,
    kbar: Int64,
    logits: Int64,
    context_lengths: Int64,
    query_starts: Int64,
    seq_len: Int32,
    num_blocks: Int32,
    row_start: Int32,
    num_rows: Int32,
    q_stride_row: Int64,
    kbar_stride_batch: Int64,
    logits_stride_row: Int64,
):
    """The chunk's `index`-th tile of `rows` rows. Tiles start at multiples of `rows` within a sequence.

    Addresses of rows before the chunk may lie before their buffers; they are computed but not used.
    """
    tiles = (seq_len + rows - 1) // rows
    sequence = row_start // seq_len
    tile = sequence * tiles + (row_start - sequence * seq_len) // rows + index
    sequence = tile // tiles
    t = (tile - sequence * tiles) * rows
    row = sequence * seq_len + t
    local = row - row_start
    last = cutlass.min(cutlass.min(seq_len - t, num_rows - local), Int32(rows))
    start = ops.load_global_i32_if(Int32(query_starts != 0), query_starts + Int64(sequence) * 4, Int32(0))
    position = start + t
    length = ops.load_global_i32_if(Int32(last > 0), context_lengths + Int64(sequence) * 4, Int32(0))
    return RowTile(
        q + Int64(row) * q_stride_row * 2,
        kbar + Int64(sequence) * kbar_stride_batch * 2,
        logits + Int64(local) * logits_stride_row * 4,
        logits_stride_row * 4,
        cutlass.max(-local, Int32(0)),
        last,
        cutlass.min(length - position, last),
        position,
        num_blocks,
    )


def q_rows(linear: int, lane_row):
    """Where (row, head) number `linear + lane_row` (0 <= lane_row < 8) of a tile lies among the rows of sQ.

    The accumulators of m16n8k16 and of wgmma give a thread columns 8i + 2c + {0, 1}, c its lane modulo 4. Row
    4j + c has its heads 0, 1 in n-tile 2j and 2, 3 in 2j + 1, so that all four meet in one thread.
    """
    i = linear // 8
    return 16 * (i // 2) + 8 * ((lane_row % INDEX_HEADS) // 2) + 4 * (i % 2) + 2 * (lane_row // 4) + lane_row % 2
