"""Timing: systems take turns, so that whatever disturbs the machine disturbs them all."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

TURN_SECONDS = 0.005
"""A turn repeats a short job this long, so that every system runs warm."""
SETTLE_SECONDS = 0.002
"""Pause between turns: the threads of the system before may still be spinning."""


@dataclass
class Timing:
    """Seconds of one call, one sample per turn."""

    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.samples) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def cell(self, unit: float) -> str:
        """Return the median and the quartiles in units of so many seconds."""
        low, high = self.quartiles
        spread = f" ({digits(low / unit)}-{digits(high / unit)})" if len(self.samples) > 2 else ""
        return f"{digits(self.median / unit)}{spread}"

    def to_json(self) -> dict[str, object]:
        low, high = self.quartiles
        return {"median_s": self.median, "quartiles_s": [low, high], "num_samples": len(self.samples)}


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


def _turn(job: Callable[[], object], expected: float) -> float:
    repeats = max(1, round(TURN_SECONDS / expected))
    if repeats > 1:
        job()  # brings caches back
    return sum(seconds_of(job) for _ in range(repeats)) / repeats


def interleave(
    jobs: Mapping[str, Callable[[], object]], *, budget: float, quick: bool, first: Mapping[str, float] | None = None
) -> dict[str, Timing]:
    """Time jobs round-robin within a budget of seconds.

    A job too slow to take part in every pass sits out passes evenly and takes part in three at least; in a
    quick run the first run of one that takes seconds stands for it.

    Args:
        jobs: what to time.
        budget: seconds for all of them together, roughly.
        quick: whether to make do with fewer passes.
        first: seconds of the first run of each job, if that is over.
    """
    num_passes = 5 if quick else 15
    share = budget / len(jobs) / num_passes
    timings = {name: Timing() for name in jobs}
    expected, period = {}, {}
    with no_garbage_collection():
        for name, job in jobs.items():
            seconds = first[name] if first else seconds_of(job)
            if quick and seconds > 1.0:
                timings[name].samples.append(seconds)
                continue
            expected[name] = seconds_of(job) if seconds < 0.5 else seconds
            period[name] = min(num_passes // 2, math.ceil(max(TURN_SECONDS, expected[name]) / share))
        for i in range(num_passes):
            for name, job in jobs.items():
                if name in period and i % period[name] == 0:
                    time.sleep(SETTLE_SECONDS)
                    timings[name].samples.append(_turn(job, expected[name]))
    return timings
