"""How long does it take to apply all gradients of a round and take once, beside what else does that job?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import gradquorum as gq
from benchmarks import phases, rivals
from benchmarks.cases import CASES, Case, Gradient, row_counts
from benchmarks.measure import Timing, cell, interleave, ratios
from benchmarks.report import Floor, Options, Report, table

COPYTO = "np.copyto"
BUDGET_SECONDS = 12.0
QUICK_BUDGET_SECONDS = 1.5

# Least ratios, other / ours: (TF op, best other rival).
FLOORS = {
    "tiny": (20.0, 2.0),
    "small": (20.0, 2.0),
    "mid": (10.0, 1.3),
    "large": (20.0, 2.0),
    "many": (100.0, 2.0),
    "wide": (10.0, 2.0),
    "thin": (5.0, 1.5),
    "raw": (5.0, 2.0),
}
GOAL = 2.0
"""For the best other rival, where its floor is lower."""
LEND_FLOOR = 3.0
LEND_CASES = ("small", "large", "many", "wide")
MOST_COPY_FLOORS = 1.3
"""On `large`, lending takes at most so many times what moving the bytes takes."""


def prepare_ours(gradients: list[Gradient], engine: str, copy: bool) -> rivals.Job:
    accumulator = gq.SparseConditionalAccumulator(gradients[0][1].dtype, engine=engine)

    def job() -> tuple[Any, Any]:
        for ids, values in gradients:
            accumulator.apply_grad(ids, values, local_step=None, copy=copy)
        result = accumulator.take_grad(len(gradients))
        return result.indices, result.values

    return job


def prepare_copyto(gradients: list[Gradient]) -> rivals.Job:
    """Copy the values of all gradients into memory that has been touched before."""
    copies = [np.full_like(values, 1) for _, values in gradients]

    def job() -> tuple[Any, Any]:
        for copy, (_, values) in zip(copies, gradients, strict=True):
            np.copyto(copy, values)
        return None, None

    return job


def moves_of_copyto(case: Case, gradients: list[Gradient]) -> float:
    """Return the bytes of all gradients, read once, and of the result, written once, per byte `np.copyto` moves."""
    value_bytes = sum(values.nbytes for _, values in gradients)
    read = value_bytes + sum(ids.nbytes for ids, _ in gradients)
    num_distinct = len(row_counts(gradients))
    written = num_distinct * (8 + 8 + case.dim * np.dtype(case.dtype).itemsize)  # ids, counts, rows
    return (read + written) / (2 * value_bytes)


def run_once(case: Case, jobs: Mapping[str, rivals.Job]) -> dict[str, float]:
    """Run each job once, compare its result with the first one's, which is ours, and return the seconds of each."""
    tolerance = 1e-2 if case.dtype == "float16" else 1e-4
    expected: tuple[Any, Any] | None = None
    seconds = {}
    for name, job in jobs.items():
        start = time.perf_counter()
        ids, values = job()
        seconds[name] = time.perf_counter() - start
        if name == COPYTO or (name == rivals.TENSORFLOW and not case.unique):
            continue  # TensorFlow returns repeated ids several times, with partial means
        expected = expected or (ids, values)
        np.testing.assert_array_equal(ids, expected[0], err_msg=f"{case.name}: {name}")
        np.testing.assert_allclose(values, expected[1], tolerance, tolerance, err_msg=f"{case.name}: {name}")
    return seconds


def ours_by_name(engines: list[str]) -> dict[str, tuple[str, bool]]:
    """Return our systems, the judged ones first: name -> (engine, copy)."""
    return {f"{engine} {'copy' if copy else 'lend'}": (engine, copy) for engine in engines for copy in (True, False)}


@dataclass
class Measured:
    """What was measured of a case: seconds of each system, and ratios to ours.

    Attributes:
        copy: for each rival how many times longer it takes than ours, copying.
        lend: the same, lending.
        moving: how many times longer ours takes than moving the bytes: copying, lending.
    """

    name: str
    timings: Mapping[str, Timing]
    copy: dict[str, list[float]]
    lend: dict[str, list[float]]
    moving: list[list[float]]

    @property
    def best_other(self) -> str:
        """The fastest rival in this run, TensorFlow's op apart."""
        others = [name for name in self.copy if name != rivals.TENSORFLOW]
        return min(others, key=lambda name: statistics.median(self.copy[name]))

    def to_json(self) -> dict[str, Any]:
        return {
            "systems": {name: timing.to_json() for name, timing in self.timings.items()},
            "best_other": self.best_other,
            "times_ours_copying": {name: statistics.median(each) for name, each in self.copy.items()},
            "times_ours_lending": {name: statistics.median(each) for name, each in self.lend.items()},
            "ours_times_moving": [statistics.median(each) for each in self.moving],
        }


def measure(case: Case, gradients: list[Gradient], jobs: Mapping[str, rivals.Job], options: Options) -> Measured:
    first = run_once(case, jobs)
    budget = QUICK_BUDGET_SECONDS if options.quick else BUDGET_SECONDS
    ours = [f"{options.engines[0]} {how}" for how in ("copy", "lend")]
    timings = interleave(jobs, budget=budget, quick=options.quick, first=first, anchors=[*ours, COPYTO])
    copy, lend = (timings[name] for name in ours)
    others = [name for name in timings if name in rivals.names()]
    moves = moves_of_copyto(case, gradients)
    moving = [[ratio / moves for ratio in ratios(mine, timings[COPYTO])] for mine in (copy, lend)]
    return Measured(
        case.name,
        timings,
        {name: ratios(timings[name], copy) for name in others},
        {name: ratios(timings[name], lend) for name in others},
        moving,
    )


def floors_of(measured: Measured, complete: bool) -> list[Floor]:
    """Return the bounds that apply to a case; `complete` says whether all rivals took part."""
    name, best = measured.name, measured.best_other
    if name not in FLOORS:
        return []

    def floor(what: str, samples: list[float] | None, bound: float, **other: Any) -> Floor:
        got = statistics.median(samples) if samples else None
        return Floor(f"{name}: {what}", got, bound, samples=samples or [], **other)

    tf_floor, best_floor = FLOORS[name]
    goal = GOAL if best_floor < GOAL else None
    floors = [
        floor("TF op / ours", measured.copy.get(rivals.TENSORFLOW), tf_floor),
        floor(f"best other ({best}) / ours", measured.copy[best], best_floor, goal=goal, judged=complete),
    ]
    if name in LEND_CASES:
        what = f"best other ({best}) / ours, lending"
        floors.append(floor(what, measured.lend[best], LEND_FLOOR, judged=complete))
    if name == "large":
        what = "ours, lending / moving the bytes"
        floors.append(floor(what, measured.moving[1], MOST_COPY_FLOORS, at_least=False))
    return floors


def ratio_row(measured: Measured) -> list[str]:
    best = measured.best_other
    tf = [
        cell(each[rivals.TENSORFLOW]) if rivals.TENSORFLOW in each else "-" for each in (measured.copy, measured.lend)
    ]
    return [
        *(measured.name, best, cell(measured.copy[best]), cell(measured.lend[best])),
        *(*tf, *map(cell, measured.moving)),
    ]


RATIO_HEADERS = ["case", "best other", "other / copy", "other / lend", "TF / copy", "TF / lend", "copy / moving"]
RATIO_HEADERS += ["lend / moving"]


def run(options: Options) -> Report:
    report = Report("Apply all gradients of a round, take once: milliseconds, median (quartiles)")
    prepare_rival, missing = rivals.load()
    report.text += missing
    complete = set(prepare_rival) | {rivals.TENSORFLOW} == set(rivals.names())
    ours = ours_by_name(options.engines)
    engine = options.engines[0]
    times, ratio_rows, profile = [], [], []
    for case in (CASES[name] for name in options.cases):
        gradients = case.gradients()
        jobs = {name: prepare_ours(gradients, *how) for name, how in ours.items()}
        jobs |= {name: prepare(gradients) for name, prepare in prepare_rival.items()}
        jobs[COPYTO] = prepare_copyto(gradients)
        print(f"{case.name}: {case.describe()}", flush=True)
        measured = measure(case, gradients, jobs, options)
        times.append([case.name, *(measured.timings[name].cell(1e-3) for name in jobs)])
        ratio_rows.append(ratio_row(measured))
        if options.profile:
            profile += [phases.row(case.name, gradients, engine, copy) for copy in (True, False)]
        report.floors += floors_of(measured, complete)
        report.data[case.name] = measured.to_json()
    report.text += ["", table(["case", *jobs], times)]
    report.text.append(f"Ratios, median (quartiles) ({engine} engine; the last two to the time of moving the bytes):\n")
    report.text.append(table(RATIO_HEADERS, ratio_rows))
    if profile:
        report.text.append("Milliseconds of CPU time of the calling thread, by phase:\n")
        report.text.append(table(phases.HEADERS, profile))
    return report
