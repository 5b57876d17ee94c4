"""What do frameworks cost on top? PyTorch gradients in and out, and micro-batches beside PyTorch's own accumulation."""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

import gradquorum as gq
from benchmarks.bench_memory import resident_bytes
from benchmarks.cases import CASES
from benchmarks.measure import Timing, cell, digits, interleave, no_garbage_collection, ratios
from benchmarks.report import Floor, Options, Report, table

MICROSECOND, MIB = 1e-6, 2**20
MOST_IN, MOST_OUT = 6.0, 12.0
NUM_BLOCKS = 15
NUM_MICRO_BATCHES = 32
NUM_RUNS = 3
OWN, BY_HAND = "torch's own accumulation", "cat, unique, index_add_"
LEAST_RATIO = {OWN: 30.0, BY_HAND: 2.0}
MOST_MEMORY = 1 / 3

Job = Callable[[], Any]


def run(options: Options) -> Report:
    engine = options.engines[0]
    report = Report(f"PyTorch: gradients in and out, and {NUM_MICRO_BATCHES} micro-batches ({engine} engine)")
    if importlib.util.find_spec("torch") is None:
        report.text.append("left out: torch is not installed (RIVALS=1)\n")
        names = ["torch gradient in", "torch gradient out"]
        names += [f"micro-batches: {rival} / ours" for rival in LEAST_RATIO]
        report.floors = [Floor(name, None, 1.0) for name in [*names, "micro-batches: our peak memory / torch's own"]]
        return report
    _crossings(report, engine, options.quick)
    _micro_batches(report, options.quick)
    return report


# In and out


def _crossings(report: Report, engine: str, quick: bool) -> None:
    """Time one row in and out, as a tensor and as arrays: what the difference is, the adapter takes."""
    import torch

    import gradquorum.torch as gqt

    embedding = torch.nn.Embedding(10, 16, sparse=True)
    embedding(torch.tensor([3])).sum().backward()
    grad = embedding.weight.grad
    ids, rows = grad._indices()[0].numpy(), grad._values().numpy()
    acc = gq.SparseConditionalAccumulator("float32", (10, 16), engine=engine)
    calls: dict[str, tuple[Job, Job]] = {
        "arrays": (lambda: acc.apply_grad(ids, rows, local_step=None), lambda: acc.take_grad(1)),
        "tensors": (lambda: gqt.apply_grad(acc, grad, local_step=None), lambda: gqt.take_grad(acc, 1)),
    }
    laps: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    now = time.perf_counter
    with no_garbage_collection():
        for _ in range(NUM_BLOCKS):
            for name, (apply, take) in calls.items():
                applies, takes = [], []
                for _ in range(200 if quick else 1000):
                    start = now()
                    apply()
                    middle = now()
                    result = take()
                    takes.append(now() - middle)
                    applies.append(middle - start)
                    del result
                laps[name][0].append(statistics.median(applies) / MICROSECOND)
                laps[name][1].append(statistics.median(takes) / MICROSECOND)
    lines = []
    for i, (what, most) in enumerate((("in", MOST_IN), ("out", MOST_OUT))):
        extra = [tensor - array for tensor, array in zip(laps["tensors"][i], laps["arrays"][i], strict=True)]
        lines.append([what, cell(laps["arrays"][i]), cell(laps["tensors"][i]), cell(extra)])
        report.floors.append(
            Floor(f"torch gradient {what}", statistics.median(extra), most, at_least=False, unit="us", samples=extra)
        )
        report.data[what] = {"arrays_us": laps["arrays"][i], "tensors_us": laps["tensors"][i]}
    report.text.append(table(["one row of 16, us", "arrays", "tensors", "more"], lines))


# Micro-batches


def _batches() -> tuple[int, list[Any]]:
    import torch

    case = CASES["raw"]
    return case.table, [
        (torch.from_numpy(ids), torch.from_numpy(rows)) for ids, rows in case.gradients(NUM_MICRO_BATCHES)
    ]


def _gradient_of(num_rows: int, ids: Any, rows: Any) -> Any:
    """Return what the backward pass of an embedding leaves: ids and rows as they came, a tensor around them."""
    import torch

    return torch.sparse_coo_tensor(ids[None], rows, (num_rows, rows.shape[1]), check_invariants=False)


def jobs() -> dict[str, Job]:
    """Return ways to make one coalesced gradient of those of all micro-batches, which are at hand."""
    import torch

    import gradquorum.torch as gqt

    num_rows, batches = _batches()
    dim = batches[0][1].shape[1]
    weight = torch.nn.Parameter(torch.empty((num_rows, dim), device="cpu"))
    micro_batches = gqt.MicroBatchAccumulator([weight], NUM_MICRO_BATCHES)

    def ours() -> Any:
        for ids, rows in batches:
            weight.grad = _gradient_of(num_rows, ids, rows)
            micro_batches.step()
        grad, weight.grad = weight.grad, None
        return grad

    def own() -> Any:
        total = None
        for ids, rows in batches:
            gradient = _gradient_of(num_rows, ids, rows)
            if total is None:  # as autograd does: the first is kept, the others are added in place
                total = gradient.clone()
            else:
                total += gradient
        return total.coalesce().div_(NUM_MICRO_BATCHES)

    def by_hand() -> Any:
        collected = []
        for ids, rows in batches:
            gradient = _gradient_of(num_rows, ids, rows)
            collected.append((gradient._indices()[0].clone(), gradient._values().clone()))
        all_ids, all_rows = (torch.cat(parts) for parts in zip(*collected, strict=True))
        ids, inverse = torch.unique(all_ids, return_inverse=True)
        sums = torch.zeros((len(ids), dim)).index_add_(0, inverse, all_rows).div_(NUM_MICRO_BATCHES)
        return torch.sparse_coo_tensor(ids[None], sums, (num_rows, dim), is_coalesced=True, check_invariants=False)

    return {"ours": ours, OWN: own, BY_HAND: by_hand}


def peak_bytes(name: str) -> int:
    """Return by how much memory grows at most while one of the jobs runs several times, its results included.

    What one run leaves, for the next one to reuse for instance, counts in that.
    """
    import threading

    job = jobs()[name]
    base = most = resident_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.0005):
            most = max(most, resident_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    for _ in range(NUM_RUNS):
        result = job()
        most = max(most, resident_bytes())
        del result
    done.set()
    watching.join()
    return most - base


def _micro_batches(report: Report, quick: bool) -> None:
    ways = jobs()
    results = {name: job() for name, job in ways.items()}
    for name, result in results.items():
        same = np.array_equal(result._indices(), results["ours"]._indices())
        if not same or not np.allclose(result._values(), results["ours"]._values(), atol=1e-3):
            raise AssertionError(f"{name}: another gradient than ours")
    del results, result
    timings = interleave(ways, budget=8 if quick else 30, quick=quick, anchors=["ours"])
    context = multiprocessing.get_context("spawn")
    memory = {}
    for name in ways:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            memory[name] = pool.submit(peak_bytes, name).result()
    report.text.append(
        table(
            ["way", "ms (quartiles)", "peak, MiB"],
            [[name, timing.cell(1e-3), digits(memory[name] / MIB)] for name, timing in timings.items()],
        )
    )
    for name, least in LEAST_RATIO.items():
        samples = ratios(timings[name], timings["ours"])
        report.floors.append(Floor(f"micro-batches: {name} / ours", statistics.median(samples), least, samples=samples))
    share = memory["ours"] / memory[OWN]
    report.floors.append(
        Floor("micro-batches: our peak memory / torch's own", share, round(MOST_MEMORY, 3), at_least=False)
    )
    report.data["micro_batches"] = {name: _json(timing, memory[name]) for name, timing in timings.items()}


def _json(timing: Timing, peak: int) -> dict[str, object]:
    return {**timing.to_json(), "peak_bytes": peak}
