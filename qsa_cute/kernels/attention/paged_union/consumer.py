"""What the paged union's consumers do beyond `union_consumer.py`: gates, and the scale of an fp8 cache."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention import union_consumer, union_steps
from qsa_cute.kernels.attention.paged_union.tile import PagedUnionTile
from qsa_cute.kernels.attention.union_consumer import Thread
from qsa_cute.kernels.attention.union_steps import Heads
from qsa_cute.kernels.common import ops


@dataclass(frozen=True)
class Tiles(union_steps.Tiles):
    entry_shift: Int32  # bits of an entry that name a block of a page


@dataclass(frozen=True)
class Output(union_consumer.Output):
    """`factor` multiplies O; so does what lies at `factor_at`, 0 for none."""

    gate: Heads
    factor: Float32
    factor_at: Int64


class UnionConsumer(PagedUnionTile, union_consumer.UnionConsumer):
    @cute.jit
    def begin_item(self, tiles: Tiles, out: Output, item: Int32, thread: Thread):
        if out.gate.at != 0:
            self.prefetch_gate(tiles, out.gate, item, thread.tid)

    @cute.jit
    def gates(self, out: Output, batch: Int32, head: Int64):
        gate_base = Int64(0)
        if out.gate.at != 0:
            gate_base = out.gate.at + (Int64(batch) * out.gate.batch + head * out.gate.head) * 2
        return gate_base, out.gate.row * 2, out.gate.head * 2

    def factors(self, out: Output):
        return (1.0,)

    @cute.jit
    def prefetch_gate(self, tiles: Tiles, gate: Heads, item: Int32, tid: Int32):
        """Bring the item's gate to the L2: two threads a pair."""
        tile, kv_head = self.place(tiles, item)
        start = (tile % tiles.per_sequence) * tiles.tile_pairs
        pair = start + tid // 2
        if tid // 2 < tiles.tile_pairs and pair < tiles.seq_len * tiles.group_size:
            row = pair // tiles.group_size
            head = pair - row * tiles.group_size + kv_head * tiles.group_size
            at = gate.at + Int64(tile // tiles.per_sequence) * gate.batch * 2
            at = at + (Int64(row) * gate.row + Int64(head) * gate.head) * 2 + Int64(tid % 2) * self.head_dim
            for line in cutlass.range_constexpr(self.head_dim // 128):
                ops.prefetch_l2(at + line * 128)
