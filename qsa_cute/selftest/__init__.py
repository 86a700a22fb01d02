"""Small cases of every runner on one GPU, against values computed by plain host arithmetic: `doctor --check`.

Needs the driver and the artifacts, and neither torch nor numpy: memory comes from the driver, tensors are `array`s,
and the expected values are sums over Python floats. Each case is launched twice, and both must give the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from qsa_cute.errors import QsaError
from qsa_cute.runners import dispatch
from qsa_cute.runtime import Wanted, missing_reason
from qsa_cute.runtime.driver import Driver, default_driver
from qsa_cute.selftest import attention, indexer, kpool, metrale, paged, paged_select
from qsa_cute.selftest.memory import Check, Memory

PARTS = (attention, indexer, paged, paged_select, kpool, metrale)
_LONGEST = 300  # letters of a reason: one that lists every artifact is cut


def checks(capability: tuple[int, int]) -> Iterator[Check]:
    """Every case, as a device of this compute capability runs it; `lacking` says which it does not."""
    for part in PARTS:
        yield from part.checks(capability == dispatch.SM90)


def lacking(check: Check, dtype: str, capability: tuple[int, int], missing: Callable[[Wanted], str | None]) -> str:
    """Why a case has no kernels here, by the targets of the build or by its artifacts; "" where it has all."""
    for one in check.needs:
        wanted = one._replace(dtype=one.dtype or dtype)
        support = dispatch.target_support(one.kernel, one.head_dim, capability, wanted.dtype)
        if not support:
            return f"no {one.kernel} here: {support.reason}"
        reason = missing(wanted)
        if reason:
            return reason if len(reason) <= _LONGEST else f"{reason.partition(': ')[0]}; {reason.rpartition('; ')[2]}"
    return ""


def run(
    device: int = 0, driver: Driver | None = None, missing: Callable[[Wanted, int], str | None] = missing_reason
) -> list[dict[str, Any]]:
    """Run every case in every type in the device's primary context.

    Args:
        driver, missing: in the place of the default driver, and of `runtime.missing_reason`.

    Returns: {"name", "ok", "skipped", "detail", "seconds"} of each. A case whose kernels the device or its artifacts
        have not is skipped, `detail` being the reason, and ok; one that raises is one that failed.

    Raises:
        DriverError: the device's context cannot be had.
    """
    driver = driver or default_driver()
    found = []
    with driver.pushed(driver.retain_primary(device)):
        capability = driver.capability(device)
        for check in checks(capability):
            for dtype in check.dtypes:
                begin = time.perf_counter()
                detail = lacking(check, dtype, capability, lambda wanted: missing(wanted, device))
                skipped = bool(detail)
                if not skipped:
                    detail = _detail(check, dtype, driver)
                seconds = time.perf_counter() - begin
                one = {"name": f"{check.name} {dtype}", "ok": skipped or not detail, "skipped": skipped}
                found.append(one | {"detail": detail, "seconds": seconds})
    return found


def _detail(check: Check, dtype: str, driver: Driver) -> str:
    """What is wrong with a case; "" for nothing."""
    try:
        with ExitStack() as stack:
            return check.case(Memory(driver, stack), dtype)
    except QsaError as error:
        return str(error)
