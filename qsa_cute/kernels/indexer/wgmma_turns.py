"""What the score kernels on SM90's tensor cores share: a warp fills a ring with tiles of keys, one or two consumer
warpgroups multiply them with the queries that they keep in shared memory, in turn."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum

from qsa_cute.kernels.common import ops

TILE = 64  # keys a stage: M of the products
TURN = 4  # named barriers of the groups' turns
PRODUCER = 32  # threads that copy keys: one warp leaves 200 registers a thread with two blocks an SM


class WgmmaTurns:
    """Needs `elem`, `groups`, `stages`, `k_offset` and `barrier_offset` of the kernel, and `open_steps`: how many k
    steps of a tile are not complete when the turn is passed on."""

    @cute.jit
    def make_ring(self, smem: Int32, tid: Int32):
        """The barriers that say that a stage has its keys, and that it is free; to be used after a barrier of all."""
        full = ops.shared_barrier(smem + self.barrier_offset)
        empty = ops.shared_barrier(smem + self.barrier_offset + 8 * self.stages)
        if tid == 0:
            for s in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + s, PRODUCER)
                cute.arch.mbarrier_init(empty + s, 4 * self.groups)
        cute.arch.mbarrier_init_fence()
        return full, empty

    def fragments(self, base: cute.Pointer, columns: int, dims: int, operands: int):
        """The MMA, its operands in shared memory, a stage of keys and one of `operands` of queries, `columns` each, as
        the last mode says; and the accumulators."""
        atom = warpgroup.make_smem_layout_atom(
            hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.elem, dims), self.elem
        )
        q_layout = cute.tile_to_shape(atom, (columns, dims, operands), order=(0, 1, 2))
        k_layout = cute.tile_to_shape(atom, (TILE, dims, self.stages), order=(0, 1, 2))
        sQ = cute.make_tensor(cute.recast_ptr(base, q_layout.inner, dtype=self.elem), q_layout.outer)
        sK = cute.make_tensor(cute.recast_ptr(base + self.k_offset, k_layout.inner, dtype=self.elem), k_layout.outer)
        mma = hopper.make_trivial_tiled_mma(
            self.elem,
            self.elem,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
            Float32,
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(TILE, columns),
        )
        slice_ = mma.get_slice(0)
        tK = slice_.make_fragment_A(slice_.partition_A(sK))
        tQ = slice_.make_fragment_B(slice_.partition_B(sQ))
        tS = cute.make_rmem_tensor(slice_.partition_shape_C((TILE, columns)), Float32)
        return mma, tK, tQ, tS

    @cute.jit
    def pass_turn(self, group: Int32):
        cute.arch.barrier_arrive(barrier_id=TURN + group, number_of_threads=256)

    @cute.jit
    def multiply(
        self, mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, queries: tuple, group: Int32, more: cutlass.Boolean
    ):
        """The products of a tile, with each of `queries` into the same sums. Two groups take turns, so that one
        multiplies while the other stores: left alone they would share the tensor cores, finish together and store
        together. The turn is passed on shortly before the products are complete."""
        steps = cute.size(a.shape[2])
        if cutlass.const_expr(self.groups == 2):
            cute.arch.barrier(barrier_id=TURN + group, number_of_threads=256)
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for term in cutlass.range_constexpr(len(queries)):
            b = queries[term]
            for k in cutlass.range_constexpr(steps):
                cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
                atom.set(warpgroup.Field.ACCUMULATE, True)
                last = term == len(queries) - 1 and k == steps - self.open_steps - 1
                if cutlass.const_expr(self.groups == 2 and last):
                    warpgroup.commit_group()
        warpgroup.commit_group()
        if cutlass.const_expr(self.groups == 2):
            warpgroup.wait_group(1)
            if group == 0 or more:
                self.pass_turn(1 - group)
        warpgroup.wait_group(0)
