"""Expansion of selected pools into tokens, and the open pool's tokens behind them, in fixed columns.

    out[r, c]        = id[r, c // pool] * pool + c % pool     c < topk; -1 where the pool is not valid
    out[r, topk + i] = closed[r] * pool + i                   i < seq_lens[r] - closed[r] * pool, i < tail; else -1

closed[r] is pool_lens[r], or seq_lens[r] // pool where there are none. With a page table a token becomes
page_table[r, token], the token clamped to its columns; with offsets it becomes token + offsets[r]. copy = 1: the first
topk columns are `ids` as they are.

Grid: (num_rows). Four columns a thread, at 16-byte aligned addresses whatever the rows' alignment; the ends of a row are
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


class ExpandTail:
    early_launch = early.SUPPORTED

    def __init__(self, head_dim: int, dtype: str):
        self.threads = 256
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
        length = po.load_index(Int32(lengths != 0), lengths + Int64(row) * Int64(seq_words * 4), seq_words)
        closed = length // pool_size
        counts = pool_lens_ptr.toint()
        if counts != 0:
            closed = po.load_index(Int32(1), counts + Int64(row) * Int64(pool_len_words * 4), pool_len_words)
        open_start = closed * pool_size
        open_count = cutlass.min(length - open_start, tail)
        shifts = po.load_index(
            Int32(offsets_ptr.toint() != 0), offsets_ptr.toint() + Int64(row) * Int64(offset_words * 4), offset_words
        )
        if offsets_ptr.toint() == 0:
            shifts = Int32(0)
        ids = ids_ptr.toint() + Int64(row) * ids_stride_row * Int64(id_words * 4)
        valid = valid_ptr.toint()
        if valid != 0:
            valid = valid + Int64(row) * valid_stride_row
        table = page_table_ptr.toint()
        if table != 0:
            table = table + Int64(row) * table_stride_row * Int64(table_words * 4)
        plain = Int32(0)
        if pool_size == FAST_POOL and copy == 0 and valid == 0 and table == 0 and id_words == 1:
            plain = Int32(1)

        columns = topk + tail
        out = out_ptr.toint() + Int64(row) * out_stride_row * 4
        shift = ((out >> 2) & 3).to(Int32)  # words between the aligned address before the row and the row
        for quad in cutlass.range(tid, (columns + shift + 3) // 4, self.threads, unroll=1):
            column = 4 * quad - shift
            values = (Int32(-1), Int32(-1), Int32(-1), Int32(-1))
            if plain != 0:
                values = self.fast(ids, column, topk, open_start, open_count, shifts)
            else:
                each = []
                for i in cutlass.range_constexpr(4):
                    each.append(
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
                            shifts,
                        )
                    )
                values = (each[0], each[1], each[2], each[3])
            at = out + Int64(column) * 4
            if column >= 0 and column + 3 < columns:
                store_i32x4(at, values)
            else:
                for i in cutlass.range_constexpr(4):
                    if column + i >= 0 and column + i < columns:
                        ops.store_global_i32(at + 4 * i, values[i])

    @cute.jit
    def fast(self, ids: Int64, column: Int32, topk: Int32, open_start: Int32, open_count: Int32, shifts: Int32):
        """Columns column .. column + 3 for pools of 4 and int32 ids: at most two pools."""
        pool = column >> 2  # floors, so that column -1 is pool -1
        last = topk // FAST_POOL
        first = ops.load_global_i32_if(Int32(Int32(pool >= 0) & Int32(pool < last)), ids + Int64(pool) * 4, Int32(-1))
        second = ops.load_global_i32_if(Int32(pool + 1 < last), ids + Int64(pool + 1) * 4, Int32(-1))
        values = []
        for i in cutlass.range_constexpr(4):
            at = column + i
            chosen = first if at >> 2 == pool else second
            token = chosen * FAST_POOL + (at & 3)
            kept = chosen >= 0
            if at >= topk:
                token = open_start + (at - topk)
                kept = at - topk < open_count
            values.append(token + shifts if kept else Int32(-1))
        return values[0], values[1], values[2], values[3]

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
        shifts: Int32,
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
        result = token + shifts
        if table != 0:
            result = po.load_index(kept, table + Int64(clamped) * Int64(table_words * 4), table_words)
        if kept == 0:
            result = Int32(-1)
        if copy != 0 and history != 0:
            result = chosen
        return result


def store_i32x4(addr: Int64, v: tuple) -> None:
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *v])
