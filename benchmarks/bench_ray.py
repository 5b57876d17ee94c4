"""How many gradients a second come in from two workers on Ray, beside one actor that holds a NumPy table?"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import gradquorum as gq
from benchmarks.cases import Case
from benchmarks.measure import cell, digits
from benchmarks.report import Floor, Options, Report, table

CASES = [Case("32 kB", 256, 32, 2, 100_000), Case("1 MB", 4096, 64, 2, 1_000_000)]
LEAST = {"32 kB": 3.0, "1 MB": 1.5}
LEAST_TWO_SHARDS = 0.6
PER_TURN = {"32 kB": 120, "1 MB": 16, "nothing": 600}
IN_FLIGHT = 64
NUM_WORKERS = 2


class Table:
    """The plain way: what comes is added to a table, one call after the other."""

    def __init__(self, num_rows: int, dim: int) -> None:
        self._table = np.zeros((num_rows, dim), np.float32)

    def apply(self, ids: Any, values: Any) -> None:
        np.add.at(self._table, ids, values)


class Worker:
    """Offers one gradient again and again."""

    def plain(self, table: Any, ids: Any, values: Any, count: int) -> None:
        import ray

        for _ in range(count):
            ray.get(table.apply.remote(ids, values))

    def waiting(self, acc: Any, ids: Any, values: Any, count: int) -> None:
        for _ in range(count):
            acc.apply_grad(ids, values, local_step=None)

    def pipelined(self, acc: Any, ids: Any, values: Any, count: int) -> None:
        from gradquorum.ray import Pipeline

        with Pipeline(acc, IN_FLIGHT) as pipeline:
            for _ in range(count):
                pipeline.submit_apply(ids, values, local_step=None)


def run(options: Options) -> Report:
    report = Report("Ray")
    ratios = [f"{name}, two workers on Ray, pipelined / one NumPy actor" for name in LEAST]
    if importlib.util.find_spec("ray") is None:
        report.text.append("left out: ray is not installed\n")
        report.floors += [Floor(what, None, floor) for what, floor in zip(ratios, LEAST.values(), strict=True)]
        return report
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    try:
        _measure(ray, options, report)
    finally:
        ray.shutdown()
    return report


def _measure(ray: Any, options: Options, report: Report) -> None:
    from gradquorum.ray import Target

    workers = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(NUM_WORKERS)]
    engine = options.engines[0]
    rows = []
    for case in CASES:
        gradients = case.gradients()
        plain = ray.remote(Table).options(num_cpus=0).remote(case.table, case.dim)
        ours = [
            gq.SparseConditionalAccumulator(
                "float32", (None, case.dim), f"bench {case.name} {shards}", target=Target(shards), engine=engine
            )
            for shards in (1, 2)
        ]
        systems: dict[str, Callable[[Any, int, int], Any]] = {
            "one NumPy actor": lambda w, i, n, plain=plain, gs=gradients: w.plain.remote(plain, *gs[i], n),
            "gradquorum, waiting": lambda w, i, n, acc=ours[0], gs=gradients: w.waiting.remote(acc, *gs[i], n),
            "gradquorum, pipelined": lambda w, i, n, acc=ours[0], gs=gradients: w.pipelined.remote(acc, *gs[i], n),
            "gradquorum, two shards": lambda w, i, n, acc=ours[1], gs=gradients: w.pipelined.remote(acc, *gs[i], n),
        }
        count = PER_TURN[case.name]
        rates: dict[str, list[float]] = {name: [] for name in systems}
        for turn in range(1 + (3 if options.quick else 7)):
            for name, job in systems.items():
                since = time.perf_counter()
                ray.get([job(worker, i, count) for i, worker in enumerate(workers)])
                if turn:  # the first is for warming up
                    rates[name].append(NUM_WORKERS * count / (time.perf_counter() - since))
                for acc in ours:
                    acc.discard()
        for acc in ours:
            acc.close()
        ray.kill(plain)
        medians = {name: statistics.median(found) for name, found in rates.items()}
        base, piped = medians["one NumPy actor"], medians["gradquorum, pipelined"]
        for name, found in rates.items():
            rows.append([case.name, name, cell(found), digits(medians[name] / base)])
        report.data[case.name] = {"gradients_per_s": rates}
        what = f"{case.name}, two workers on Ray, pipelined / one NumPy actor"
        report.floors.append(Floor(what, piped / base, LEAST[case.name]))
        what = f"{case.name}, two workers on Ray, two shards / one"
        report.floors.append(Floor(what, medians["gradquorum, two shards"] / piped, LEAST_TWO_SHARDS))
    report.text.append("Two workers at once, each an actor:\n")
    report.text.append(table(["gradient", "system", "gradients/s (quartiles)", "x plain"], rows))
    with gq.SparseConditionalAccumulator("float32", (None, 1), "bench commits", target=Target(1)) as acc:
        nothing = np.empty(0, np.int64), np.empty((0, 1), np.float32)
        found = []
        for _ in range(4):
            since = time.perf_counter()
            ray.get([worker.pipelined.remote(acc, *nothing, PER_TURN["nothing"]) for worker in workers])
            found.append(NUM_WORKERS * PER_TURN["nothing"] / (time.perf_counter() - since))
            acc.discard()
    report.data["commits_per_s"] = found[1:]
    report.text.append(f"Commits at the coordinator, of gradients without rows, pipelined: {cell(found[1:])} /s\n")
