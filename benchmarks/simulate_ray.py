"""Where does a round on Ray saturate? A model of bytes and messages, and a simulation of its queues.

``python -m benchmarks.simulate_ray --workers 8 64 512 --shards 1 4 16``. The costs of one message at a coordinator and
at a shard are measured (`make bench BENCH_ARGS="--only ray"`); here they are arguments.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.report import table

COMPACT_FROM_BYTES = 1 << 20
GROWTH = 2.5
"""A log is compacted when it is so many times as large as its distinct rows, and larger than that."""


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes per second of one machine's parts.

    Attributes:
        prepare: seconds of a worker for one gradient that travels with others.
        commit: seconds of the coordinator for one gradient that travels with others.
        part: seconds of worker and shard for what one shard gets of one gradient.
        message: seconds of an actor for one message, whatever is in it.
        copy: bytes per second that a shard takes in.
        link: bytes per second of a worker's network.
        merge: bytes per second that a shard merges.
        latency: seconds of a message on its way.
    """

    prepare: float = 100e-6
    commit: float = 60e-6
    part: float = 150e-6
    message: float = 500e-6
    copy: float = 2e9
    link: float = 1.25e9
    merge: float = 2e9
    latency: float = 200e-6


@dataclass(frozen=True)
class Load:
    """What is asked: so many workers, each of which computes for so long on gradients of so many bytes.

    `distinct` are the bytes of the distinct rows of a round that goes on and on: such a one is compacted again and
    again, one in which nothing is repeated never. None for rounds that end before that.
    """

    workers: int
    shards: int
    num_bytes: int
    compute: float
    distinct: int | None = None


def bounds(load: Load, costs: Costs) -> dict[str, float]:
    """Return the gradients per second that each part could take in if all others were free."""
    part = load.num_bytes / load.shards
    per_gradient_at_shard = costs.message + costs.part + part / costs.copy + part / costs.merge
    return {
        "workers": load.workers / (load.compute + costs.message * load.shards + load.num_bytes / costs.link),
        "shards": 1 / per_gradient_at_shard,
        "coordinator": 1 / (costs.message + costs.commit),
    }


def compactions(load: Load, in_call: float) -> float:
    """Return the compactions for each gradient, of so many in a call: at most one for all that are judged together."""
    if load.distinct is None or not load.num_bytes:
        return 0.0
    between = (max(COMPACT_FROM_BYTES, GROWTH * load.distinct) - load.distinct) / load.num_bytes
    return 1 / max(between, in_call)


def on_one_machine(load: Load, costs: Costs, cores: float, in_call: float = 1.0) -> float:
    """Return the gradients per second of a machine whose cores do all of it, with so many gradients in a call.

    Each message costs both who sends it and who gets it, as each byte does. A compaction is two messages to each
    shard: to compact, and to let go of what was.
    """
    parts = load.shards if load.num_bytes else 0
    seconds = load.compute + costs.prepare + costs.commit + parts * costs.part
    seconds += ((2 * parts + 2) / in_call + 4 * parts * compactions(load, in_call)) * costs.message
    return cores / (seconds + load.num_bytes * (2 / costs.copy + 1 / costs.merge))


def fit(measured: dict[str, Any], cores: float) -> Costs:
    """Return costs that agree with what `bench_ray` has measured of one shard; they say how all else should be."""
    small, large, nothing = measured["32 kB"], measured["1 MB"], measured["nothing"]
    waiting, piped, bulk = [
        cores / statistics.median(case["gradients_per_s"][f"gradquorum, {how}"])
        for case, how in ((small, "waiting"), (small, "pipelined"), (large, "pipelined"))
    ]
    in_small, in_large = _messages(small, small["gradients_per_call"]), _messages(large, large["gradients_per_call"])
    message = (waiting - piped) / (_messages(small, 1.0) - in_small)
    piped -= in_small * message
    bulk -= in_large * message
    gradient = cores / statistics.median(nothing["commits_per_s"]) - 2 * message / nothing["gradients_per_call"]
    byte = (bulk - piped) / (large["bytes"] - small["bytes"])
    part = piped - gradient - byte * small["bytes"]
    return Costs(gradient / 2, gradient / 2, part, message, copy=3 / byte, merge=3 / byte)


def _load(case: dict[str, Any], shards: int) -> Load:
    """Return what the benchmark asks for in a case."""
    return Load(2, shards, case["bytes"], 0.0, case["distinct_bytes"])


def _messages(case: dict[str, Any], in_call: float) -> float:
    """Return the ends of messages for each gradient, with one shard."""
    return 4 / in_call + 4 * compactions(_load(case, 1), in_call)


def check(measured: dict[str, Any], cores: float) -> list[list[str]]:
    """Return for what was not fitted the gradients per second expected, measured, and their ratio."""
    costs = fit(measured, cores)
    rows = []
    for name, shards, key in (("32 kB", 2, "two shards"), ("1 MB", 2, "two shards"), ("1 MB", 1, "waiting")):
        case = measured[name]
        in_call = 1.0 if key == "waiting" else case["gradients_per_call"]
        expected = on_one_machine(_load(case, shards), costs, cores, in_call)
        found = statistics.median(case["gradients_per_s"][f"gradquorum, {key}"])
        rows.append([f"{name}, {key}", f"{expected:.0f}", f"{found:.0f}", f"{expected / found:.2f}"])
    return rows


def simulate(load: Load, costs: Costs, num_steps: int = 50) -> float:
    """Return the gradients per second that come in, over so many steps.

    Each worker computes, sends its parts to all shards, then commits, then begins anew; the step is over when the
    quorum has committed, which nobody waits for: a late gradient is dropped, and costs what any other costs.
    """
    free_at_shard = [0.0] * load.shards
    free_at_coordinator = 0.0
    part = load.num_bytes / load.shards
    ready = [(load.compute * (1 + i / load.workers), i) for i in range(load.workers)]
    heapq.heapify(ready)
    num_committed, wanted = 0, num_steps * load.workers
    now = 0.0
    while num_committed < wanted:
        begin, worker = heapq.heappop(ready)
        sent = begin + costs.message * load.shards + load.num_bytes / costs.link
        held = 0.0
        for shard in range(load.shards):
            start = max(sent + costs.latency, free_at_shard[shard])
            free_at_shard[shard] = start + costs.message + costs.part + part / costs.copy + part / costs.merge
            held = max(held, start + costs.message + costs.part + part / costs.copy)
        free_at_coordinator = max(held + costs.latency, free_at_coordinator) + costs.message + costs.commit
        now = free_at_coordinator + costs.latency
        num_committed += 1
        heapq.heappush(ready, (now + load.compute, worker))
    return num_committed / now


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate_ray", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 32, 128, 512])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--bytes", type=int, nargs="+", default=[32 << 10, 1 << 20])
    parser.add_argument("--cores", type=float, default=2.0, help="of the machine that was measured")
    parser.add_argument("--check", metavar="FILE", help="what `benchmarks --only ray --json FILE` has written: compare")
    parser.add_argument("--compute", type=float, default=0.02, help="seconds that a worker takes for a gradient")
    for name, default in vars(Costs()).items():
        parser.add_argument(f"--{name}", type=float, default=default)
    arguments = parser.parse_args()
    if arguments.check:
        with open(arguments.check) as file:
            measured = json.load(file)["questions"]["ray"]
        print(fit(measured, arguments.cores))
        print(table(["what", "expected/s", "measured/s", "ratio"], check(measured, arguments.cores)))
        return
    costs = Costs(**{name: getattr(arguments, name) for name in vars(Costs())})
    rows = []
    for num_bytes in arguments.bytes:
        for workers in arguments.workers:
            for shards in arguments.shards:
                load = Load(workers, shards, num_bytes, arguments.compute)
                limits = bounds(load, costs)
                least = min(limits, key=lambda what: limits[what])
                found = simulate(load, costs)
                words = [
                    f"{num_bytes >> 10} kB",
                    str(workers),
                    str(shards),
                    f"{found:.0f}",
                    f"{limits[least]:.0f}",
                    least,
                ]
                rows.append(words)
    print(table(["gradient", "workers", "shards", "gradients/s, simulated", "bound", "by"], rows))


if __name__ == "__main__":
    main()
