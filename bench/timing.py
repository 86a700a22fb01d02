"""The clock: providers in turn in one process, by events on the device, with the host ahead of it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

GRAPH_BELOW_US = 1000.0  # a longer launch hides what the host does for the next; a shorter one is replayed
SAMPLE_US = 300.0  # a sample has at least so much work, so that the gap between two samples does not count
LEAD_CYCLES = 400_000  # the device waits about 0.2 ms before each round, and the host gets ahead
MIN_ROUNDS, MAX_ROUNDS = 5, 60


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch: median and interquartile range of the samples."""

    us: float
    iqr: float

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Timing(middle, high - low)


@dataclass(frozen=True)
class _Sample:
    """What is timed at once: `play` makes `launches` launches."""

    play: Callable[[], object]
    launches: int


def warm_up(milliseconds: float = 500.0) -> None:
    """Raise the clocks: dense work for about that long."""
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    spent = 0.0
    while spent < milliseconds:
        spent += sum(_events([lambda: square @ square] * 20)) / 1e3


def measure(works: Mapping[str, Sequence[Callable[[], object]]], seconds: float) -> dict[str, Timing]:
    """Time each provider's launches, one sample of each in every round.

    Args:
        works: provider -> launches of its rotation.
        seconds: about how long the rounds may take; there are 5 at least.
    """
    if not works:
        return {}
    samples = {name: _sample(list(launches)) for name, launches in works.items()}
    plays = [sample.play for sample in samples.values()]
    for _ in range(2):
        round_us = sum(_events(plays))
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds * 1e6 / round_us)))
    taken = [_events(plays) for _ in range(rounds)]
    return {
        name: Timing.of([times[i] / sample.launches for times in taken])
        for i, (name, sample) in enumerate(samples.items())
    }


def _events(plays: Sequence[Callable[[], object]]) -> list[float]:
    """Microseconds of each, run one after another without the host waiting between them."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(plays) + 1)]
    torch.cuda._sleep(LEAD_CYCLES)
    marks[0].record()
    for play, mark in zip(plays, marks[1:], strict=True):
        play()
        mark.record()
    marks[-1].synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in itertools.pairwise(marks)]


def _sample(launches: list[Callable[[], object]]) -> _Sample:
    """One pass over the rotation, or several in a graph where launches are short."""

    def one_pass() -> None:
        for launch in launches:
            launch()

    one_pass()
    if min(_events([one_pass] * 2)) / len(launches) >= GRAPH_BELOW_US:
        return _Sample(one_pass, len(launches))
    graph = _captured(launches)
    graph.replay()
    passes = max(1, round(SAMPLE_US / min(_events([graph.replay] * 3)) + 0.5))
    if passes > 1:
        graph = _captured(launches * passes)
    return _Sample(graph.replay, len(launches) * passes)


def _captured(launches: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for launch in launches:
            launch()
    return graph
