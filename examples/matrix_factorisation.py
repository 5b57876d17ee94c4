"""Matrix factorisation with a group, two sparse tables and a dense bias: four workers, of which three are waited for.

    python examples/matrix_factorisation.py              the workers are threads; one stops half-way
    python examples/matrix_factorisation.py --processes  they are processes; one is killed half-way

A rating is estimated as users[u] @ items[i] + bias. What differs between the two forms is in `main`.
"""

import multiprocessing
import sys
import threading
import time

import numpy as np

import gradquorum as gq

USERS, ITEMS, DIM, BATCH, WORKERS, QUORUM, ROUNDS, RATE = 300, 200, 4, 256, 4, 3, 400, 0.05


def ratings(seed, number):
    """Draw users, items, and what the one thinks of the other: what there is to learn."""
    truth = np.random.default_rng(0)
    tastes, traits = truth.standard_normal((USERS, 2)), truth.standard_normal((ITEMS, 2))
    rng = np.random.default_rng(seed)
    users, items = rng.integers(USERS, size=number), rng.integers(ITEMS, size=number)
    noise = 0.1 * rng.standard_normal(number)
    return users, items, ((tastes[users] * traits[items]).sum(axis=1) + 3.5 + noise).astype("float32")


def errors(params, users, items, rated):
    return (params["users"][users] * params["items"][items]).sum(axis=1) + params["bias"] - rated


def work(sync, rank, params, stop):
    with sync.worker(rank) as worker:
        for step in worker:  # waits for parameters; ends when the training is closed
            if stop.is_set():
                return
            users, items, rated = ratings([rank, step], BATCH)
            wrong = errors(params, users, items, rated)
            worker.apply(
                {
                    "users": (users, wrong[:, None] * params["items"][items]),  # ids as they come, repeats and all
                    "items": (items, wrong[:, None] * params["users"][users]),
                    "bias": wrong.mean(keepdims=True),
                }
            )


def main(processes):
    server = gq.Server() if processes else None
    zeros = gq.shared_table if processes else np.zeros
    make_group = server.group if processes else gq.AccumulatorGroup
    kind = multiprocessing.get_context("spawn") if processes else threading
    start = kind.Process if processes else kind.Thread

    rng = np.random.default_rng(1)
    params = {"users": zeros((USERS, DIM), "float32"), "items": zeros((ITEMS, DIM), "float32")}
    for table in params.values():
        table[:] = 0.3 * rng.standard_normal(table.shape)
    params["bias"] = zeros((1,), "float32")
    specs = {name: gq.SparseSpec("float32", params[name].shape, "MEAN_BY_COUNT") for name in ("users", "items")}
    specs["bias"] = gq.DenseSpec("float32", (1,), "MEAN_BY_COUNT")
    group = make_group(specs, order="worker", expected_workers=WORKERS, max_per_worker=1)

    def update(gradients):
        gradients = gradients.clip_by_norm(1000.0)  # one factor for all three
        for name in ("users", "items"):
            params[name][gradients[name].indices] -= RATE * gradients[name].values
        params["bias"] -= RATE * gradients["bias"]

    def report(text):
        error = np.sqrt(np.square(errors(params, *ratings(99, 4096))).mean())
        print(f"{text}: error {error:.3f}, {group.num_workers} workers", flush=True)

    stop = [kind.Event() for _ in range(WORKERS)]
    with gq.SyncReplicas(group, QUORUM, num_workers=WORKERS, update=update) as sync:
        workers = [start(target=work, args=(sync, rank, params, stop[rank])) for rank in range(WORKERS)]
        for worker in workers:
            worker.start()
        while group.num_workers < WORKERS:  # else a slow starter could miss it all
            time.sleep(0.01)
        report("at first")
        sync.run(ROUNDS // 2, timeout=60)
        workers[-1].kill() if processes else stop[-1].set()
        workers[-1].join()
        report("half-way, without the last worker")
        sync.run(ROUNDS // 2, timeout=60)
        report("at the end")
    for worker in workers:
        worker.join()
    if server is not None:
        server.close()


if __name__ == "__main__":
    main("--processes" in sys.argv[1:])
