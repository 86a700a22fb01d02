"""Early launch: a kernel's start overlaps the end of the kernels before it (programmatic dependent launch, SM90 up).

A class says `early_launch = early.SUPPORTED`, and its kernel calls `early.begin()` before it touches global memory.
"""

import os
import re

import cutlass.cute as cute

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
