"""Do appliers run beside each other, and beside a take's merge?"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

import gradquorum as gq
from benchmarks.cases import CASES, Case, Gradient
from benchmarks.measure import Timing, digits, interleave
from benchmarks.report import Floor, Options, Report, table

NUM_THREADS = 8
PER_THREAD = 16
LEAST_SHARE = 0.9
MOST_IDLE_MEDIANS = 20.0


def run_threads(jobs: Sequence[Callable[[], None]]) -> float:
    """Run the jobs, each in a thread, and return the seconds from the common start to the last end."""
    start, ends = threading.Barrier(len(jobs) + 1), []

    def run_one(job: Callable[[], None]) -> None:
        start.wait()
        job()
        ends.append(time.perf_counter())

    threads = [threading.Thread(target=run_one, args=[job]) for job in jobs]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return max(ends) - began


def speed_ups(engine: str, quick: bool) -> dict[str, Timing]:
    """Return seconds of 128 applies of 1 MB, and of 128 copies of 1 MB, by one thread and by eight."""
    gradients = Case("", 4096, 64, NUM_THREADS, 10_000_000, zipf=False).gradients()
    accumulator = gq.SparseConditionalAccumulator("float32", engine=engine)
    copies = [np.ones_like(gradients[0][1]) for _ in range(NUM_THREADS * PER_THREAD)]

    def applying(i: int) -> Callable[[], None]:
        ids, values = gradients[i]

        def job() -> None:
            for _ in range(PER_THREAD):
                accumulator.apply_grad(ids, values, local_step=None)

        return job

    def copying(i: int) -> Callable[[], None]:
        def job() -> None:
            for copy in copies[i * PER_THREAD : (i + 1) * PER_THREAD]:
                np.copyto(copy, gradients[i][1])

        return job

    jobs = {"apply": [applying(i) for i in range(NUM_THREADS)], "copy": [copying(i) for i in range(NUM_THREADS)]}
    timings: dict[str, Timing] = {}
    for i in range(4 if quick else 16):
        for kind, each in jobs.items():
            alone = run_threads([lambda each=each: [job() for job in each]])
            accumulator.discard()
            together = run_threads(each)
            accumulator.discard()
            if i:  # the first pass warms up
                timings.setdefault(f"{kind}, 1 thread", Timing()).samples.append(alone)
                timings.setdefault(f"{kind}, {NUM_THREADS} threads", Timing()).samples.append(together)
    return timings


def beside_a_merge(engine: str, gradients: list[Gradient]) -> tuple[float, float, int]:
    """Return the idle median of a 4 kB apply, its 99th percentile beside a merge of 128 MB, and how many there were."""
    ids, values = np.arange(16), np.ones((16, 64), np.float32)
    with gq.SparseConditionalAccumulator("float32", num_threads=1, engine=engine) as accumulator:

        def apply() -> tuple[float, float]:
            start = time.perf_counter()
            accumulator.apply_grad(ids, values, local_step=None)
            return start, time.perf_counter()

        idle = statistics.median(end - start for start, end in (apply() for _ in range(2000)))
        accumulator.discard()
        for lent_ids, lent_values in gradients:
            accumulator.apply_grad(lent_ids, lent_values, local_step=None, copy=False)
        laps: list[tuple[float, float]] = []
        ready, taken = threading.Event(), threading.Event()

        def apply_on() -> None:
            while not taken.is_set():
                laps.append(apply())
                ready.set()

        thread = threading.Thread(target=apply_on)
        thread.start()
        ready.wait()
        began = time.perf_counter()
        accumulator.take_grad(1)
        ended = time.perf_counter()
        taken.set()
        thread.join()
    beside = [end - start for start, end in laps if start < ended and end > began]
    return idle, float(np.quantile(beside, 0.99)), len(beside)


def run(options: Options) -> Report:
    engine = options.engines[0]
    report = Report(f"Appliers beside each other and beside a merge ({engine} engine)")
    timings = speed_ups(engine, options.quick)
    ups = {}
    for kind in ("apply", "copy"):
        ups[kind] = timings[f"{kind}, 1 thread"].median / timings[f"{kind}, {NUM_THREADS} threads"].median
    rows = [[f"128 x 1 MB: {name}", timing.cell(1e-3)] for name, timing in timings.items()]
    report.text.append(table(["what", "ms (quartiles)"], rows))
    report.text.append(f"Speed-up of eight threads: apply {digits(ups['apply'])}, plain copy {digits(ups['copy'])}.\n")

    gradients = CASES["large"].gradients()
    runs = [beside_a_merge(engine, gradients) for _ in range(2 if options.quick else 5)]
    rows = [
        [str(i + 1), digits(idle * 1e6), digits(p99 * 1e6), digits(p99 / idle), str(num)]
        for i, (idle, p99, num) in enumerate(runs)
    ]
    report.text.append("A 4 kB apply while a take merges 128 MB on one thread:\n")
    report.text.append(table(["run", "idle median, us", "99th percentile, us", "ratio", "applies"], rows))
    ratio = statistics.median(p99 / idle for idle, p99, _ in runs)

    report.text.append(merge_threads(engine, gradients, options.quick, report))
    report.floors = [
        Floor("eight appliers' speed-up / plain copy's", ups["apply"] / ups["copy"], LEAST_SHARE),
        Floor("4 kB apply beside a merge: p99 / idle median", ratio, MOST_IDLE_MEDIANS, at_least=False),
    ]
    report.data |= {name: timing.to_json() for name, timing in timings.items()}
    report.data["beside_a_merge"] = runs
    return report


def merge_threads(engine: str, gradients: list[Gradient], quick: bool, report: Report) -> str:
    """Time `large`, lent, with 1, 2, ... threads for the merge."""
    jobs = {}
    for num_threads in (1, 2, 4):
        accumulator = gq.SparseConditionalAccumulator("float32", num_threads=num_threads, engine=engine)

        def job(accumulator: gq.SparseConditionalAccumulator = accumulator) -> object:
            for ids, values in gradients:
                accumulator.apply_grad(ids, values, local_step=None, copy=False)
            return accumulator.take_grad(len(gradients))

        jobs[f"num_threads={num_threads}"] = job
    timings = interleave(jobs, budget=1.0 if quick else 5.0, quick=quick)
    report.data["merge_threads"] = {name: timing.to_json() for name, timing in timings.items()}
    rows = [[name, timing.cell(1e-3)] for name, timing in timings.items()]
    return "`large`, lent, by threads of the merge:\n\n" + table(["accumulator", "ms (quartiles)"], rows)
