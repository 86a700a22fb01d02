"""Sparse attention of query rows over vLLM's paged cache, by counted lists, gated; every SM from 80 up, fp8 from 89.

    O[r, h] = bf16(softmax_i(scale * Q[r, h] . K[id_i]) V[id_i]) * sigmoid(gate[r, h]),   id = the row's counted list

Grid: (rows, splits, KV heads). One split does a whole row (many rows, prefill); several share its list as those of
`sparse_decode.py` do, through the workspace. Layouts, guards and the gate: `paged_rows.py`; the main loop:
`row_gather.py`; K and V in e4m3: `fp8_rows.py`.

Baked: head dim, the cache's type, warps, pipeline depth, the workspace's split stride. Run-time: everything else.
An entry counts when its token is not negative, its page lies in the block table and its physical page in the cache;
all others have weight 0 and touch no memory, and so has the whole list of a row whose request does not exist.

The caller guarantees: split counters zero at launch (left zero); Q, O, gate bf16; K and V rows 16-byte aligned, unit
inner stride everywhere; places in the cache below 2^31 units. `k_scale_ptr`, `v_scale_ptr`: FP32 factors of
`attention_scale` and `output_scale`, 0 for none; `output_scale` counts with an e4m3 cache only.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention.paged_rows import (
    PageDivisor,
    PagedOutput,
    PagedRows,
    PagedTokens,
    PageStrides,
)
from qsa_cute.kernels.attention.row_gather import Share
from qsa_cute.kernels.attention.sparse_decode import SparseDecode, Workspace
from qsa_cute.kernels.common import ops
from qsa_cute.kernels.common.params import f32, i32, i64, ptr

PARAMS = (
    ptr("q_ptr", "bf16", 16),
    ptr("k_ptr", "elem", 16),
    ptr("v_ptr", "elem", 16),
    ptr("indices", "i32"),
    ptr("block_table", "i32"),
    ptr("token_to_req", "i32"),
    ptr("o_ptr", "bf16", 16),
    ptr("gate_ptr", "bf16", 16),
    ptr("k_scale_ptr", "f32"),
    ptr("v_scale_ptr", "f32"),
    ptr("partial_o", "f32", 16),
    ptr("partial_stats", "f32"),
    ptr("split_counters", "i32"),
    i32("num_requests"),
    i32("num_kv_heads"),
    i32("group_size"),
    i32("num_pages"),
    i32("table_width"),
    i32("width"),
    i32("num_splits"),
    i32("page_size"),
    i32("page_magic"),
    i32("page_shift"),
    i32("unit"),
    i32("k_page_units"),
    i32("k_token_units"),
    i32("v_page_units"),
    i32("v_token_units"),
    i64("k_head_bytes"),
    i64("v_head_bytes"),
    i64("q_stride_row"),
    i64("q_stride_head"),
    i64("o_stride_row"),
    i64("o_stride_head"),
    i64("gate_stride_row"),
    i64("gate_stride_head"),
    i64("indices_stride_row"),
    i64("table_stride"),
    f32("attention_scale"),
    f32("output_scale"),
)


class PagedAttention(PagedRows, SparseDecode):
    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        k_ptr: cute.Pointer,
        v_ptr: cute.Pointer,
        indices: cute.Pointer,
        block_table: cute.Pointer,
        token_to_req: cute.Pointer,
        o_ptr: cute.Pointer,
        gate_ptr: cute.Pointer,
        k_scale_ptr: cute.Pointer,
        v_scale_ptr: cute.Pointer,
        partial_o: cute.Pointer,
        partial_stats: cute.Pointer,
        split_counters: cute.Pointer,
        num_requests: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        num_pages: Int32,
        table_width: Int32,
        width: Int32,
        num_splits: Int32,
        page_size: Int32,
        page_magic: Int32,
        page_shift: Int32,
        unit: Int32,
        k_page_units: Int32,
        k_token_units: Int32,
        v_page_units: Int32,
        v_token_units: Int32,
        k_head_bytes: Int64,
        v_head_bytes: Int64,
        q_stride_row: Int64,
        q_stride_head: Int64,
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
            indices,
            block_table,
            token_to_req,
            o_ptr,
            gate_ptr,
            k_scale_ptr,
            v_scale_ptr,
            partial_o,
            partial_stats,
            split_counters,
            num_requests,
            num_kv_heads,
            group_size,
            num_pages,
            table_width,
            width,
            num_splits,
            page_size,
            page_magic,
            page_shift,
            unit,
            k_page_units,
            k_token_units,
            v_page_units,
            v_token_units,
            k_head_bytes,
            v_head_bytes,
            q_stride_row,
            q_stride_head,
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
        indices: cute.Pointer,
        block_table: cute.Pointer,
        token_to_req: cute.Pointer,
        o_ptr: cute.Pointer,
        gate_ptr: cute.Pointer,
        k_scale_ptr: cute.Pointer,
        v_scale_ptr: cute.Pointer,
        partial_o: cute.Pointer,
        partial_stats: cute.Pointer,
        split_counters: cute.Pointer,
        num_requests: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        num_pages: Int32,
        table_width: Int32,
        width: Int32,
        num_splits: Int32,
        page_size: Int32,
        page_magic: Int32,
        page_shift: Int32,
        unit: Int32,
        k_page_units: Int32,
        k_token_units: Int32,
        v_page_units: Int32,
        v_token_units: Int32,
        k_head_bytes: Int64,
        v_head_bytes: Int64,
        q_stride_row: Int64,
        q_stride_head: Int64,
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
        row, split, kv_head = cute.arch.block_idx()
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())
        head = Int64(kv_head * group_size)
        share = Share(split, num_splits, group_size)
        request = ops.load_global_i32(token_to_req.toint() + Int64(row) * 4)
        ids = self.open_list(indices.toint() + Int64(row) * indices_stride_row * 4, width, share, tid)
        count = ops.load_global_i32(ids.address + Int64(width) * 4)
        gate = gate_ptr.toint()
        if gate != 0:
            gate = gate + (Int64(row) * gate_stride_row + head * gate_stride_head) * 2
        gate = self.stage_gate(smem, gate, gate_stride_head * 2, share, tid)
        q = q_ptr.toint() + (Int64(row) * q_stride_row + head * q_stride_head) * 2
        self.load_q(smem, q, q_stride_head * 2, group_size, tid)
        live = request >= 0 and request < num_requests
        top_k = cutlass.min(cutlass.max(count, 0), width) if live else Int32(0)
        source = PagedTokens(
            k_ptr.toint() + Int64(kv_head) * k_head_bytes,
            v_ptr.toint() + Int64(kv_head) * v_head_bytes,
            block_table.toint() + Int64(request if live else Int32(0)) * table_stride * 4,
            table_width,
            num_pages,
            PageDivisor(page_size, page_magic, page_shift),
            PageStrides(unit, k_page_units, k_token_units, v_page_units, v_token_units),
        )
        scale_log2 = attention_scale * ops.LOG2_E
        if k_scale_ptr.toint() != 0:
            scale_log2 = scale_log2 * ops.load_global_f32(k_scale_ptr.toint())

        tO = cute.make_rmem_tensor((self.warp_cols // 2,), Float32)
        tMax = cute.make_rmem_tensor((2,), Float32)
        tSum = cute.make_rmem_tensor((2,), Float32)
        self.attend(smem, source, ids, top_k, scale_log2, share, tO, tMax, tSum, tid)
        self.arrange(tO, tid)
        scale = output_scale
        if v_scale_ptr.toint() != 0:
            scale = scale * ops.load_global_f32(v_scale_ptr.toint())
        o = o_ptr.toint() + (Int64(row) * o_stride_row + head * o_stride_head) * 2
        out = PagedOutput(o, o_stride_head * 2, Int64(0), gate, gate_stride_head * 2, scale)
        unit_of_work = row * num_kv_heads + kv_head
        work = Workspace(partial_o.toint(), partial_stats.toint(), split_counters.toint(), unit_of_work)
        self.finish(smem, out, work, share, tO, tMax, tSum, tid)
