"""How `prepare.py` places the union's blocks in chunks, and says for each (row, block) whether the row wants it.

Blocks are numbered as in `lists.py`. An entry, as `prefill.py` takes it, is where a block lies and which of its
tokens some row wants: (page << entry_shift | block in the page) * 16 + a bit a token; -1 for padding.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.paged_union.lists import BAD, FIRST, THREADS, Bitmaps, Lists
from qsa_cute.kernels.attention.union_scan import BlockScan
from qsa_cute.kernels.common import ops


@dataclass(frozen=True)
class Pages:
    """Where blocks lie: in the pages of up to two requests, or in page `batch` of dense K and V."""

    table: Int64  # of the first request
    table2: Int64  # of the second
    batch: Int32
    num_pages: Int32
    page_blocks: Int32  # 0: dense
    shift: Int32


@dataclass(frozen=True)
class Halves:
    """Rows [0, a) are warpgroup 0's, rows [b, ..) warpgroup 1's; one may be of both."""

    a: Int32
    b: Int32


@dataclass(frozen=True)
class Chunks:
    """What a tile's union takes: `ns` shared chunks, then pairs of exclusive ones that hold `limit` blocks each."""

    ns: Int32
    limit: Int32
    total: Int32
    partial_blocks: Int32
    mask_rows: Int32
    entries: Int64
    masks: Int64
    places: Int32  # shared: the blocks by place; 0 where they do not fit, and are in `entries` for now
    words: Int32  # of a plane's part in use, a request


class UnionPlaces(BlockScan):
    """Needs `blocks`, of a chunk, of the kernel that inherits it."""

    @cute.jit
    def plane_at(self, maps: Bitmaps, words: Int32, i: Int32) -> Int32:
        """Word i of those in use is this word of a plane."""
        return i if i < words else i - words + maps.pitch

    @cute.jit
    def words_in_use(self, maps: Bitmaps, words: Int32) -> Int32:
        """Of a plane, of one request or two."""
        return words if maps.size == maps.pitch else 2 * words

    @cute.jit
    def gather_planes(self, lists: Lists, maps: Bitmaps, halves: Halves, words: Int32, tid: Int32) -> Int32:
        """Add the rows' bitmaps to the planes of wanted blocks; returns how many bits this thread's words hold."""
        found = Int32(0)
        count = self.words_in_use(maps, words)
        for i in cutlass.range(tid, count, THREADS, unroll=1):
            at = self.plane_at(maps, words, i)
            word_at = i
            low = maps.first
            high = cutlass.min(maps.last, lists.cut)
            if i >= words:
                word_at = i - words
                low = cutlass.max(maps.first, lists.cut)
                high = maps.last
            a = ops.load_shared_i32(maps.planes + at * 4)
            b = ops.load_shared_i32(maps.planes + (maps.size + at) * 4)
            for r in cutlass.range(low, high, unroll=4):
                word = ops.load_shared_i32(maps.rows + ((r - maps.first) * maps.pitch + word_at) * 4)
                found = found + cute.arch.popc(word)
                a = a | (word if r < halves.a else Int32(0))
                b = b | (word if r >= halves.b else Int32(0))
            ops.store_shared_i32(maps.planes + at * 4, a)
            ops.store_shared_i32(maps.planes + (maps.size + at) * 4, b)
        return found

    @cute.jit
    def classify(self, maps: Bitmaps, at: Int32):
        """Of a plane word's blocks: shared, only warpgroup 0's, only 1's, those with records."""
        a = ops.load_shared_i32(maps.planes + at * 4)
        b = ops.load_shared_i32(maps.planes + (maps.size + at) * 4)
        part = ops.load_shared_i32(maps.planes + (2 * maps.size + at) * 4)
        return a & b & ~part, a & ~b & ~part, b & ~a & ~part, part

    @cute.jit
    def assign(self, maps: Bitmaps, chunks: Chunks, before0: Int32, before1: Int32, tid: Int32):
        """Write each block of this thread's words to its place, as its number."""
        n_shared = before0 & 0xFFFF
        n_a = (before0 >> 16) & 0xFFFF
        n_b = before1 & 0xFFFF
        n_part = (before1 >> 16) & 0xFFFF
        limit = chunks.limit
        count = self.words_in_use(maps, chunks.words)
        each = (count + THREADS - 1) // THREADS
        for i in cutlass.range(tid * each, cutlass.min((tid + 1) * each, count), unroll=1):
            at = self.plane_at(maps, chunks.words, i)
            shared, only_a, only_b, part = self.classify(maps, at)
            left = shared | only_a | only_b | part
            while left != 0:
                bit = left & (-left)
                left = left ^ bit
                place = (
                    chunks.partial_blocks
                    + n_shared
                    + cutlass.max(n_a - limit, Int32(0))
                    + cutlass.max(n_b - limit, Int32(0))
                )
                if part & bit != 0:
                    place = n_part
                    n_part = n_part + 1
                elif shared & bit != 0:
                    n_shared = n_shared + 1
                elif only_a & bit != 0:
                    if n_a < limit:
                        place = (chunks.ns + 2 * (n_a // self.blocks)) * self.blocks + n_a % self.blocks
                    n_a = n_a + 1
                else:
                    if n_b < limit:
                        place = (chunks.ns + 2 * (n_b // self.blocks) + 1) * self.blocks + n_b % self.blocks
                    n_b = n_b + 1
                self.put_block(chunks, place, at * 32 + ops.count_trailing_zeros(bit))

    @cute.jit
    def put_block(self, chunks: Chunks, place: Int32, block: Int32):
        if chunks.places != 0:
            ops.store_shared_i32(chunks.places + place * 4, block)
        else:
            ops.store_global_i32(chunks.entries + Int64(place) * 4, block)

    @cute.jit
    def block_at(self, chunks: Chunks, c: Int32, lane: Int32) -> Int32:
        """The number of a lane's block of chunk c; -1 for padding and past the last chunk."""
        block = Int32(-1)
        if lane < self.blocks and c < chunks.total:
            place = c * self.blocks + lane
            if chunks.places != 0:
                block = ops.load_shared_i32(chunks.places + place * 4)
            else:
                block = ops.load_global_i32(chunks.entries + Int64(place) * 4)
        return block

    @cute.jit
    def look_up(self, pages: Pages, maps: Bitmaps, block: Int32):
        """The page of a block's number, -1 for padding, and the block's place in it."""
        page = Int32(-1)
        inside = block
        if pages.page_blocks == 0:
            page = pages.batch if block >= 0 else Int32(-1)
        else:
            table = pages.table
            if block >= maps.pitch * 32:
                table = pages.table2
                inside = block - maps.pitch * 32
            at = cutlass.max(inside, Int32(0)) // pages.page_blocks
            page = union_ops.load_i32_if(Int32(block >= 0), table + Int64(at) * 4, Int32(-1))
            inside = inside - at * pages.page_blocks
        return page, inside

    @cute.jit
    def write_chunks(self, lists: Lists, maps: Bitmaps, pages: Pages, chunks: Chunks, planes: Int32, tid: Int32):
        """A warp a chunk: entries, and a word for each row whose bitmap is there; chunk 0's words to `planes`.

        Rows are written last to first where they take turns, so `entries` may hold the blocks' numbers until row 0.
        """
        lane = tid % 32
        end = maps.last if maps.last < lists.live else chunks.mask_rows  # rows past the live ones want nothing
        block = self.block_at(chunks, tid // 32, lane)
        page, inside = self.look_up(pages, maps, block)
        for c in cutlass.range(tid // 32, chunks.total, THREADS // 32, unroll=1):
            # The next chunk's reads are under way while this one's words are made.
            next_block = self.block_at(chunks, c + THREADS // 32, lane)
            next_page, next_inside = self.look_up(pages, maps, next_block)
            packed = Int32(-1)  # page << shift | block in the page; padding, too, where no page is mapped
            if page >= 0 and page < pages.num_pages:
                packed = (page << pages.shift) | inside
            else:
                block = Int32(-1)
            if c == 0:
                ops.store_shared_i32x2(maps.smem + FIRST + lane * 8, block, packed)
            elif maps.first == 0 and lane < self.blocks:
                entry = packed * 16 + 15  # of padding, -1
                ops.store_global_i32(chunks.entries + Int64(c * self.blocks + lane) * 4, entry)
            bit = Int32(1) << (block & 31) if block >= 0 else Int32(0)
            word_at = cutlass.max(block >> 5, Int32(0))
            bit2 = Int32(0)  # in the second request's rows
            if word_at >= maps.pitch:
                word_at = word_at - maps.pitch
                bit2 = bit
                bit = Int32(0)
            bitmap = maps.rows + word_at * 4
            for first in cutlass.range(maps.first, end, 32, unroll=1):
                mine = Int32(0)
                for r in cutlass.range(first, cutlass.min(first + 32, maps.last), unroll=4):
                    word = ops.load_shared_i32(bitmap + (r - maps.first) * maps.pitch * 4)
                    votes = cute.arch.vote_ballot_sync(word & (bit if r < lists.cut else bit2) != 0)
                    mine = votes if lane == r - first else mine
                if first + lane < end:
                    ops.store_global_i32(chunks.masks + Int64(c * chunks.mask_rows + first + lane) * 4, mine)
                    if c == 0:
                        for j in cutlass.range_constexpr(4):
                            ops.store_shared_i32(planes + (j * chunks.mask_rows + first + lane) * 4, mine)
            block, page, inside = next_block, next_page, next_inside

    @cute.jit
    def apply_record(self, maps: Bitmaps, chunks: Chunks, planes: Int32, at: Int32):
        """Set a record's tokens in chunk 0's bits; a token that is there already was listed twice."""
        code = ops.load_shared_i32(at)
        block = ops.load_shared_i32(at + 4)
        place = Int32(-1)  # none where its page is not mapped
        for i in cutlass.range(chunks.partial_blocks, unroll=1):
            if ops.load_shared_i32(maps.smem + FIRST + i * 8) == block:
                place = i
        for j in cutlass.range_constexpr(4):
            if (code >> j) & 1 != 0 and place >= 0:
                bit = Int32(1) << place
                old = union_ops.fetch_or_shared(planes + (j * chunks.mask_rows + code // 16) * 4, bit)
                if old & bit != 0:
                    ops.store_shared_i32(maps.smem + BAD, Int32(1))

    @cute.jit
    def write_first_entries(self, maps: Bitmaps, chunks: Chunks, planes: Int32, lane: Int32):
        """Chunk 0's entries, by one warp: its blocks' tokens are those that some row wants."""
        packed = ops.load_shared_i32(maps.smem + FIRST + lane * 8 + 4)
        tokens = Int32(0)
        for j in cutlass.range_constexpr(4):
            wanted = Int32(0)
            for r in cutlass.range(lane, chunks.mask_rows, 32, unroll=1):
                wanted = wanted | ops.load_shared_i32(planes + (j * chunks.mask_rows + r) * 4)
            wanted = cute.arch.warp_redux_sync(wanted, "or")
            tokens = tokens | (((wanted >> lane) & 1) << j)
        if lane < self.blocks:
            entry = packed * 16 + tokens if packed >= 0 else Int32(-1)
            ops.store_global_i32(chunks.entries + Int64(lane) * 4, entry)
