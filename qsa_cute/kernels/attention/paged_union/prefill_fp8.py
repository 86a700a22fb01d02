"""`prefill.py` over an e4m3 cache (SM90): the same walk and the same products, by another gather.

wgmma takes 16-bit operands, so K and V become fp16 (exact) between memory and their slots: the four gather warps read
them into registers and write them widened (`widen.py`), where `prefill.py` has TMA. Half the bytes cross the L2; what
crosses shared memory is the same. Q, bf16, becomes fp16 in its place in shared memory: exact from 6e-5 to 65504 in
magnitude. P is fp16 and at most 2^8.

`k_scale_ptr`, `v_scale_ptr`: FP32 factors of `attention_scale` and `output_scale`, 0 for none. Strides of K and V are
in bytes. Everything else is as in `prefill.py`; the chunks are those that `prepare.py` made for bf16, whose tensor maps
are not used.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.paged_union.consumer import OutputScale, Thread, Tiles, UnionConsumer
from qsa_cute.kernels.attention.paged_union.widen import Plane, WideningGather
from qsa_cute.kernels.attention.union_steps import Heads, UnionSteps
from qsa_cute.kernels.attention.union_tile import PAIRS
from qsa_cute.kernels.common import early, ops
from qsa_cute.kernels.common.params import f32, i32, i64, ptr
from qsa_cute.kernels.common.rope_norm import unpack_2

PARAMS = (
    ptr("q_ptr", "bf16", 16),
    ptr("o_ptr", "bf16", 16),
    ptr("gate_ptr", "bf16", 16),
    ptr("k_ptr", "elem", 16),
    ptr("v_ptr", "elem", 16),
    ptr("k_scale_ptr", "f32"),
    ptr("v_scale_ptr", "f32"),
    ptr("union_counts", "i32", 8),
    ptr("union_entries", "i32"),
    ptr("union_masks", "i32", 16),
    ptr("union_first_masks", "i32"),
    ptr("row_path", "i32"),
    i32("seq_len"),
    i32("num_kv_heads"),
    i32("group_size"),
    i32("tile_pairs"),
    i32("tiles_per_sequence"),
    i32("num_tiles"),
    i32("max_chunks"),
    i32("mask_rows"),
    i32("entry_shift"),
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
    f32("attention_scale"),
    f32("output_scale"),
)

GATHER_REGISTERS, CONSUMER_REGISTERS = 56, 224  # 128 * 56 + 256 * 224 <= 65536
DEPTH = 6  # units of 16 bytes that a gather thread has on their way


class UnionPrefillFp8(WideningGather, UnionConsumer):
    early_launch = True

    def __init__(self, head_dim: int, dtype: str, tile: int):
        UnionSteps.__init__(self, head_dim, "fp16", tile)
        self.dtype, self.cache_dtype = "bf16", dtype
        self.units = self.warp_blocks * (self.boxes // 2)
        self.depth = DEPTH

    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        o_ptr: cute.Pointer,
        gate_ptr: cute.Pointer,
        k_ptr: cute.Pointer,
        v_ptr: cute.Pointer,
        k_scale_ptr: cute.Pointer,
        v_scale_ptr: cute.Pointer,
        union_counts: cute.Pointer,
        union_entries: cute.Pointer,
        union_masks: cute.Pointer,
        union_first_masks: cute.Pointer,
        row_path: cute.Pointer,
        seq_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        tile_pairs: Int32,
        tiles_per_sequence: Int32,
        num_tiles: Int32,
        max_chunks: Int32,
        mask_rows: Int32,
        entry_shift: Int32,
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
        attention_scale: Float32,
        output_scale: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_ptr,
            o_ptr,
            gate_ptr,
            k_ptr,
            v_ptr,
            k_scale_ptr,
            v_scale_ptr,
            union_counts,
            union_entries,
            union_masks,
            union_first_masks,
            row_path,
            seq_len,
            num_kv_heads,
            group_size,
            tile_pairs,
            tiles_per_sequence,
            num_tiles,
            max_chunks,
            mask_rows,
            entry_shift,
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
            attention_scale,
            output_scale,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        q_ptr: cute.Pointer,
        o_ptr: cute.Pointer,
        gate_ptr: cute.Pointer,
        k_ptr: cute.Pointer,
        v_ptr: cute.Pointer,
        k_scale_ptr: cute.Pointer,
        v_scale_ptr: cute.Pointer,
        union_counts: cute.Pointer,
        union_entries: cute.Pointer,
        union_masks: cute.Pointer,
        union_first_masks: cute.Pointer,
        row_path: cute.Pointer,
        seq_len: Int32,
        num_kv_heads: Int32,
        group_size: Int32,
        tile_pairs: Int32,
        tiles_per_sequence: Int32,
        num_tiles: Int32,
        max_chunks: Int32,
        mask_rows: Int32,
        entry_shift: Int32,
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
        attention_scale: Float32,
        output_scale: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        operands, slots, bars = self.allocate()
        self.init_barriers(bars, warp)
        early.begin()

        tiles = Tiles(
            union_counts.toint(),
            union_entries.toint(),
            union_masks.toint(),
            union_first_masks.toint(),
            seq_len,
            num_kv_heads,
            group_size,
            tile_pairs,
            tiles_per_sequence,
            num_tiles,
            max_chunks,
            mask_rows,
            entry_shift,
        )
        if warp < 4:
            cute.arch.setmaxregister_decrease(GATHER_REGISTERS)
            self.gather(
                tiles,
                Plane(k_ptr.toint(), k_stride_page, k_stride_token, k_stride_head),
                Plane(v_ptr.toint(), v_stride_page, v_stride_token, v_stride_head),
                slots[1],
                slots[2],
                slots[3],
                bars,
                warp,
            )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            scale_log2 = attention_scale * ops.LOG2_E
            if k_scale_ptr.toint() != 0:
                scale_log2 = scale_log2 * ops.load_global_f32(k_scale_ptr.toint())
            self.consume(
                tiles,
                Heads(q_ptr.toint(), Int64(0), q_stride_row, q_stride_head),
                Heads(o_ptr.toint(), Int64(0), o_stride_row, o_stride_head),
                Heads(gate_ptr.toint(), Int64(0), gate_stride_row, gate_stride_head),
                Int64(0),
                row_path.toint(),
                scale_log2,
                OutputScale(output_scale, v_scale_ptr.toint()),
                operands,
                slots[0],
                slots[3],
                bars,
                # From registers of the SM, which costs none to keep.
                Thread(tid - 128, (warp - 4) // 4, warp - 4, cute.arch.lane_idx()),
            )

    @cute.jit
    def pack(self, tS: cute.Tensor, tP: cute.Tensor):
        for i in cutlass.range_constexpr(self.tile // 4):
            tP[i] = ops.pack_2("fp16", tS[2 * i], tS[2 * i + 1])

    @cute.jit
    def settle_q(self, q_smem: Int32, warp: Int32, lane: Int32):
        """To fp16: each thread its own 16-byte pieces, where `load_q` put them."""
        pieces = self.head_dim // 8
        at_once = 32 // pieces
        piece = lane % pieces
        at = q_smem + (piece // 8) * (PAIRS * 128) + (warp * 16 + lane // pieces) * 128
        swizzled = ((piece % 8) ^ (lane // pieces)) * 16
        for j in cutlass.range_constexpr(16 // at_once):
            to = at + j * at_once * 128 + (swizzled ^ (j * at_once % 8 * 16))
            words = []
            for word in union_ops.load_shared_i32x4(to):
                low, high = unpack_2("bf16", word)
                words.append(ops.pack_2("fp16", low, high))
            union_ops.store_shared_i32x4(to, tuple(words))

    @cute.jit
    def factor(self, scale: OutputScale) -> Float32:
        found = scale.number
        if scale.at != 0:
            found = found * ops.load_global_f32(scale.at)
        return found
