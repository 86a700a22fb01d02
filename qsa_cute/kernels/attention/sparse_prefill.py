"""Sparse prefill attention, one query row at a time: dense BSND K/V, any selection, every SM from 80 up.

    O[b, r, h] = sum_i softmax_i(scale * Q[b, r, h] . K[b, id_i, h // G]) V[b, id_i, h // G],  id = indices[b, r]

Grid: one block a (batch, KV head, row), rows fastest, so that the blocks at work at one time share one head of K
and V in the L2; flattened on x, which takes 2^31 - 1 blocks. The main loop and its roles: `row_gather.py`.

Baked: head dim, type, warps, pipeline depth. Run-time: batch, lengths, heads, group size 1..16, top-k,
strides, scale. No positional mask: causality lives in the list. An id counts when 0 <= id < the sequence's
length; a row at or past the length is stored as zeros and reads nothing.

The caller guarantees: 16-byte aligned rows of Q, K, V, O with unit inner stride; int32 lists.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention.row_gather import EMPTY_MAX, RowGather, RowOutput, Share, TokenSource
from qsa_cute.kernels.common import ops
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
    i32("seq_len"),
    i32("kv_seq_len"),
    i32("num_kv_heads"),
    i32("group_size"),
    i32("top_k"),
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


@dataclass(frozen=True)
class DenseTokens(TokenSource):
    """Rows of one sequence's dense K and V."""

    k: Int64
    v: Int64
    k_row: Int64
    v_row: Int64
    length: Int32

    @cute.jit
    def look_up(self, token: Int32):
        return token, token

    @cute.jit
    def slots(self, token: Int32, looked_up):
        slot = token if token < self.length else Int32(-1)
        return slot, slot

    @cute.jit
    def address(self, slot: Int32, plane: cutlass.Constexpr[int]) -> Int64:
        if cutlass.const_expr(plane == 1):
            return self.v + Int64(slot) * self.v_row
        return self.k + Int64(slot) * self.k_row


class SparsePrefill(RowGather):
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
        seq_len: Int32,
        kv_seq_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        top_k: Int32,
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
            seq_len,
            kv_seq_len,
            num_kv_heads,
            group_size,
            top_k,
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
        seq_len: Int32,
        kv_seq_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        top_k: Int32,
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
        row = block % seq_len
        kv_head = block // seq_len % num_kv_heads
        batch = block // seq_len // num_kv_heads
        smem = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint())

        length = ops.load_global_i32(context_lengths.toint() + Int64(batch) * 4)
        start = Int32(0)
        if query_starts.toint() != 0:
            start = ops.load_global_i32(query_starts.toint() + Int64(batch) * 4)
        head = Int64(kv_head * group_size)
        source = DenseTokens(
            k_ptr.toint() + (Int64(batch) * k_stride_batch + Int64(kv_head) * k_stride_head) * 2,
            v_ptr.toint() + (Int64(batch) * v_stride_batch + Int64(kv_head) * v_stride_head) * 2,
            k_stride_row * 2,
            v_stride_row * 2,
            cutlass.min(length, kv_seq_len),
        )
        ids = indices.toint() + (Int64(batch) * indices_stride_batch + Int64(row) * indices_stride_row) * 4

        tO = cute.make_rmem_tensor((self.warp_cols // 2,), Float32)
        tMax = cute.make_rmem_tensor((2,), Float32)
        tSum = cute.make_rmem_tensor((2,), Float32)
        tO.fill(0.0)
        tMax.fill(EMPTY_MAX)
        tSum.fill(0.0)
        if Int64(start) + row < length:
            q = q_ptr.toint() + (Int64(batch) * q_stride_batch + Int64(row) * q_stride_row + head * q_stride_head) * 2
            self.load_q(smem, q, q_stride_head * 2, group_size, tid)
            self.attend(
                smem,
                source,
                ids,
                top_k,
                attention_scale * ops.LOG2_E,
                Share(Int32(0), Int32(1), group_size),
                tO,
                tMax,
                tSum,
                tid,
            )
        lse = lse_ptr.toint()
        if lse != 0:
            lse = lse + ((Int64(batch) * seq_len + row) * num_kv_heads * group_size + head) * 4
        out = RowOutput(
            o_ptr.toint() + (Int64(batch) * o_stride_batch + Int64(row) * o_stride_row + head * o_stride_head) * 2,
            o_stride_head * 2,
            lse,
        )
        self.store_row(out, group_size, tO, tMax, tSum, tid)
