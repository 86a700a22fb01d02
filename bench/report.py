"""What the command prints: rich on a terminal, plain lines otherwise."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import click

from bench.cases import OURS, Case
from bench.results import Row

HEADINGS = ("case", "provider", "us", "IQR", "TFLOP/s", "TB/s", "vLLM's time / this", "target of ours")


@dataclass
class Outcome:
    """What became of a case.

    Attributes:
        rows: what was measured.
        errors: provider -> largest absolute error of its check.
        notes: "provider: why it cannot".
        failures: "provider: what went wrong"; the exit code depends on these.
    """

    case: Case
    rows: list[Row] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.failures)

    def fail(self, provider: str, what: str) -> None:
        self.failures.append(f"{provider}: {what}")

    def verdict(self) -> str:
        """The target, with met or short."""
        if self.case.target is None:
            return ""
        met = self.case.target.met({row.provider: row.us for row in self.rows})
        return f"{self.case.target} {'not measured' if met is None else 'met' if met else 'short'}"


def cells(outcome: Outcome) -> list[tuple[str, ...]]:
    """One line a provider, as text."""
    times = {row.provider: row.us for row in outcome.rows}
    return [
        (
            row.case,
            row.provider,
            f"{row.us:.2f}",
            f"{row.us_iqr:.2f}",
            f"{row.useful_tflops:.0f}" if row.useful_tflops else "",
            f"{row.tbps:.2f}" if row.tbps else "",
            f"{times['vllm'] / row.us:.2f}" if "vllm" in times else "",
            outcome.verdict() if row.provider == OURS else "",
        )
        for row in outcome.rows
    ]


def rich_terminal() -> bool:
    """Whether stdout is a terminal and rich is there."""
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return sys.stdout.isatty()


def plain(outcome: Outcome) -> None:
    """Lines of a case, with units, as soon as it is done."""
    for case, provider, us, iqr, tflops, tbps, ratio, target in cells(outcome):
        parts = [f"{case:<38} {provider:<14} {us:>10} us  IQR {iqr}"]
        parts += [f"{tflops} TFLOP/s"] if tflops else []
        parts += [f"{tbps} TB/s"] if tbps else []
        parts += [f"{ratio}x vllm"] if ratio else []
        parts += [f"target {target}"] if target else []
        click.echo("  ".join(parts))


def table(outcomes: Iterable[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    _print(
        Table(*HEADINGS),
        Console(),
        [
            tuple(_coloured(text) if i == len(HEADINGS) - 1 else text for i, text in enumerate(line))
            for outcome in outcomes
            for line in cells(outcome)
        ],
    )


def _print(grid: object, console: object, lines: Sequence[tuple[str, ...]]) -> None:
    for line in lines:
        grid.add_row(*line)  # type: ignore[attr-defined]
    console.print(grid)  # type: ignore[attr-defined]


def _coloured(target: str) -> str:
    colour = "green" if target.endswith(" met") else "red" if target.endswith(" short") else ""
    return f"[{colour}]{target}[/{colour}]" if colour else target


def notes(outcome: Outcome) -> None:
    """What is missing and what failed, on stderr."""
    for note in outcome.notes:
        click.echo(f"{outcome.case.id}: without {note}", err=True)
    for failure in outcome.failures:
        click.echo(f"{outcome.case.id}: FAILED {failure}", err=True)


def cases(known: Sequence[Case], as_json: bool = False) -> None:
    """The list of cases on stdout, with their targets; as JSON every field of `Case`."""
    for case in known:
        click.echo(json.dumps(asdict(case)) if as_json else f"{case.id:<38} {case.target or ''}".rstrip())
