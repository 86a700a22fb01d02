"""The command line: build, list, verify, inspect, lock, wheel, clean. Thin: it parses, calls and prints."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import click

from qsa_cute.abi import build_command
from qsa_cute.aot import build as aot_build
from qsa_cute.aot import manifest as mf
from qsa_cute.aot import output, sources
from qsa_cute.aot import verify as aot_verify
from qsa_cute.aot import wheel as aot_wheel
from qsa_cute.aot.store import Store
from qsa_cute.errors import QsaError, UnsupportedError
from qsa_cute.variants import SMS, Variant, variants

FAILED = 1
OUT_OF_DATE = 3

F = TypeVar("F", bound=Callable[..., Any])


class Group(click.Group):
    """Shows what qsa_cute raises on purpose as one message, without a traceback; an unknown name is a usage error."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UnsupportedError as error:  # a name that there is not
            raise click.UsageError(str(error)) from error
        except BrokenPipeError:  # the reader has seen enough: click ends without a word
            raise
        except (QsaError, OSError) as error:  # OSError: a full or read-only disk, with the file in its message
            raise click.ClickException(str(error)) from error


def _filters(command: F) -> F:
    """The options that choose variants."""
    for option in reversed(
        (
            click.option("--gpu-arch", "sms", multiple=True, metavar="SM", help="Target, repeatable; or 'all'."),
            click.option("--kernels", default="*", metavar="GLOB", help="Kernel names, e.g. 'sparse_*'."),
            click.option("--head-dim", "head_dims", multiple=True, type=int, help="Repeatable; default all."),
            click.option("--dtype", "dtypes", multiple=True, help="bf16, fp16 or fp8_e4m3, repeatable; default all."),
            click.option("--max-splits", type=click.IntRange(1, 256), help="Bake this split count instead."),
        )
    ):
        command = option(command)
    return command


_output = click.option(
    "--output",
    "root",
    default="artifacts",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The artifact folder.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _chosen(
    sms: tuple[str, ...], kernels: str, head_dims: tuple[int, ...], dtypes: tuple[str, ...], max_splits: int | None
) -> list[Variant]:
    targets = _known_sms(sms) or None
    found = variants(targets, kernels, head_dims or None, dtypes or None, max_splits)
    if not found:
        raise click.UsageError(_why_none(kernels, head_dim=head_dims, dtype=dtypes, sm=targets or ()))
    if max_splits is not None and not any("max_splits" in dict(variant.baked) for variant in found):
        with_splits = {variant.kernel: None for variant in variants() if "max_splits" in dict(variant.baked)}
        raise click.UsageError(f"--max-splits is of {', '.join(with_splits)}; none of them is asked for")
    return found


def _known_sms(sms: tuple[str, ...]) -> tuple[str, ...]:
    """The targets asked for, () for all. An SM's other names are answered with the target."""
    for sm in sms:
        if sm not in (*SMS, "all"):
            near = [target for target in SMS if _digits(target) == _digits(sm)]
            hint = f"did you mean {near[0]}? " if near else ""
            raise click.UsageError(f"unknown SM {sm!r}; {hint}there are: {', '.join(SMS)}")
    return () if "all" in sms else sms


def _digits(sm: str) -> str:
    return "".join(filter(str.isdecimal, sm))


def _why_none(kernels: str, **filters: tuple[Any, ...]) -> str:
    """Which filter, taken one after another, left nothing of the kernels that match, and what there is in its place."""
    left, narrowed = variants(kernels=kernels), f"--kernels {kernels!r}"
    for option, key in (("--head-dim", "head_dim"), ("--dtype", "dtype"), ("--gpu-arch", "sm")):
        asked, before = filters[key], left
        left = [variant for variant in before if not asked or getattr(variant, key) in asked]
        words = "".join(f" {option} {value}" for value in asked)
        if not left:
            break
        narrowed += words
    has: dict[str, dict[str, None]] = {}  # kernel -> what it is built for
    for variant in before:
        has.setdefault(variant.kernel, {})[str(getattr(variant, key))] = None
    groups: dict[str, list[str]] = {}
    for kernel, there in has.items():
        groups.setdefault(", ".join(there), []).append(kernel)
    there_are = "; ".join(f"{', '.join(names)} for {there}" for there, names in groups.items())
    return f"{words.strip()} leaves nothing of {narrowed}; there are: {there_are}"


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="qsa-cute")
def main() -> None:
    """Build QSA kernels ahead of time, for any SM, on any machine: no GPU is needed, used or looked for.

    Data goes to stdout, logs to stderr. Exit codes: 0 done; 1 something failed, and what is published is as it
    was; 2 usage; 3 `build --check` found something out of date.
    """


@main.command()
@_filters
@click.option("--jobs", type=click.IntRange(1), help="Compilers at a time; default one a CPU.")
@_output
@click.option("--dry-run", is_flag=True, help="Say what would be built, and why; build nothing.")
@click.option("--check", is_flag=True, help="Exit 3 unless everything asked for is up to date; build nothing.")
@click.option("--force", is_flag=True, help="Build what is up to date, too.")
@_json
def build(root: Path, jobs: int | None, dry_run: bool, check: bool, force: bool, as_json: bool, **filters: Any) -> None:
    """Build what is missing, changed or damaged; --gpu-arch says for which SM.

    Variants that are not asked for stay while they are up to date and are dropped when they no longer are, so
    that a set is always of one state of the sources.
    """
    if not filters["sms"]:
        raise click.UsageError(f"say for which SM: --gpu-arch SM or 'all'; there are: {', '.join(SMS)}")
    wanted = _chosen(**filters)
    store = Store(root)
    if dry_run or check:
        _show_plan(aot_build.plan(store, wanted, sources.Digests(sources.dsl_version()), force), check, as_json)
        return
    with output.progress(len(wanted)) as progress:
        result = aot_build.build(store, wanted, jobs or os.cpu_count() or 1, force, progress)
    _show_result(result, as_json)
    if not result.ok:
        raise SystemExit(FAILED)


def _show_plan(plans: list[aot_build.SmPlan], check: bool, as_json: bool) -> None:
    todo = {variant.name: why for plan in plans for variant, why in plan.todo}
    dropped = {name: why for plan in plans for name, why in plan.dropped.items()}
    if as_json:
        output.data_json({"build": todo, "drop": dropped})
    else:
        rows = [("build", name, why) for name, why in todo.items()]
        output.table(("", "variant", "why"), rows + [("drop", name, why) for name, why in dropped.items()])
    output.log(f"{len(todo)} to build, {len(dropped)} to drop")
    if check and todo:
        raise SystemExit(OUT_OF_DATE)


def _show_result(result: aot_build.Result, as_json: bool) -> None:
    if as_json:
        output.data_json(vars(result))
    else:
        output.table(("variant",), [(name,) for name in result.built])
    for name, why in result.dropped.items():
        output.log(f"dropped {name}: {why}")
    for name, why in result.failed.items():
        output.log(f"FAILED {name}: {why}")
    for sm, why in result.unpublished.items():
        output.log(f"{sm} was not published: {why}")
    output.log(f"{len(result.built)} built, {len(result.up_to_date)} up to date, {len(result.failed)} failed")


@main.command("list")
@_filters
@_output
@_json
def list_(root: Path, as_json: bool, **filters: Any) -> None:
    """List variants of the registry and whether each is built: ok, missing, changed or damaged."""
    rows = _states(root, _chosen(**filters))
    if as_json:
        output.data_json([{"variant": name, "sm": sm, "state": state} for name, sm, state in rows])
    else:
        output.table(("variant", "sm", "state"), rows)


def _states(root: Path, wanted: list[Variant]) -> list[tuple[str, str, str]]:
    """Without the DSL, "changed" speaks of the sources alone: the DSL is taken to be the one that built."""
    try:
        installed = metadata.version(sources.DSL)
    except metadata.PackageNotFoundError:
        installed = ""
    rows, digests = [], {}
    for variant in wanted:
        manifest = mf.read_manifest(root / variant.sm) or {"variants": {}}
        dsl = installed or manifest.get("dsl_version", "")
        if dsl not in digests:
            digests[dsl] = sources.Digests(dsl)
        entry = manifest["variants"].get(variant.name)
        state = aot_build.out_of_date(root / variant.sm, entry, variant, digests[dsl])
        rows.append((variant.name, variant.sm, state or "ok"))
    return rows


def _asked_sms(root: Path, sms: tuple[str, ...]) -> tuple[str, ...]:
    if "all" in sms:
        return SMS
    found = _known_sms(sms) or aot_verify.built_sms(root)
    if not found:
        raise click.ClickException(f"{root} holds no set; run: {build_command('SM', root)}")
    return found


_sms = click.option("--gpu-arch", "sms", multiple=True, metavar="SM", help="Repeatable, or 'all'; default those built.")


@main.command()
@_sms
@_output
@click.option("--lock/--no-lock", default=True, help="Compare with lock.json, too.")
@click.option("--evidence", is_flag=True, help="Compare with the record of the GPU test run, too.")
@_json
def verify(root: Path, sms: tuple[str, ...], lock: bool, evidence: bool, as_json: bool) -> None:
    """Hash every file again: against the manifest, lock.json and, on request, evidence/SM.json."""
    problems = aot_verify.verify(root, _asked_sms(root, sms), lock, evidence)
    if as_json:
        output.data_json(problems)
    else:
        output.table(
            ("sm", "state"),
            [(sm, output.count(len(found), "problem") if found else "ok") for sm, found in problems.items()],
        )
    for note in aot_verify.evidence_notes(root, tuple(problems)) if evidence else ():
        output.log(note)
    for found in problems.values():
        for problem in found:
            output.log(problem)
    if any(problems.values()):
        raise SystemExit(FAILED)


@main.command("lock")
@_sms
@_output
def lock_(root: Path, sms: tuple[str, ...]) -> None:
    """Record the hashes of the built sets in lock.json, after a deliberate change of kernels or tools."""
    changed = aot_verify.write_lock(root, _asked_sms(root, sms))
    output.table(("variant",), [(name,) for name in changed])
    output.log(f"{len(changed)} hashes new or changed in {root / aot_verify.LOCK}")


@main.command()
@_sms
@_output
@click.option(
    "--dist",
    default="dist",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the wheel goes.",
)
def wheel(root: Path, sms: tuple[str, ...], dist: Path) -> None:
    """Pack the package and the built sets into one wheel, which needs no compiler to load."""
    asked = _asked_sms(root, sms)
    made = aot_wheel.make_wheel(root, asked, dist)
    output.table(("wheel",), [(made,)])
    output.log(f"{made.stat().st_size / 1e6:.1f} MB with the artifacts of {', '.join(asked)}")


@main.command()
@click.argument("variant")
@_output
@_json
def inspect(variant: str, root: Path, as_json: bool) -> None:
    """Show what is recorded of a built VARIANT: resources, tensor-core instructions, parameters."""
    for sm in aot_verify.built_sms(root):
        entry = aot_verify.load(root, sm)["variants"].get(variant)
        if entry is not None:
            break
    else:
        built = [name for sm in aot_verify.built_sms(root) for name in aot_verify.load(root, sm)["variants"]]
        near = difflib.get_close_matches(variant, built, n=5, cutoff=0.4)
        hint = f"near it are {', '.join(near)}; " if near else ""
        raise click.UsageError(f"{variant} is not one of the {len(built)} built in {root}; {hint}`list` shows all")
    if as_json:
        output.data_json(entry | {"sm": sm})
        return
    params = entry.pop("params")
    output.table(("", ""), [("sm", sm), *((key, _plain(value)) for key, value in entry.items())])
    output.table(
        ("parameter", "kind", "offset", "size"), [(p["name"], p["kind"], p["offset"], p["size"]) for p in params]
    )


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items()) or "none"
    return value


@main.command()
@_sms
@_output
def clean(root: Path, sms: tuple[str, ...]) -> None:
    """Remove built sets and what killed builds left; lock.json and evidence/ stay."""
    removed = Store(root).clean(_known_sms(sms) or SMS)
    output.table(("removed",), [(path,) for path in removed])
