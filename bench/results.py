"""The JSON lines of bench/results: one measurement of one provider on one case each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import click

from bench.cases import registry
from qsa_cute.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results/h200.jsonl"
# Of the commands that read them.
results_option = click.option(
    "--results",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=RESULTS,
    show_default=True,
    help="JSON lines that `bench.run --append` wrote.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line.

    Attributes:
        run_id: the same for all that one process measured; peers are compared within a run.
        date: UTC, ISO 8601.
        device: the driver's name of it.
        source_digest: of the artifacts that were measured.
        case, provider: ids.
        us: median microseconds of one launch.
        us_iqr: interquartile range of the samples.
        useful_tflops, tbps: see `cases`; None where the case has none of the kind.
    """

    run_id: str
    date: str
    device: str
    source_digest: str
    case: str
    provider: str
    us: float
    us_iqr: float
    useful_tflops: float | None
    tbps: float | None

    def line(self) -> str:
        """JSON without a newline; figures to four digits."""
        return json.dumps({key: _short(value) for key, value in asdict(self).items()})

    @staticmethod
    def of(line: str) -> Row:
        """Raises ArgumentError: the line is not one."""
        try:
            values = json.loads(line)
            row = Row(**values)
        except (json.JSONDecodeError, TypeError) as error:
            keys = ", ".join(field.name for field in fields(Row))
            raise ArgumentError(f"{line[:60]!r} is no result: {error}; it takes an object of {keys}") from None
        if not isinstance(row.us, int | float) or not row.us > 0:
            raise ArgumentError(f"{line[:60]!r} is no result: us is {row.us!r}, it takes microseconds above 0")
        return row


def _short(value: object) -> object:
    if not isinstance(value, float) or not value:
        return value
    return round(value, max(0, 3 - math.floor(math.log10(abs(value)))))


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add lines to a file, made with its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(row.line() + "\n" for row in rows)


def read(path: Path) -> list[Row]:
    """All lines. Raises ArgumentError: one is no result; the message has its number."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                rows.append(Row.of(line))
            except ArgumentError as error:
                raise ArgumentError(f"{path}:{number}: {error}") from None
    return rows


def latest(rows: Iterable[Row]) -> Mapping[str, Mapping[str, Row]]:
    """case -> provider -> its row, of one run, since figures of different runs do not compare: the last that measured
    ours and all peers that the case's target is over; else the last with ours; else the last."""
    peers = {case.id: set(case.target.peers) for case in registry() if case.target and case.target.ratio}
    by_case: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        by_case.setdefault(row.case, {}).setdefault(row.run_id, {})[row.provider] = row
    found = {}
    for case, runs in by_case.items():
        with_ours = [run for run in runs.values() if "ours" in run]
        complete = [run for run in with_ours if peers.get(case, set()) <= run.keys()]
        found[case] = (complete or with_ours or list(runs.values()))[-1]
    return found
