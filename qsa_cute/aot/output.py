"""Where the command line's words go: data to stdout, logs to stderr, rich only where a terminal reads it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from qsa_cute.aot.build import Progress
from qsa_cute.variants import Variant


def log(message: str) -> None:
    click.echo(message, err=True)


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def data_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, sort_keys=True))


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on a terminal; elsewhere one line a row, tab-separated, without headers."""
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(map(str, row)))
        return
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*headers, box=None, pad_edge=False)
    for row in rows:
        drawn.add_row(*map(str, row))
    Console().print(drawn)


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """Reports each variant as it is done: a bar on a terminal, lines elsewhere."""

    def line(variant: Variant, seconds: float, problem: str) -> None:
        log(f"{'FAILED' if problem else 'built'} {variant.name} ({seconds:.1f} s)")

    if not sys.stderr.isatty():
        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)

        def advance(variant: Variant, seconds: float, problem: str) -> None:
            if problem:
                bar.console.print(f"FAILED {variant.name} ({seconds:.1f} s)")
            bar.update(task, advance=1, description=variant.name)

        yield advance
