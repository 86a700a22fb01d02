"""`union_rows` over vLLM's paged cache: the rows of tiles that `union_prefill` leaves, by counted lists, gated.

Grid and marks as in `union_rows`; the rows of all requests are one sequence. An entry counts when its page lies in the
block table and its physical page in the cache; a row whose request does not exist is zeros.

A token's place is its page << `token_shift` | its place in the page: the page is divided out once an entry.

K and V in e4m3 become fp16 on their way to the products (`fp8_rows.py`); Q, O and the gate are bf16 then.
`k_scale_ptr`, `v_scale_ptr`: FP32 factors of `attention_scale` and `output_scale`, 0 for none; with e4m3 only.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention.fp8_rows import Fp8RowGather
from qsa_cute.kernels.attention.row_gather import EMPTY_MAX, RowOutput, Share, TokenSource
from qsa_cute.kernels.attention.union_rows import RowList, UnionRows
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import f32, i32, i64, ptr
from qsa_cute.kernels.common.rope_norm import unpack_2

PARAMS = (
    ptr("q_ptr", "elem", 16),
    ptr("k_ptr", "elem", 16),
    ptr("v_ptr", "elem", 16),
    ptr("o_ptr", "elem", 16),
    ptr("gate_ptr", "elem", 16),
    ptr("k_scale_ptr", "f32"),
    ptr("v_scale_ptr", "f32"),
    ptr("indices", "i32"),
    ptr("block_table", "i32"),
    ptr("token_to_req", "i32"),
    ptr("row_path", "i32"),
    i32("rows"),
    i32("num_requests"),
    i32("num_pages"),
    i32("page_size"),
    i32("token_shift"),
    i32("table_width"),
    i32("num_kv_heads"),
    i32("group_size"),
    i32("width"),
    i32("tile_pairs"),
    i64("q_stride_row"),
    i64("q_stride_head"),
    i64("k_stride_page"),
    i64("k_stride_token"),
    i64("k_stride_head"),
    i64("v_stride_page"),
    i64("v_stride_token"),
    i64("v_stride_head"),
    i64("o_stride_row"),
    i64("o_stride_head"),
    i64("gate_stride_row"),
    i64("gate_stride_head"),
    i64("indices_stride_row"),
    i64("table_stride"),
    f32("attention_scale"),
    f32("output_scale"),
)


@dataclass(frozen=True)
class CacheTokens(TokenSource):
    """Tokens of one request in the caches; addresses and strides in bytes."""

    k: Int64
    v: Int64
    table: Int64
    k_page: Int64
    k_token: Int64
    v_page: Int64
    v_token: Int64
    num_pages: Int32
    page_size: Int32
    table_width: Int32
    shift: Int32

    @cute.jit
    def look_up(self, token: Int32):
        at = cutlass.max(token, Int32(0)) // self.page_size
        page = ops.load_global_i32_if(
            Int32((token >= 0) & (at < self.table_width)), self.table + Int64(at) * 4, Int32(-1)
        )
        return page, at

    @cute.jit
    def slots(self, token: Int32, looked_up):
        page, at = looked_up
        slot = Int32(-1)
        if page >= 0 and page < self.num_pages:
            slot = (page << self.shift) | (token - at * self.page_size)
        return slot, slot

    @cute.jit
    def address(self, slot: Int32, plane: cutlass.Constexpr[int]) -> Int64:
        page = Int64(slot >> self.shift)
        token = Int64(slot & ((1 << self.shift) - 1))
        if cutlass.const_expr(plane == 1):
            return self.v + page * self.v_page + token * self.v_token
        return self.k + page * self.k_page + token * self.k_token


@dataclass(frozen=True)
class GatedOutput(RowOutput):
    gate: Int64  # of the row's first head; 0: none
    gate_head: Int64  # bytes between heads
    factor: Float32  # of O, with K and V in e4m3


class UnionRowsPaged(Fp8RowGather, UnionRows):
    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        k_ptr: cute.Pointer,
        v_ptr: cute.Pointer,
        o_ptr: cute.Pointer,
        gate_ptr: cute.Pointer,
        k_scale_ptr: cute.Pointer,
        v_scale_ptr: cute.Pointer,
        indices: cute.Pointer,
        block_table: cute.Pointer,
        token_to_req: cute.Pointer,
        row_path: cute.Pointer,
        rows: Int32,
        num_requests: Int32,
        num_pages: Int32,
        page_size: Int32,
        token_shift: Int32,
        table_width: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        width: Int32,
        tile_pairs: Int32,
        q_stride_row: Int64,
        q_stride_head: Int64,
        k_stride_page: Int64,
        k_stride_token: Int64,
        k_stride_head: Int64,
        v_stride_page: Int64,
        v_stride_token: Int64,
        v_stride_head: Int64,
        o_stride_row: Int64,
        o_stride_head: Int64,
        gate_stride_row: Int64,
        gate_stride_head: Int64,
        indices_stride_row: Int64,
        table_stride: Int64,
        attention_scale: Float32,
        output_scale: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_ptr,
            k_ptr,
            v_ptr,
            o_ptr,
            gate_ptr,
            k_scale_ptr,
            v_scale_ptr,
            indices,
            block_table,
            token_to_req,
            row_path,
            rows,
            num_requests,
            num_pages,
            page_size,
            token_shift,
            table_width,
            num_kv_heads,
            group_size,
            width,
            tile_pairs,
            q_stride_row,
            q_stride_head,
            k_stride_page,
            k_stride_token,
            k_stride_head,
            v_stride_page,
            v_stride_token,
            v_stride_head,
            o_stride_row,
            o_stride_head,
            gate_stride_row,
            gate_stride_head,
            indices_stride_row,
            table_stride,
            attention_scale,
            output_scale,
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
        gate_ptr: cute.Pointer,
        k_scale_ptr: cute.Pointer,
        v_scale_ptr: cute.Pointer,
        indices: cute.Pointer,
        block_table: cute.Pointer,
        token_to_req: cute.Pointer,
        row_path: cute.Pointer,
        rows: Int32,
        num_requests: Int32,
        num_pages: Int32,
        page_size: Int32,
        token_shift: Int32,
        table_width: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        width: Int32,
        tile_pairs: Int32,
        q_stride_row: Int64,
        q_stride_head: Int64,
        k_stride_page: Int64,
        k_stride_token: Int64,
        k_stride_head: Int64,
        v_stride_page: Int64,
        v_stride_token: Int64,
        v_stride_head: Int64,
        o_stride_row: Int64,
        o_stride_head: Int64,
        gate_stride_row: Int64,
        gate_stride_head: Int64,
        indices_stride_row: Int64,
        table_stride: Int64,
        attention_scale: Float32,
        output_scale: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        early.begin()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        tO = cute.make_rmem_tensor((self.warp_cols // 2,), Float32)
        tMax = cute.make_rmem_tensor((2,), Float32)
        tSum = cute.make_rmem_tensor((2,), Float32)
        units = rows * num_kv_heads
        item = 1 if self.fp8 else 2  # bytes of an element of K and V
        scale_log2 = attention_scale * ops.LOG2_E
        if cutlass.const_expr(self.fp8):
            if k_scale_ptr.toint() != 0:
                scale_log2 = scale_log2 * ops.load_global_f32(k_scale_ptr.toint())
        for first in cutlass.range(block, units, step * 32, unroll=1):
            mark = self.mark(
                row_path.toint(),
                first + (tid % 32) * step,
                units,
                rows,
                num_kv_heads,
                group_size,
                tile_pairs,
                Int32(0),  # tiles of a sequence: there is only one
            )
            marked = cute.arch.vote_ballot_sync(mark != 0)
            while marked != 0:
                unit = first + ops.count_trailing_zeros(marked) * step
                # Every thread writes the same; the loop's last barrier lies between the reads and the next writes.
                ops.store_shared_i32x2(smem + self.at["place"], unit, marked & (marked - 1))
                kv_head = unit % num_kv_heads
                row = unit // num_kv_heads
                head = Int64(kv_head * group_size)
                request = ops.load_global_i32(token_to_req.toint() + Int64(row) * 4)
                source = CacheTokens(
                    k_ptr.toint() + Int64(kv_head) * k_stride_head * item,
                    v_ptr.toint() + Int64(kv_head) * v_stride_head * item,
                    block_table.toint() + Int64(request) * table_stride * 4,
                    k_stride_page * item,
                    k_stride_token * item,
                    v_stride_page * item,
                    v_stride_token * item,
                    num_pages,
                    page_size,
                    table_width,
                    token_shift,
                )
                at = indices.toint() + Int64(row) * indices_stride_row * 4
                columns = cutlass.min(width, ops.load_global_i32(at + Int64(width) * 4))
                tO.fill(0.0)
                tMax.fill(EMPTY_MAX)
                tSum.fill(0.0)
                if request >= 0 and request < num_requests:
                    q = q_ptr.toint() + (Int64(row) * q_stride_row + head * q_stride_head) * 2
                    self.load_q(smem, q, q_stride_head * 2, group_size, tid)
                    self.attend(
                        smem,
                        source,
                        RowList(at, Int32(1), columns, Int32(0)),
                        columns,
                        scale_log2,
                        Share(Int32(0), Int32(1), group_size),
                        tO,
                        tMax,
                        tSum,
                        tid,
                    )
                    self.arrange(tO, tid)
                unit = ops.load_shared_i32(smem + self.at["place"])
                marked = ops.load_shared_i32(smem + self.at["place"] + 4)
                row = unit // num_kv_heads
                head = Int64(unit % num_kv_heads * group_size)
                gate = gate_ptr.toint()
                if gate != 0:
                    gate = gate + (Int64(row) * gate_stride_row + head * gate_stride_head) * 2
                factor = Float32(1.0)
                if cutlass.const_expr(self.fp8):
                    factor = output_scale
                    if v_scale_ptr.toint() != 0:
                        factor = factor * ops.load_global_f32(v_scale_ptr.toint())
                out = GatedOutput(
                    o_ptr.toint() + (Int64(row) * o_stride_row + head * o_stride_head) * 2,
                    o_stride_head * 2,
                    Int64(0),
                    gate,
                    gate_stride_head * 2,
                    factor,
                )
                self.store_row(out, group_size, tO, tMax, tSum, tid)
                cute.arch.sync_threads()

    @cute.jit
    def store_row(
        self, out: GatedOutput, group: Int32, tO: cute.Tensor, tMax: cute.Tensor, tSum: cute.Tensor, tid: Int32
    ):
        """Normalise, round, gate and store; a row with no valid entry is zeros whatever its gate."""
        lane = tid % 32
        column = Int64((tid // 32) * self.warp_cols + (lane % 4) * 2) * 2
        for r in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * r
            if row < group:
                inverse = self.inverse(tSum[r])
                if cutlass.const_expr(self.fp8):
                    inverse = inverse * out.factor
                at = out.o + Int64(row) * out.o_head + column
                gate = out.gate + Int64(row) * out.gate_head + column
                gated = Int32(out.gate != 0 and tSum[r] > 0.0)
                for n in cutlass.range_constexpr(self.warp_cols // 8):
                    word = ops.pack_2(self.dtype, tO[4 * n + 2 * r] * inverse, tO[4 * n + 2 * r + 1] * inverse)
                    if gated != 0:
                        low, high = unpack_2(self.dtype, word)
                        gates = unpack_2(self.dtype, ops.load_global_i32(gate + 16 * n))
                        word = ops.pack_2(self.dtype, low * ops.sigmoid(gates[0]), high * ops.sigmoid(gates[1]))
                    ops.store_global_i32(at + 16 * n, word)
