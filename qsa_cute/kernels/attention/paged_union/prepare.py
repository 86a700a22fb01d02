"""What `prefill.py` walks: each tile's union of selected blocks, as chunks with a bit per (row, block).

Grid: one block a tile of `tile_pairs` consecutive (row, head of the group) pairs of one sequence; KV heads share it.

    1. the rows' lists become a bitmap a row in shared memory, and records of partly wanted blocks (`lists.py`);
    2. a thread a 32-block word: which blocks are wanted by warpgroup 0's rows only, by warpgroup 1's only, by
       both, or have a record; a prefix sum over the block gives each its place. Blocks stay ascending;
    3. the places are written: first the blocks with records, then the shared ones, then pairs of exclusive
       chunks. As many exclusive blocks as fill chunks for both warpgroups go there, the rest to the shared ones;
    4. a warp a chunk: where its blocks lie, and per row a word with a bit per block, by ballots over the bitmaps;
    5. the records become chunk 0's bits per token.

The host gives room for bitmaps; how long they must be is known when the lists have been read. Where the rows' do not
fit at once they take turns, and the lists are read again: so any context fits, and a short one costs little in a launch
that is made for a long one.

Dense K and V [batch, rows, heads, D] are pages of a whole sequence. Paged ones, of vLLM's contract, have lists of
logical tokens and a block table; then the rows of all requests are one sequence of tiles, and `token_to_req` says whose
a row is. A tile's rows may be of two requests, and its union holds the blocks of both.

A tile goes to the row path (0 chunks) when the union cannot say what its rows want (an entry listed twice, more
records or partial blocks than there is room for, rows of three requests) or has more chunks than the workspace.

Block 0 leaves the launch's tensor maps of K, of V, and of single tokens of V, as the driver encodes them.

Index kinds: 0 padded list, 1 counted list (its count in column top_k), 2 block ids, to which the open tail is added.
Baked: head dim and type (tensor maps), tile. Run-time: everything else. The shared memory of a launch depends on
the context: `paged_union_layout.prepare_smem_bytes`.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute import paged_union_layout as union_layout
from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.paged_union.lists import (
    BAD,
    ENDS,
    NUM_RECORDS,
    REACH,
    RECORDS,
    SCAN,
    THREADS,
    Bitmaps,
    Lists,
    UnionLists,
)
from qsa_cute.kernels.attention.paged_union.places import Chunks, Halves, Pages, UnionPlaces
from qsa_cute.kernels.attention.union_scan import position_of, rows_before
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr, tensor_map

PARAMS = (
    tensor_map("k_map"),
    tensor_map("v_map"),
    tensor_map("v_token_map"),
    ptr("indices", "i32"),
    ptr("context_lengths", "i32"),
    ptr("query_starts", "i32"),
    ptr("block_table", "i32"),
    ptr("token_to_req", "i32"),
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
    i32("num_requests"),
    i32("num_pages"),
    i32("page_blocks"),
    i32("entry_shift"),
    i32("tile_pairs"),
    i32("tiles_per_sequence"),
    i32("max_chunks"),
    i32("mask_rows"),
    i32("bitmap_words"),
    i64("indices_stride_batch"),
    i64("indices_stride_row"),
    i64("table_stride"),
)

BLOCKS_PER_SM = 3  # 80 registers: with the 64 of four, loads wait for one another (18.5 us for ids against 14.7)
NO_REQUEST = -(2**31)  # of rows past the tile's


class UnionPrepare(UnionLists, UnionPlaces):
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str, tile: int):
        self.tile = tile
        self.blocks = tile // BLOCK_TOKENS
        self.threads = THREADS
        self.smem_bytes = union_layout.MAX_SMEM_BYTES

    @cute.jit
    def __call__(
        self,
        k_map: tuple,
        v_map: tuple,
        v_token_map: tuple,
        indices: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        block_table: cute.Pointer,
        token_to_req: cute.Pointer,
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
        num_requests: Int32,
        num_pages: Int32,
        page_blocks: Int32,
        entry_shift: Int32,
        tile_pairs: Int32,
        tiles_per_sequence: Int32,
        max_chunks: Int32,
        mask_rows: Int32,
        bitmap_words: Int32,
        indices_stride_batch: Int64,
        indices_stride_row: Int64,
        table_stride: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            k_map,
            v_map,
            v_token_map,
            indices,
            context_lengths,
            query_starts,
            block_table,
            token_to_req,
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
            num_requests,
            num_pages,
            page_blocks,
            entry_shift,
            tile_pairs,
            tiles_per_sequence,
            max_chunks,
            mask_rows,
            bitmap_words,
            indices_stride_batch,
            indices_stride_row,
            table_stride,
        ).launch(
            grid=(1, 1, 1),
            block=(THREADS, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=BLOCKS_PER_SM,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        k_map: tuple,
        v_map: tuple,
        v_token_map: tuple,
        indices: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        block_table: cute.Pointer,
        token_to_req: cute.Pointer,
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
        num_requests: Int32,
        num_pages: Int32,
        page_blocks: Int32,
        entry_shift: Int32,
        tile_pairs: Int32,
        tiles_per_sequence: Int32,
        max_chunks: Int32,
        mask_rows: Int32,
        bitmap_words: Int32,
        indices_stride_batch: Int64,
        indices_stride_row: Int64,
        table_stride: Int64,
    ):
        tid, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        early.begin()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        records = smem + union_layout.FIXED_BYTES
        first_words = records + RECORDS * 8  # chunk 0's words, a plane for each token of a block
        places = first_words + mask_rows * 16
        space = places + union_layout.PLACE_WORDS * 4
        if tile == 0 and tid < 96:
            self.publish_maps(smem, tensor_maps.toint(), k_map, v_map, v_token_map, tid)

        batch = tile // tiles_per_sequence
        row0, rows, halves = self.cut((tile % tiles_per_sequence) * tile_pairs, tile_pairs, seq_len, group_size)
        at = indices.toint() + (Int64(batch) * indices_stride_batch + Int64(row0) * indices_stride_row) * 4

        # How many entries of its row's list count: asked for before the rest is known.
        entries_end = top_k
        if index_kind == 1:
            counts = at + Int64(tid) * indices_stride_row * 4 + Int64(top_k) * 4
            counted = union_ops.load_i32_if(Int32(tid < rows), counts, Int32(0))
            entries_end = cutlass.max(cutlass.min(counted, top_k), Int32(0))

        # Whose rows these are, and which of them select.
        live = rows
        cut = rows
        position = row0
        length = kv_seq_len
        table = Int64(0)
        table2 = Int64(0)
        mixed = Int32(0)
        one = Int32(1)  # whether the first request exists; the second
        two = Int32(1)
        if token_to_req.toint() != 0:
            request, request2, cut, mixed = self.find_requests(token_to_req.toint() + Int64(row0) * 4, rows, tid % 32)
            one = Int32(request >= 0 and request < num_requests)
            two = Int32(request2 >= 0 and request2 < num_requests)
            table = block_table.toint() + Int64(request) * table_stride * 4
            table2 = block_table.toint() + Int64(request2) * table_stride * 4
        else:
            context = ops.load_global_i32(context_lengths.toint() + Int64(batch) * 4)
            start = Int32(0)
            if query_starts.toint() != 0:
                start = ops.load_global_i32(query_starts.toint() + Int64(batch) * 4)
            position = position_of(row0, start)
            length = cutlass.max(cutlass.min(context, kv_seq_len), Int32(0))
            live = rows_before(context, row0, start, rows)
            cut = live
        lists = Lists(at, indices_stride_row * 4, index_kind, top_k, live, cut, position, length)
        pages = Pages(table, table2, batch, num_pages, page_blocks, entry_shift)
        halves = Halves(*halves)
        if tid < live:
            exists = one if tid < cut else two
            ops.store_shared_i32(smem + ENDS + tid * 4, entries_end if exists != 0 else Int32(0))

        requests = Int32(1) if cut == live else Int32(2)
        pitch, at_once, last_first, words, again, fits = self.find_wanted(
            lists, halves, smem, records, space, requests, bitmap_words, mixed == 0, tid
        )

        # Places: per thread `each` neighbouring words.
        size = requests * pitch
        maps = Bitmaps(
            smem,
            records,
            space,
            size,
            space + 3 * size * 4,
            pitch,
            last_first,
            cutlass.min(last_first + at_once, live),
        )
        count = requests * words if fits else Int32(0)
        sizes, before, twice = self.count(maps, words, count, again, tid)
        ns, pairs, shared_blocks, partial_blocks = sizes
        total = ns + 2 * pairs
        num_records = ops.load_shared_i32(smem + NUM_RECORDS)
        fits = fits and twice == 0 and num_records <= RECORDS and partial_blocks <= self.blocks and total <= max_chunks
        chunks = Chunks(
            ns,
            pairs * self.blocks,
            total,
            partial_blocks,
            mask_rows,
            union_entries.toint() + Int64(tile) * Int64(max_chunks) * (self.blocks * 4),
            union_masks.toint() + Int64(tile) * Int64(max_chunks) * Int64(mask_rows * 4),
            places if total * self.blocks <= union_layout.PLACE_WORDS else Int32(0),
            words,
        )
        if fits:
            first_masks = union_first_masks.toint() + Int64(tile) * Int64(mask_rows * 16)
            self.write_union(lists, maps, pages, chunks, *before, shared_blocks, at_once, first_words, first_masks, tid)
        if tid == 0:
            good = Int32(0)
            if fits and ops.load_shared_i32(smem + BAD) == 0:
                good = Int32(1)
            ops.store_global_i32x2(union_counts.toint() + Int64(tile) * 8, ns * good, pairs)
            for h in cutlass.range(num_kv_heads, unroll=1):
                ops.store_global_i32(row_path.toint() + Int64(tile * num_kv_heads + h) * 4, 1 - good)

    @cute.jit
    def find_wanted(
        self,
        lists: Lists,
        halves: Halves,
        smem: Int32,
        records: Int32,
        space: Int32,
        requests: Int32,
        bitmap_words: Int32,
        starts: cutlass.Boolean,
        tid: Int32,
    ):
        """The planes of wanted blocks and the records: all rows at once where their bitmaps fit, else in turns.

        Returns: a bitmap's words; rows at once; the first of those whose bitmaps are there now; words in use; how many
        blocks this thread's rows want again; whether it could be done.
        """
        live = lists.live
        whole = ((lists.length + 127) // 128 + 3) // 4 * 4
        pitch = cutlass.min(whole, bitmap_words // (live + 3 * requests) // 4 * 4)
        at_once = live
        first = Int32(0)
        last_first = Int32(0)
        added = Int32(0)
        found = Int32(0)
        words = Int32(0)
        fits = starts
        reading = starts
        while reading:
            last = cutlass.min(first + at_once, live)
            plane = requests * pitch
            some = Bitmaps(smem, records, space, plane, space + 3 * plane * 4, pitch, first, last)
            cleared = some.planes if first == 0 else some.rows
            self.clear(cleared, some.rows + (last - first) * pitch * 4, tid)
            if tid == 0 and first == 0:
                ops.store_shared_i32(smem + NUM_RECORDS, Int32(0))
                ops.store_shared_i32(smem + BAD, Int32(0))
                ops.store_shared_i32(smem + REACH, Int32(-1))
            cute.arch.sync_threads()
            added = added + self.read(lists, some, True, tid)
            cute.arch.sync_threads()
            words = (ops.load_shared_i32(smem + REACH) + 32) >> 5  # up to the last block wanted so far
            needed = (words + 3) // 4 * 4
            if needed > pitch:
                pitch = needed
                at_once = cutlass.min(bitmap_words // needed - 3 * requests, live)
                first = Int32(0)
                added = Int32(0)
                found = Int32(0)
                fits = at_once > 0
                reading = at_once > 0
            else:
                found = found + self.gather_planes(lists, some, halves, words, tid)
                last_first = first
                first = last
                reading = first < live
            cute.arch.sync_threads()
        return pitch, at_once, last_first, words, added - found, fits

    @cute.jit
    def count(self, maps: Bitmaps, words: Int32, count: Int32, again: Int32, tid: Int32):
        """How the blocks of `count` words divide, of all threads and before this one; whether any was listed twice."""
        each = (count + THREADS - 1) // THREADS
        c0 = Int32(0)  # shared | warpgroup 0's << 16
        c1 = Int32(0)  # warpgroup 1's | partial << 16
        for i in cutlass.range(tid * each, cutlass.min((tid + 1) * each, count), unroll=1):
            shared, only_a, only_b, part = self.classify(maps, self.plane_at(maps, words, i))
            c0 = c0 + cute.arch.popc(shared) + (cute.arch.popc(only_a) << 16)
            c1 = c1 + cute.arch.popc(only_b) + (cute.arch.popc(part) << 16)
        before0, total0, before1, total1, twice = self.scan(maps.smem + SCAN, c0, c1, again, tid)
        return self.divide_blocks(total0, total1), (before0, before1), twice

    @cute.jit
    def write_union(
        self,
        lists: Lists,
        maps: Bitmaps,
        pages: Pages,
        chunks: Chunks,
        before0: Int32,
        before1: Int32,
        shared_blocks: Int32,
        at_once: Int32,
        first_words: Int32,
        first_masks: Int64,
        tid: Int32,
    ):
        """Places, entries and masks; the last rows' bitmaps are still there, the others' are made again."""
        if tid < chunks.ns * self.blocks - shared_blocks:
            self.put_block(chunks, shared_blocks + tid, Int32(-1))
        self.assign(maps, chunks, before0, before1, tid)
        cute.arch.sync_threads()
        first = maps.first
        writing = Int32(0) == Int32(0)
        while writing:
            last = cutlass.min(first + at_once, lists.live)
            some = Bitmaps(maps.smem, maps.records, maps.planes, maps.size, maps.rows, maps.pitch, first, last)
            if first != maps.first:
                self.clear(maps.rows, maps.rows + (last - first) * maps.pitch * 4, tid)
                cute.arch.sync_threads()
                self.read(lists, some, False, tid)
                cute.arch.sync_threads()
            self.write_chunks(lists, some, pages, chunks, first_words, tid)
            cute.arch.sync_threads()
            writing = first > 0
            first = first - at_once
        if tid < ops.load_shared_i32(maps.smem + NUM_RECORDS):
            self.apply_record(maps, chunks, first_words, maps.records + tid * 8)
        cute.arch.sync_threads()
        if tid < 32:
            self.write_first_entries(maps, chunks, first_words, tid)
        for i in cutlass.range(tid, chunks.mask_rows * 4, THREADS, unroll=1):
            ops.store_global_i32(first_masks + Int64(i) * 4, ops.load_shared_i32(first_words + i * 4))

    @cute.jit
    def clear(self, begin: Int32, end: Int32, tid: Int32):
        for at in cutlass.range(begin + tid * 16, end, THREADS * 16, unroll=1):
            union_ops.clear_shared_16(at)

    @cute.jit
    def publish_maps(self, smem: Int32, maps: Int64, k_map: tuple, v_map: tuple, v_token_map: tuple, tid: Int32):
        """Warps 0 to 2 leave a tensor map each."""
        warp = tid // 32
        at = smem + warp * union_ops.TENSOR_MAP_BYTES
        if tid % 32 == 0:
            for i in cutlass.range_constexpr(union_ops.TENSOR_MAP_BYTES // 8):
                word = v_map[i] if warp == 1 else k_map[i]
                ops.store_shared_64(at + i * 8, v_token_map[i] if warp == 2 else word)
        cute.arch.sync_warp()
        union_ops.publish_tensor_map(maps + Int64(warp * union_ops.TENSOR_MAP_BYTES), at)

    @cute.jit
    def find_requests(self, at: Int64, rows: Int32, lane: Int32):
        """The first row's request, the next one, how many rows are the first's, and whether there is a third.

        Every warp finds them by itself. A tile has at most 64 rows.
        """
        low = union_ops.load_i32_if(Int32(lane < rows), at + Int64(lane) * 4, Int32(NO_REQUEST))
        high = union_ops.load_i32_if(Int32(lane + 32 < rows), at + Int64(lane + 32) * 4, Int32(NO_REQUEST))
        request = cute.arch.shuffle_sync(low, offset=0)
        other_low = cute.arch.vote_ballot_sync((lane < rows) & (low != request))
        other_high = cute.arch.vote_ballot_sync((lane + 32 < rows) & (high != request))
        cut = rows
        if other_low != 0:
            cut = ops.count_trailing_zeros(other_low)
        elif other_high != 0:
            cut = 32 + ops.count_trailing_zeros(other_high)
        from_low = cute.arch.shuffle_sync(low, offset=cutlass.min(cut, Int32(31)))
        from_high = cute.arch.shuffle_sync(high, offset=cutlass.min(cutlass.max(cut - 32, Int32(0)), Int32(31)))
        request2 = from_low if cut < 32 else from_high
        third_low = (lane < rows) & (lane >= cut) & (low != request2)
        third_high = (lane + 32 < rows) & (lane + 32 >= cut) & (high != request2)
        mixed = cute.arch.vote_ballot_sync(third_low | third_high)
        return request, request2, cut, mixed
