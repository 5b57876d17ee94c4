"""How many gradients a second come in from two workers on Ray, beside one actor that holds a NumPy table?"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

import gradquorum as gq
from benchmarks.bench_process import parameter_server
from benchmarks.cases import Case
from benchmarks.measure import cell, digits
from benchmarks.report import Floor, Options, Report, table

CASES = [Case("32 kB", 256, 32, 2, 100_000), Case("1 MB", 4096, 64, 2, 1_000_000)]
LEAST = {"32 kB": 3.0, "1 MB": 1.5}
LEAST_TWO_SHARDS = 0.6
LEAST_TENSORFLOW = {"1 MB": 1.0}
PER_TURN = {"32 kB": 120, "1 MB": 48, "nothing": 600}
LONGER = 3
"""So many times as many gradients go through a pipeline: what it holds at its start and end must not count for much."""
IN_FLIGHT = 64
NUM_WORKERS = 2
PIPELINED = ("gradquorum, pipelined", "gradquorum, two shards")


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

    def pipelined(self, acc: Any, ids: Any, values: Any, count: int) -> int:
        """Return in how many calls that went."""
        from gradquorum.ray import Pipeline

        sender, calls = acc._target._sender, []
        send = type(sender).send
        sender.send = lambda *arguments: (calls.append(None), send(sender, *arguments))[1]
        with Pipeline(acc, IN_FLIGHT) as pipeline:
            for _ in range(count):
                pipeline.submit_apply(ids, values, local_step=None)
        return len(calls)


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
    workers = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(NUM_WORKERS)]
    with_tensorflow = importlib.util.find_spec("tensorflow") is not None
    if not with_tensorflow:
        report.text.append("left out: TF parameter server (tensorflow is not installed)\n")
    rows = []
    for case in CASES:
        with ExitStack() as stack:
            rates, in_call = _rates(ray, workers, case, options, stack, with_tensorflow=with_tensorflow)
        medians = {name: statistics.median(found) for name, found in rates.items()}
        base, piped = medians["one NumPy actor"], medians["gradquorum, pipelined"]
        for name, found in rates.items():
            rows.append([case.name, name, cell(found), digits(medians[name] / base)])
        report.data[case.name] = {"gradients_per_s": rates, "gradients_per_call": in_call, **_sizes(case)}
        what = f"{case.name}, two workers on Ray, pipelined / one NumPy actor"
        report.floors.append(Floor(what, piped / base, LEAST[case.name]))
        what = f"{case.name}, two workers on Ray, two shards / one"
        report.floors.append(Floor(what, medians["gradquorum, two shards"] / piped, LEAST_TWO_SHARDS))
        if case.name in LEAST_TENSORFLOW:
            ratio = piped / medians["TF, gRPC"] if with_tensorflow else None
            what = f"{case.name}, two workers on Ray, pipelined / TF, gRPC"
            report.floors.append(Floor(what, ratio, LEAST_TENSORFLOW[case.name]))
    report.text.append("Two workers at once, each an actor; those of TensorFlow are processes:\n")
    report.text.append(table(["gradient", "system", "gradients/s (quartiles)", "x plain"], rows))
    _commits(ray, workers, report)


def _rates(
    ray: Any, workers: list[Any], case: Case, options: Options, stack: ExitStack, *, with_tensorflow: bool
) -> tuple[dict[str, list[float]], float]:
    """Return for each system its gradients per second, in each of its turns; and how many a pipeline puts in a call."""
    from gradquorum.ray import Target

    gradients = case.gradients()
    plain = ray.remote(Table).options(num_cpus=0).remote(case.table, case.dim)
    stack.callback(ray.kill, plain)
    ours = []
    for shards in (1, 2):
        name, target = f"bench {case.name} {shards}", Target(shards)
        engine = options.engines[0]
        acc = gq.SparseConditionalAccumulator("float32", (None, case.dim), name, target=target, engine=engine)
        ours.append(stack.enter_context(acc))

    calls: list[int] = []

    def ask(method: str, place: Any) -> Callable[[int], float]:
        def run(count: int) -> float:
            since = time.perf_counter()
            done = ray.get([getattr(w, method).remote(place, *gradients[i], count) for i, w in enumerate(workers)])
            if method == "pipelined":
                calls.append(sum(done))
            return time.perf_counter() - since

        return run

    systems = {
        "one NumPy actor": ask("plain", plain),
        "gradquorum, waiting": ask("waiting", ours[0]),
        "gradquorum, pipelined": ask("pipelined", ours[0]),
        "gradquorum, two shards": ask("pipelined", ours[1]),
    }
    if with_tensorflow and case.name in LEAST_TENSORFLOW:
        crew = stack.enter_context(parameter_server(case, stack))
        systems["TF, gRPC"] = lambda count: max(sum(seconds) for seconds in crew.turn(count))
    count = PER_TURN[case.name]
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(1 + (3 if options.quick else 7)):
        for name, run in systems.items():
            number = count * LONGER if name in PIPELINED else count
            seconds = run(number)
            if turn:  # the first is for warming up
                rates[name].append(NUM_WORKERS * number / seconds)
            for acc in ours:
                acc.discard()
    return rates, NUM_WORKERS * count * LONGER / statistics.mean(calls)


def _sizes(case: Case) -> dict[str, int]:
    """Return the bytes of one gradient, and of the distinct rows of those of all workers."""
    gradients = case.gradients()
    ids, values = gradients[0]
    num_bytes = ids.nbytes + values.nbytes
    distinct = np.unique(np.concatenate([ids for ids, _ in gradients]))
    return {"bytes": num_bytes, "distinct_bytes": num_bytes * len(distinct) // len(ids)}


def _commits(ray: Any, workers: list[Any], report: Report) -> None:
    """Measure what the coordinator takes in when gradients are empty."""
    from gradquorum.ray import Target

    with gq.SparseConditionalAccumulator("float32", (None, 1), "bench commits", target=Target(1)) as acc:
        nothing = np.empty(0, np.int64), np.empty((0, 1), np.float32)
        found, calls = [], 0
        for _ in range(4):
            since = time.perf_counter()
            calls += sum(ray.get([worker.pipelined.remote(acc, *nothing, PER_TURN["nothing"]) for worker in workers]))
            found.append(NUM_WORKERS * PER_TURN["nothing"] / (time.perf_counter() - since))
            acc.discard()
    in_call = 4 * NUM_WORKERS * PER_TURN["nothing"] / calls
    report.data["nothing"] = {"commits_per_s": found[1:], "gradients_per_call": in_call}
    report.text.append(f"Commits at the coordinator, of gradients without rows, pipelined: {cell(found[1:])} /s\n")
