"""What a persistent block of the union's main kernels does apart from loading: whose turn it is, and its products.

Shared by the dense kernel (`union_prefill.py`) and the paged one (`paged_union/`), which differ in how chunks are
gathered and in what becomes of the output.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.union_tile import PAIRS, UnionTile
from qsa_cute.kernels.common import ops

BOX_COLUMNS = 64  # of a TMA box: the 128-byte swizzle's width
BOX_BYTES = BLOCK_TOKENS * BOX_COLUMNS * 2
STAGES = 2  # slots of the K ring, and of V's


@dataclass(frozen=True)
class Tiles:
    """How rows are cut in tiles, and where `union_prepare` left what; the launch's parameters of these names."""

    counts: Int64
    entries: Int64
    masks: Int64
    first_masks: Int64
    seq_len: Int32
    num_kv_heads: Int32
    group_size: Int32
    tile_pairs: Int32
    per_sequence: Int32
    num_tiles: Int32
    max_chunks: Int32
    mask_rows: Int32


@dataclass(frozen=True)
class Heads:
    """Q or O: address, and strides in elements."""

    at: Int64
    batch: Int64
    row: Int64
    head: Int64


class UnionSteps(UnionTile):
    def __init__(self, head_dim: int, dtype: str, tile: int):
        self.head_dim, self.dtype, self.tile = head_dim, dtype, tile
        self.element = ops.ELEMENTS[dtype]
        self.blocks = tile // BLOCK_TOKENS  # of a chunk
        self.boxes = head_dim // BOX_COLUMNS  # of a block
        self.warp_blocks = self.blocks // 4
        self.slot_bytes = tile * head_dim * 2
        self.threads = 384
        if tile % 16 or self.blocks > 32:
            raise ValueError("a chunk is a multiple of 16 tokens, and its blocks have a bit each of a word")
        self.pv_columns = head_dim  # of one instruction
        self.smem_bytes = 2048 + PAIRS * head_dim * 2 + 2 * STAGES * self.slot_bytes

    @cute.jit
    def place(self, tiles: Tiles, item: Int32):
        """(tile, KV head) of an item: the last tiles first, a tile's heads together."""
        return tiles.num_tiles - 1 - item // tiles.num_kv_heads, item % tiles.num_kv_heads

    @cute.jit
    def find_item(self, tiles: Tiles, item: Int32):
        """The first item from `item` on, in steps of the grid, that has chunks; and its tile's ns and x."""
        step, _, _ = cute.arch.grid_dim()
        num_items = tiles.num_tiles * tiles.num_kv_heads
        ns = Int32(0)
        pairs = Int32(0)
        looking = item < num_items
        while looking:
            tile, _ = self.place(tiles, item)
            ns, pairs = union_ops.load_i32x2(tiles.counts + Int64(tile) * 8)
            looking = Int32(0) == Int32(1)
            if ns == 0:
                item = item + step
                looking = item < num_items
        return item, ns, pairs

    @cute.jit
    def full_barrier(self, ring: Int32, exclusive: Int32) -> Int32:
        """Which barrier a chunk's arrival completes: its slot's, or as exclusive chunk 0, 1, .. its warpgroup's own."""
        return STAGES + exclusive % 2 if exclusive >= 0 else ring % STAGES

    @cute.jit
    def step(
        self,
        f: SimpleNamespace,
        half: Int32,
        at0: Int32,
        to_m1: Int32,
        k: Int32,
        k_bar: Int32,
        v: Int32,
        v_bar: Int32,
        flying: Int32,
        bars,
        k_phases: Int32,
        v_phases: Int32,
        scale_log2: Float32,
    ):
        """Q K^T of ring place k, then P V of the chunk before, at v, under the softmax of k's; the new phases."""
        k_full, k_empty, v_full, v_empty = bars
        self.finish(flying, v_empty, f.s, f.p)
        k_phases = self.wait(k_full, k_bar, k_phases)
        w0 = ops.load_shared_i32(at0 + k % 2 * (PAIRS * 4)) >> half
        w1 = ops.load_shared_i32(at0 + to_m1 + k % 2 * (PAIRS * 4)) >> half
        self.gemm(f.qk, f.acc_s, f.sq, f.sk[None, None, None, k % 2], True)
        self.rescale(f.o, f.scale)
        v_phases = self.wait(v_full, v_bar, v_phases)
        self.gemm(f.pv, f.acc_o, f.rp, f.sv[None, None, None, v % 2], False)
        warpgroup.wait_group(1)
        self.release(k_empty, k)
        self.apply_masks(f.s, w0, w0, w1, w1)
        self.softmax(f.s, f.max, f.sum, f.scale, scale_log2)
        return k_phases, v_phases

    def first_step(
        self, f: SimpleNamespace, words: tuple, half: Int32, ring: Int32, bars, k_phases: Int32, scale_log2: Float32
    ) -> Int32:
        """Q K^T and softmax of a tile's chunk 0; the new phases."""
        k_full, k_empty, _, _ = bars
        k_phases = self.wait(k_full, ring % 2, k_phases)
        self.gemm(f.qk, f.acc_s, f.sq, f.sk[None, None, None, ring % 2], True)
        warpgroup.wait_group(0)
        self.release(k_empty, ring)
        self.apply_masks(f.s, *(word >> half for word in words))
        self.softmax(f.s, f.max, f.sum, f.scale, scale_log2)
        return k_phases

    def last_product(self, f: SimpleNamespace, done: Int32, done_full: Int32, bars, v_phases: Int32) -> Int32:
        """P V of a tile's last chunk; the new phases."""
        _, _, v_full, v_empty = bars
        self.rescale(f.o, f.scale)
        v_phases = self.wait(v_full, done_full, v_phases)
        self.gemm(f.pv, f.acc_o, f.rp, f.sv[None, None, None, done % 2], False)
        warpgroup.wait_group(0)
        self.release(v_empty, done)
        return v_phases

    @cute.jit
    def finish(self, flying: Int32, v_empty: cute.Pointer, tS: cute.Tensor, tP: cute.Tensor):
        """Wait for the P V in flight, if any, and put the new P in its operand's place.

        This opens a step, rather than closing the one before, because ptxas hoists the wait over a softmax in the
        same basic block, and then nothing overlaps.
        """
        warpgroup.wait_group(0)
        if flying >= 0:
            self.release(v_empty, flying)
        self.pack(tS, tP)

    @cute.jit
    def wait(self, full: cute.Pointer, index: Int32, phases: Int32) -> Int32:
        """Wait for the next arrival on a barrier, of which bit `index` of `phases` is the parity; the new phases.

        A parity tells only neighbours apart, so each waiter must see every phase. Chunks of one warpgroup alone
        therefore have barriers of their own: the other could miss two of them.
        """
        cute.arch.mbarrier_wait(full + index, (phases >> index) & 1)
        return phases ^ (1 << index)

    @cute.jit
    def release(self, empty: cute.Pointer, ring: Int32):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + ring % 2)

    @cute.jit
    def load_masks(self, tiles: Tiles, tile: Int32, chunk: Int32, ring: Int32, sMasks: Int32, full: cute.Pointer):
        """The chunk's mask words; they complete on K's barrier."""
        size = tiles.mask_rows * 4
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
        src = tiles.masks + (Int64(tile) * Int64(tiles.max_chunks) + Int64(chunk)) * Int64(size)
        union_ops.bulk_load(sMasks + ring % STAGES * (PAIRS * 4), src, size, Int32(full.toint()))

    @cute.jit
    def load_q(self, tiles: Tiles, q: Heads, q_smem: Int32, item: Int32, warp: Int32, lane: Int32):
        """Start copying the warp's 16 pairs of the item's Q; pairs past the tile or the sequence become zeros."""
        tile, kv_head = self.place(tiles, item)
        start = (tile % tiles.per_sequence) * tiles.tile_pairs
        group_size = tiles.group_size
        live = cutlass.min(tiles.seq_len * group_size - start, tiles.tile_pairs) - warp * 16
        row = (start + warp * 16) // group_size
        head = start + warp * 16 - row * group_size
        mine = (head + lane % 16) // group_size
        # Elements from the warp's first row to pair lane % 16.
        offset = mine * Int32(q.row) + (head + lane % 16 - mine * group_size) * Int32(q.head)
        chunks = self.head_dim // 8  # 16-byte pieces of a row; a warp copies 32 at a time
        at_once = 32 // chunks
        piece = lane % chunks
        base = q.at + (Int64(tile // tiles.per_sequence) * q.batch + Int64(kv_head * group_size) * q.head) * 2
        base = base + Int64(row) * q.row * 2 + Int64(piece) * 16
        dst = q_smem + (piece // 8) * (PAIRS * 128) + (warp * 16 + lane // chunks) * 128
        swizzled = ((piece % 8) ^ (lane // chunks)) * 16
        for j in cutlass.range_constexpr(16 // at_once):
            m = j * at_once + lane // chunks
            src = base + Int64(cute.arch.shuffle_sync(offset, offset=m)) * 2
            wanted = m < live
            union_ops.cp_async_16(
                dst + j * at_once * 128 + (swizzled ^ (j * at_once % 8 * 16)),
                src if wanted else base,
                Int32(16) if wanted else Int32(0),
            )
        cute.arch.cp_async_commit_group()
