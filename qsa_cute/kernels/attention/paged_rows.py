"""What the paged kernels add to the row kernels: vLLM's cache and lists, and the gated output.

K and V are separately strided caches [blocks, page, KV heads, D]; a page holds any number of tokens that is a multiple
of 16. Row r's lists are of request `token_to_req[r]`, whose pages are a row of the block table. A counted list is int32
[width + 1]; its last column is the number of entries, those past it are stale and stand for nothing.

An entry is resolved once: the token's page by one multiplication (a divisor that the host turned into a multiplier and
a shift), the physical page from the table, and then its place in K and in V in units of `unit` bytes, the greatest
common divisor of the strides: 31 bits reach over caches of any size.

The output is rounded to bf16, multiplied by sigmoid(gate) in FP32 and rounded again; without a gate it is rounded once.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from qsa_cute.kernels.attention.fp8_rows import Fp8RowGather
from qsa_cute.kernels.attention.row_gather import RowGather, RowOutput, Share, TokenSource
from qsa_cute.kernels.common import ops
from qsa_cute.kernels.common.rope_norm import unpack_2


@dataclass(frozen=True)
class PageDivisor:
    """token // page_size as the high word of token * magic, shifted: exact for 0 <= token < 2^31."""

    size: Int32
    magic: Int32
    shift: Int32


@dataclass(frozen=True)
class PageStrides:
    """Between pages and between tokens, in units of `unit` bytes."""

    unit: Int32
    k_page: Int32
    k_token: Int32
    v_page: Int32
    v_token: Int32


@dataclass(frozen=True)
class PagedTokens(TokenSource):
    """Rows of one request in the caches. A slot is an offset in units."""

    k: Int64
    v: Int64
    table: Int64
    table_width: Int32
    num_pages: Int32
    divisor: PageDivisor
    strides: PageStrides

    @cute.jit
    def page_of(self, token: Int32):
        """Where in the table a token's page stands, and whether it does."""
        at = ops.shift_right_u32(ops.mul_hi_u32(token, self.divisor.magic), self.divisor.shift)
        mapped = Int32(0)
        if token >= 0 and at < self.table_width:
            mapped = Int32(1)
        return at, mapped

    @cute.jit
    def look_up(self, token: Int32):
        at, mapped = self.page_of(token)
        page = ops.load_global_i32_if(mapped, self.table + Int64(at) * 4, Int32(-1))
        return page, at

    @cute.jit
    def slots(self, token: Int32, looked_up):
        page, at = looked_up
        k_slot, v_slot = Int32(-1), Int32(-1)
        if page >= 0 and page < self.num_pages:
            in_page = token - at * self.divisor.size
            k_slot = page * self.strides.k_page + in_page * self.strides.k_token
            v_slot = page * self.strides.v_page + in_page * self.strides.v_token
        return k_slot, v_slot

    @cute.jit
    def address(self, slot: Int32, plane: cutlass.Constexpr[int]) -> Int64:
        offset = Int64(slot) * Int64(self.strides.unit)
        if cutlass.const_expr(plane == 1):
            return self.v + offset
        return self.k + offset


@dataclass(frozen=True)
class CountedList:
    """Address of a row's entries, how many there is room for, and this thread's of the first two chunks as they stand
    there, counted or not."""

    address: Int64
    width: Int32
    first: Int32
    second: Int32


@dataclass(frozen=True)
class PagedOutput(RowOutput):
    gate: Int64  # of the row's first head, in global memory; 0: none
    gate_head: Int64  # bytes between heads
    scale: Float32  # of V


class GatedOutput(RowGather):
    @cute.jit
    def stage_gate(self, smem: Int32, gate: Int64, gate_head: Int64, share: Share, tid: Int32) -> Int64:
        """Have the row's gates at hand when they are wanted; what `PagedOutput.gate` is to be."""
        lines = self.head_dim * 2 // 128
        if gate != 0 and tid < share.group * lines:
            ops.prefetch_l2(gate + Int64(tid // lines) * gate_head + Int64(tid % lines * 128))
        return gate

    @cute.jit
    def gated(self, word: Int32, gate: Int32):
        """Two rounded outputs times the sigmoids of two gates."""
        low, high = unpack_2("bf16", word)
        gate_low, gate_high = unpack_2("bf16", gate)
        return ops.pack_2("bf16", self.pass_gate(low, gate_low), self.pass_gate(high, gate_high))

    @cute.jit
    def pass_gate(self, o: Float32, gate: Float32) -> Float32:
        """Zero stays zero, so that a row without entries is zeros whatever its gate holds."""
        passed = o * ops.sigmoid(gate)
        return passed if o != 0.0 else Float32(0.0)

    @cute.jit
    def load_gate_pair(self, out: PagedOutput, row: Int32, col: Int32) -> Int32:
        return ops.load_global_i32(out.gate + Int64(row) * out.gate_head + Int64(col * 2))

    @cute.jit
    def load_gate_quad(self, out: PagedOutput, row: Int32, col: Int32):
        return ops.load_global_i32x2(out.gate + Int64(row) * out.gate_head + Int64(col * 2))

    @cute.jit
    def store_row(
        self, out: PagedOutput, group: Int32, tO: cute.Tensor, tMax: cute.Tensor, tSum: cute.Tensor, tid: Int32
    ):
        lane = tid % 32
        col = (tid // 32) * self.warp_cols + (lane % 4) * 2
        pairs = self.warp_cols // 8
        gates = cute.make_rmem_tensor((2 * pairs,), Int32)
        gates.fill(0)
        for r in cutlass.range_constexpr(2):
            if lane // 4 + 8 * r < group and out.gate != 0:
                for n in cutlass.range_constexpr(pairs):
                    gates[pairs * r + n] = self.load_gate_pair(out, lane // 4 + 8 * r, col + 8 * n)
        for r in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * r
            if row < group:
                factor = self.inverse(tSum[r])
                if cutlass.const_expr(self.fp8):
                    factor = factor * out.scale
                at = out.o + Int64(row) * out.o_head + Int64(col * 2)
                for n in cutlass.range_constexpr(pairs):
                    word = ops.pack_2(self.dtype, tO[4 * n + 2 * r] * factor, tO[4 * n + 2 * r + 1] * factor)
                    if out.gate != 0:
                        word = self.gated(word, gates[pairs * r + n])
                    ops.store_global_i32(at + 16 * n, word)

    @cute.jit
    def store_quad(self, out: PagedOutput, row: Int32, col: Int32, v: tuple):
        scale = Float32(1.0)
        if cutlass.const_expr(self.fp8):
            scale = out.scale
        low = ops.pack_2(self.dtype, v[0] * scale, v[1] * scale)
        high = ops.pack_2(self.dtype, v[2] * scale, v[3] * scale)
        if out.gate != 0:
            gate = self.load_gate_quad(out, row, col)
            low, high = self.gated(low, gate[0]), self.gated(high, gate[1])
        ops.store_global_i32x2(out.o + Int64(row) * out.o_head + Int64(col) * 2, low, high)


class PagedRows(GatedOutput, Fp8RowGather):
    @cute.jit
    def place(self, chunk: Int32, share: Share, tid: Int32) -> Int32:
        """Where in the list this thread's entry of a chunk stands."""
        tile = (chunk * self.chunk_tiles + tid // self.tile) * share.num_splits + share.split
        return tile * self.tile + tid % self.tile

    @cute.jit
    def open_list(self, address: Int64, width: Int32, share: Share, tid: Int32) -> CountedList:
        """Start reading the list; before its count is known, so that neither waits for the other."""
        at, next_at = self.place(Int32(0), share, tid), self.place(Int32(1), share, tid)
        first = ops.load_global_i32_if(Int32(at < width), address + Int64(at) * 4, Int32(-1))
        second = ops.load_global_i32_if(Int32(next_at < width), address + Int64(next_at) * 4, Int32(-1))
        return CountedList(address, width, first, second)

    @cute.jit
    def first_entries(self, ids: CountedList, top_k: Int32, share: Share, tid: Int32):
        first = ids.first if self.place(Int32(0), share, tid) < top_k else Int32(-1)
        second = ids.second if self.place(Int32(1), share, tid) < top_k else Int32(-1)
        return first, second

    @cute.jit
    def entry(self, ids: CountedList, top_k: Int32, chunk: Int32, share: Share, tid: Int32) -> Int32:
        at = self.place(chunk, share, tid)
        return ops.load_global_i32_if(Int32(at < top_k), ids.address + Int64(at) * 4, Int32(-1))

    @cute.jit
    def count_tiles(self, ids: CountedList, top_k: Int32, first: Int32, share: Share, tid: Int32) -> Int32:
        tiles = (top_k + (self.tile - 1)) // self.tile
        if share.num_splits > 1:
            tiles = (tiles + (share.num_splits - 1 - share.split)) // share.num_splits
        return tiles
