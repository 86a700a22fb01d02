"""Early launch: a kernel's start overlaps the end of the kernels before it (programmatic dependent launch, SM90 up).

A class says `early_launch = early.SUPPORTED`, and its kernel calls `early.begin()` before it touches global memory, but
for `peek` and `prefetch`, which may come before the wait.
"""

import os
import re

import cutlass.cute as cute
from cutlass import Int32, Int64

from qsa_cute.kernels.common import ops

_TARGET = re.match(r"sm_(\d+)", os.environ.get("CUTE_DSL_ARCH", ""))
SUPPORTED = _TARGET is not None and int(_TARGET[1]) >= 90


def begin() -> None:
    """Let the next kernel start, and wait until what the kernels before this one wrote is there."""
    let_next_start()
    wait()


def let_next_start() -> None:
    """After `wait`, the next kernel's start means that all before this one are done: it may read, before it waits
    itself, whatever this kernel does not write."""
    if SUPPORTED:
        cute.arch.griddepcontrol_launch_dependents()


def wait() -> None:
    """Until what the kernels before this one wrote is there."""
    if SUPPORTED:
        cute.arch.griddepcontrol_wait()


LINE = 128  # bytes that a prefetch brings
FEW_WARPS = 2048  # that prefetch some KB each: more would take turns with what the kernels before still read


def prefetch(address: Int64) -> None:
    """Ask for a line of memory, before `wait`. Nothing is read: the line comes to the L2, where all write, and a read
    after the wait finds there whatever the kernels before this one left. So a guess will do, if memory is there."""
    if SUPPORTED:
        ops.prefetch_l2(address)


def peek(wanted: Int32, address: Int64, other: Int32) -> Int32:
    """A word as it is before `wait`, when the kernels before this one may still change it: a guess for `prefetch`, and
    for nothing else. Read past the L1, where a read after the wait would find it. `other` when `wanted` is 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, {$r2}; @p ld.relaxed.gpu.global.b32 {$w0}, [{$r1}]; }",
        write_only_types=[Int32],
        read_only_args=[wanted, address, other],
    )
