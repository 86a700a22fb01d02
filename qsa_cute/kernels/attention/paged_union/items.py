"""Which tiles and KV heads a block of `prefill.py` takes, and the ring that its warps share."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.kernels.attention import union_ops

STAGES = 2  # slots of the K ring, and of V's


@dataclass(frozen=True)
class Tiles:
    """How rows are cut in tiles, and where `prepare.py` left what; the launch's parameters of these names."""

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
    entry_shift: Int32


class UnionItems:
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
