"""Sparse attention of query rows over vLLM's paged cache by TMA boxes (SM90), the splits of a row one cluster.

The sum, lists, guards, gate and scales of `paged_attention.py`. How a block gathers and multiplies is `box_gather.py`'s
and `box_products.py`'s (K and V in e4m3: `fp8_boxes.py`), how the blocks of a cluster merge `box_merge.py`'s; lists,
tables and gates are `box_paged.py`'s: no workspace, no counters, nothing to zero.

Grid: (rows, splits, KV heads), in clusters of (1, num_splits, 1), num_splits 1..16, given at launch.

Baked: head dim, the cache's type, stages of the ring. Run-time: everything else. `k_map` and `v_map` are tensor maps
over the pages of K and of V, encoded by the host: (columns of 128 bytes, tokens of a page, parts of a row, KV heads,
pages), boxes of a block of a head, 128-byte swizzle. TMA reads them where they stand among the parameters, so six
pointers come before: that puts them at multiples of 64 bytes. The table of request `row / rows_per_request` is read
before it is known that the row is of that request; a row of another waits for a trip to memory more.

The caller guarantees: what it guarantees to `paged_attention.py`, and num_pages << block_bits of at most 2^31.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention.box_paged import BoxedTokens, PagedBoxes
from qsa_cute.kernels.attention.box_products import TABLE_PAGES, WARPS, BoxShare
from qsa_cute.kernels.attention.paged_rows import PageDivisor, PagedOutput, PageStrides
from qsa_cute.kernels.common import early, ops, tma
from qsa_cute.kernels.common.params import f32, i32, i64, ptr, tensor_map

PARAMS = (
    ptr("q_ptr", "bf16", 16),
    ptr("k_ptr", "elem", 16),
    ptr("v_ptr", "elem", 16),
    ptr("indices", "i32"),
    ptr("block_table", "i32"),
    ptr("token_to_req", "i32"),
    tensor_map("k_map"),
    tensor_map("v_map"),
    ptr("o_ptr", "bf16", 16),
    ptr("gate_ptr", "bf16", 16),
    ptr("k_scale_ptr", "f32"),
    ptr("v_scale_ptr", "f32"),
    i32("num_requests"),
    i32("rows_per_request"),
    i32("group_size"),
    i32("num_pages"),
    i32("table_width"),
    i32("width"),
    i32("num_splits"),
    i32("page_size"),
    i32("page_magic"),
    i32("page_shift"),
    i32("block_bits"),
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


class PagedAttentionTma(PagedBoxes):
    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        k_ptr: cute.Pointer,
        v_ptr: cute.Pointer,
        indices: cute.Pointer,
        block_table: cute.Pointer,
        token_to_req: cute.Pointer,
        k_map: tuple,
        v_map: tuple,
        o_ptr: cute.Pointer,
        gate_ptr: cute.Pointer,
        k_scale_ptr: cute.Pointer,
        v_scale_ptr: cute.Pointer,
        num_requests: Int32,
        rows_per_request: Int32,
        group_size: Int32,
        num_pages: Int32,
        table_width: Int32,
        width: Int32,
        num_splits: Int32,
        page_size: Int32,
        page_magic: Int32,
        page_shift: Int32,
        block_bits: Int32,
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
            k_map,
            v_map,
            o_ptr,
            gate_ptr,
            k_scale_ptr,
            v_scale_ptr,
            num_requests,
            rows_per_request,
            group_size,
            num_pages,
            table_width,
            width,
            num_splits,
            page_size,
            page_magic,
            page_shift,
            block_bits,
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
            min_blocks_per_mp=1,
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
        k_map: tuple,
        v_map: tuple,
        o_ptr: cute.Pointer,
        gate_ptr: cute.Pointer,
        k_scale_ptr: cute.Pointer,
        v_scale_ptr: cute.Pointer,
        num_requests: Int32,
        rows_per_request: Int32,
        group_size: Int32,
        num_pages: Int32,
        table_width: Int32,
        width: Int32,
        num_splits: Int32,
        page_size: Int32,
        page_magic: Int32,
        page_shift: Int32,
        block_bits: Int32,
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
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row, split, kv_head = cute.arch.block_idx()
        smem = ops.forget(Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024).toint()))
        share = BoxShare.of(split, num_splits, group_size)
        likely = row
        if rows_per_request > 1:  # the division is worth a branch: everything waits for it
            likely = row // rows_per_request
        likely = cutlass.min(likely, num_requests - 1)
        if warp == WARPS:  # the first that gathers
            tma.prefetch_tensor_map(tma.parameter_address(k_map[0]))
            tma.prefetch_tensor_map(tma.parameter_address(v_map[0]))
        self.begin(smem, share, tid)

        head = Int64(kv_head * group_size)
        ids = indices.toint() + Int64(row) * indices_stride_row * 4
        likely_table = block_table.toint() + Int64(likely) * table_stride * 4
        early.wait()
        pages = cute.make_rmem_tensor((TABLE_PAGES // self.workers,), Int32)
        self.read_table(pages, likely_table, table_width, tid)
        request_at, count_at = token_to_req.toint() + Int64(row) * 4, ids + Int64(width) * 4
        if warp >= WARPS:
            gatherer, lane = warp - WARPS, cute.arch.lane_idx()
            first = self.entries(ids, width, share, Int32(0), gatherer, lane)
            request, count = ops.load_global_i32(request_at), ops.load_global_i32(count_at)
            live = request >= 0 and request < num_requests
            top_k = cutlass.min(cutlass.max(count, 0), width) if live else Int32(0)
            source = BoxedTokens(
                k_ptr.toint() + Int64(kv_head) * k_head_bytes,
                v_ptr.toint() + Int64(kv_head) * v_head_bytes,
                block_table.toint() + Int64(request) * table_stride * 4,
                table_width,
                num_pages,
                PageDivisor(page_size, page_magic, page_shift),
                PageStrides(unit, k_page_units, k_token_units, v_page_units, v_token_units),
                smem + self.at["table"] if table_width <= TABLE_PAGES else Int32(0),
                tma.parameter_address(k_map[0]),
                tma.parameter_address(v_map[0]),
                kv_head,
                block_bits,
            )
            first = self.counted(first, top_k, share, gatherer, lane)
            self.produce(smem, source, ids, top_k, self.split_groups(top_k, share), share, first, gatherer)
            self.merge(smem, Int64(0), share, gatherer, lane)
        else:
            request, count = ops.load_global_i32(request_at), ops.load_global_i32(count_at)
            cute.arch.sync_warp()  # so that they come before Q: the tables wait for the request
            scale_log2 = attention_scale * ops.LOG2_E
            k_scale, v_scale = k_scale_ptr.toint(), v_scale_ptr.toint()
            scale_log2 = scale_log2 * ops.load_global_f32_if(Int32(k_scale != 0), k_scale, Float32(1.0))
            scale = output_scale
            if cutlass.const_expr(self.fp8):
                scale = scale * ops.load_global_f32_if(Int32(v_scale != 0), v_scale, Float32(1.0))
            q = q_ptr.toint() + (Int64(row) * q_stride_row + head * q_stride_head) * 2
            self.load_q(smem, q, q_stride_head * 2, group_size, tid)
            live = request >= 0 and request < num_requests
            if live and request != likely:
                self.read_table(pages, block_table.toint() + Int64(request) * table_stride * 4, table_width, tid)
            self.stage_table(smem, pages, table_width, tid)
            gate = gate_ptr.toint()
            if gate != 0:
                gate = gate + (Int64(row) * gate_stride_row + head * gate_stride_head) * 2
            gate = self.stage_gate(smem, gate, gate_stride_head * 2, share, tid)
            tO = cute.make_rmem_tensor((self.warp_cols // 2,), Float32)
            tMax = cute.make_rmem_tensor((2,), Float32)
            tSum = cute.make_rmem_tensor((2,), Float32)
            tTo = cute.make_rmem_tensor((2 * self.warp_groups,), Int32)
            slots = share.divide(self.groups + num_splits - 1)  # of a rank in the inbox
            self.address_columns(smem, share, slots, tTo, tid)
            if num_splits > 1:
                cute.arch.cluster_wait()  # while the first boxes are on their way
            top_k = cutlass.min(cutlass.max(count, 0), width) if live else Int32(0)
            self.consume(smem, scale_log2, top_k, share, tO, tMax, tSum, tid)
            o = o_ptr.toint() + (Int64(row) * o_stride_row + head * o_stride_head) * 2
            out = PagedOutput(o, o_stride_head * 2, Int64(0), gate, gate_stride_head * 2, scale)
            self.store(smem, out, share, slots, tO, tMax, tSum, tTo, tid)
