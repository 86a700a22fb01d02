"""What the paged union does with a tile beside `union_tile.py`: the output is multiplied by a gate on its way out."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention import union_ops
from qsa_cute.kernels.attention.union_tile import UnionTile
from qsa_cute.kernels.common import ops
from qsa_cute.kernels.common.rope_norm import unpack_2


class PagedUnionTile(UnionTile):
    @cute.jit
    def store(
        self,
        tO: cute.Tensor,
        tMax: cute.Tensor,
        tSum: cute.Tensor,
        o: Int64,
        o_row: Int64,
        o_head: Int64,
        lse: Int64,
        lse_row: Int32,
        start: Int32,
        live: Int32,
        group_size: Int32,
        scale_log2: Float32,
        pair0: Int32,
        lane: Int32,
        gate: Int64,
        gate_row: Int64,
        gate_head: Int64,
        factor,
    ):
        """Normalise, gate and store; a row with nothing selected is zeros, its LSE -inf. Four lanes hold 8 columns in
        turn, 2 each; exchanging them gives each lane 8 neighbours, 16 bytes. A gate multiplies what is rounded.

        `factor` multiplies O: V's scale, or the constant 1."""
        for j in cutlass.range_constexpr(2):
            pair = pair0 + 8 * j
            row = (start + pair) // group_size
            head = start + pair - row * group_size
            inverse = cute.arch.rcp_approx(tSum[j]) if tSum[j] > 0.0 else Float32(0.0)
            inverse = inverse * factor
            at = o + Int64(row) * o_row + Int64(head) * o_head + Int64((lane % 4) * 16)
            gate_at = gate + Int64(row) * gate_row + Int64(head) * gate_head + Int64((lane % 4) * 16)
            gated = Int32(gate != 0 and pair < live and tSum[j] > 0.0)
            gates = [union_ops.load_i32x4_if(gated, gate_at + k * 64) for k in range(self.head_dim // 32)]
            for k in cutlass.range_constexpr(self.head_dim // 32):
                v = [
                    ops.pack_2(
                        self.dtype, tO[16 * k + 4 * i + 2 * j] * inverse, tO[16 * k + 4 * i + 2 * j + 1] * inverse
                    )
                    for i in range(4)
                ]
                v = self.transpose_quad(v[0], v[1], v[2], v[3], lane)
                if gated != 0:
                    v = self.gate(v, gates[k])
                if pair < live:
                    ops.store_global_i32x4(at + k * 64, v)
            if pair < live and lane % 4 == 0 and lse != 0:
                value = -Float32.inf
                if tSum[j] > 0.0:
                    value = (tMax[j] * scale_log2 + cute.math.log2(tSum[j], fastmath=True)) * ops.LN_2
                ops.store_global_f32(lse + (Int64(row) * Int64(lse_row) + Int64(head)) * 4, value)

    @cute.jit
    def gate(self, v: tuple, gates: tuple):
        """Eight rounded outputs times the sigmoids of eight gates."""
        found = []
        for i in cutlass.range_constexpr(4):
            low, high = unpack_2(self.dtype, v[i])
            gate_low, gate_high = unpack_2(self.dtype, gates[i])
            found.append(ops.pack_2(self.dtype, low * ops.sigmoid(gate_low), high * ops.sigmoid(gate_high)))
        return found[0], found[1], found[2], found[3]
