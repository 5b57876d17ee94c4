"""Where does a round on Ray saturate? A model of bytes and messages, and a simulation of its queues.

``python -m benchmarks.simulate_ray --workers 8 64 512 --shards 1 4 16``. The costs of one message at a coordinator and
at a shard are measured (`make bench BENCH_ARGS="--only ray"`); here they are arguments.
"""

from __future__ import annotations

import argparse
import heapq
from dataclasses import dataclass

from benchmarks.report import table


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes per second of one machine's parts.

    Attributes:
        commit: seconds of the coordinator for one gradient that travels with others.
        message: seconds of an actor for one message, whatever is in it.
        copy: bytes per second that a shard takes in.
        link: bytes per second of a worker's network.
        merge: bytes per second that a shard merges.
        latency: seconds of a message on its way.
    """

    commit: float = 60e-6
    message: float = 500e-6
    copy: float = 2e9
    link: float = 1.25e9
    merge: float = 2e9
    latency: float = 200e-6


@dataclass(frozen=True)
class Load:
    """What is asked: so many workers, each of which computes for so long on gradients of so many bytes."""

    workers: int
    shards: int
    num_bytes: int
    compute: float
    quorum: float = 1.0


def bounds(load: Load, costs: Costs) -> dict[str, float]:
    """Return the gradients per second that each part could take in if all others were free."""
    part = load.num_bytes / load.shards
    per_gradient_at_shard = costs.message + part / costs.copy + part / costs.merge
    return {
        "workers": load.workers / (load.compute + costs.message * load.shards + load.num_bytes / costs.link),
        "shards": 1 / per_gradient_at_shard,
        "coordinator": 1 / (costs.message + costs.commit),
    }


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
            free_at_shard[shard] = start + costs.message + part / costs.copy + part / costs.merge
            held = max(held, start + costs.message + part / costs.copy)
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
    parser.add_argument("--compute", type=float, default=0.02, help="seconds that a worker takes for a gradient")
    for name, default in vars(Costs()).items():
        parser.add_argument(f"--{name}", type=float, default=default)
    arguments = parser.parse_args()
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
