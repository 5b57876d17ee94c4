"""What does an apply cost a worker in a process of its own, and do two of them run beside each other?"""

from __future__ import annotations

import importlib.util
import os
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

import gradquorum as gq
from benchmarks.cases import Case
from benchmarks.crew import Crew, end, receive, start
from benchmarks.measure import Timing, digits
from benchmarks.report import Floor, Options, Report, table

CASES = [Case("256 x 32", 256, 32, 2, 100_000), Case("4096 x 64", 4096, 64, 2, 1_000_000)]
LEAST_TIMES_FASTER = {"256 x 32": 15.0, "4096 x 64": 8.0}
LEAST_SHARE = 0.85
NUM_IDLE = 200
MOST_IDLE_SHARE = 0.01
"""Of one core: what the clock of a process can tell from nothing."""

Job = tuple[Callable[[], Any], Callable[[], Any]]


def prepare_apply(acc: gq.SparseConditionalAccumulator, case: Case, index: int) -> Job:
    ids, values = case.gradients()[index]
    return lambda: acc.apply_grad(ids, values, local_step=None), acc.discard


def prepare_copy(case: Case, index: int) -> Job:
    """Copy a gradient to memory like that to which a worker writes it: warm, shared, a place for each of a turn."""
    values = case.gradients()[index][1]
    places = gq.shared_table((16, *values.shape), values.dtype)
    places[...] = 0.0
    turn = iter(range(2**62))
    return lambda: np.copyto(places[next(turn) % 16], values), lambda: None


def latencies(engine: str, quick: bool, report: Report) -> list[Floor]:
    """Time applies by two workers at once, ours and TensorFlow's in turns."""
    floors, rows = [], []
    with_tensorflow = importlib.util.find_spec("tensorflow") is not None
    if not with_tensorflow:
        report.text.append("left out: TF parameter server (tensorflow is not installed)\n")
    for case in CASES:
        with ExitStack() as stack:
            server = stack.enter_context(gq.Server())
            acc = server.accumulator("float32", (None, case.dim), case.name, engine=engine)
            crews = {"gradquorum": stack.enter_context(Crew(prepare_apply, [(acc, case, 0), (acc, case, 1)]))}
            if with_tensorflow:
                crews["TF, gRPC"] = stack.enter_context(parameter_server(case, stack))
            samples: dict[str, list[float]] = {name: [] for name in crews}
            for _ in range(4 if quick else 20):
                for name, crew in crews.items():
                    samples[name] += [s for seconds in crew.turn(25) for s in seconds]
        medians = {name: statistics.median(seconds) for name, seconds in samples.items()}
        for name, seconds in samples.items():
            timing = Timing(seconds)
            p99 = float(np.quantile(seconds, 0.99))
            rows.append([case.name, name, timing.cell(1e-6), digits(p99 * 1e6), str(len(seconds))])
            report.data[f"{case.name}, {name}"] = timing.to_json() | {"p99_s": p99}
        ratio = medians["TF, gRPC"] / medians["gradquorum"] if with_tensorflow else None
        floors.append(
            Floor(f"apply of {case.name}, two processes: TF, gRPC / ours", ratio, LEAST_TIMES_FASTER[case.name])
        )
    report.text.append("One apply, two worker processes at once:\n")
    report.text.append(table(["gradient", "system", "us (quartiles)", "99th percentile, us", "applies"], rows))
    return floors


def parameter_server(case: Case, stack: ExitStack) -> Crew:
    """Return two workers of TensorFlow's, each about to apply to an accumulator of the case's on a server."""
    from benchmarks.rivals import tensorflow_ps

    cluster = tensorflow_ps.free_cluster(2)
    process, connection = start(tensorflow_ps.serve, cluster)
    stack.callback(end, process, connection)
    receive(connection)
    return Crew(tensorflow_ps.prepare_worker, [(cluster, index, case) for index in (0, 1)])


def speed_ups(engine: str, quick: bool, report: Report) -> Floor:
    """Time 1 MB gradients by one process and by two, beside plain copies of as many bytes by one and by two."""
    case, count = CASES[1], 32
    ups: dict[str, list[float]] = {"apply": [], "copy": []}
    rates: dict[str, list[float]] = {}
    with gq.Server() as server, ExitStack() as stack:
        acc = server.accumulator("float32", (None, case.dim), case.name, engine=engine)
        crews = {
            "apply": stack.enter_context(Crew(prepare_apply, [(acc, case, 0), (acc, case, 1)])),
            "copy": stack.enter_context(Crew(prepare_copy, [(case, 0), (case, 1)])),
        }
        for _ in range(5 if quick else 25):
            for name, crew in crews.items():
                alone = sum(crew.turn(count, members=1)[0]) / count
                together = statistics.mean(sum(seconds) for seconds in crew.turn(count)) / count / 2
                ups[name].append(alone / together)
                rates.setdefault(f"{name}, 1 process", []).append(alone)
                rates.setdefault(f"{name}, 2 processes", []).append(together)
    report.text.append("1 MB for each gradient, by one worker process and by two:\n")
    rows = [[name, Timing(seconds).cell(1e-6)] for name, seconds in rates.items()]
    report.text.append(table(["what", "us for one gradient (quartiles)"], rows))
    report.data |= {name: Timing(seconds).to_json() for name, seconds in rates.items()}
    medians = {name: statistics.median(found) for name, found in ups.items()}
    report.text.append(f"Speed-up: apply {digits(medians['apply'])}, plain copy {digits(medians['copy'])}.\n")
    return Floor("two worker processes' speed-up / plain copy's", medians["apply"] / medians["copy"], LEAST_SHARE)


def be_idle_clients(connection: Any, address: str, shared_name: str, number: int, waiting: bool) -> None:
    """Be the parent of many clients that have applied once, and then do nothing, or wait for a step in vain."""
    children = []
    for _ in range(number):
        here, there = os.pipe()
        child = os.fork()
        if not child:
            try:
                acc = gq.attach(shared_name, address)
                acc.apply_grad([0], [[1.0]], local_step=None)
                os.write(there, b".")
                acc.wait_published(2**62) if waiting else signal.pause()
            finally:
                os._exit(1)
        os.close(there)
        assert os.read(here, 1) == b"."
        os.close(here)
        children.append(child)
    connection.send("ready")
    connection.recv()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def idle_cost(quick: bool, report: Report) -> Floor:
    """Measure the processor time of a server with many clients that do nothing, and with as many that wait."""
    shares = {}
    for what in ("idle", "waiting"):
        with gq.Server() as server:
            acc = server.accumulator("float32", (1, 1), "idle")
            process, connection = start(be_idle_clients, server.address, "idle", NUM_IDLE, what == "waiting")
            try:
                receive(connection)
                assert acc.num_accumulated() == NUM_IDLE
                wall, used = time.perf_counter(), time.process_time()
                time.sleep(2.0 if quick else 10.0)
                shares[what] = (time.process_time() - used) / (time.perf_counter() - wall)
            finally:
                end(process, connection)
        report.text.append(f"A server with {NUM_IDLE} {what} clients uses {100 * shares[what]:.2f} % of a core.\n")
    report.data["processor_shares"] = shares
    return Floor(
        f"{NUM_IDLE} idle clients: share of a core", shares["idle"], None, MOST_IDLE_SHARE, at_least=False, unit=""
    )


def run(options: Options) -> Report:
    engine = options.engines[0]
    report = Report(f"Worker processes ({engine} engine)")
    report.floors = [
        *latencies(engine, options.quick, report),
        speed_ups(engine, options.quick, report),
        idle_cost(options.quick, report),
    ]
    return report
