"""Every target of the registry against the latest results: met, by how much not, or not measured yet.
`python -m bench.targets --help`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from bench.cases import OURS, Case, registry
from bench.results import ROOT, Row, latest, read, results_option
from qsa_cute.errors import QsaError

PAGE = ROOT / "docs/targets.md"
HEAD = """# Targets

Every target of `bench/cases.py` and the latest run that measured it, on one NVIDIA H200; us a call, the peer in the
same run (vLLM's Triton kernel, or the faster of those that the target names). "Not measured": no row of
`bench/results/h200.jsonl` yet; some were timed in trials that the lab books report. Why what is short is short:
[performance.md](performance.md) and the lab books beside it. Written by `python -m bench.targets`.

| case | qsa-cute | peer | | target | |
|---|---|---|---|---|---|
"""
NAMES = {"fa4": "FlashAttention-4", "torch": "cuDNN", "bare": "cuLaunchKernel"}  # of peers other than vLLM


def _us(row: Row | None) -> str:
    return "" if row is None else f"{row.us:.3g}" if row.us < 100 else f"{row.us:.0f}"


def line(case: Case, rows: Mapping[str, Row]) -> str:
    """One case of the table."""
    ours = rows.get(OURS)
    named = [name for name in case.target.peers if name in rows] if case.target else []
    peer = min(named, key=lambda name: rows[name].us) if named else "vllm"
    met = case.target.met({name: row.us for name, row in rows.items()}) if case.target and ours else None
    verdict = "not measured" if met is None else "met" if met else "short"
    ratio = f"{rows[peer].us / ours.us:.2f}x" if ours and peer in rows else ""
    beside = " ".join(part for part in (_us(rows.get(peer)), NAMES.get(peer, "") if peer in rows else "") if part)
    target = str(case.target)
    for name, text in NAMES.items():
        target = target.replace(name, text)
    return f"| {case.id} | {_us(ours)} | {beside} | {ratio} | {target} | {verdict} |"


def page(results: Mapping[str, Mapping[str, Row]]) -> str:
    """The whole page, its counts last."""
    lines = [line(case, results.get(case.id, {})) for case in registry() if case.target]
    ends = [one.rsplit("|", 2)[1].strip() for one in lines]
    counts = ", ".join(f"{ends.count(what)} {what}" for what in ("met", "short", "not measured"))
    return HEAD + "\n".join(lines) + f"\n\n{len(lines)} targets: {counts}.\n"


EPILOG = """\b
Example:
  python -m bench.targets --results bench/results/h200.jsonl --output /tmp/targets.md

Providers: the page has ours and vllm; a target may be over another, as its text says.

Exit codes: 0 written, whether the targets are met or not; 1 a line is no result; 2 usage.
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@results_option
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=PAGE,
    show_default=True,
    help="The page to write.",
)
def main(results: Path, output: Path) -> None:
    """Write the table of targets. The page's name goes to stdout."""
    try:
        output.write_text(page(latest(read(results))))
    except (QsaError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(output)


if __name__ == "__main__":
    main()
