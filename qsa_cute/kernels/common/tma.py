"""What SM90's TMA copies need that CuTe DSL has no short form for: boxes of tensor maps, and mbarriers.

As in `common.ops`: global addresses are Int64, shared addresses Int32, one instruction a function.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir import ir

# What `createpolicy.fractional.L2::evict_first` of all accesses gives; as an operand it costs no instruction.
EVICT_FIRST = "0x12F0000000000000"


def parameter_address(value: Int64) -> Int64:
    """Where a parameter of the kernel lies, by its value as the kernel takes it: a generic address of constant memory.
    A tensor map that is passed as words (`params.tensor_map`) is used where it stands; it must lie at a multiple of 64
    bytes, and parameters begin 16 bytes past one."""
    parameter = ir.BlockArgument(value.ir_value())
    kernel = parameter.owner.owner
    name = f"{kernel.name.value}_param_{parameter.arg_number}"  # as the compiler writes it in PTX
    return cute.arch.inline_ptx(
        f"{{ .reg .b64 at; mov.b64 at, {name}; cvta.param.u64 {{$w0}}, at; }}", write_only_types=[Int64]
    )


def prefetch_tensor_map(tensor_map: Int64) -> None:
    cute.arch.inline_ptx("prefetch.tensormap [{$r0}];", read_only_args=[tensor_map])


def load_box(dst: Int32, tensor_map: Int64, at: tuple, barrier: Int32, once: bool = False) -> None:
    """A box of a tensor map to shared memory; its bytes complete on `barrier`. Elements out of bounds become 0.

    Args:
        at: where the box begins, innermost dimension first.
        once: nobody else reads it, so that the L2 may let go of it first.
    """
    places = ", ".join(f"{{$r{2 + i}}}" for i in range(len(at)))
    copy = f"cp.async.bulk.tensor.{len(at)}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    operands = f"[{{$r0}}], [{{$r1}}, {{{places}}}], [{{$r{2 + len(at)}}}]"
    text = f"{copy} {operands};"
    if once:
        text = f"{copy}.L2::cache_hint {operands}, {EVICT_FIRST};"
    cute.arch.inline_ptx(text, read_only_args=[dst, tensor_map, *at, barrier])


def fence_async_proxy() -> None:
    """TMA copies from here on come after what this thread knows of in shared memory."""
    cute.arch.inline_ptx("fence.proxy.async.shared::cta;")


# mbarriers by shared address: cute.arch's take pointers, whose conversion costs an S2R each time.


def arrive(barrier: Int32) -> None:
    cute.arch.inline_ptx("mbarrier.arrive.shared.b64 _, [{$r0}];", read_only_args=[barrier])


def arrive_expect(barrier: Int32, size: Int32) -> None:
    """Arrive, and let the phase wait for `size` bytes more."""
    cute.arch.inline_ptx("mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], {$r1};", read_only_args=[barrier, size])


def arrive_copied(barrier: Int32) -> None:
    """One more arrival to wait for on `barrier`: that this thread's cp.async so far have landed."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.shared.b64 [{$r0}];", read_only_args=[barrier])


def wait(barrier: Int32, parity: Int32) -> None:
    """Until the phase of this parity is over."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [{$r0}], {$r1}; @!p bra again; }",
        read_only_args=[barrier, parity],
    )
