"""Sparse prefill attention that shares its gather between neighbouring rows (SM90).

    O[r, h] = sum_i softmax_i(scale * Q[r, h] . K[id_i]) V[id_i]      over the valid ids of row r's selection

A tile is up to 128 consecutive (row, head of the group) pairs of one sequence and one KV head: the M extent of
two wgmma warpgroups. It walks the union of its rows' 4-token blocks once, as `union_prepare` left it, in chunks
of `tile` tokens; a bit per (row, block) masks what a row did not select:

    chunk 0            holds every block of which some row wants only a part, so has a bit per token;
    chunks 1 .. ns-1   shared by both warpgroups;
    then x pairs       one chunk that only warpgroup 0's rows want, one that only warpgroup 1's want; the other
                       warpgroup skips it.

Grid: one persistent block an SM; block b takes items b, b + grid, ... An item is (tile, KV head), the last tiles
of the sequences first, since theirs are the longest unions. An item is never split over blocks: measured on the
H200, the merge costs more than the idle SMs, down to 512 rows.

Warps 0-3 gather: each issues the TMA boxes (4 tokens x 64 columns, 128-byte swizzle) of a quarter of a chunk's
blocks into a ring of two K and two V slots. Padding blocks lie out of bounds: zeros, and no memory is touched.
Warps 4-11 are the two consumer warpgroups: while P V of chunk i runs on the tensor cores, the softmax of chunk
i + 1 runs beside it. The ring runs on over items, so that the next item's K, V and Q arrive during this one's
last products and epilogue.

A tile whose `union_counts` say 0 chunks is left to `union_rows`. A V that is not finite would reach rows that
did not select it as 0 x NaN; so a warp that meets one gives its tile to `union_rows` too, which recomputes it.

Baked: head dim, type, tile. Run-time: everything else. The caller guarantees 16-byte aligned rows of Q
and O, and that `union_prepare` ran before this launch on the same stream with the same sizes.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.union_consumer import Output, UnionConsumer, consumer_thread
from qsa_cute.kernels.attention.union_gather import UnionGather
from qsa_cute.kernels.attention.union_steps import BOX_COLUMNS, Heads, Tiles
from qsa_cute.kernels.common import early, ops, tma
from qsa_cute.kernels.common.params import f32, i32, i64, ptr

PARAMS = (
    ptr("q_ptr", "elem", 16),
    ptr("o_ptr", "elem", 16),
    ptr("lse_ptr", "f32"),
    ptr("tensor_maps", "i32", 16),
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
    i64("q_stride_batch"),
    i64("q_stride_row"),
    i64("q_stride_head"),
    i64("o_stride_batch"),
    i64("o_stride_row"),
    i64("o_stride_head"),
    f32("attention_scale"),
)

GATHER_REGISTERS, CONSUMER_REGISTERS = 32, 232  # 128 * 32 + 256 * 232 <= 65536


class UnionPrefill(UnionGather, UnionConsumer):
    early_launch = True

    @cute.jit
    def __call__(
        self,
        q_ptr: cute.Pointer,
        o_ptr: cute.Pointer,
        lse_ptr: cute.Pointer,
        tensor_maps: cute.Pointer,
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
        q_stride_batch: Int64,
        q_stride_row: Int64,
        q_stride_head: Int64,
        o_stride_batch: Int64,
        o_stride_row: Int64,
        o_stride_head: Int64,
        attention_scale: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            q_ptr,
            o_ptr,
            lse_ptr,
            tensor_maps,
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
            q_stride_batch,
            q_stride_row,
            q_stride_head,
            o_stride_batch,
            o_stride_row,
            o_stride_head,
            attention_scale,
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.smem_bytes, stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        q_ptr: cute.Pointer,
        o_ptr: cute.Pointer,
        lse_ptr: cute.Pointer,
        tensor_maps: cute.Pointer,
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
        q_stride_batch: Int64,
        q_stride_row: Int64,
        q_stride_head: Int64,
        o_stride_batch: Int64,
        o_stride_row: Int64,
        o_stride_head: Int64,
        attention_scale: Float32,
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
        )
        if warp < 4:
            cute.arch.setmaxregister_decrease(GATHER_REGISTERS)
            self.gather(tiles, tensor_maps.toint(), slots[1], slots[2], slots[3], bars, warp)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(
                tiles,
                Heads(q_ptr.toint(), q_stride_batch, q_stride_row, q_stride_head),
                Output(
                    Heads(o_ptr.toint(), o_stride_batch, o_stride_row, o_stride_head), lse_ptr.toint(), row_path.toint()
                ),
                attention_scale * ops.LOG2_E,
                operands,
                slots[0],
                slots[3],
                bars,
                consumer_thread(tid - 128),
            )

    # ---- gather --------------------------------------------------------------------------------------

    def find_maps(self, tiles: Tiles, maps: Int64, tile: Int32):
        """K's and V's map of the tile's sequence."""
        k_map = maps + Int64(tile // tiles.per_sequence) * (2 * union_ops.TENSOR_MAP_BYTES)
        v_map = k_map + union_ops.TENSOR_MAP_BYTES
        union_ops.acquire_tensor_map(k_map)
        union_ops.acquire_tensor_map(v_map)
        return k_map, v_map

    @cute.jit
    def copy_block(
        self,
        tiles: Tiles,
        tensor_map: Int64,
        plane: cutlass.Constexpr[int],
        token: Int32,
        dst: Int32,
        kv_head: Int32,
        barrier: Int32,
    ):
        """An entry is the block's first token."""
        for c in cutlass.range_constexpr(self.boxes):
            at = (Int32(c * BOX_COLUMNS), kv_head, token)
            tma.load_box(dst + c * (self.tile * 128), tensor_map, at, barrier)
