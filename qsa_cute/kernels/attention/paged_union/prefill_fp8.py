"""`prefill.py` over an e4m3 cache (SM90): the same walk and the same products, by another gather.

wgmma takes 16-bit operands, so K and V become fp16 (exact) between memory and their slots: eight gather warps read
them into registers and write them widened (`widen.py`), where `prefill.py` has TMA. Half the bytes cross the L2; what
crosses shared memory is the same. Q, bf16, becomes fp16 in its place in shared memory: exact from 6e-5 to 65504 in
magnitude. P is fp16 and at most 2^8.

`k_scale_ptr`, `v_scale_ptr`: FP32 factors of `attention_scale` and `output_scale`, 0 for none. Pages and tokens
of K and V lie `.._units` apart, of `unit` bytes. Everything else is as in `prefill.py`; the chunks are those that
`prepare.py` made for bf16, whose tensor maps are not used.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention.paged_union.consumer import Output, Tiles, UnionConsumer
from qsa_cute.kernels.attention.paged_union.widen import Plane, WideningGather
from qsa_cute.kernels.attention.union_consumer import Thread
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
    i32("unit"),
    i32("k_page_units"),
    i32("k_token_units"),
    i32("v_page_units"),
    i32("v_token_units"),
    i64("q_stride_row"),
    i64("q_stride_head"),
    i64("k_head_bytes"),
    i64("v_head_bytes"),
    i64("o_stride_row"),
    i64("o_stride_head"),
    i64("gate_stride_row"),
    i64("gate_stride_head"),
    f32("attention_scale"),
    f32("output_scale"),
)

GATHER_REGISTERS, CONSUMER_REGISTERS = 32, 224  # 256 * 32 + 256 * 224 = 65536
DEPTH = 3  # units of 16 bytes that a gather thread has on their way


class UnionPrefillFp8(WideningGather, UnionConsumer):
    early_launch = True

    def __init__(self, head_dim: int, dtype: str, tile: int):
        UnionConsumer.__init__(self, head_dim, "fp16", tile)
        self.pv_columns = 128  # ptxas gives no instruction more registers than threads have at launch
        self.dtype, self.cache_dtype = "bf16", dtype
        self.units = self.warp_blocks * (self.boxes // 2)
        self.depth = DEPTH
        self.threads = 512

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
        unit: Int32,
        k_page_units: Int32,
        k_token_units: Int32,
        v_page_units: Int32,
        v_token_units: Int32,
        q_stride_row: Int64,
        q_stride_head: Int64,
        k_head_bytes: Int64,
        v_head_bytes: Int64,
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
            unit,
            k_page_units,
            k_token_units,
            v_page_units,
            v_token_units,
            q_stride_row,
            q_stride_head,
            k_head_bytes,
            v_head_bytes,
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
        unit: Int32,
        k_page_units: Int32,
        k_token_units: Int32,
        v_page_units: Int32,
        v_token_units: Int32,
        q_stride_row: Int64,
        q_stride_head: Int64,
        k_head_bytes: Int64,
        v_head_bytes: Int64,
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
        masks = slots[3]
        if warp < 4:
            cute.arch.setmaxregister_decrease(GATHER_REGISTERS)
            plane = Plane(k_ptr.toint(), k_head_bytes, k_page_units, k_token_units, unit)
            self.gather(tiles, plane, True, slots[1], masks, bars[0], bars[1], warp)
        elif warp < 8:
            cute.arch.setmaxregister_decrease(GATHER_REGISTERS)
            plane = Plane(v_ptr.toint(), v_head_bytes, v_page_units, v_token_units, unit)
            self.gather(tiles, plane, False, slots[2], masks, bars[2], bars[3], warp - 4)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            scale_log2 = attention_scale * ops.LOG2_E
            if k_scale_ptr.toint() != 0:
                scale_log2 = scale_log2 * ops.load_global_f32(k_scale_ptr.toint())
            self.consume(
                tiles,
                Heads(q_ptr.toint(), Int64(0), q_stride_row, q_stride_head),
                Output(
                    Heads(o_ptr.toint(), Int64(0), o_stride_row, o_stride_head),
                    Int64(0),
                    row_path.toint(),
                    Heads(gate_ptr.toint(), Int64(0), gate_stride_row, gate_stride_head),
                    output_scale,
                    v_scale_ptr.toint(),
                ),
                scale_log2,
                operands,
                slots[0],
                masks,
                bars,
                # From registers of the SM, which costs none to keep.
                Thread(tid - 256, (warp - 8) // 4, warp - 8, cute.arch.lane_idx()),
            )

    @cute.jit
    def pack(self, tS: cute.Tensor, tP: cute.Tensor):
        for i in cutlass.range_constexpr(self.tile // 4):
            tP[i] = ops.pack_2("fp16", tS[2 * i], tS[2 * i + 1])

    @cute.jit
    def load_q(self, tiles: Tiles, q: Heads, q_smem: Int32, item: Int32, warp: Int32, lane: Int32):
        UnionSteps.load_q(self, tiles, q, q_smem, item, warp, ops.forget(lane))

    @cute.jit
    def settle_q(self, q_smem: Int32, warp: Int32, lane: Int32):
        """To fp16: each thread its own 16-byte pieces, where `load_q` put them."""
        lane = ops.forget(lane)
        pieces = self.head_dim // 8
        at_once = 32 // pieces
        piece = lane % pieces
        at = q_smem + (piece // 8) * (PAIRS * 128) + (warp * 16 + lane // pieces) * 128
        swizzled = ((piece % 8) ^ (lane // pieces)) * 16
        for j in cutlass.range_constexpr(16 // at_once):
            to = at + j * at_once * 128 + (swizzled ^ (j * at_once % 8 * 16))
            words = []
            for word in ops.load_shared_i32x4(to):
                low, high = unpack_2("bf16", word)
                words.append(ops.pack_2("fp16", low, high))
            ops.store_shared_i32x4(to, tuple(words))

    @cute.jit
    def factors(self, out: Output):
        found = out.factor
        if out.factor_at != 0:
            found = found * ops.load_global_f32(out.factor_at)
        return (found,)
