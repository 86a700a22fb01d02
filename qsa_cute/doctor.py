"""What this installation has, what each GPU can use of it and why not the rest: `python -m qsa_cute doctor`.

Looks and reports, and never fails: what cannot be found out is part of the report. Needs no GPU, no driver, no
torch and no compiler; only `--check` launches anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from qsa_cute.abi import ABI, SCHEMA, build_command
from qsa_cute.errors import ArtifactError, DriverError
from qsa_cute.runtime import Loader, Store
from qsa_cute.runtime import sm as sm_rules
from qsa_cute.runtime.artifacts import ENVIRONMENT, places
from qsa_cute.runtime.driver import default_driver
from qsa_cute.variants import SMS, variants

Report = dict[str, Any]

# Distribution -> what it is needed for.
PACKAGES = {
    "cuda-bindings": "loading and launching",
    "torch": "torch tensors and operators",
    "nvidia-cutlass-dsl": "building only",
}
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_SHOWN = 3  # names of a group of variants


def examine(path: str | None = None) -> Report:
    """Everything about this installation, as JSON-able values. Never raises.

    Args:
        path: the artifact folder; None looks where a load would.

    Returns: "qsa_cute", "python", "packages", "driver", "artifacts", "devices" and, last, "problems": one sentence
        for each thing that keeps kernels from running here, with what mends it; empty when nothing does.
    """
    report: Report = {
        "qsa_cute": {"version": _version("qsa-cute"), "at": str(Path(__file__).parent), "schema": SCHEMA, "abi": ABI},
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
    }
    for name, look in (("driver", _driver), ("artifacts", _artifacts), ("devices", _devices)):
        try:
            report[name] = look(path)
        except Exception as error:
            report[name] = {"problem": _said(error)}
    report["problems"] = list(_problems(report))
    return report


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except Exception:  # not installed, or its metadata is damaged
        return None


def _said(error: BaseException) -> str:
    """One line: the sentence of an error of ours, the type too of another."""
    text = " ".join(str(error).split())
    return text if type(error).__module__.startswith("qsa_cute") else f"{type(error).__name__}: {text}"


def _driver(_path: str | None) -> Report:
    found: Report = {"kernel_module": None}
    with contextlib.suppress(OSError, IndexError):
        found["kernel_module"] = _KERNEL_MODULE.read_text().splitlines()[0]
    try:
        number = default_driver().version()
    except DriverError as error:
        return found | {"problem": str(error)}
    return found | {"cuda": f"{number // 1000}.{number % 1000 // 10}"}


def _artifacts(path: str | None) -> Report:
    """Every place looked at, the one taken, and its sets with every file hashed."""
    found: Report = {
        "root": None,
        "looked_at": [
            {"source": place.source, "path": place.path and str(place.path), "state": place.state}
            for place in places(path)
        ],
        "sets": {},
    }
    try:
        store = Store(path)
    except ArtifactError as error:
        return found | {"problem": str(error)}
    found["root"] = str(store.root)
    for sm in store.sms():
        found["sets"][sm] = _set(store, sm)
    nothing = store.problem()
    return found | {"problem": nothing} if nothing else found


def _set(store: Store, sm: str) -> Report:
    try:
        artifacts = store.read(sm)
    except ArtifactError as error:
        return {"problems": [str(error)]}
    problems = []
    for record in artifacts.variants.values():
        try:
            artifacts.cubin(record)
        except ArtifactError as error:
            problems.append(str(error))
    registered = {variant.name for variant in variants([sm])} if sm in SMS else set()
    return {
        "variants": len(artifacts.variants),
        "dsl": artifacts.dsl_version,
        "ptxas": artifacts.ptxas_version,
        "oldest_driver": f"{artifacts.min_driver // 1000}.0",
        "not_built": sorted(registered - set(artifacts.variants)),
        "problems": problems,
    }


def _devices(path: str | None) -> list[Report]:
    driver = default_driver()
    loader = Loader(path, driver)
    found = []
    for device in range(driver.device_count()):
        one: Report = {"device": device}
        try:
            one["name"] = driver.device_name(device)
            one["capability"] = list(driver.capability(device))
            one["target"] = next(iter(sm_rules.preference(SMS, driver.capability(device))), None)
            report = loader.report(device)
            one |= {"usable": list(report.usable), "refused": report.refused}
        except Exception as error:
            one["problem"] = _said(error)
        found.append(one)
    return found


def _problems(report: Report) -> Iterator[str]:
    for name in ("driver", "artifacts"):
        if "problem" in report[name]:
            yield report[name]["problem"]
    for found in report["artifacts"].get("sets", {}).values():
        yield from found["problems"]
    devices = report["devices"]
    if isinstance(devices, dict):
        if devices["problem"] not in (report["driver"].get("problem"), report["artifacts"].get("problem")):
            yield devices["problem"]
        return
    if not devices:
        yield f"the driver shows no device; CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}"
    for device in devices:
        if "problem" in device:
            if device["problem"] != report["artifacts"].get("problem"):
                yield f"device {device['device']}: {device['problem']}"
        elif not device["usable"] and report["artifacts"].get("sets"):  # without any, that is the problem
            capability, target = ".".join(map(str, device["capability"])), device["target"]
            what = f"no target runs there ({', '.join(SMS)})"
            if target:
                what = f"build its artifacts: {build_command(target, report['artifacts']['root'])}"
            yield f"device {device['device']} (compute capability {capability}) can use no artifact; {what}"


# The report as text.


def text(report: Report) -> str:
    """The report for a person: variants in groups that share their answer."""
    ours, driver = report["qsa_cute"], report["driver"]
    lines = [
        f"qsa_cute {ours['version'] or '(not installed)'} at {ours['at']}, manifest schema {ours['schema']}, "
        f"ABI {ours['abi']}",
        f"Python {report['python']}",
    ]
    lines += [f"{name} {report['packages'][name] or 'not installed'} ({use})" for name, use in PACKAGES.items()]
    lines.append(f"driver: {'unusable, see below' if 'problem' in driver else 'CUDA ' + driver['cuda']}")
    if driver.get("kernel_module"):
        lines.append(f"  {driver['kernel_module']}")
    lines += ["", "artifacts looked for in:"]
    artifacts = report["artifacts"]
    for place in artifacts.get("looked_at", ()):
        taken = "  <- taken" if place["path"] and _same(place["path"], artifacts["root"]) else ""
        lines.append(f"  {place['source']}: {', '.join(filter(None, (place['path'], place['state'])))}{taken}")
    for sm, found in artifacts.get("sets", {}).items():
        lines += _set_lines(sm, found, artifacts["root"])
    lines.append("")
    devices = report["devices"]
    if isinstance(devices, dict):
        lines.append("devices: none can be asked")
    else:
        for device in devices:
            lines += _device_lines(device, artifacts.get("sets", {}))
    for check in report.get("checks", ()):
        state = "skipped" if check["skipped"] else "ok     " if check["ok"] else "FAILED "
        seconds = "" if check["skipped"] else f" ({check['seconds']:.2f} s)"
        detail = check["detail"] and f": {check['detail']}"
        lines.append(f"  {state} {check['name']}{seconds}{detail}")
    lines += [f"  {note}" for note in report.get("notes", ())]
    lines += ["", *(f"problem: {problem}" for problem in report["problems"])]
    if not report["problems"]:
        lines.append("no problem found")
    return "\n".join(lines)


def _same(one: str, other: str | None) -> bool:
    return other is not None and Path(one).resolve() == Path(other).resolve()


def _set_lines(sm: str, found: Report, root: str | None) -> list[str]:
    if "variants" not in found:
        return [f"  {sm}: unusable, see below"]
    bad = len(found["problems"])
    state = f"{bad} damaged" if bad else "every hash is right"
    lines = [
        f"  {sm}: {found['variants']} variants, {state}; DSL {found['dsl']}, ptxas {found['ptxas']}, for drivers of "
        f"CUDA {found['oldest_driver']} and up"
    ]
    if found["not_built"]:
        lines.append(f"    not built: {_some(found['not_built'])}; {build_command(sm, root)}")
    return lines


def _device_lines(device: Report, sets: Report) -> list[str]:
    if "capability" not in device:
        return [f"device {device['device']}: {device['problem']}"]
    capability = tuple(device["capability"])
    lines = [f"device {device['device']}: {device['name']}, compute capability {capability[0]}.{capability[1]}"]
    if "usable" not in device:
        return [*lines, f"  {device['problem']}"]
    lines.append(f"  can use {len(device['usable'])} variants: {_some(device['usable'])}")
    foreign = [sm for sm in sets if not sm_rules.runs_on(sm, capability)]
    lines += [f"  not {sm}: its cubins do not run on this compute capability" for sm in foreign]
    reasons: dict[str, list[str]] = {}
    for name, reason in device["refused"].items():
        if not name.endswith(tuple(sm.replace("_", "") for sm in foreign)) and name not in foreign:
            reasons.setdefault(reason.removeprefix(f"{name}: "), []).append(name)
    return lines + [f"  not {_some(names)}: {reason}" for reason, names in reasons.items()]


def _some(names: list[str]) -> str:
    left = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {left} more (--json has all)" if left > 0 else "")


# The command.


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns its exit status: 1 when `--check` found something wrong or nothing to check, else 0."""
    parser = argparse.ArgumentParser(prog="python -m qsa_cute", description="Sparse-attention kernels, built ahead.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="say what this installation has and what each GPU can use of it",
        description="Says which versions, driver, devices and artifacts there are, where artifacts were looked for, "
        "and which variants each device can use and why not the rest. Needs no GPU. Exit status 0, whatever is found; "
        "with --check 1 where there is a problem.",
    )
    doctor.add_argument("--json", action="store_true", help="print the whole report as JSON")
    doctor.add_argument("--check", action="store_true", help="run small cases on every GPU and check them (seconds)")
    doctor.add_argument("--artifacts", metavar="PATH", help=f"look here for artifacts; overrides ${ENVIRONMENT}")
    options = parser.parse_args(arguments)
    report = examine(options.artifacts)
    status = _check(report, options.artifacts) if options.check else 0
    print(json.dumps(report, indent=1, sort_keys=True) if options.json else text(report))
    return status


def _check(report: Report, path: str | None) -> int:
    """Add the self-test's results to the report; the exit status."""
    report["checks"], report["notes"] = [], []
    if report["packages"]["torch"] is None:
        report["notes"].append("torch is not installed: operators were not looked at; the checks need none")
    if path is not None:
        os.environ[ENVIRONMENT] = path  # where the runners' own loader looks
    devices = report["devices"] if isinstance(report["devices"], list) else []
    usable = [one["device"] for one in devices if one.get("usable")]
    if not usable:
        report["problems"].append("nothing could be checked: no device here can use an artifact")
        return 1
    from qsa_cute import selftest

    for device in usable:
        try:
            checks = selftest.run(device)
            report["checks"] += checks
            if all(check["skipped"] for check in checks):
                report["problems"].append(f"device {device}: nothing was checked: every case was skipped")
        except Exception as error:
            report["problems"].append(f"device {device}: the self-test could not run: {_said(error)}")
    failed = [f"{check['name']}: {check['detail']}" for check in report["checks"] if not check["ok"]]
    report["problems"] += failed
    return int(bool(report["problems"]))


if __name__ == "__main__":
    sys.exit(main())
