"""Checks built sets against their manifests, the lock and the GPU evidence; writes the lock."""

from __future__ import annotations

from pathlib import Path

from qsa_cute.abi import MANIFEST, SCHEMA, build_command, output_option
from qsa_cute.aot import manifest as mf
from qsa_cute.aot.output import count
from qsa_cute.errors import ArtifactError
from qsa_cute.variants import SMS, variants

LOCK = "lock.json"
EVIDENCE = "evidence"
_LOCK_FIELDS = {"dsl_version": str, "ptxas_version": str, "variants": dict}
_EVIDENCE_FIELDS = {"sm": str, "variants": dict, "tests": dict}
_EVIDENCE_MEND = "take it from version control, or: make gpu-test"


def built_sms(root: Path) -> tuple[str, ...]:
    """SMs that have a set, in registry order."""
    return tuple(sm for sm in SMS if (root / sm / MANIFEST).is_file())


def load(root: Path, sm: str) -> mf.Record:
    """An SM's manifest, its head checked.

    Raises:
        ArtifactError: there is none, or it is unreadable, foreign or of another version.
    """
    manifest = mf.read_manifest(root / sm)
    if manifest is None:
        there = ", ".join(built_sms(root)) or "none"
        raise ArtifactError(f"{root} has no set for {sm}, built are: {there}; run: {build_command(sm, root)}")
    return manifest


def check_files(root: Path, sm: str, manifest: mf.Record) -> list[str]:
    """Every file of the set against the manifest, and no file beside."""
    folder, problems, mend = root / sm, [], build_command(sm, root)
    expected = {entry["file"]: entry for entry in manifest["variants"].values()}
    for file, entry in expected.items():
        what = _wrong_file(folder / file, entry)
        if what:
            problems.append(f"{folder / file} {what}; run: {mend}")
    strays = sorted({path.name for path in folder.iterdir()} - {*expected, MANIFEST})
    problems += [f"{folder / stray} is not in the manifest; delete it" for stray in strays]
    return problems


def _wrong_file(path: Path, entry: mf.Entry) -> str:
    try:
        if not path.is_file():
            return "is missing"
        if path.stat().st_size != entry["size"]:
            return f"has {path.stat().st_size} bytes, the manifest says {entry['size']}"
        return "" if mf.sha256(path) == entry["sha256"] else "was altered: its sha256 is not the manifest's"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _lock_command(root: Path) -> str:
    return f"python build_cutedsl.py lock{output_option(root)}"


def _lock(root: Path) -> mf.Record | None:
    """lock.json, None where there is none. Raises ArtifactError: it is unreadable."""
    mend = f"take it from version control, or delete it and: {_lock_command(root)}"
    return mf.read_json(root / LOCK, _LOCK_FIELDS, mend)


def check_lock(root: Path, sm: str, manifest: mf.Record) -> list[str]:
    """The set's hashes against lock.json, as far as the registry has the variants."""
    lock = _lock(root)
    if lock is None:
        return [f"{root / LOCK} is missing; after a deliberate change: {_lock_command(root)}"]
    for tool in ("dsl_version", "ptxas_version"):
        if lock[tool] != manifest[tool]:
            return [
                f"{sm} was built with {tool} {manifest[tool]}, {LOCK} holds the hashes of {lock[tool]}; "
                "install the pinned build tools: pip install -e '.[build]'"
            ]
    ours = {variant.name for variant in variants([sm])}
    problems = []
    for name, entry in manifest["variants"].items():
        if name in ours and lock["variants"].get(name) != entry["sha256"]:
            how = "differs from" if name in lock["variants"] else "is not in"
            problems.append(f"{name} {how} {LOCK}; after a deliberate change: {_lock_command(root)}")
    return problems


def _evidence(root: Path, sm: str) -> mf.Record | None:
    """The record of the GPU runs; None where there is none. Raises ArtifactError: it is unreadable."""
    return mf.read_json(root / EVIDENCE / f"{sm}.json", _EVIDENCE_FIELDS, _EVIDENCE_MEND)


def check_evidence(root: Path, sm: str, manifest: mf.Record) -> list[str]:
    """The GPU test run: every registered variant was run as it is built now, and nothing failed, or what failed is
    explained where the record is composed of several runs."""
    path = root / EVIDENCE / f"{sm}.json"
    evidence = _evidence(root, sm)
    if evidence is None:
        return [f"{path} is missing; run the GPU tests: make gpu-test"]
    if evidence["sm"] != sm:
        return [f"{path} is of {evidence['sm']}; {_EVIDENCE_MEND}"]
    failed, passed = (evidence["tests"].get(name) for name in ("failed", "passed"))
    problems = []
    if failed != 0 or type(passed) is not int or passed < 1:
        problems.append(f"{path} records {failed} failed and {passed} passed GPU tests")
    in_runs = _failures(evidence)
    if in_runs is None:
        problems.append(f"{path} has runs without a count of failures; {_EVIDENCE_MEND}")
    elif in_runs and not _composed(evidence):
        problems.append(
            f'{path} has {count(in_runs, "failure")} in its runs and no "composed" that explains them; make gpu-test'
        )
    for variant in variants([sm]):
        built = manifest["variants"].get(variant.name, {}).get("sha256")
        if built is None:
            mend = build_command(sm, root)
            problems.append(f"{variant.name} is not built, so {path} cannot be compared; run: {mend}")
        elif evidence["variants"].get(variant.name) != built:
            problems.append(f"{variant.name} is not the cubin that {path} tested; run the GPU tests: make gpu-test")
    return problems


def _composed(evidence: mf.Record) -> str:
    """What a record that is composed of several runs says of them."""
    said = evidence.get("composed")
    return said.strip() if isinstance(said, str) else ""


def _failures(evidence: mf.Record) -> int | None:
    """Failed tests of the runs that a record is composed of; None where they do not say."""
    runs, total = evidence.get("runs", []), 0
    for run in runs if isinstance(runs, list) else [None]:
        failed = run.get("failed") if isinstance(run, dict) else None
        if type(failed) is not int or failed < 0:
            return None
        total += failed
    return total


def evidence_notes(root: Path, sms: tuple[str, ...]) -> list[str]:
    """A line for each record that is not of one run: of how many, with how many failures, and what it says of them."""
    notes = []
    for sm in sms:
        try:
            evidence = _evidence(root, sm)
        except (ArtifactError, OSError):  # a problem, and said as one
            continue
        if evidence is not None and ("runs" in evidence or "composed" in evidence):
            runs = evidence.get("runs")
            number = count(len(runs), "run") if isinstance(runs, list) else "several runs"
            failed = _failures(evidence)
            failures = "unknown failures" if failed is None else count(failed, "failure")
            said = _composed(evidence) or "it does not say why"
            notes.append(f"evidence of {sm} is composed of {number}; {failures}: {said}")
    return notes


def verify(root: Path, sms: tuple[str, ...], lock: bool, evidence: bool) -> dict[str, list[str]]:
    """Problems per SM, empty lists where there are none."""
    found = {}
    for sm in sms:
        try:
            manifest = load(root, sm)
            found[sm] = check_files(root, sm, manifest)
            found[sm] += check_lock(root, sm, manifest) if lock else []
            found[sm] += check_evidence(root, sm, manifest) if evidence else []
        except (ArtifactError, OSError) as error:
            found[sm] = [str(error)]
    return found


def write_lock(root: Path, sms: tuple[str, ...]) -> list[str]:
    """Put the hashes of the built sets of `sms` into lock.json; the other SMs' hashes stay.

    Returns: names whose hash is new or changed.

    Raises:
        ArtifactError: a set is incomplete or damaged, or was built with other tools than the hashes that stay.
    """
    former = _lock(root)
    hashes = {} if former is None else former["variants"]
    tools = {}
    locked = {variant.name: hashes[variant.name] for variant in variants() if variant.name in hashes}
    for sm in sms:
        manifest = load(root, sm)
        problems = check_files(root, sm, manifest)
        missing = [variant.name for variant in variants([sm]) if variant.name not in manifest["variants"]]
        if problems or missing:
            raise ArtifactError(f"{sm} cannot be locked: {'; '.join(problems) or 'not built: ' + ', '.join(missing)}")
        locked |= {variant.name: manifest["variants"][variant.name]["sha256"] for variant in variants([sm])}
        tools[sm] = (manifest["dsl_version"], manifest["ptxas_version"])
    others = set(SMS) - set(sms)
    if former is not None and any(variant.name in locked for variant in variants(others)):
        tools["the hashes that stay"] = (former["dsl_version"], former["ptxas_version"])
    if len(set(tools.values())) != 1:
        said = ", ".join(f"{what}: DSL {dsl} and ptxas {ptxas}" for what, (dsl, ptxas) in tools.items())
        raise ArtifactError(f"one lock holds the hashes of one set of tools, found {said}; build and lock every SM")
    dsl, ptxas = next(iter(tools.values()))
    mf.write_json(root / LOCK, {"schema": SCHEMA, "dsl_version": dsl, "ptxas_version": ptxas, "variants": locked})
    return [name for name, value in locked.items() if hashes.get(name) != value]
