"""What does the round itself cost: judging, tickets, receipts? One-row calls through the public class."""

from __future__ import annotations

import cProfile
import itertools
import pstats
import queue
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import gradquorum as gq
from benchmarks.measure import Timing, cell, digits, no_garbage_collection
from benchmarks.report import Floor, Options, Report, table
from gradquorum.engine import ReducerSpec, get_engine
from gradquorum.records import Contribution
from gradquorum.round import Round
from gradquorum.waiters import Ticket

IDS = np.array([3])
ROW = np.ones((1, 16), np.float32)
NUM_BLOCKS = 15
MICROSECOND = 1e-6
TARGET_MICROSECONDS = 4.0
LEAST_SECONDS = 1e-8
"""What the clock can tell: a call that seems to take less takes this much."""

Call = Callable[[], Any]
Pair = tuple[str, Call, str, Call]
"""Two calls in turn, and what they are called."""


def pairs(engine: str) -> list[Pair]:
    def accumulator() -> gq.SparseConditionalAccumulator:
        return gq.SparseConditionalAccumulator("float32", (10, 16), engine=engine)

    fifo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    plain, lending, named, stale = (accumulator() for _ in range(4))
    stale.set_global_step(2)
    receipt = plain.apply_grad(IDS, ROW)
    plain.discard()
    reducer = get_engine(engine).sparse_reducer(ReducerSpec(ROW.dtype, ROW.dtype, "MEAN"))
    blocks = [reducer.block(IDS, ROW)]
    accepted = gq.ApplyStatus.ACCEPTED
    clock = time.monotonic

    def python_call(at: float, *, limit: float = 0.0) -> bool:
        return at > limit

    round_ = Round(1)
    handle = round_.open()
    contribution = Contribution((blocks[0],), ((16,),), blocks[0].num_bytes)

    def take_from_round() -> None:
        ticket = Ticket(handle, 1, exact=False)
        round_.enqueue(ticket)
        round_.deliver(ticket)

    sequence = itertools.count()

    def named_apply() -> None:
        named.apply_grad(IDS, ROW, local_step=None, worker="w", sequence=next(sequence))

    return [
        ("SimpleQueue.put", lambda: fifo.put(receipt), "SimpleQueue.get", lambda: fifo.get()),
        ("yardstick: a Python function", lambda: python_call(1.0, limit=2.0), "yardstick: time.monotonic", clock),
        (
            "the round alone: offer",
            lambda: round_.offer(handle, contribution, None),
            "the round alone: take",
            take_from_round,
        ),
        (
            "apply_grad",
            lambda: plain.apply_grad(IDS, ROW, local_step=None),
            "take_grad",
            lambda: plain.take_grad(1),
        ),
        (
            "apply_grad, lending",
            lambda: lending.apply_grad(IDS, ROW, local_step=None, copy=False),
            "take_grad after lending",
            lambda: lending.take_grad(1),
        ),
        ("apply_grad, worker and sequence", named_apply, "take_grad of a named one", lambda: named.take_grad(1)),
        (
            "apply_grad, judged stale",
            lambda: stale.apply_grad(IDS, ROW, local_step=1),
            "num_accumulated",
            stale.num_accumulated,
        ),
        (
            "engine alone: block",
            lambda: reducer.block(IDS, ROW),
            "engine alone: merge",
            lambda: reducer.merge(blocks, (16,), 1),
        ),
        ("make a receipt", lambda: gq.ApplyReceipt(accepted, 0, 0, 1), "ask a receipt", receipt.__bool__),
    ]


def clock_seconds() -> float:
    """Return what reading the clock adds to a timed call, an empty lambda included."""
    now = time.perf_counter
    nothing = lambda: None  # noqa: E731 - like the calls that are timed
    laps = []
    for _ in range(500):
        start = now()
        nothing()
        laps.append(now() - start)
    return statistics.median(laps)


def time_pair(first: Call, second: Call, count: int) -> tuple[float, float]:
    """Return the median seconds of either call in a block of so many."""
    now = time.perf_counter
    laps_of_first, laps_of_second = [], []
    for _ in range(count):
        start = now()
        first()
        middle = now()
        second()
        end = now()
        laps_of_first.append(middle - start)
        laps_of_second.append(end - middle)
    return statistics.median(laps_of_first), statistics.median(laps_of_second)


def profile(engine: str) -> None:
    """Print where the time of one-row applies and takes goes."""
    apply, take = next((apply, take) for name, apply, _, take in pairs(engine) if name == "apply_grad")
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(20_000):
        apply()
        take()
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(30)


def run(options: Options) -> Report:
    engine = options.engines[0]
    report = Report(f"One-row calls, microseconds, median (quartiles) ({engine} engine)")
    timings: dict[str, Timing] = {}
    calls = pairs(engine)
    with no_garbage_collection():
        for _ in range(NUM_BLOCKS):
            for first_name, first, second_name, second in calls:
                clock = clock_seconds()  # right before: the processor's own clock changes, too
                for name, seconds in zip(
                    (first_name, second_name), time_pair(first, second, 200 if options.quick else 1000), strict=True
                ):
                    timings.setdefault(name, Timing()).samples.append(max(seconds - clock, 0.0))
    # Block by block, so that a change of the clock between blocks does not matter.
    pairs_of = [timings[name].samples for name in ("apply_grad", "take_grad", "SimpleQueue.put", "SimpleQueue.get")]
    in_queue_pairs = [
        (apply + take) / max(put + get, LEAST_SECONDS) for apply, take, put, get in zip(*pairs_of, strict=True)
    ]
    apply, take = timings["apply_grad"].median, timings["take_grad"].median
    rows = [[name, timing.cell(MICROSECOND)] for name, timing in timings.items()]
    report.text.append(table(["call", "us"], rows))
    own = [apply - timings["engine alone: block"].median, take - timings["engine alone: merge"].median]
    report.text.append(
        f"Apply and take together: {cell(in_queue_pairs)} times a put and get. Without the engine's "
        f"part: apply {digits(own[0] / MICROSECOND)}, take {digits(own[1] / MICROSECOND)} us."
    )
    for what, name in (("apply", "apply_grad"), ("take", "take_grad")):
        samples = [seconds / MICROSECOND for seconds in timings[name].samples]
        got = statistics.median(samples)
        report.floors.append(
            Floor(f"one-row {what}", got, TARGET_MICROSECONDS, at_least=False, unit="us", samples=samples)
        )
    report.data = {name: timing.to_json() for name, timing in timings.items()}
    report.data["times a put and get"] = in_queue_pairs
    if options.profile:
        profile(engine)
    return report
