"""Does an apply's cost, and the memory held, depend on what is in the round already?

Each figure comes from a process of its own: memory that was used before would hide memory that is used now.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import gradquorum as gq
from benchmarks.cases import Case
from benchmarks.measure import digits
from benchmarks.report import Floor, Options, Report, table

MIB = 2**20
PAGE_BYTES = resource.getpagesize()


def resident_bytes() -> int:
    """Return the memory this process has now, or where that is not known the most it had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if peak > 2**32 else peak * 1024  # macOS counts bytes


def growing_round(engine: str, quick: bool) -> list[list[float]]:
    """Return for each round the seconds of its 64 applies of 20,000 rows of 2,000,000 x 16."""
    gradients = Case("", 20_000, 16, 64, 2_000_000, zipf=False).gradients()
    rounds: list[list[float]] = []
    with gq.SparseConditionalAccumulator("float32", (2_000_000, 16), engine=engine) as accumulator:
        for _ in range(3 if quick else 9):
            laps = []
            for ids, values in gradients:
                start = time.perf_counter()
                accumulator.apply_grad(ids, values, local_step=None)
                laps.append(time.perf_counter() - start)
            accumulator.take_grad(64)
            rounds.append(laps)
    return rounds[1:]


def same_ids(engine: str, quick: bool) -> dict[str, int]:
    """Apply the same 100 ids 10,000 times without a take; return by how much memory grew after the first 1,000."""
    num_applies, warm = (2_000, 200) if quick else (10_000, 1_000)
    ids, values = np.arange(0, 1000, 10), np.ones((100, 64), np.float32)
    most = base = 0
    with gq.SparseConditionalAccumulator("float32", engine=engine) as accumulator:
        for i in range(num_applies):
            accumulator.apply_grad(ids, values, local_step=None)
            if i == warm:
                most = base = resident_bytes()
            elif i > warm and i % 50 == 0:
                most = max(most, resident_bytes())
    return {"grown": most - base, "offered": (num_applies - warm) * (ids.nbytes + values.nbytes)}


def sparse_in_large_table(engine: str, quick: bool) -> dict[str, int]:
    """Apply 2,560 ids of a 793,471 x 512 table; return by how much memory grew."""
    shape = (793_471, 512)
    ids, values = Case("", 2_560, shape[1], 1, shape[0], zipf=False).gradients()[0]
    with gq.SparseConditionalAccumulator("float32", shape, engine=engine) as accumulator:
        accumulator.apply_grad(ids[:1], values[:1], local_step=None)
        accumulator.take_grad(1)
        base = resident_bytes()
        accumulator.apply_grad(ids, values, local_step=None)
        grown = resident_bytes() - base
    return {"grown": grown, "rows": ids.nbytes + values.nbytes, "table": 4 * shape[0] * shape[1]}


def in_own_process(figure: Callable[[str, bool], Any], options: Options) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(figure, options.engines[0], options.quick).result()


def run(options: Options) -> Report:
    report = Report(f"Cost and memory of a growing round ({options.engines[0]} engine)")
    rounds = in_own_process(growing_round, options)
    early, late = ([statistics.median(laps[part]) for laps in rounds] for part in (slice(16), slice(-16, None)))
    growth = [last / first for first, last in zip(early, late, strict=True)]
    same = in_own_process(same_ids, options)
    large = in_own_process(sparse_in_large_table, options)
    rows = [
        [
            "64 gradients of 20,000 x 16: applies 49-64 against 1-16",
            f"{digits(statistics.median(late) * 1e3)} ms, {digits(statistics.median(early) * 1e3)} ms",
        ],
        ["the same 100 ids again and again: memory grown, offered", _mib(same["grown"], same["offered"])],
        ["2,560 rows of a 793,471 x 512 table: grown, the rows, the table", _mib(*large.values())],
    ]
    report.text.append(table(["what", "got"], rows))
    # Three times the distinct rows and 1 MiB is what the library promises.
    most_large = (3 * large["rows"] + MIB) / large["rows"]
    report.floors = [
        Floor("growing round: applies 49-64 / 1-16", statistics.median(growth), 1.2, at_least=False, samples=growth),
        Floor("same 100 ids: memory grown", same["grown"] / MIB, 1.5, at_least=False, unit="MiB"),
        Floor(
            "rows of a large table: grown / rows", large["grown"] / large["rows"], round(most_large, 2), at_least=False
        ),
    ]
    report.data = {"growing_round": growth, "same_ids": same, "large_table": large}
    return report


def _mib(*sizes: int) -> str:
    return ", ".join(f"{digits(size / MIB)} MiB" for size in sizes)
