"""Does an apply stay as cheap when the round grows? Applies 129-256 of a round against 1-128."""

from __future__ import annotations

import statistics
import time

import numpy as np

import gradquorum as gq
from benchmarks.cases import CASES, Case, Gradient
from benchmarks.measure import cell, digits, no_garbage_collection
from benchmarks.report import Floor, Options, Report, table

NUM_APPLIES = 256
MOST = 1.2

# The same ids in every gradient: the round's log is compacted again and again.
SAME_IDS = "same 100 ids"


def gradients_of(name: str) -> tuple[Case, list[Gradient]]:
    if name != SAME_IDS:
        return CASES[name], CASES[name].gradients(NUM_APPLIES)
    case = Case(SAME_IDS, 100, 64, NUM_APPLIES, 100, zipf=False)
    ids = np.arange(0, 10_000, 100)
    return case, [(ids, values) for _, values in Case(SAME_IDS, 100, 64, NUM_APPLIES, 100_000).gradients()]


def time_applies(accumulator: gq.SparseConditionalAccumulator, gradients: list[Gradient]) -> list[float]:
    """Apply one round's gradients and take; return the seconds of each apply."""
    now, laps = time.perf_counter, []
    for ids, values in gradients:
        start = now()
        accumulator.apply_grad(ids, values, local_step=None)
        laps.append(now() - start)
    accumulator.take_grad(len(gradients))
    return laps


def run(options: Options) -> Report:
    engine = options.engines[0]
    report = Report(f"Applies 129-256 of a round against 1-128 ({engine} engine)")
    work = {name: gradients_of(name)[1] for name in ("many", SAME_IDS)}
    accumulators = {name: gq.SparseConditionalAccumulator("float32", engine=engine) for name in work}
    laps: dict[str, list[list[float]]] = {name: [] for name in work}
    with no_garbage_collection():
        for i in range(11 if options.quick else 21):
            for name, gradients in work.items():
                times = time_applies(accumulators[name], gradients)
                if i:  # the first round warms up
                    laps[name].append(times)
    rows, half = [], NUM_APPLIES // 2
    for name, rounds in laps.items():
        ratios = [sum(times[half:]) / sum(times[:half]) for times in rounds]
        ratio = statistics.median(ratios)
        median = statistics.median(lap for times in rounds for lap in times)
        slowest = statistics.median(max(times) for times in rounds)
        worst = max(max(times) for times in rounds)
        rows.append([name, cell(ratios), *(digits(x * 1e6) for x in (median, slowest, worst))])
        report.floors.append(Floor(f"{name}: applies 129-256 / 1-128", ratio, MOST, at_least=False, samples=ratios))
        report.data[name] = {"ratios": ratios, "median_s": median, "slowest_s": slowest, "slowest_of_all_s": worst}
    headers = ["round", "ratio (quartiles)", "median apply, us", "slowest of a round, us", "slowest of all, us"]
    report.text.append(table(headers, rows))
    return report
