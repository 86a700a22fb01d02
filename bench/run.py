"""Times ours and the peers on the cases, in turn in one process; a result that is wrong is an error, not a number.
`python -m bench.run --help` has examples, providers and exit codes.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from bench import report
from bench.cases import OURS, PROVIDER_NAMES, Case, registry, select
from bench.report import Outcome
from bench.results import Row, append
from qsa_cute.errors import ArgumentError, QsaError

if TYPE_CHECKING:
    from bench.work import Work

SECONDS, QUICK_SECONDS = 0.6, 0.1  # of rounds a case
NO_DEVICE = 3

EPILOG = f"""\b
Examples:
  python -m bench.run --list --case 'decode/*'
  python -m bench.run --case 'prefill/*' --case decode/ctx65536/b1 --append bench/results/h200.jsonl
  python -m bench.run --all --providers ours,vllm --quick

Providers: {", ".join(PROVIDER_NAMES)}. Not every one computes every case.

Exit codes: 0 all that ran was right; 1 a result was wrong or one of ours failed; 2 usage; {NO_DEVICE} no GPU, or no
artifacts for it.
"""


@dataclasses.dataclass(frozen=True)
class Session:
    """What all rows of one process have in common."""

    run_id: str
    date: str
    device: str
    source_digest: str

    def row(self, case: Case, provider: str, us: float, iqr: float) -> Row:
        rates = (case.tflops(us), case.tbps(us))
        return Row(self.run_id, self.date, self.device, self.source_digest, case.id, provider, us, iqr, *rates)


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.option("--case", "patterns", multiple=True, metavar="GLOB", help="Cases to run; may be given again.")
@click.option("--all", "everything", is_flag=True, help="Run every case of the registry.")
@click.option("--providers", metavar="NAMES", help="Only these, separated by commas; default all.")
@click.option("--list", "listing", is_flag=True, help="List the cases and their targets; needs no GPU.")
@click.option("--append", "path", type=click.Path(dir_okay=False, path_type=Path), help="Add JSON lines to this file.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON lines, one a measurement or, with --list, one a case."
)
@click.option("--quick", is_flag=True, help=f"{QUICK_SECONDS} s of rounds a case in place of {SECONDS}.")
def main(
    patterns: tuple[str, ...],
    everything: bool,
    providers: str | None,
    listing: bool,
    path: Path | None,
    as_json: bool,
    quick: bool,
) -> None:
    """Time ours and the peers on the cases of the registry. Data goes to stdout, the rest to stderr."""
    try:
        cases = select(patterns) if patterns else registry()
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None
    if listing:
        report.cases(cases, as_json)
        return
    if not patterns and not everything:
        raise click.UsageError("nothing to run: give --case GLOB or --all; --list shows the cases")
    chosen = providers.split(",") if providers else None
    if unknown := set(chosen or ()) - set(PROVIDER_NAMES):
        raise click.UsageError(f"no provider {', '.join(sorted(unknown))}; there are {', '.join(PROVIDER_NAMES)}")
    session = _session()
    outcomes = []
    for case in cases:
        outcome = run_case(case, session, chosen, QUICK_SECONDS if quick else SECONDS)
        if path:
            append(path, outcome.rows)
        if as_json:
            for row in outcome.rows:
                click.echo(row.line())
        elif not report.rich_terminal():
            report.plain(outcome)
        report.notes(outcome)
        outcomes.append(outcome)
    if not as_json and report.rich_terminal():
        report.table(outcomes)
    sys.exit(1 if any(outcome.failed for outcome in outcomes) else 0)


def _session() -> Session:
    try:
        import torch
    except ImportError:
        _no_device("it needs torch, which does not import")
    from bench.device import missing

    reason = missing()
    if reason:
        _no_device(f"it needs a CUDA device, and {reason}; --list shows the cases without one")
    from bench.timing import warm_up
    from qsa_cute.runtime import default_loader
    from qsa_cute.runtime import sm as sm_rules

    try:
        store, capability = default_loader().store, torch.cuda.get_device_capability()
        built = sm_rules.preference(store.sms(), capability)
        if not built:
            _no_device(
                f"no artifacts for compute capability {capability}; there are {', '.join(store.sms()) or 'none'}"
            )
        digest = store.read(built[0]).source_digest
    except QsaError as error:
        _no_device(str(error))
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    run_id = f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:4]}"
    warm_up()
    return Session(run_id, now.isoformat(), torch.cuda.get_device_name(), digest)


def _no_device(reason: str) -> NoReturn:
    click.echo(f"bench cannot run: {reason}", err=True)
    sys.exit(NO_DEVICE)


def run_case(case: Case, session: Session, providers: Sequence[str] | None, seconds: float) -> Outcome:
    """Check and time every provider that can compute the case."""
    import torch

    outcome = Outcome(case)
    stream = torch.cuda.Stream()  # not the default one, which cannot be captured
    with torch.cuda.stream(stream):
        try:
            _measure(outcome, session, providers, seconds)
        except (QsaError, RuntimeError) as error:
            outcome.fail(OURS, f"{type(error).__name__}: {error}")
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return outcome


def _measure(outcome: Outcome, session: Session, providers: Sequence[str] | None, seconds: float) -> None:
    from bench.providers import MAKERS
    from bench.timing import measure

    case = outcome.case
    if case.family == "host":
        from bench.host import launch_costs

        timings = launch_costs()
    else:
        # Inputs and works stay alive while they are timed: launches know addresses only.
        given = MAKERS[case.family](case)
        works = _checked(outcome, given, providers)
        timings = measure({name: work.launches for name, work in works.items()}, seconds)
        del works, given
    for name, timing in timings.items():
        if not providers or name in providers:
            outcome.rows.append(session.row(case, name, timing.us, timing.iqr))


def _checked(outcome: Outcome, given: object, providers: Sequence[str] | None) -> dict[str, Work]:
    from bench.providers import PROVIDERS
    from bench.work import UnavailableError, WrongResultError

    case = outcome.case
    found: dict[str, Work] = {}
    for name, make in PROVIDERS[case.family].items():
        if providers and name not in providers:
            continue
        try:
            work = make(case, given)
            outcome.errors[name] = work.check()
            found[name] = work
        except UnavailableError as reason:
            outcome.notes.append(f"{name}: {reason}")
        except WrongResultError as error:
            outcome.fail(name, f"wrong result: {error}")
        except Exception as error:  # a peer's code may raise anything; the case goes on without it
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if name.startswith(OURS):
                outcome.fail(name, text)
            else:
                outcome.notes.append(f"{name}: {text}")
    return found


if __name__ == "__main__":
    main()
