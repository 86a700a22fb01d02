"""Builds what is out of date: plan, compile in parallel, judge, publish each SM's folder whole."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from qsa_cute.abi import CHECKSUM, MANIFEST
from qsa_cute.aot import compile as aot_compile
from qsa_cute.aot import manifest as mf
from qsa_cute.aot import sass, sources
from qsa_cute.aot.cubin import read_cubin
from qsa_cute.aot.store import Store, link_or_copy
from qsa_cute.errors import ArtifactError
from qsa_cute.variants import KERNELS, Variant, is_registered

Progress = Callable[[Variant, float, str], None]  # variant, seconds, what went wrong or ""


@dataclass
class SmPlan:
    """What a build of one SM comes to.

    Attributes:
        todo: variants to compile, each with the reason.
        keep: entries of the present manifest that stay: asked for and up to date, or not asked for and still valid.
        dropped: names of present variants that do not stay, each with the reason.
        ptxas: version that built what is kept; "" when nothing is.
    """

    sm: str
    todo: list[tuple[Variant, str]] = field(default_factory=list)
    keep: dict[str, mf.Entry] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    ptxas: str = ""

    @property
    def changes(self) -> bool:
        return bool(self.todo or self.dropped)


@dataclass
class Result:
    """What a build did; names of variants, with reasons where there are some."""

    built: list[str] = field(default_factory=list)
    up_to_date: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    unpublished: dict[str, str] = field(default_factory=dict)  # SM -> why its new set was not published

    @property
    def ok(self) -> bool:
        return not self.failed and not self.unpublished


def plan(store: Store, wanted: Iterable[Variant], digests: sources.Digests, force: bool = False) -> list[SmPlan]:
    """What building `wanted` would do, per SM in the order asked. Reads; writes nothing."""
    by_sm: dict[str, list[Variant]] = {}
    for variant in wanted:
        by_sm.setdefault(variant.sm, []).append(variant)
    return [_plan_sm(store.folder(sm), sm, asked, digests, force) for sm, asked in by_sm.items()]


def _plan_sm(folder: Path, sm: str, asked: list[Variant], digests: sources.Digests, force: bool) -> SmPlan:
    result = SmPlan(sm)
    try:
        present = mf.read_manifest(folder) or {}
        unreadable = "" if not present or CHECKSUM in present else "its manifest has no checksum"  # it may be altered
    except ArtifactError:
        present, unreadable = {}, "its manifest cannot be read"
    present = {} if unreadable else present
    entries = dict(present.get("variants", {}))
    for variant in asked:
        entry = entries.pop(variant.name, None)
        why = "forced" if force else out_of_date(folder, entry, variant, digests)
        if why:
            result.todo.append((variant, unreadable or why))
        elif entry is not None:
            result.keep[variant.name] = entry
    for name, entry in entries.items():
        why = _not_worth_keeping(folder, entry, sm, digests)
        if why:
            result.dropped[name] = why
        else:
            result.keep[name] = entry
    result.ptxas = present.get("ptxas_version", "") if result.keep else ""
    return result


def out_of_date(folder: Path, entry: mf.Entry | None, variant: Variant, digests: sources.Digests) -> str:
    """Why a variant must be built; "" when it need not."""
    if entry is None:
        return "missing"
    if entry["digest"] != digests.of(variant):
        return "changed"
    file = folder / entry["file"]
    if not file.is_file() or mf.sha256(file) != entry["sha256"]:
        return "damaged"
    return ""


def _not_worth_keeping(folder: Path, entry: mf.Entry, sm: str, digests: sources.Digests) -> str:
    variant = mf.variant_of(entry, sm)
    if variant is None or not is_registered(variant):
        return "no longer in the registry"
    return out_of_date(folder, entry, variant, digests)


def build(
    store: Store, wanted: Sequence[Variant], jobs: int, force: bool = False, progress: Progress = lambda *_: None
) -> Result:
    """Bring `wanted` up to date.

    Every variant that is out of date is compiled, whatever happens to the others; an SM's set is then replaced
    if all of its own succeeded, and left as it was if not. Present variants that were not asked for stay while
    they are up to date, and are dropped when not: a set never mixes states of the sources.

    Args:
        jobs: compilers at a time.
        progress: called after each variant, from one thread.

    Raises:
        ArtifactError: a build tool is missing, or the folder is being written by another build or cannot be.
    """
    digests = sources.Digests(sources.dsl_version())
    if not any(sm_plan.changes for sm_plan in plan(store, wanted, digests, force)):
        return Result(up_to_date=[variant.name for variant in wanted])
    sass.cuobjdump()
    with store.writing() as staging:
        plans = plan(store, wanted, digests, force)  # once more, now that nobody else writes
        result = Result()
        try:
            made = _compile_all(plans, digests, staging, jobs, progress, result)
        except OSError as error:
            raise ArtifactError(f"writing {staging} failed: {error}; what is published is as it was") from error
        _refuse_moving_sources(plans, digests, result)
        for sm_plan in plans:
            _publish(store, sm_plan, staging / sm_plan.sm, made, digests, result)
    compiled = {variant.name for sm_plan in plans for variant, _why in sm_plan.todo}
    result.up_to_date = [variant.name for variant in wanted if variant.name not in compiled]
    return result


@dataclass(frozen=True)
class Made:
    """One variant's new entry, and what only its SM's manifest carries."""

    entry: mf.Entry
    ptxas: str


def _compile_all(
    plans: list[SmPlan], digests: sources.Digests, staging: Path, jobs: int, progress: Progress, result: Result
) -> dict[str, Made]:
    made: dict[str, Made] = {}
    pool = ThreadPoolExecutor(max_workers=max(1, jobs))
    try:
        running = {}
        for sm_plan in plans:
            (staging / sm_plan.sm).mkdir()
            for variant, _why in sm_plan.todo:
                future = pool.submit(_timed, variant, digests.of(variant), staging / sm_plan.sm)
                running[future] = variant
        for future in as_completed(running):
            variant = running[future]
            outcome, seconds = future.result()
            if isinstance(outcome, Made):
                made[variant.name] = outcome
                progress(variant, seconds, "")
            else:
                result.failed[variant.name] = outcome
                progress(variant, seconds, outcome)
    finally:
        pool.shutdown(cancel_futures=True)
    return made


def _refuse_moving_sources(plans: list[SmPlan], digests: sources.Digests, result: Result) -> None:
    """A file saved during the build would leave a cubin recorded under sources that it was not made from."""
    now = sources.Digests(digests.dsl)
    for variant, _why in (item for sm_plan in plans for item in sm_plan.todo):
        if now.of(variant) != digests.of(variant):
            result.failed.setdefault(variant.name, "its sources changed while it was compiled; build again")


def _timed(variant: Variant, digest: str, folder: Path) -> tuple[Made | str, float]:
    start = time.monotonic()
    try:
        outcome = make(variant, digest, folder)
    except (ArtifactError, OSError) as error:
        return str(error), time.monotonic() - start
    return outcome, time.monotonic() - start


def make(variant: Variant, digest: str, folder: Path) -> Made:
    """Compile one variant into `folder` and judge it.

    Raises:
        ArtifactError: it did not compile, or must not be published; says why.
    """
    job = aot_compile.Job(
        entry=KERNELS[variant.kernel].entry,
        name=variant.name,
        sm=variant.sm,
        head_dim=variant.head_dim,
        dtype=variant.dtype,
        baked=dict(variant.baked),
        folder=str(folder.resolve()),
    )
    problem = aot_compile.run_job(job)
    if problem:
        raise ArtifactError(problem)
    file, report = folder / f"{variant.name}.cubin", folder / f"{variant.name}.json"
    data = file.read_bytes()
    cubin, counts = read_cubin(data), sass.opcodes(file)
    entry = mf.record(variant, digest, data, cubin, counts, json.loads(report.read_text()))
    report.unlink()
    problems = mf.defects(entry, variant.sm, cubin, counts)
    if problems:
        raise ArtifactError("; ".join(problems))
    return Made(entry, cubin.ptxas_version)


def _publish(
    store: Store, sm_plan: SmPlan, staged: Path, made: dict[str, Made], digests: sources.Digests, result: Result
) -> None:
    if not sm_plan.changes:
        return
    names = [variant.name for variant, _why in sm_plan.todo]
    failed = [name for name in names if name in result.failed]
    if failed:
        kept = "the set built before stays" if store.folder(sm_plan.sm).exists() else "there was no set before"
        result.unpublished[sm_plan.sm] = f"{len(failed)} of {len(names)} variants failed; {kept}"
        return
    versions = {made[name].ptxas for name in names} | ({sm_plan.ptxas} if sm_plan.ptxas else set())
    if len(versions) > 1:
        result.unpublished[sm_plan.sm] = (
            f"ptxas {', '.join(sorted(versions))} would stand in one set; build all of {sm_plan.sm} with --force"
        )
        return
    try:
        for entry in sm_plan.keep.values():
            link_or_copy(store.folder(sm_plan.sm) / entry["file"], staged / entry["file"])
        entries = sm_plan.keep | {name: made[name].entry for name in names}
        head = mf.manifest(sm_plan.sm, digests.dsl, "".join(versions), sources.source_digest(), entries)
        mf.write_json(staged / MANIFEST, head)
        store.publish(staged, sm_plan.sm)
    except OSError as error:
        result.unpublished[sm_plan.sm] = f"writing it failed: {error}; the set built before stays"
        return
    result.built += names
    result.dropped |= sm_plan.dropped
