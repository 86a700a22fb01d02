"""Fixtures of the tests that run kernels. Without a GPU they fail: a green run has to mean that kernels ran.

`--evidence PATH` records what ran, by sha256 of each variant, for the check that a build is the one that was tested.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
import torch

from bench.device import missing
from qsa_cute.runtime import Store
from qsa_cute.runtime import sm as sm_rules
from qsa_cute.runtime.driver import default_driver

SCHEMA = 1


def pytest_addoption(parser):
    parser.addoption("--evidence", metavar="PATH", type=Path, help="write the record of this run of all GPU tests")
    parser.addoption("--launches", type=int, default=200_000, help="of each operation in the soak")


def pytest_configure(config):
    path = config.getoption("--evidence")
    if path is None:
        return
    option = config.option
    if option.keyword or option.markexpr or getattr(option, "lf", False) or any(".py" in arg for arg in config.args):
        raise pytest.UsageError("--evidence records a run of all GPU tests; run it without a selection")
    config.pluginmanager.register(Evidence(path), "qsa-evidence")


class Evidence:
    """Counts the tests and writes the record when the session ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.tests["failed"] += 1
        elif report.skipped:
            self.tests["skipped"] += 1
        elif report.when == "call":
            self.tests["passed"] += 1

    def pytest_collectreport(self, report):
        self.tests["failed"] += report.failed

    def pytest_sessionfinish(self, session, exitstatus):
        if not torch.cuda.is_available() or exitstatus == pytest.ExitCode.INTERRUPTED:
            return
        driver, store = default_driver(), Store()
        sm = sm_rules.preference(store.sms(), driver.capability(0))[0]
        artifacts = store.read(sm)
        version = driver.version()
        record = {
            "schema": SCHEMA,
            "sm": sm,
            "device": driver.device_name(0),
            "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "source_digest": artifacts.source_digest,
            "variants": {name: variant.sha256 for name, variant in artifacts.variants.items()},
            "tests": self.tests,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The GPU; current while the tests run."""
    reason = missing()
    if reason:
        pytest.exit(f"tests/gpu needs a CUDA device, and {reason}", returncode=1)
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference is FP32
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def synchronised(device):
    """A launch that faults fails the test that made it, not the next one."""
    yield
    torch.cuda.synchronize()
