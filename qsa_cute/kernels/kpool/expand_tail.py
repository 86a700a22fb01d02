"""Expansion of selected pools into tokens, and the open pool's tokens behind them, in fixed columns.

    out[r, c]        = id[r, c // pool] * pool + c % pool     c < topk; -1 where the pool is not valid
    out[r, topk + i] = closed[r] * pool + i                   i < seq_lens[r] - closed[r] * pool, i < tail; else -1

closed[r] is pool_lens[r], or seq_lens[r] // pool where there are none; a length below 0 is 0. With a page table a token
becomes page_table[r, token], the token clamped to its columns; with offsets, token + offsets[r]. With copy the first
topk columns are `ids` as they are.

Grid: (num_rows). Four columns a thread, at 16-byte aligned addresses whatever the rows' alignment; a row's ends are
stored one by one. Nothing baked; index tensors are int32 or int64 each (`*_words` 1 or 2).
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import i32, i64, ptr
from qsa_cute.kernels.kpool import pool_ops as po

PARAMS = (
    ptr("out_ptr", "i32"),
    ptr("ids_ptr", "i32"),
    ptr("valid_ptr", "u8", 1),
    ptr("seq_lens_ptr", "i32"),
    ptr("pool_lens_ptr", "i32"),
    ptr("page_table_ptr", "i32"),
    ptr("offsets_ptr", "i32"),
    i32("topk"),
    i32("tail"),
    i32("pool_size"),
    i32("copy"),
    i32("table_width"),
    i32("id_words"),
    i32("seq_words"),
    i32("pool_len_words"),
    i32("table_words"),
    i32("offset_words"),
    i64("out_stride_row"),
    i64("ids_stride_row"),
    i64("valid_stride_row"),
    i64("table_stride_row"),
)

FAST_POOL = 4  # whose expansion is shifts
QUADS = 2  # of columns a thread loads at once: 288 threads hold a row of 2051


class ExpandTail:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.threads = 288
        self.smem_bytes = 0

    @cute.jit
    def __call__(
        self,
        out_ptr: cute.Pointer,
        ids_ptr: cute.Pointer,
        valid_ptr: cute.Pointer,
        seq_lens_ptr: cute.Pointer,
        pool_lens_ptr: cute.Pointer,
        page_table_ptr: cute.Pointer,
        offsets_ptr: cute.Pointer,
        topk: Int32,
        tail: Int32,
        pool_size: Int32,
        copy: Int32,
        table_width: Int32,
        id_words: Int32,
        seq_words: Int32,
        pool_len_words: Int32,
        table_words: Int32,
        offset_words: Int32,
        out_stride_row: Int64,
        ids_stride_row: Int64,
        valid_stride_row: Int64,
        table_stride_row: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(
            out_ptr,
            ids_ptr,
            valid_ptr,
            seq_lens_ptr,
            pool_lens_ptr,
            page_table_ptr,
            offsets_ptr,
            topk,
            tail,
            pool_size,
            copy,
            table_width,
            id_words,
            seq_words,
            pool_len_words,
            table_words,
            offset_words,
            out_stride_row,
            ids_stride_row,
            valid_stride_row,
            table_stride_row,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream)

    @cute.kernel
    def kernel(
        self,
        out_ptr: cute.Pointer,
        ids_ptr: cute.Pointer,
        valid_ptr: cute.Pointer,
        seq_lens_ptr: cute.Pointer,
        pool_lens_ptr: cute.Pointer,
        page_table_ptr: cute.Pointer,
        offsets_ptr: cute.Pointer,
        topk: Int32,
        tail: Int32,
        pool_size: Int32,
        copy: Int32,
        table_width: Int32,
        id_words: Int32,
        seq_words: Int32,
        pool_len_words: Int32,
        table_words: Int32,
        offset_words: Int32,
        out_stride_row: Int64,
        ids_stride_row: Int64,
        valid_stride_row: Int64,
        table_stride_row: Int64,
    ):
        early.begin()
        row, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        lengths = seq_lens_ptr.toint()
        if lengths != 0:
            lengths = lengths + Int64(row) * Int64(seq_words * 4)
        ids = ids_ptr.toint() + Int64(row) * ids_stride_row * Int64(id_words * 4)
        valid = valid_ptr.toint()
        table = page_table_ptr.toint()
        offsets = offsets_ptr.toint()
        columns = topk + tail
        out = out_ptr.toint() + Int64(row) * out_stride_row * 4
        shift = ((out >> 2) & 3).to(Int32)  # words between the aligned address before the row and the row
        quads = (columns + shift + 3) // 4
        plain = pool_size == FAST_POOL and copy == 0 and valid == 0 and table == 0
        if plain and pool_lens_ptr.toint() == 0 and offsets == 0:
            for first in cutlass.range(tid, quads, QUADS * self.threads, unroll=1):
                self.fast(ids, lengths, out, first, shift, topk, columns, id_words, seq_words)
        else:
            length = po.load_index(Int32(lengths != 0), lengths, seq_words)
            length = cutlass.max(length, Int32(0))
            closed = length // pool_size
            counts = pool_lens_ptr.toint()
            if counts != 0:
                closed = po.load_index(Int32(1), counts + Int64(row) * Int64(pool_len_words * 4), pool_len_words)
            open_start = closed * pool_size
            open_count = cutlass.min(length - open_start, tail)
            moved = Int32(0)
            if offsets != 0:
                moved = po.load_index(Int32(1), offsets + Int64(row) * Int64(offset_words * 4), offset_words)
            if valid != 0:
                valid = valid + Int64(row) * valid_stride_row
            if table != 0:
                table = table + Int64(row) * table_stride_row * Int64(table_words * 4)
            for quad in cutlass.range(tid, quads, self.threads, unroll=1):
                column = 4 * quad - shift
                values = []
                for i in cutlass.range_constexpr(4):
                    values.append(
                        self.general(
                            ids,
                            valid,
                            table,
                            column + i,
                            topk,
                            pool_size,
                            copy,
                            table_width,
                            id_words,
                            table_words,
                            open_start,
                            open_count,
                            moved,
                        )
                    )
                store_columns(out, column, columns, (values[0], values[1], values[2], values[3]))

    @cute.jit
    def fast(
        self,
        ids: Int64,
        lengths: Int64,
        out: Int64,
        quad: Int32,
        shift: Int32,
        topk: Int32,
        columns: Int32,
        id_words: Int32,
        seq_words: Int32,
    ):
        """QUADS times four columns, a block's threads apart, for pools of 4 and tokens as they are: each four touch at
        most two pools, and nothing is waited for before all is loaded. Of an int64 id the low word counts."""
        last = topk // FAST_POOL
        length = po.load_index(Int32(lengths != 0), lengths, seq_words)
        loaded = []
        for k in cutlass.range_constexpr(QUADS):
            pool = (4 * (quad + k * self.threads) - shift) >> 2  # floors, so that column -1 is pool -1
            at = ids + Int64(pool * id_words) * 4
            first = ops.load_global_i32_if(Int32(Int32(pool >= 0) & Int32(pool < last)), at, Int32(-1))
            second = ops.load_global_i32_if(Int32(pool + 1 < last), at + Int64(id_words * 4), Int32(-1))
            loaded.append((pool, first, second))
        length = cutlass.max(length, Int32(0))
        open_start = length // FAST_POOL * FAST_POOL
        for k in cutlass.range_constexpr(QUADS):
            pool, first, second = loaded[k]
            column = 4 * (quad + k * self.threads) - shift
            values = []
            for i in cutlass.range_constexpr(4):
                at = column + i
                chosen = first if at >> 2 == pool else second
                token = chosen * FAST_POOL + (at & 3) if chosen >= 0 else Int32(-1)
                opened = open_start + (at - topk)
                if at >= topk:
                    token = opened if opened < length else Int32(-1)
                values.append(token)
            store_columns(out, column, columns, (values[0], values[1], values[2], values[3]))

    @cute.jit
    def general(
        self,
        ids: Int64,
        valid: Int64,
        table: Int64,
        column: Int32,
        topk: Int32,
        pool_size: Int32,
        copy: Int32,
        table_width: Int32,
        id_words: Int32,
        table_words: Int32,
        open_start: Int32,
        open_count: Int32,
        moved: Int32,
    ):
        """One column, whatever is given."""
        history = Int32(0)
        if column >= 0 and column < topk:
            history = Int32(1)
        group = column if copy != 0 else column // pool_size
        chosen = po.load_index(history, ids + Int64(group) * Int64(id_words * 4), id_words)
        flagged = Int32(0)
        if history != 0 and valid != 0:
            flagged = Int32(1)
        kept = Int32(chosen >= 0)
        if flagged != 0:
            kept = Int32(po.load_u8_if(flagged, valid + Int64(group), Int32(0)) != 0)
        token = chosen * pool_size + (column - group * pool_size)
        most = table_width - 1
        clamped = cutlass.max(token, Int32(0))
        clamped = cutlass.min(clamped, most)
        if chosen > most // pool_size:
            clamped = most
        if chosen < 0:
            clamped = Int32(0)
        if column >= topk:
            token = open_start + (column - topk)
            kept = Int32(column - topk < open_count)
            clamped = cutlass.min(cutlass.max(token, Int32(0)), most)
        result = token + moved
        if table != 0:
            result = po.load_index(kept, table + Int64(clamped) * Int64(table_words * 4), table_words)
        if kept == 0:
            result = Int32(-1)
        if copy != 0 and history != 0:
            result = chosen
        return result


@cute.jit
def store_columns(out: Int64, column: Int32, columns: Int32, values: tuple):
    """Columns column .. column + 3 of a row: at once where all exist."""
    at = out + Int64(column) * 4
    if column >= 0 and column + 3 < columns:
        ops.store_global_i32x4(at, values)
    else:
        for i in cutlass.range_constexpr(4):
            if column + i >= 0 and column + i < columns:
                ops.store_global_i32(at + 4 * i, values[i])
