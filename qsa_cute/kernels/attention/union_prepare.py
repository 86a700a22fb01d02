"""What `union_prefill` walks: each tile's union of selected blocks, as chunks with a bit per (row, block).

Grid: one block a tile of `tile_pairs` consecutive (row, head of the group) pairs of one sequence; KV heads share it.

    1. a bitmap per row, in shared memory: bit b = the row wants all of block b. A block of which a row wants only
       some tokens (the open tail, a hole) becomes a record (row, block, tokens) instead;
    2. a thread a 32-block word: which blocks are wanted by warpgroup 0's rows only, by warpgroup 1's only, by
       both, or have a record; a prefix sum over the block gives each its place. Blocks stay ascending;
    3. the places are written: first the blocks with records, then the shared ones, then pairs of exclusive
       chunks. As many exclusive blocks as fill chunks for both warpgroups go there, the rest to the shared ones;
    4. a warp a chunk: block starts, and per row a word with a bit per block, by ballots over the bitmaps;
    5. the records become chunk 0's bits per token.

A tile goes to the row path (0 chunks) when the union cannot say what its rows want (an entry listed twice, more
records or partial blocks than there is room for) or has more chunks than the workspace.

Block 0 of each sequence also leaves its tensor maps of K and V: the launch's `k_map` and `v_map`, as the driver
encodes them, with the sequence's address and the context length in them, so that no box reads past that.

Index kinds: 0 padded list, 1 counted list (its count in column top_k), 2 block ids, to which the open tail is added.
Baked: head dim and type (tensor maps), tile, threads: 256 for blocks that share an SM, 512 for one that has it alone.
Run-time: everything else. The shared memory of a launch depends on the context: `union_layout.prepare_smem_bytes`.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute import union_layout
from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.union_scan import BlockScan, open_block, position_of, rows_before
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr, tensor_map

PARAMS = (
    ptr("k_ptr", "elem", 16),
    ptr("v_ptr", "elem", 16),
    tensor_map("k_map"),
    tensor_map("v_map"),
    ptr("indices", "i32"),
    ptr("context_lengths", "i32"),
    ptr("query_starts", "i32"),
    ptr("tensor_maps", "i32", 16),
    ptr("union_counts", "i32", 8),
    ptr("union_entries", "i32"),
    ptr("union_masks", "i32"),
    ptr("union_first_masks", "i32"),
    ptr("row_path", "i32"),
    i32("seq_len"),
    i32("kv_seq_len"),
    i32("num_kv_heads"),
    i32("group_size"),
    i32("top_k"),
    i32("index_kind"),
    i32("tile_pairs"),
    i32("tiles_per_sequence"),
    i32("max_chunks"),
    i32("mask_rows"),
    i64("k_stride_batch"),
    i64("v_stride_batch"),
    i64("indices_stride_batch"),
    i64("indices_stride_row"),
)

BLOCKS_PER_SM = {256: 4, 512: 1}  # by threads
ID_ROWS, LIST_ROWS = 12, 4  # rows whose loads a thread has in flight: a word a row of ids, four of a list
RECORDS = union_layout.RECORDS

# Shared memory: the fixed part, in bytes.
MAPS, NUM_RECORDS, BAD, SCAN, LISTS = 0, 256, 260, 272, union_layout.FIXED_BYTES


@dataclass(frozen=True)
class Lists:
    """What the tile's rows select."""

    at: Int64  # of the first row
    stride: Int64  # of rows, in entries
    kind: Int32
    top_k: Int32
    live: Int32  # rows that select
    position: Int32  # of the first row
    length: Int32  # an id counts below it
    a_rows: Int32  # rows [0, a_rows) are warpgroup 0's
    first_b: Int32  # rows from here on are warpgroup 1's


@dataclass(frozen=True)
class Space:
    """Shared addresses."""

    smem: Int32
    bitmaps: Int32  # [mask_rows][words], bit b of a row: it wants all of block b
    partial: Int32  # [words], the blocks that have a record
    planes: Int32  # [4][mask_rows], chunk 0's words, one for each token of a block
    records: Int32
    places: Int32  # the blocks by place
    words: Int32  # of a bitmap
    mask_rows: Int32


@dataclass(frozen=True)
class Chunks:
    """What the union takes: `ns` shared chunks, then `pairs` of exclusive ones, `limit` blocks of each half."""

    ns: Int32
    pairs: Int32
    limit: Int32
    total: Int32
    shared_blocks: Int32
    partial_blocks: Int32
    records: Int32


class UnionPrepare(BlockScan):
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str, tile: int, threads: int):
        self.tile = tile
        self.blocks = tile // BLOCK_TOKENS
        self.threads = threads
        self.smem_bytes = union_layout.MAX_SMEM_BYTES

    @cute.jit
    def __call__(
        self,
        k_ptr: cute.Pointer,
        v_ptr: cute.Pointer,
        k_map: tuple,
        v_map: tuple,
        indices: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        tensor_maps: cute.Pointer,
        union_counts: cute.Pointer,
        union_entries: cute.Pointer,
        union_masks: cute.Pointer,
        union_first_masks: cute.Pointer,
        row_path: cute.Pointer,
        seq_len: Int32,
        kv_seq_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        top_k: Int32,
        index_kind: Int32,
        tile_pairs: Int32,
        tiles_per_sequence: Int32,
        max_chunks: Int32,
        mask_rows: Int32,
        k_stride_batch: Int64,
        v_stride_batch: Int64,
        indices_stride_batch: Int64,
        indices_stride_row: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            k_ptr,
            v_ptr,
            k_map,
            v_map,
            indices,
            context_lengths,
            query_starts,
            tensor_maps,
            union_counts,
            union_entries,
            union_masks,
            union_first_masks,
            row_path,
            seq_len,
            kv_seq_len,
            num_kv_heads,
            group_size,
            top_k,
            index_kind,
            tile_pairs,
            tiles_per_sequence,
            max_chunks,
            mask_rows,
            k_stride_batch,
            v_stride_batch,
            indices_stride_batch,
            indices_stride_row,
        ).launch(
            grid=(1, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=BLOCKS_PER_SM[self.threads],
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        k_ptr: cute.Pointer,
        v_ptr: cute.Pointer,
        k_map: tuple,
        v_map: tuple,
        indices: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        tensor_maps: cute.Pointer,
        union_counts: cute.Pointer,
        union_entries: cute.Pointer,
        union_masks: cute.Pointer,
        union_first_masks: cute.Pointer,
        row_path: cute.Pointer,
        seq_len: Int32,
        kv_seq_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        top_k: Int32,
        index_kind: Int32,
        tile_pairs: Int32,
        tiles_per_sequence: Int32,
        max_chunks: Int32,
        mask_rows: Int32,
        k_stride_batch: Int64,
        v_stride_batch: Int64,
        indices_stride_batch: Int64,
        indices_stride_row: Int64,
    ):
        tid, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        early.begin()
        batch = tile // tiles_per_sequence
        row0, rows, halves = self.cut((tile % tiles_per_sequence) * tile_pairs, tile_pairs, seq_len, group_size)
        context = ops.load_global_i32(context_lengths.toint() + Int64(batch) * 4)
        start = Int32(0)
        if query_starts.toint() != 0:
            start = ops.load_global_i32(query_starts.toint() + Int64(batch) * 4)
        position = position_of(row0, start)
        length = cutlass.max(cutlass.min(context, kv_seq_len), Int32(0))
        live = rows_before(context, row0, start, rows)
        ids = indices.toint() + (Int64(batch) * indices_stride_batch + Int64(row0) * indices_stride_row) * 4
        lists = Lists(ids, indices_stride_row, index_kind, top_k, live, position, length, *halves)
        space = self.clear(lists, mask_rows, tid)
        if tile % tiles_per_sequence == 0 and tid < 64:
            self.publish_map(
                space.smem + MAPS,
                tensor_maps.toint() + Int64(batch) * 256,
                k_map,
                v_map,
                k_ptr.toint() + Int64(batch) * k_stride_batch * 2,
                v_ptr.toint() + Int64(batch) * v_stride_batch * 2,
                lists.length,
                tid,
            )
        cute.arch.sync_threads()
        added = self.read(space, lists, tid)
        cute.arch.sync_threads()

        each = (space.words + self.threads - 1) // self.threads  # neighbouring words that a thread has
        chunks, before, twice = self.count(space, lists, each, added, tid)
        fits = (
            (twice == 0)
            & (chunks.records <= RECORDS)
            & (chunks.partial_blocks <= self.blocks)
            & (chunks.total <= max_chunks)
        )
        if fits:
            self.write_places(space, lists, chunks, each, before, tid)
            cute.arch.sync_threads()
            entries = union_entries.toint() + Int64(tile) * Int64(max_chunks) * (self.blocks * 4)
            masks = union_masks.toint() + Int64(tile) * Int64(max_chunks) * Int64(mask_rows * 4)
            self.write_chunks(space, chunks, entries, masks, tid)
            cute.arch.sync_threads()
            if tid < chunks.records:
                self.apply_record(space, chunks, space.records + tid * 8)
            cute.arch.sync_threads()
            at = union_first_masks.toint() + Int64(tile) * Int64(mask_rows * 16)
            for i in cutlass.range(tid, mask_rows * 4, self.threads, unroll=1):
                ops.store_global_i32(at + Int64(i) * 4, ops.load_shared_i32(space.planes + i * 4))
        if tid == 0:
            good = Int32(1) if fits else Int32(0)
            good = good if ops.load_shared_i32(space.smem + BAD) == 0 else Int32(0)
            ops.store_global_i32x2(union_counts.toint() + Int64(tile) * 8, chunks.ns * good, chunks.pairs)
            for h in cutlass.range(num_kv_heads, unroll=1):
                ops.store_global_i32(row_path.toint() + Int64(tile * num_kv_heads + h) * 4, 1 - good)

    @cute.jit
    def clear(self, lists: Lists, mask_rows: Int32, tid: Int32):
        """Lay out the shared memory; clear the bitmaps, the blocks with records and chunk 0's words."""
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        words = ((lists.length + 127) // 128 + 3) // 4 * 4
        bitmaps = smem + LISTS
        partial = bitmaps + mask_rows * words * 4
        planes = partial + words * 4
        records = planes + mask_rows * 16
        for i in cutlass.range(tid, (mask_rows + 1) * (words // 4) + mask_rows, self.threads, unroll=1):
            union_ops.clear_shared_16(bitmaps + i * 16)
        if tid == 0:
            ops.store_shared_i32(smem + NUM_RECORDS, Int32(0))
            ops.store_shared_i32(smem + BAD, Int32(0))
        return Space(smem, bitmaps, partial, planes, records, records + RECORDS * 8, words, mask_rows)

    # ---- tensor maps ---------------------------------------------------------------------------------

    @cute.jit
    def publish_map(
        self, smem: Int32, maps: Int64, k_map: tuple, v_map: tuple, k: Int64, v: Int64, length: Int32, tid: Int32
    ):
        """Warp 0 leaves K's tensor map, warp 1 V's: the host's, set to this sequence's address and length."""
        warp = tid // 32
        at = smem + warp * union_ops.TENSOR_MAP_BYTES
        if tid % 32 == 0:
            for i in cutlass.range_constexpr(union_ops.TENSOR_MAP_BYTES // 8):
                ops.store_shared_64(at + i * 8, v_map[i] if warp == 1 else k_map[i])
            union_ops.replace_map_field(at, "global_address", v if warp == 1 else k)
            union_ops.replace_map_field(at, "global_dim 2", cutlass.max(length, Int32(1)))
        cute.arch.sync_warp()
        union_ops.publish_tensor_map(maps + Int64(warp * union_ops.TENSOR_MAP_BYTES), at)

    # ---- reading the selection -----------------------------------------------------------------------

    @cute.jit
    def read(self, space: Space, lists: Lists, tid: Int32) -> Int32:
        """The selection to bitmaps and records; returns how many bits this thread set, those set before included."""
        added = Int32(0)
        if lists.kind == 2:
            added = self.read_ids(space, lists, tid)
            row = tid
            while row < lists.live:
                block, tokens = open_block(lists.position + row)
                self.record(space, row, block, tokens, lists.length)
                row = row + self.threads
        else:
            added = self.read_list(space, lists, tid)
        return added

    @cute.jit
    def read_ids(self, space: Space, lists: Lists, tid: Int32) -> Int32:
        """Block ids to bitmaps; returns as `read`."""
        row_bytes = lists.stride * 4
        added = Int32(0)
        for column in cutlass.range(tid, lists.top_k, self.threads, unroll=1):
            for first in cutlass.range(0, lists.live, ID_ROWS, unroll=1):
                at = lists.at + Int64(column) * 4 + Int64(first) * row_bytes
                b = [
                    union_ops.load_i32_if(Int32(first + r < lists.live), at + Int64(r) * row_bytes, Int32(-1))
                    for r in range(ID_ROWS)
                ]
                for r in cutlass.range_constexpr(ID_ROWS):
                    if b[r] >= 0 and b[r] < lists.length // 4:
                        union_ops.or_shared(
                            space.bitmaps + ((first + r) * space.words + b[r] // 32) * 4, 1 << (b[r] % 32)
                        )
                        added = added + 1
                    elif b[r] == lists.length // 4:
                        self.record(space, first + r, b[r], Int32(15), lists.length)
        return added

    @cute.jit
    def read_list(self, space: Space, lists: Lists, tid: Int32) -> Int32:
        """Token ids, four list places a thread, to bitmaps and records; returns as `read`."""
        row_bytes = lists.stride * 4
        added = Int32(0)
        for group in cutlass.range(tid, (lists.top_k + 3) // 4, self.threads, unroll=1):
            for first in cutlass.range(0, lists.live, LIST_ROWS, unroll=1):
                at = lists.at + Int64(group) * 16 + Int64(first) * row_bytes
                end = [lists.top_k for _ in range(LIST_ROWS)]
                if lists.kind == 1:
                    for r in cutlass.range_constexpr(LIST_ROWS):
                        count = lists.at + Int64(first + r) * row_bytes + Int64(lists.top_k) * 4
                        end[r] = cutlass.min(
                            lists.top_k, union_ops.load_i32_if(Int32(first + r < lists.live), count, Int32(0))
                        )
                t = [
                    union_ops.load_i32_if(
                        Int32((first + i // 4 < lists.live) & (group * 4 + i % 4 < end[i // 4])),
                        at + Int64(i // 4) * row_bytes + (i % 4) * 4,
                        Int32(-1),
                    )
                    for i in range(LIST_ROWS * 4)
                ]
                for r in cutlass.range_constexpr(LIST_ROWS):
                    bitmap = space.bitmaps + (first + r) * space.words * 4
                    added = added + self.add_tokens(space, bitmap, first + r, t[4 * r : 4 * r + 4], lists.length)
        return added

    @cute.jit
    def add_tokens(self, space: Space, bitmap: Int32, row: Int32, entries: list, length: Int32) -> Int32:
        """Four entries of a list: usually a whole block; else a record, or one for each token."""
        t = [i if i < length else Int32(-1) for i in entries]
        block = cutlass.max(cutlass.max(t[0], t[1]), cutlass.max(t[2], t[3])) >> 2
        tokens = Int32(0)
        valid = Int32(0)
        for j in cutlass.range_constexpr(4):
            valid = valid + (Int32(1) if t[j] >= 0 else Int32(0))
            if t[j] >= 0 and t[j] >> 2 == block:
                tokens = tokens | (1 << (t[j] & 3))
        added = Int32(0)
        if tokens == 15:
            union_ops.or_shared(bitmap + (block // 32) * 4, 1 << (block % 32))
            added = Int32(1)
        elif valid > 0:
            if cute.arch.popc(tokens) == valid:
                self.record(space, row, block, tokens, length)
            else:
                for j in cutlass.range_constexpr(4):
                    if t[j] >= 0:
                        self.record(space, row, t[j] >> 2, 1 << (t[j] & 3), length)
        return added

    @cute.jit
    def record(self, space: Space, row: Int32, block: Int32, tokens: Int32, length: Int32):
        """Note that a row wants these tokens of a block, as far as they are before the length."""
        tokens = tokens & ((1 << cutlass.min(cutlass.max(length - block * 4, Int32(0)), Int32(4))) - 1)
        if tokens != 0:
            place = union_ops.fetch_add_shared(space.smem + NUM_RECORDS, Int32(1))
            if place < RECORDS:
                ops.store_shared_i32x2(space.records + place * 8, row * 16 + tokens, block)
                union_ops.or_shared(space.partial + (block // 32) * 4, 1 << (block % 32))

    # ---- places --------------------------------------------------------------------------------------

    @cute.jit
    def count(self, space: Space, lists: Lists, each: Int32, added: Int32, tid: Int32):
        """How the blocks divide, of all threads and before this one, and whether any was listed twice."""
        c0 = Int32(0)  # shared | warpgroup 0's << 16
        c1 = Int32(0)  # warpgroup 1's | partial << 16
        found = Int32(0)
        for i in cutlass.range(tid * each, cutlass.min((tid + 1) * each, space.words), unroll=1):
            shared, only_a, only_b, part, bits = self.classify(space, lists, i)
            c0 = c0 + cute.arch.popc(shared) + (cute.arch.popc(only_a) << 16)
            c1 = c1 + cute.arch.popc(only_b) + (cute.arch.popc(part) << 16)
            found = found + bits
        before0, total0, before1, total1, twice = self.scan(space.smem + SCAN, c0, c1, added - found, tid)
        ns, pairs, shared_blocks, partial_blocks = self.divide_blocks(total0, total1)
        records = ops.load_shared_i32(space.smem + NUM_RECORDS)
        chunks = Chunks(ns, pairs, pairs * self.blocks, ns + 2 * pairs, shared_blocks, partial_blocks, records)
        return chunks, (before0, before1), twice

    @cute.jit
    def classify(self, space: Space, lists: Lists, i: Int32):
        """Of word i's blocks: shared, only warpgroup 0's, only 1's, those with records; and the bits of all rows."""
        a = Int32(0)
        b = Int32(0)
        bits = Int32(0)
        for r in cutlass.range(lists.live, unroll=4):
            word = ops.load_shared_i32(space.bitmaps + (r * space.words + i) * 4)
            bits = bits + cute.arch.popc(word)
            a = a | (word if r < lists.a_rows else Int32(0))
            b = b | (word if r >= lists.first_b else Int32(0))
        part = ops.load_shared_i32(space.partial + i * 4)
        return a & b & ~part, a & ~b & ~part, b & ~a & ~part, part, bits

    @cute.jit
    def write_places(self, space: Space, lists: Lists, chunks: Chunks, each: Int32, before: tuple, tid: Int32):
        """Write each block of this thread's words to its place, and -1 where the shared chunks have no block."""
        if tid < chunks.ns * self.blocks - chunks.shared_blocks:
            ops.store_shared_i32(space.places + (chunks.shared_blocks + tid) * 4, Int32(-1))
        before0, before1 = before
        ns, limit = chunks.ns, chunks.limit
        n_shared = before0 & 0xFFFF
        n_a = (before0 >> 16) & 0xFFFF
        n_b = before1 & 0xFFFF
        n_part = (before1 >> 16) & 0xFFFF
        for i in cutlass.range(tid * each, cutlass.min((tid + 1) * each, space.words), unroll=1):
            shared, only_a, only_b, part, _ = self.classify(space, lists, i)
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
                        place = (ns + 2 * (n_a // self.blocks)) * self.blocks + n_a % self.blocks
                    n_a = n_a + 1
                else:
                    if n_b < limit:
                        place = (ns + 2 * (n_b // self.blocks) + 1) * self.blocks + n_b % self.blocks
                    n_b = n_b + 1
                ops.store_shared_i32(space.places + place * 4, i * 32 + ops.count_trailing_zeros(bit))

    @cute.jit
    def write_chunks(self, space: Space, chunks: Chunks, entries: Int64, masks: Int64, tid: Int32):
        """A warp a chunk: token starts (out of bounds for padding) and a word a row; chunk 0's words to `planes`."""
        lane = tid % 32
        for c in cutlass.range(tid // 32, chunks.total, self.threads // 32, unroll=1):
            block = Int32(-1)
            if lane < self.blocks:
                block = ops.load_shared_i32(space.places + (c * self.blocks + lane) * 4)
                ops.store_global_i32(entries + Int64(c * self.blocks + lane) * 4, block * BLOCK_TOKENS)
            at = space.bitmaps + cutlass.max(block // 32, Int32(0)) * 4
            mask = Int32(1) << (block & 31) if block >= 0 else Int32(0)
            for first in cutlass.range(0, space.mask_rows, 32, unroll=1):
                mine = Int32(0)
                for r in cutlass.range(first, cutlass.min(first + 32, space.mask_rows), unroll=4):
                    word = cute.arch.vote_ballot_sync((ops.load_shared_i32(at + r * space.words * 4) & mask) != 0)
                    mine = word if lane == r - first else mine
                if first + lane < space.mask_rows:
                    ops.store_global_i32(masks + Int64(c * space.mask_rows + first + lane) * 4, mine)
                    if c == 0:
                        for j in cutlass.range_constexpr(4):
                            ops.store_shared_i32(space.planes + (j * space.mask_rows + first + lane) * 4, mine)

    @cute.jit
    def apply_record(self, space: Space, chunks: Chunks, at: Int32):
        """Set a record's tokens in chunk 0's bits; a token that is there already was listed twice."""
        code = ops.load_shared_i32(at)
        block = ops.load_shared_i32(at + 4)
        place = Int32(0)
        for i in cutlass.range(chunks.partial_blocks, unroll=1):
            if ops.load_shared_i32(space.places + i * 4) == block:
                place = i
        for j in cutlass.range_constexpr(4):
            if (code >> j) & 1 != 0:
                bit = Int32(1) << place
                old = union_ops.fetch_or_shared(space.planes + (j * space.mask_rows + code // 16) * 4, bit)
                if old & bit != 0:
                    ops.store_shared_i32(space.smem + BAD, Int32(1))
