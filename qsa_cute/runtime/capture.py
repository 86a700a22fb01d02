"""Stream capture: what may not happen under it, and how to say so."""

from __future__ import annotations

from qsa_cute.errors import CaptureError
from qsa_cute.runtime.driver import Driver


def refuse_under_capture(driver: Driver, stream: int, what: str) -> None:
    """Raise when `stream` is being captured: a load inside a capture would become part of no graph and may break it.

    Args:
        what: what would be loaded, for the message.

    Raises:
        CaptureError: `stream` is being captured.
    """
    if driver.is_capturing(stream):
        raise CaptureError(
            f"first use of {what} in this context while stream {stream:#x} is being captured; call the runner's "
            "preflight with the same type, once in each context, before the capture begins"
        )
