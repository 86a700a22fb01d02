"""Device code that the score kernels of vLLM's caches share: keys behind a block table, limits that a row brings.

Columns are compressed keys of a request, in order: column c is token c % page_size of page table[c // page_size] of a
cache [pages, page_size, 1, 128]. The page size is a run-time number (196, 400, 1952, ...), so what a column's division
gives is found once a tile, a lane a column, and handed to the lanes that copy by shuffles.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.common import early, ops


@cute.jit
def head_sum(s0: Float32, s1: Float32, s2: Float32, s3: Float32) -> Float32:
    """The heads' scores of one (row, key): ReLU each, summed in ascending head order; vLLM scales nothing."""
    zero = Float32(0.0)
    total = cute.arch.fmax(s0, zero) + cute.arch.fmax(s1, zero)
    total = total + cute.arch.fmax(s2, zero)
    return total + cute.arch.fmax(s3, zero)


@cute.jit
def pair_sum(s0: Float32, s1: Float32) -> Float32:
    """`head_sum` in the odd lanes, whose scores are of heads 2 and 3; the lane below has heads 0 and 1."""
    zero = Float32(0.0)
    high0, high1 = cute.arch.fmax(s0, zero), cute.arch.fmax(s1, zero)
    return cute.arch.shuffle_sync_bfly(high0 + high1, offset=1) + high0 + high1


@cute.jit
def pair_row(linear: Int32) -> Int32:
    """Where (row, head) number `linear` of a tile lies among the rows of sQ: `scores_ops.q_rows`, in bits."""
    row = linear >> 2
    return ((row >> 2) << 4) + ((linear & 2) << 2) + ((row & 3) << 1) + (linear & 1)


@cute.jit
def clamp(value: Int32, high: Int32) -> Int32:
    return cutlass.max(cutlass.min(value, high), Int32(0))


@dataclass(frozen=True)
class PagedKeys:
    """One request's keys."""

    base: Int64  # address of page 0
    table: Int64  # address of the request's row of the block table
    page_bytes: Int64
    token_bytes: Int64
    num_pages: Int32
    page_size: Int32
    num_columns: Int32  # that the table has

    @cute.jit
    def fetch(self, column: Int32):
        """Start reading a column's page: (page, token in it), page -1 for a column outside the table."""
        slot = column // self.page_size
        return self.read_table(slot, column), column - slot * self.page_size

    @cute.jit
    def prefetch(self, column: Int32, size: cutlass.Constexpr[int]):
        """Before `early.wait`: ask for the `size` bytes of a column's key, as the table has it now."""
        if cutlass.const_expr(early.SUPPORTED):
            slot = column // self.page_size
            page = early.peek(Int32(column < self.num_columns), self.table + Int64(slot) * 4, Int32(-1))
            if page >= 0 and page < self.num_pages:
                token = column - slot * self.page_size
                key = self.base + Int64(page) * self.page_bytes + Int64(token) * self.token_bytes
                for line in cutlass.range_constexpr(0, size, early.LINE):
                    early.prefetch(key + line)

    @cute.jit
    def read_table(self, slot: Int32, column: Int32) -> Int32:
        return ops.load_global_i32_if(Int32(column < self.num_columns), self.table + Int64(slot) * 4, Int32(-1))

    @cute.jit
    def locate(self, page: Int32, token: Int32, live):
        """A key's address as two words; zeros for a key that is not live or whose page does not exist."""
        found = Int64(0)
        if live and page >= 0 and page < self.num_pages:
            found = self.base + Int64(page) * self.page_bytes + Int64(token) * self.token_bytes
        return ops.split_i64(found)

    @cute.jit
    def copy(self, dst: Int32, low: Int32, high: Int32, lane: Int32, offset: Int32):
        """Start copying 16 bytes, `offset` into the key that `lane` located; zeros, unread, where it has none."""
        found = ops.join_i64(cute.arch.shuffle_sync(low, offset=lane), cute.arch.shuffle_sync(high, offset=lane))
        live = found != 0
        ops.cp_async_16(dst, (found if live else self.base) + Int64(offset), Int32(16) if live else Int32(0))


@dataclass(frozen=True)
class RequestTile:
    """Consecutive query rows of one request. Row i sees the columns below its limit; rows past the tile see none."""

    logits: Int64  # address of row 0, column 0
    stride: Int64  # bytes between rows of logits
    limits: Int32  # shared address of the rows' limits
    most: Int32  # the largest limit
    least: Int32  # the smallest of all rows that a tile may have

    @cute.jit
    def limit(self, row: Int32) -> Int32:
        return ops.load_shared_i32(self.limits + row * 4)

    @cute.jit
    def store(self, at: Int64, row: Int32, column: Int32, values):
        """Store consecutive logits of a row one by one at `at`, as many as the row sees."""
        limit = self.limit(row)
        for i in cutlass.range_constexpr(len(values)):
            if column + i < limit:
                ops.store_global_f32(at + i * 4, values[i])


@cute.jit
def copy_query(
    dst: Int32, q: Int64, q_row: Int64, q_head: Int64, heads: Int32, count: Int32, linear: Int32, offset: Int32
):
    """Start copying 16 bytes of (row, head) number `linear` of the tile at `q`; rows from `count` on and heads that are
    not there are zeros."""
    row = linear >> 2
    head = linear & 3
    live = head < heads and row < count
    src = q + Int64(row if live else 0) * q_row + Int64(head if live else 0) * q_head
    ops.cp_async_16(dst, src + Int64(offset), Int32(16) if live else Int32(0))


@cute.jit
def find_tile(
    slot: Int32, rows: cutlass.Constexpr[int], starts: Int64, num_requests: Int32, row_start: Int32, end: Int32
):
    """(request, first row, rows) of the `slot`-th tile of the chunk [row_start, end); no rows past the last one.

    Each request's rows are cut into tiles of `rows` from its first row in the chunk on. A warp reads 32 requests at
    a time. Starts that do not ascend make empty or overlapping tiles, never rows outside of the chunk.
    """
    lane = cute.arch.lane_idx()
    base = ops.load_global_i32(starts)
    left = slot
    request = Int32(0)
    first = Int32(0)
    count = Int32(0)
    at = Int32(0)
    while at < num_requests:
        mine = at + lane
        wanted = Int32(mine < num_requests)
        begin = ops.load_global_i32_if(wanted, starts + Int64(mine) * 4, base)
        finish = ops.load_global_i32_if(wanted, starts + Int64(mine + 1) * 4, base)
        begin = cutlass.max(begin - base, row_start)
        finish = cutlass.min(finish - base, end)
        tiles = Int32(0)
        if finish > begin and wanted != 0:
            tiles = (finish - begin + rows - 1) // rows
        through = tiles
        for step in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(through, offset=1 << step)
            through = through + (before if lane >= 1 << step else Int32(0))
        ballot = cute.arch.vote_ballot_sync(through > left)
        if ballot != 0:
            owner = 31 - Int32(cute.arch.clz(ballot & -ballot))
            skipped = left - cute.arch.shuffle_sync(through - tiles, offset=owner)
            request = at + owner
            first = cute.arch.shuffle_sync(begin, offset=owner) + skipped * rows
            count = cutlass.min(cute.arch.shuffle_sync(finish, offset=owner) - first, Int32(rows))
            at = num_requests
        else:
            left = left - cute.arch.shuffle_sync(through, offset=31)
            at = at + 32
    return (
        cute.arch.make_warp_uniform(request),
        cute.arch.make_warp_uniform(first),
        cute.arch.make_warp_uniform(count),
    )


@cute.jit
def write_lengths(
    lengths: Int64,
    visible: Int64,
    starts: Int64,
    first: Int32,
    rows: cutlass.Constexpr[int],
    num_requests: Int32,
    row_start: Int32,
    end: Int32,
    num_columns: Int32,
    tid: Int32,
):
    """The selection's lengths, 4 tokens a column, of chunk rows first .. first + rows - 1; a row of no request sees
    nothing."""
    row = row_start + first + tid
    if tid < rows and row < end:
        total = ops.load_global_i32(starts + Int64(num_requests) * 4) - ops.load_global_i32(starts)
        seen = clamp(ops.load_global_i32(visible + Int64(row) * 4), num_columns)
        ops.store_global_i32(lengths + Int64(row - row_start) * 4, seen * 4 if row < total else Int32(0))
