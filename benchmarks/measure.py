"""Timing: systems take turns, so that whatever disturbs the machine disturbs them all."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

TURN_SECONDS = 0.005
"""A turn repeats a short job this long, so that every system runs warm."""
WARM_SECONDS = 0.05
"""A turn of a job that takes no longer begins with a run that is not timed."""
SETTLE_SECONDS = 0.002
"""Pause between turns: the threads of the system before may still be spinning."""


@dataclass
class Timing:
    """Seconds of one call, one sample per turn.

    Attributes:
        samples: seconds.
        times: when each was taken, if that is known.
    """

    samples: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quartiles(self.samples)

    def cell(self, unit: float) -> str:
        """Return the median and the quartiles in units of so many seconds."""
        return cell([sample / unit for sample in self.samples])

    def to_json(self) -> dict[str, object]:
        low, high = self.quartiles
        return {"median_s": self.median, "quartiles_s": [low, high], "num_samples": len(self.samples)}


def ratios(above: Timing, below: Timing) -> list[float]:
    """Return how many times longer the one takes, a ratio for each sample of the one that has fewer.

    The other's seconds at that moment are read off the line through its samples. So a clock that doubles or
    halves between turns cancels out, which it does not in the ratio of two medians.
    """
    if len(above.samples) <= len(below.samples):
        return list(np.array(above.samples) / np.interp(above.times, below.times, below.samples))
    return list(np.interp(below.times, above.times, above.samples) / np.array(below.samples))


def quartiles(samples: Collection[float]) -> tuple[float, float]:
    if len(samples) < 2:
        return (statistics.median(samples),) * 2
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def cell(samples: Collection[float]) -> str:
    """Return the median, and the quartiles of three samples or more."""
    low, high = quartiles(samples)
    spread = f" ({digits(low)}-{digits(high)})" if len(samples) > 2 else ""
    return f"{digits(statistics.median(samples))}{spread}"


def digits(x: float) -> str:
    """Return three significant digits, not in exponents."""
    if not math.isfinite(x) or x == 0:
        return f"{x:g}"
    return f"{x:.{max(0, 2 - math.floor(math.log10(abs(x))))}f}"


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def seconds_of(job: Callable[[], object]) -> float:
    """Time one call. Freeing its result is not part of it."""
    start = time.perf_counter()
    result = job()
    seconds = time.perf_counter() - start
    del result
    return seconds


def _turn(job: Callable[[], object], expected: float, timing: Timing) -> None:
    time.sleep(SETTLE_SECONDS)
    repeats = max(1, round(TURN_SECONDS / expected))
    if expected <= WARM_SECONDS:
        job()  # brings caches back
    start = time.perf_counter()
    timing.samples.append(sum(seconds_of(job) for _ in range(repeats)) / repeats)
    timing.times.append((start + time.perf_counter()) / 2)


def _cost(expected: float) -> float:
    """Return about how long a turn takes."""
    return max(TURN_SECONDS, expected) + (expected if expected <= WARM_SECONDS else 0.0) + SETTLE_SECONDS


def interleave(
    jobs: Mapping[str, Callable[[], object]],
    *,
    budget: float,
    quick: bool,
    first: Mapping[str, float] | None = None,
    anchors: Collection[str] = (),
) -> dict[str, Timing]:
    """Time jobs within a budget of seconds: passes over all of them, each in another order.

    A job too slow to take part in every pass sits out passes evenly; it takes part in three at least, in a quick
    run in one.

    Args:
        jobs: what to time.
        budget: seconds for all of them together, roughly.
        quick: whether to make do with fewer passes.
        first: seconds of the first run of each job, if that is over.
        anchors: jobs that the others are compared with: they have a turn before and after each turn of another.
    """
    num_passes, least = (5, 1) if quick else (15, 3)
    timings = {name: Timing() for name in jobs}
    shuffle = random.Random(2021).shuffle
    with no_garbage_collection():
        expected = {}
        for name, job in jobs.items():
            seconds = first[name] if first else seconds_of(job)
            expected[name] = seconds_of(job) if seconds < 0.5 else seconds
        around = sum(_cost(expected[name]) for name in anchors)
        others = [name for name in jobs if name not in anchors]
        share = budget / max(1, len(others)) / num_passes
        period = {
            name: min(num_passes // least, math.ceil((_cost(expected[name]) + around) / share)) for name in others
        }

        def turns(names: Collection[str]) -> None:
            shuffled = list(names)
            shuffle(shuffled)
            for name in shuffled:
                _turn(jobs[name], expected[name], timings[name])

        for i in range(num_passes):
            due = [name for name in others if i % period[name] == 0]
            shuffle(due)
            for name in due:
                turns(anchors)
                turns([name])
        turns(anchors)
    return timings
