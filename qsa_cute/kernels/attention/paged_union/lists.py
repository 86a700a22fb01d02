"""How `prepare.py` reads a tile's selection: lists of tokens, or ids of blocks, to a bitmap a row and to records.

Bit b of a row's bitmap: the row wants all four tokens of block b. A block of which a row wants only some (the open
tail, a hole) becomes a record (row, block, tokens) instead. A tile's rows may be of two requests: rows from `cut` on
are the second's, whose blocks are numbered from `pitch` * 32 on wherever both are named together.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute import paged_union_layout as union_layout
from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.union_scan import open_block
from qsa_cute.kernels.common import ops

THREADS = 256  # of the pre-kernel
ID_ROWS, LIST_ROWS = 12, 8  # rows whose loads a thread has in flight: a word a row of ids, four of a list
RECORDS = union_layout.RECORDS

# Shared memory: the fixed part, in bytes.
NUM_RECORDS, BAD, REACH = 512, 516, 520  # after three tensor maps
SCAN = 528  # sums of up to 8 warps, 16 bytes each
ENDS = 704  # a word a row: how many of its list's entries count
FIRST = ENDS + 4 * union_layout.PAIRS  # chunk 0's blocks, 32 words, and where they lie, 32 words


@dataclass(frozen=True)
class Lists:
    """The rows of a tile and where their lists are."""

    at: Int64  # of the tile's first row
    row_bytes: Int64
    kind: Int32
    top_k: Int32
    live: Int32  # rows that select
    cut: Int32  # of them, how many are the first request's
    position: Int32  # of the first row, for the open tail of kind 2
    length: Int32  # an id counts below it


@dataclass(frozen=True)
class Bitmaps:
    """Shared addresses. Planes of a word per 32 blocks: wanted by warpgroup 0's rows, by 1's, and partly wanted."""

    smem: Int32
    records: Int32
    planes: Int32  # three of `size` words, one after another
    size: Int32  # words of a plane: pitch, or twice that with two requests
    rows: Int32  # row `first`'s bitmap; the others follow
    pitch: Int32  # words of a row's bitmap
    first: Int32  # rows [first, last) of the tile have theirs
    last: Int32


class UnionLists:
    @cute.jit
    def read(self, lists: Lists, maps: Bitmaps, counting: cutlass.Constexpr[bool], tid: Int32) -> Int32:
        """Rows [first, last) to their bitmaps; returns how many bits this thread set, those set before included.

        counting: also make records, and raise REACH to the last block that is wanted, even past the bitmaps' end.
        """
        added = Int32(0)
        reach = Int32(-1)
        if lists.kind == 2:
            added, reach = self.read_ids(lists, maps, counting, tid)
        else:
            added, reach = self.read_tokens(lists, maps, counting, tid)
        if cutlass.const_expr(counting):
            reach = cute.arch.warp_redux_sync(reach, "max")
            if tid % 32 == 0:
                union_ops.max_shared(maps.smem + REACH, reach)
        return added

    @cute.jit
    def read_ids(self, lists: Lists, maps: Bitmaps, counting: cutlass.Constexpr[bool], tid: Int32):
        whole = lists.length // 4  # blocks; the one of this id is cut short by the length
        room = maps.pitch * 32
        added = Int32(0)
        reach = Int32(-1)
        for column in cutlass.range(tid, lists.top_k, THREADS, unroll=1):
            for first in cutlass.range(maps.first, maps.last, ID_ROWS, unroll=1):
                at = lists.at + Int64(column) * 4 + Int64(first) * lists.row_bytes
                b = [
                    union_ops.load_i32_if(Int32(first + r < maps.last), at + Int64(r) * lists.row_bytes, Int32(-1))
                    for r in range(ID_ROWS)
                ]
                for r in cutlass.range_constexpr(ID_ROWS):
                    if b[r] >= 0 and b[r] < whole:
                        reach = cutlass.max(reach, b[r])
                        added = added + 1
                        if b[r] < room:
                            row = maps.rows + (first - maps.first + r) * maps.pitch * 4
                            union_ops.or_shared(row + (b[r] >> 5) * 4, 1 << (b[r] & 31))
                    elif b[r] == whole and lists.length % 4 != 0:
                        reach = cutlass.max(reach, b[r])
                        if cutlass.const_expr(counting):
                            self.record(lists, maps, first + r, b[r], Int32(15))
        if cutlass.const_expr(counting):
            row = maps.first + tid
            while row < maps.last:
                block, tokens = open_block(lists.position + row)
                if tokens != 0 and block * BLOCK_TOKENS < lists.length:
                    reach = cutlass.max(reach, block)
                    self.record(lists, maps, row, block, tokens)
                row = row + THREADS
        return added, reach

    @cute.jit
    def read_tokens(self, lists: Lists, maps: Bitmaps, counting: cutlass.Constexpr[bool], tid: Int32):
        """Four list places a thread; all of a row are read, whatever its count, so that no read waits for another."""
        added = Int32(0)
        reach = Int32(-1)
        aligned = Int32((Int32(lists.at) | Int32(lists.row_bytes)) & 15 == 0)
        for group in cutlass.range(tid, lists.top_k // 4, THREADS, unroll=1):
            for first in cutlass.range(maps.first, maps.last, LIST_ROWS, unroll=1):
                at = lists.at + Int64(group) * 16 + Int64(first) * lists.row_bytes
                t = [
                    union_ops.load_list_x4_if(
                        Int32(first + r < maps.last), aligned, at + Int64(r) * lists.row_bytes, Int32(-1)
                    )
                    for r in range(LIST_ROWS)
                ]
                for r in cutlass.range_constexpr(LIST_ROWS):
                    end = Int32(0)
                    if first + r < maps.last:
                        end = ops.load_shared_i32(maps.smem + ENDS + (first + r) * 4) - group * 4
                    more, block = self.add_tokens(lists, maps, first + r, t[r], end, counting)
                    added = added + more
                    reach = cutlass.max(reach, block)
        # The last entries of lists whose width is no multiple of 4.
        row = maps.first + tid
        rest = lists.top_k // 4 * 4
        while row < maps.last and rest < lists.top_k:
            at = lists.at + Int64(rest) * 4 + Int64(row) * lists.row_bytes
            t = [union_ops.load_i32_if(Int32(rest + j < lists.top_k), at + Int64(j * 4), Int32(-1)) for j in range(4)]
            end = ops.load_shared_i32(maps.smem + ENDS + row * 4) - rest
            more, block = self.add_tokens(lists, maps, row, t, end, counting)
            added = added + more
            reach = cutlass.max(reach, block)
            row = row + THREADS
        return added, reach

    @cute.jit
    def add_tokens(
        self, lists: Lists, maps: Bitmaps, row: Int32, t: tuple, end: Int32, counting: cutlass.Constexpr[bool]
    ):
        """Four entries of a list, of which `end` count: usually a whole block; else a record, or one for each token.

        Returns how many bits were set, and the last block that is wanted, -1 for none.
        """
        t0, t1, t2, t3 = t
        added = Int32(0)
        block = Int32(-1)
        bitmap = maps.rows + (row - maps.first) * maps.pitch * 4
        in_order = (t1 == t0 + 1) & (t2 == t0 + 2) & (t3 == t0 + 3)
        if in_order and t0 & 3 == 0 and t0 >= 0 and t3 < lists.length and end >= 4:
            block = t0 >> 2
            added = Int32(1)
            if block < maps.pitch * 32:
                union_ops.or_shared(bitmap + (block >> 5) * 4, 1 << (block & 31))
        elif end > 0:
            u = [t[j] if (t[j] < lists.length) & (t[j] >= 0) & (end > j) else Int32(-1) for j in range(4)]
            block = cutlass.max(cutlass.max(u[0], u[1]), cutlass.max(u[2], u[3])) >> 2
            tokens = Int32(0)
            valid = Int32(0)
            for j in cutlass.range_constexpr(4):
                valid = valid + (Int32(1) if u[j] >= 0 else Int32(0))
                if u[j] >= 0 and u[j] >> 2 == block:
                    tokens = tokens | (1 << (u[j] & 3))
            if tokens == 15:
                added = Int32(1)
                if block < maps.pitch * 32:
                    union_ops.or_shared(bitmap + (block >> 5) * 4, 1 << (block & 31))
            elif valid > 0:
                if cutlass.const_expr(counting):
                    if cute.arch.popc(tokens) == valid:
                        self.record(lists, maps, row, block, tokens)
                    else:
                        for j in cutlass.range_constexpr(4):
                            if u[j] >= 0:
                                self.record(lists, maps, row, u[j] >> 2, 1 << (u[j] & 3))
        return added, block

    @cute.jit
    def record(self, lists: Lists, maps: Bitmaps, row: Int32, block: Int32, tokens: Int32):
        """Note that a row wants these tokens of a block, as far as they are before the length."""
        tokens = tokens & ((1 << cutlass.min(cutlass.max(lists.length - block * 4, Int32(0)), Int32(4))) - 1)
        if tokens != 0 and block < maps.pitch * 32:
            place = union_ops.fetch_add_shared(maps.smem + NUM_RECORDS, Int32(1))
            if place < RECORDS:
                at = block
                if row >= lists.cut:
                    at = block + maps.pitch * 32
                ops.store_shared_i32x2(maps.records + place * 8, row * 16 + tokens, at)
                union_ops.or_shared(maps.planes + (2 * maps.size + (at >> 5)) * 4, 1 << (at & 31))
