"""How long does it take to apply all gradients of a round and take once, beside what else does that job?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import gradquorum as gq
from benchmarks import phases, rivals
from benchmarks.cases import CASES, Case, Gradient, row_counts
from benchmarks.measure import Timing, digits, interleave
from benchmarks.report import Floor, Options, Report, table

COPYTO = "np.copyto"
BUDGET_SECONDS = 12.0
QUICK_BUDGET_SECONDS = 1.5

# Least ratios: other / ours.  (TF op, best other rival)  for any release, and for the finished library.
BASE = (10.0, 1.0)
GOALS = {
    "tiny": (20.0, 2.0),
    "small": (20.0, 2.0),
    "mid": (10.0, 1.3),
    "large": (20.0, 2.0),
    "many": (100.0, 2.0),
    "wide": (10.0, 2.0),
    "thin": (5.0, 1.5),
    "raw": (5.0, 2.0),
}
LEND_GOAL = 3.0
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


def copy_floor(case: Case, gradients: list[Gradient], copying: Timing) -> float:
    """Return the seconds to read all gradients and to write the result, at the bandwidth of `np.copyto`."""
    value_bytes = sum(values.nbytes for _, values in gradients)
    read = value_bytes + sum(ids.nbytes for ids, _ in gradients)
    num_distinct = len(row_counts(gradients))
    written = num_distinct * (8 + 8 + case.dim * np.dtype(case.dtype).itemsize)  # ids, counts, rows
    return (read + written) * copying.median / (2 * value_bytes)


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


def floors_of(case: Case, timings: Mapping[str, Timing], engine: str, floor_seconds: float) -> list[Floor]:
    """Return the bounds that apply to a case."""
    if case.name not in GOALS:
        return []
    copy, lend = timings[f"{engine} copy"].median, timings[f"{engine} lend"].median
    tf = timings.get(rivals.TENSORFLOW)
    best_name, best = best_other(timings)
    base, goal = BASE, GOALS[case.name]
    floors = [
        Floor(f"{case.name}: TF op / ours", tf.median / copy if tf else None, base[0], goal[0]),
        Floor(f"{case.name}: {best_name} / ours", best / copy, base[1], goal[1]),
    ]
    if case.name in LEND_CASES:
        floors.append(Floor(f"{case.name}: {best_name} / ours, lending", best / lend, None, LEND_GOAL))
    if case.name == "large":
        what = f"{case.name}: ours, lending / moving the bytes"
        floors.append(Floor(what, lend / floor_seconds, None, MOST_COPY_FLOORS, at_least=False))
    return floors


def best_other(timings: Mapping[str, Timing]) -> tuple[str, float]:
    """Return the fastest rival other than TensorFlow's op."""
    others = set(rivals.names()) - {rivals.TENSORFLOW}
    return min(((name, t.median) for name, t in timings.items() if name in others), key=lambda pair: pair[1])


def run(options: Options) -> Report:
    report = Report("Apply all gradients of a round, take once: milliseconds, median (quartiles)")
    prepare_rival, missing = rivals.load()
    report.text += missing
    ours = ours_by_name(options.engines)
    engine = options.engines[0]
    times, ratios, profile = [], [], []
    for case in (CASES[name] for name in options.cases):
        gradients = case.gradients()
        jobs = {name: prepare_ours(gradients, *how) for name, how in ours.items()}
        jobs |= {name: prepare(gradients) for name, prepare in prepare_rival.items()}
        jobs[COPYTO] = prepare_copyto(gradients)
        print(f"{case.name}: {case.describe()}", flush=True)
        first = run_once(case, jobs)
        budget = QUICK_BUDGET_SECONDS if options.quick else BUDGET_SECONDS
        timings = interleave(jobs, budget=budget, quick=options.quick, first=first)
        moving = copy_floor(case, gradients, timings[COPYTO])
        copying, lending = timings[f"{engine} copy"].median, timings[f"{engine} lend"].median
        times.append([case.name, *(timing.cell(1e-3) for timing in timings.values())])
        best_name, best = best_other(timings)
        tf = timings.get(rivals.TENSORFLOW)
        ratios.append([case.name, best_name, *map(digits, (best / copying, best / lending))])
        ratios[-1] += [digits(tf.median / x) if tf else "-" for x in (copying, lending)]
        ratios[-1] += [digits(x / moving) for x in (copying, lending)]
        if options.profile:
            profile += [phases.row(case.name, gradients, engine, copy) for copy in (True, False)]
        report.floors += floors_of(case, timings, engine, moving)
        report.data[case.name] = {name: timing.to_json() for name, timing in timings.items()}
        report.data[case.name]["moving the bytes"] = moving
    report.text += ["", table(["case", *jobs], times)]
    headers = ["case", "best other", "other / copy", "other / lend", "TF / copy", "TF / lend"]
    report.text.append(f"Ratios of the medians ({engine} engine; the last two to the time of moving the bytes):\n")
    report.text.append(table([*headers, "copy / moving", "lend / moving"], ratios))
    if profile:
        report.text.append("Milliseconds of CPU time of the calling thread, by phase:\n")
        report.text.append(table(phases.HEADERS, profile))
    return report
