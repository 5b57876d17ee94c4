"""When does a round touch so much of a table that adding into a dense one would be faster?"""

from __future__ import annotations

import statistics

import numpy as np

from benchmarks.bench_shapes import prepare_ours
from benchmarks.cases import Gradient
from benchmarks.measure import digits, interleave, ratios
from benchmarks.report import Options, Report, table
from benchmarks.rivals import Job

ROWS, DIM, NUM_GRADIENTS = 16_384, 64, 8
SHARES = (0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)


def gradients_touching(share: float) -> list[Gradient]:
    rng = np.random.default_rng(7)
    num = int(ROWS * share)
    return [
        (np.sort(rng.choice(ROWS, num, replace=False)), rng.standard_normal((num, DIM), dtype=np.float32))
        for _ in range(NUM_GRADIENTS)
    ]


def prepare_dense(gradients: list[Gradient]) -> Job:
    """Add into a table of all rows that is there already, then pick the rows that were touched."""
    total, counts = np.zeros((ROWS, DIM), np.float32), np.zeros(ROWS, np.int64)

    def job():
        total.fill(0)
        counts.fill(0)
        for ids, values in gradients:
            total[ids] += values
            counts[ids] += 1
        ids = np.flatnonzero(counts)
        return ids, total[ids] / counts[ids, None].astype(np.float32)

    return job


def run(options: Options) -> Report:
    engine = options.engines[0]
    report = Report(f"Density: {NUM_GRADIENTS} gradients that touch a share of {ROWS:,} x {DIM} rows ({engine} engine)")
    rows, crossover = [], None
    for share in SHARES:
        gradients = gradients_touching(share)
        jobs = {"copy": prepare_ours(gradients, engine, True), "lend": prepare_ours(gradients, engine, False)}
        jobs["dense NumPy table"] = prepare_dense(gradients)
        timings = interleave(jobs, budget=0.3 if options.quick else 1.5, quick=options.quick, anchors=["copy"])
        num_rows = NUM_GRADIENTS * len(gradients[0][0])
        each = [digits(timing.median / num_rows * 1e9) for timing in timings.values()]
        rows.append([f"{share:.0%}", *(timing.cell(1e-3) for timing in timings.values()), *each])
        if statistics.median(ratios(timings["dense NumPy table"], timings["copy"])) >= 1:
            crossover = None
        elif crossover is None:
            crossover = share
        report.data[f"{share}"] = {name: timing.to_json() for name, timing in timings.items()}
    names = ["copy", "lend", "dense NumPy table"]
    report.text.append(table(["touched", *(f"{n}, ms" for n in names), *(f"{n}, ns/row" for n in names)], rows))
    where = "nowhere" if crossover is None else f"from {crossover:.0%} of the rows on"
    report.text.append(f"The dense table is faster: {where}.")
    report.data["crossover"] = crossover
    return report
