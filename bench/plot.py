"""Draws bench/results: decode against batch, prefill against context and likeness, whole prefills, the parts of a
layer's step, what a launch costs the host, and the roofline: `python -m bench.plot --help`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bench.cases import Case, parse
from bench.results import ROOT, Row, latest, read, results_option
from qsa_cute.errors import QsaError

PLOTS = ROOT / "docs/plots"

# (colour, marker, label), in the order of the legend: Okabe and Ito's palette, told apart by marker and dash as well.
STYLES = {
    "ours": ("#0072B2", "o", "-", "qsa-cute"),
    "ours_lists": ("#E69F00", "P", "-.", "qsa-cute, from token lists"),
    "ours_rows": ("#56B4E9", "v", "--", "qsa-cute, row by row"),
    "vllm": ("#D55E00", "s", "-", "vLLM (Triton)"),
    "sglang": ("#CC79A7", "D", "--", "SGLang (Triton)"),
    "fa4": ("#009E73", "^", "-.", "FlashAttention-4, dense"),
    "torch": ("#000000", "x", ":", "cuDNN, dense"),
}
# Measured on the H200 by a device copy and by cuBLAS: what memory and tensor cores give in practice.
COPY_TBPS, MATMUL_TFLOPS = 4.25, 750.0

Results = Mapping[str, Mapping[str, Row]]
Points = list[tuple[float, float]]


def curves(
    results: Results, wanted: Callable[[Case], float | None], value: Callable[[Row], float | None]
) -> dict[str, Points]:
    """provider -> [(x, y)] ascending, of the cases that `wanted` gives an x; in the order of `STYLES`."""
    found: dict[str, Points] = {}
    for case_id, rows in results.items():
        x = wanted(parse(case_id))
        for provider, row in rows.items():
            y = value(row)
            if x is not None and y is not None and provider in STYLES:
                found.setdefault(provider, []).append((x, y))
    return {name: sorted(found[name]) for name in STYLES if name in found}


def _draw(axes: Any, lines: Mapping[str, Points], title: str, x: str, y: str) -> None:
    for name, points in lines.items():
        colour, marker, dash, label = STYLES[name]
        width = 2.2 if name == "ours" else 1.5
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, ls=dash, lw=width, ms=6, label=label)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3, which="major")


def _ticks(axes: Any, values: Iterable[float], text: Callable[[float], str]) -> None:
    places = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [text(place) for place in places])
    axes.minorticks_off()


def _tokens(value: float) -> str:
    return f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"


def _us(row: Row) -> float | None:
    return row.us


def _tflops(row: Row) -> float | None:
    return row.useful_tflops


def _xs(lines: Mapping[str, Points]) -> set[float]:
    return {x for points in lines.values() for x, _ in points}


def decode(plt: Any, results: Results) -> Any:
    """Time and bandwidth against batch, 64K context."""

    def batch(case: Case) -> float | None:
        return case.batch if case.family == "decode" and case.dtype == "bf16" and case.ctx == 65536 else None

    times, rates = curves(results, batch, _us), curves(results, batch, lambda row: row.tbps)
    if not times:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    _draw(left, times, "Decode, 64K context", "sequences", "microseconds a step (log)")
    _draw(right, rates, "Decode, bandwidth of the selected K and V", "sequences", "TB/s")
    right.axhline(COPY_TBPS, color="#777777", lw=1, ls=":")
    right.text(max(_xs(rates)), COPY_TBPS, "device copy ", ha="right", va="bottom", color="#555555", fontsize=9)
    right.set_ylim(0, COPY_TBPS * 1.12)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}"))
    left.set_yticks((5, 10, 20, 50, 100, 200))
    for axes in (left, right):
        _ticks(axes, _xs(times), lambda value: f"{value:g}")
    left.legend()
    return figure


def prefill(plt: Any, results: Results) -> Any:
    """Useful TFLOP/s of 4096 rows against context, and against how alike neighbouring rows select."""

    def at(rho: float | None = None, ctx: int | None = None) -> Callable[[Case], float | None]:
        def x(case: Case) -> float | None:
            if case.family != "prefill" or case.rows != 4096 or case.dtype != "bf16":
                return None
            if ctx is None:
                return case.ctx if case.rho == rho else None
            return case.rho if case.ctx == ctx else None

        return x

    by_context = curves(results, at(rho=0.995), _tflops)
    by_rho = curves(results, at(ctx=32768), _tflops)
    if not by_context or not by_rho:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    _draw(left, by_context, "Prefill of 4096 rows, rho 0.995", "context (tokens)", "useful TFLOP/s")
    _ticks(left, _xs(by_context), _tokens)
    # Even steps: what matters of rho lies close to 1.
    places = sorted(_xs(by_rho))
    even: dict[str, Points] = {name: [(places.index(x), y) for x, y in points] for name, points in by_rho.items()}
    _draw(
        right,
        even,
        "Prefill of 4096 rows, 32K context",
        "rho: likeness of neighbouring rows' block scores (not to scale)",
        "",
    )
    right.set_xticks(range(len(places)), [f"{place:g}" for place in places])
    left.set_ylim(bottom=0)
    right.legend()
    return figure


def prefill_full(plt: Any, results: Results) -> Any:
    """Time of a whole prefill, every row from the first, beside the dense kernels."""

    def context(case: Case) -> float | None:
        return case.ctx if case.family == "prefill_full" and case.dtype == "bf16" else None

    lines = curves(results, context, lambda row: row.us / 1e3)
    if not lines:
        return None
    figure, axes = plt.subplots(figsize=(6.5, 4.4))
    _draw(axes, lines, "Attention of a whole prefill, rho 0.995", "context (tokens)", "milliseconds (log)")
    _ticks(axes, _xs(lines), _tokens)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.legend()
    return figure


def roofline(plt: Any, results: Results) -> Any:
    """Useful TFLOP/s against useful FLOPs a byte that must move, of every attention case."""

    def intensity(*families: str) -> Callable[[Case], float | None]:
        return lambda case: case.flops / case.bytes if case.family in families else None

    lines = curves(results, intensity("decode", "prefill", "prefill_full"), _tflops)
    lines = {name: points for name, points in lines.items() if name in ("ours", "vllm", "sglang")}
    if not lines:
        return None
    figure, axes = plt.subplots(figsize=(6.5, 4.4))
    low, high = min(_xs(lines)) / 2, max(_xs(lines)) * 2
    ridge = MATMUL_TFLOPS / COPY_TBPS
    roof: Sequence[float] = [low, min(max(ridge, low), high), high]
    axes.plot(roof, [min(x * COPY_TBPS, MATMUL_TFLOPS) for x in roof], color="#777777", lw=1.5)
    beside = ridge / 3
    axes.text(
        beside, beside * COPY_TBPS, f"device copy, {COPY_TBPS:g} TB/s  ", ha="right", va="bottom", color="#555555"
    )
    axes.text(high, MATMUL_TFLOPS * 1.08, f"cuBLAS, {MATMUL_TFLOPS:g} TFLOP/s", ha="right", color="#555555")
    for name, points in lines.items():
        colour, marker, _, label = STYLES[name]
        axes.scatter(*zip(*points, strict=True), color=colour, marker=marker, s=36, alpha=0.8, label=label, zorder=3)
    axes.set(xscale="log", yscale="log", xlabel="useful FLOPs a byte that must move", ylabel="useful TFLOP/s")
    axes.set_title("Attention against the H200's roofline: decode left, prefill right")
    axes.set_ylim(top=MATMUL_TFLOPS * 1.8)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


PARTS = {"ours_indexer": ("#0072B2", "indexer"), "ours_attention": ("#E69F00", "attention")}


def layer(plt: Any, results: Results) -> Any:
    """The parts of a layer's decode steps and prefill chunk, each timed by itself, and the whole beside them."""
    found = []
    for case_id, rows in results.items():
        case = parse(case_id)
        if case.family in ("layer_decode", "layer_prefill") and {"ours", *PARTS} <= rows.keys():
            what = f"{case.rows} rows" if case.family == "layer_prefill" else f"decode of {case.batch}"
            found.append((f"{what}\n{_tokens(case.ctx)} context", rows))
    if not found:
        return None
    figure, panels = plt.subplots(1, len(found), figsize=(2.6 * len(found), 4.2), squeeze=False)
    for axes, (label, rows) in zip(panels[0], found, strict=True):
        bottom = 0.0
        for name, (colour, text) in PARTS.items():
            axes.bar(0, rows[name].us, bottom=bottom, color=colour, width=0.6, label=f"{text} by itself")
            axes.text(0, bottom + rows[name].us / 2, f"{rows[name].us:.3g}", ha="center", va="center", color="white")
            bottom += rows[name].us
        axes.bar(1, rows["ours"].us, color="#777777", width=0.6, label="whole layer")
        axes.text(1, rows["ours"].us / 2, f"{rows['ours'].us:.4g}", ha="center", va="center", color="white")
        axes.set(title=label, xticks=[], xlim=(-0.6, 1.6))
        axes.title.set_size(10)
    panels[0][0].set_ylabel("microseconds")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def host(plt: Any, results: Results) -> Any:
    """Microseconds of the host a launch."""
    rows = results.get("host/launch", {})
    bars = [(label, rows[name].us) for name, label in HOST.items() if name in rows]
    if "ours" not in rows or len(bars) < 2:
        return None
    figure, axes = plt.subplots(figsize=(6.5, 1.9))
    places = range(len(bars), 0, -1)
    axes.barh(
        places, [us for _, us in bars], color=["#0072B2" if label == HOST["ours"] else "#999999" for label, _ in bars]
    )
    for place, (_, us) in zip(places, bars, strict=True):
        axes.text(us, place, f" {us:.3g}", va="center")
    axes.set_yticks(places, [label for label, _ in bars])
    axes.set(title="What a launch costs the host", xlabel="microseconds")
    return figure


HOST = {"bare": "cuLaunchKernel", "ours": "SparseDecodeRunner.run", "triton": "a Triton launch"}
FIGURES = {
    "decode": decode,
    "prefill": prefill,
    "prefill_full": prefill_full,
    "layer": layer,
    "host": host,
    "roofline": roofline,
}


def draw(rows: Iterable[Row], output: Path) -> list[Path]:
    """Write what the rows suffice for as PNG files.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    results, written = latest(rows), []
    output.mkdir(parents=True, exist_ok=True)
    for name, make in FIGURES.items():
        figure = make(plt, results)
        if figure is not None:
            written.append(output / f"{name}.png")
            if name != "layer":  # its legend has a place of its own
                figure.tight_layout()
            figure.savefig(written[-1], dpi=130)
            plt.close(figure)
    return written


EPILOG = f"""\b
Example:
  python -m bench.plot --results bench/results/h200.jsonl --output /tmp/plots

Figures: {", ".join(FIGURES)}; those that the results suffice for. Providers: {", ".join(STYLES)}.

Exit codes: 0 drawn; 1 a line is no result, or matplotlib is missing; 2 usage.
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@results_option
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=PLOTS,
    show_default=True,
    help="Folder of the PNG files; those of the same names are replaced.",
)
def main(results: Path, output: Path) -> None:
    """Draw the last measurement of every case. The files' names go to stdout."""
    try:
        written = draw(read(results), output)
    except QsaError as error:
        raise click.ClickException(str(error)) from None
    except ImportError as error:
        raise click.ClickException(f"plots need matplotlib: {error}") from None
    for path in written:
        click.echo(path)


if __name__ == "__main__":
    main()
