"""Resets the primary context under loaded kernels; run by `soak.py` in a process of its own, without torch.

Prints what a launch into the context that is gone was answered, and checks that new memory in a new context works.
"""

from __future__ import annotations

from contextlib import ExitStack

from qsa_cute.errors import DriverError
from qsa_cute.runtime import Loader, default_loader
from qsa_cute.runtime.driver import default_driver
from qsa_cute.selftest import attention
from qsa_cute.selftest.memory import Case, Memory

CASES = {"prefill": attention.prefill_case(256, "rows"), "decode": attention.decode_case(256, "tma")}


def run(case: Case) -> str:
    with ExitStack() as stack:
        return case(Memory(default_driver(), stack), "bf16")


def main() -> None:
    import cuda.bindings.driver as cuda

    driver = default_driver()
    primary = driver.retain_primary(0)
    with driver.pushed(primary):
        for name, case in CASES.items():
            assert run(case) == "", name
    error = cuda.cuDevicePrimaryCtxReset(0)[0]
    assert not error, error
    print("reset")
    for name, case in CASES.items():  # nothing is current now: the loader's own place is asked for
        try:
            said = run(case) or "it ran"
        except DriverError as failed:
            said = f"DriverError: {failed}"
        print(f"after the reset: {name}: {said}")
    with driver.pushed(driver.retain_primary(0)):
        for name, case in CASES.items():
            assert run(case) == "", f"{name} in the new context"
        assert Loader().kernel(("sparse_prefill", 256, "bf16"))
    assert default_loader()
    print("the new context serves as the first did")


if __name__ == "__main__":
    main()
