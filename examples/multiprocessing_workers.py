"""Worker processes by `multiprocessing`: this one hosts the round, takes the means and updates the shared table.

python examples/multiprocessing_workers.py
"""

import itertools
import multiprocessing
import time

import numpy as np

import gradquorum as gq

ROWS, DIM, WORKERS, QUORUM, STEPS = 1000, 8, 4, 3, 200


def work(rank: int, table: np.ndarray, acc: gq.SparseConditionalAccumulator) -> None:
    """Compute gradients of half the squared distance to 1, on a few rows at a time, until the server is closed."""
    rng = np.random.default_rng(rank)
    try:
        worker = acc.worker(rank)
        while True:
            worker.begin()  # remembers the step of the parameters that are read now
            ids = rng.integers(ROWS, size=64)
            receipt = worker.apply_grad(ids, table[ids] - 1)
            acc.wait_published(receipt.step + bool(receipt))  # after a stale one: the step that came instead
    except (gq.CancelledError, gq.ClosedError):
        pass


def main() -> None:
    table = gq.shared_table((ROWS, DIM), "float32")
    with gq.Server() as server:
        acc = server.accumulator("float32", (ROWS, DIM))
        spawn = multiprocessing.get_context("spawn")
        workers = [spawn.Process(target=work, args=(rank, table, acc)) for rank in range(WORKERS)]
        for process in workers:
            process.start()
        while acc.num_workers < WORKERS:  # one that starts late would find no server any more
            time.sleep(0.01)
        for gradient in itertools.islice(acc.rounds(QUORUM), STEPS):  # each turn is a step, published at its end
            table[gradient.indices] -= 0.5 * gradient.values
    for process in workers:
        process.join()
    print(f"{STEPS} steps; mean distance to the optimum: {np.abs(table - 1).mean():.3f}")


if __name__ == "__main__":
    main()
