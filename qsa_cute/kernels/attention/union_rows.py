"""The rows that `union_prefill` leaves: tiles whose lists a union cannot say, or that met a value not finite.

Grid: as many blocks as run at once, each over the (row, KV head) units block, block + grid, ... whose tile
`row_path` marks; the marks are read 32 at a time, so that a launch with none costs little. A marked unit is
computed as `sparse_prefill` does. A row whose heads lie in two tiles is computed whole when either is marked.

Index kinds as in `union_prepare`. Runs after `union_prefill` on the same stream, with the same sizes.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention.row_gather import EMPTY_MAX, RowGather, RowOutput, Share
from qsa_cute.kernels.attention.sparse_prefill import DenseTokens
from qsa_cute.kernels.attention.union_scan import position_of, rows_before
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import f32, i32, i64, ptr

PARAMS = (
    ptr("q_ptr", "elem", 16),
    ptr("k_ptr", "elem", 16),
    ptr("v_ptr", "elem", 16),
    ptr("o_ptr", "elem", 16),
    ptr("lse_ptr", "f32"),
    ptr("indices", "i32"),
    ptr("context_lengths", "i32"),
    ptr("query_starts", "i32"),
    ptr("row_path", "i32"),
    i32("batch_size"),
    i32("seq_len"),
    i32("kv_seq_len"),
    i32("num_kv_heads"),
    i32("group_size"),
    i32("top_k"),
    i32("index_kind"),
    i32("tile_pairs"),
    i32("tiles_per_sequence"),
    i64("q_stride_batch"),
    i64("q_stride_row"),
    i64("q_stride_head"),
    i64("k_stride_batch"),
    i64("k_stride_row"),
    i64("k_stride_head"),
    i64("v_stride_batch"),
    i64("v_stride_row"),
    i64("v_stride_head"),
    i64("o_stride_batch"),
    i64("o_stride_row"),
    i64("o_stride_head"),
    i64("indices_stride_batch"),
    i64("indices_stride_row"),
    f32("attention_scale"),
)

MAX_BLOCK = 1 << 29


@dataclass(frozen=True)
class RowList:
    """One row's selection: where its indices are, of which kind, and the row's position."""

    at: Int64
    kind: Int32
    columns: Int32
    position: Int32


class UnionRows(RowGather):
    early_launch = True

    def __init__(self, head_dim: int, dtype: str, **tuning: int):
        super().__init__(head_dim, dtype, **tuning)
        self.sizes["place"] = 16  # where the block is in its units: in registers, it would spill
        self.lay_out()

    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        k_ptr: cute.Pointer,
        v_ptr: cute.Pointer,
        o_ptr: cute.Pointer,
        lse_ptr: cute.Pointer,
        indices: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        row_path: cute.Pointer,
        batch_size: Int32,
        seq_len: Int32,
        kv_seq_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        top_k: Int32,
        index_kind: Int32,
        tile_pairs: Int32,
        tiles_per_sequence: Int32,
        q_stride_batch: Int64,
        q_stride_row: Int64,
        q_stride_head: Int64,
        k_stride_batch: Int64,
        k_stride_row: Int64,
        k_stride_head: Int64,
        v_stride_batch: Int64,
        v_stride_row: Int64,
        v_stride_head: Int64,
        o_stride_batch: Int64,
        o_stride_row: Int64,
        o_stride_head: Int64,
        indices_stride_batch: Int64,
        indices_stride_row: Int64,
        attention_scale: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_ptr,
            k_ptr,
            v_ptr,
            o_ptr,
            lse_ptr,
            indices,
            context_lengths,
            query_starts,
            row_path,
            batch_size,
            seq_len,
            kv_seq_len,
            num_kv_heads,
            group_size,
            top_k,
            index_kind,
            tile_pairs,
            tiles_per_sequence,
            q_stride_batch,
            q_stride_row,
            q_stride_head,
            k_stride_batch,
            k_stride_row,
            k_stride_head,
            v_stride_batch,
            v_stride_row,
            v_stride_head,
            o_stride_batch,
            o_stride_row,
            o_stride_head,
            indices_stride_batch,
            indices_stride_row,
            attention_scale,
        ).launch(
            grid=(1, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        q_ptr: cute.Pointer,
        k_ptr: cute.Pointer,
        v_ptr: cute.Pointer,
        o_ptr: cute.Pointer,
        lse_ptr: cute.Pointer,
        indices: cute.Pointer,
        context_lengths: cute.Pointer,
        query_starts: cute.Pointer,
        row_path: cute.Pointer,
        batch_size: Int32,
        seq_len: Int32,
        kv_seq_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        top_k: Int32,
        index_kind: Int32,
        tile_pairs: Int32,
        tiles_per_sequence: Int32,
        q_stride_batch: Int64,
        q_stride_row: Int64,
        q_stride_head: Int64,
        k_stride_batch: Int64,
        k_stride_row: Int64,
        k_stride_head: Int64,
        v_stride_batch: Int64,
        v_stride_row: Int64,
        v_stride_head: Int64,
        o_stride_batch: Int64,
        o_stride_row: Int64,
        o_stride_head: Int64,
        indices_stride_batch: Int64,
        indices_stride_row: Int64,
        attention_scale: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        early.begin()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        tO = cute.make_rmem_tensor((self.warp_cols // 2,), Float32)
        tMax = cute.make_rmem_tensor((2,), Float32)
        tSum = cute.make_rmem_tensor((2,), Float32)
        units = batch_size * seq_len * num_kv_heads
        for first in cutlass.range(block, units, step * 32, unroll=1):
            mark = self.mark(
                row_path.toint(),
                first + (tid % 32) * step,
                units,
                seq_len,
                num_kv_heads,
                group_size,
                tile_pairs,
                tiles_per_sequence,
            )
            marked = cute.arch.vote_ballot_sync(mark != 0)
            while marked != 0:
                unit = first + ops.count_trailing_zeros(marked) * step
                # Every thread writes the same; the loop's last barrier lies between the reads and the next writes.
                ops.store_shared_i32x2(smem + self.at["place"], unit, marked & (marked - 1))
                kv_head = unit % num_kv_heads
                row = (unit // num_kv_heads) % seq_len
                batch = unit // num_kv_heads // seq_len
                context = ops.load_global_i32(context_lengths.toint() + Int64(batch) * 4)
                start = Int32(0)
                if query_starts.toint() != 0:
                    start = ops.load_global_i32(query_starts.toint() + Int64(batch) * 4)
                head = Int64(kv_head * group_size)
                source = DenseTokens(
                    k_ptr.toint() + (Int64(batch) * k_stride_batch + Int64(kv_head) * k_stride_head) * 2,
                    v_ptr.toint() + (Int64(batch) * v_stride_batch + Int64(kv_head) * v_stride_head) * 2,
                    k_stride_row * 2,
                    v_stride_row * 2,
                    cutlass.min(context, kv_seq_len),
                )
                at = indices.toint() + (Int64(batch) * indices_stride_batch + Int64(row) * indices_stride_row) * 4
                columns = top_k
                entries = top_k
                if index_kind == 1:
                    columns = cutlass.min(top_k, ops.load_global_i32(at + Int64(top_k) * 4))
                if index_kind == 2:
                    entries = top_k * 4 + 3
                tO.fill(0.0)
                tMax.fill(EMPTY_MAX)
                tSum.fill(0.0)
                if rows_before(context, row, start, Int32(1)) != 0:
                    q = (
                        q_ptr.toint()
                        + (Int64(batch) * q_stride_batch + Int64(row) * q_stride_row + head * q_stride_head) * 2
                    )
                    self.load_q(smem, q, q_stride_head * 2, group_size, tid)
                    self.attend(
                        smem,
                        source,
                        RowList(at, index_kind, columns, position_of(row, start)),
                        entries,
                        attention_scale * ops.LOG2_E,
                        Share(Int32(0), Int32(1), group_size),
                        tO,
                        tMax,
                        tSum,
                        tid,
                    )
                unit = ops.load_shared_i32(smem + self.at["place"])
                marked = ops.load_shared_i32(smem + self.at["place"] + 4)
                kv_head = unit % num_kv_heads
                row = (unit // num_kv_heads) % seq_len
                batch = unit // num_kv_heads // seq_len
                head = Int64(kv_head * group_size)
                lse = lse_ptr.toint()
                if lse != 0:
                    lse = lse + Int64(unit // num_kv_heads) * Int64(num_kv_heads * group_size * 4) + head * 4
                out = RowOutput(
                    o_ptr.toint()
                    + (Int64(batch) * o_stride_batch + Int64(row) * o_stride_row + head * o_stride_head) * 2,
                    o_stride_head * 2,
                    lse,
                )
                self.store_row(out, group_size, tO, tMax, tSum, tid)
                cute.arch.sync_threads()

    @cute.jit
    def mark(
        self,
        row_path: Int64,
        unit: Int32,
        units: Int32,
        seq_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        tile_pairs: Int32,
        tiles_per_sequence: Int32,
    ) -> Int32:
        """Whether either tile that a unit's heads lie in is marked."""
        found = Int32(0)
        if unit < units:
            row = (unit // num_kv_heads) % seq_len
            base = (unit // num_kv_heads // seq_len) * tiles_per_sequence
            low = base + row * group_size // tile_pairs
            high = base + (row * group_size + group_size - 1) // tile_pairs
            found = ops.load_global_i32(row_path + Int64(low * num_kv_heads + unit % num_kv_heads) * 4)
            found = found | ops.load_global_i32(row_path + Int64(high * num_kv_heads + unit % num_kv_heads) * 4)
        return found

    @cute.jit
    def entry(self, ids: RowList, top_k: Int32, chunk: Int32, share: Share, tid: Int32) -> Int32:
        """This thread's token of a chunk; block ids are expanded, and the open tail follows them."""
        place = chunk * self.threads + tid
        if ids.kind == 2:
            block = ops.load_global_i32_if(Int32(place < ids.columns * 4), ids.at + Int64(place // 4) * 4, Int32(-1))
            token = Int32(-1)
            if block >= 0 and block < MAX_BLOCK:  # past it 4 * block wraps around to a token that exists
                token = block * 4 + place % 4
            tail = (ids.position + 1) // 4 * 4 + place - ids.columns * 4
            if place >= ids.columns * 4:
                token = tail if tail <= ids.position else Int32(-1)
            place = token
        else:
            place = ops.load_global_i32_if(Int32(place < ids.columns), ids.at + Int64(place) * 4, Int32(-1))
        return place
