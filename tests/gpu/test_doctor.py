"""`python -m qsa_cute doctor --check` on a GPU: every runner passes, in a process without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from qsa_cute import selftest
from qsa_cute.runtime.driver import default_driver

ROOT = Path(__file__).parents[2]


def test_every_check_passes_without_torch() -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy')))\n"
        "from qsa_cute.doctor import main; raise SystemExit(main(['doctor', '--check', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["problems"]
    checks = report["checks"]
    names = [
        f"{check.name} {dtype}" for check in selftest.checks(default_driver().capability(0)) for dtype in check.dtypes
    ]
    assert [check["name"] for check in checks] == names * len(report["devices"])
    assert [check for check in checks if not check["ok"] or check["skipped"]] == []
    assert sum(check["seconds"] for check in checks) < 10 * len(report["devices"])
