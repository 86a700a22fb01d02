"""What a provider hands to the clock, and the check that comes before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# An output averages 2051 values and is about 0.03, so the absolute part is far below what a lost token would leave;
# the relative one is two roundings to bf16, for the short rows whose outputs are of unit scale.
ATOL, RTOL = 4e-3, 1e-2


class UnavailableError(Exception):
    """A provider cannot compute a case here; the message says why."""


class WrongResultError(Exception):
    """A provider's output is not the reference's: it is not timed."""


@dataclass(frozen=True)
class Work:
    """A provider's launches for a case.

    Attributes:
        launches: one for each set of inputs, on the current stream of the time when they were made.
        got: what launch i left behind of the checked rows; called right after it.
        want: the reference of the same rows, FP32; NaN where any value will do.
        atol, rtol: what an error may be: atol + rtol * |want|.
    """

    launches: Sequence[Callable[[], object]]
    got: Callable[[int], Tensor]
    want: Callable[[int], Tensor]
    atol: float = ATOL
    rtol: float = RTOL

    def check(self) -> float:
        """Largest absolute error of the first and the last launch.

        Raises:
            WrongResultError: beyond what is allowed, or NaN where the reference is not.
        """
        worst = 0.0
        for number in sorted({0, len(self.launches) - 1}):
            self.launches[number]()
            want, got = self.want(number), self.got(number).float()
            if got.shape != want.shape:
                raise WrongResultError(
                    f"launch {number} gives {list(got.shape)} where the reference is {list(want.shape)}"
                )
            error = torch.where(want.isnan(), 0, got - want).abs().nan_to_num(nan=float("inf"))
            beyond = error > self.atol + self.rtol * want.abs()
            if beyond.any():
                raise WrongResultError(
                    f"launch {number} is off by up to {error.max().item():.3g}, {int(beyond.sum())} of "
                    f"{beyond.numel()} values by more than {self.atol:g} + {self.rtol:g} x the reference"
                )
            worst = max(worst, error.max().item())
        return worst
