"""Plain processes that know their RANK and the WORLD_SIZE, as torchrun starts them: rank 0 hosts and updates.

    torchrun --nproc-per-node 4 examples/torchrun_style.py DIRECTORY

or without torch, from a shell:

    for RANK in 0 1 2 3; do RANK=$RANK WORLD_SIZE=4 python examples/torchrun_style.py DIRECTORY & done; wait

DIRECTORY is one of this run, which only this user can write to: the processes meet there.
"""

import itertools
import os
import pickle
import sys
import time
from pathlib import Path

import numpy as np

import gradquorum as gq

ROWS, DIM, STEPS = 1000, 8, 200


def host(directory: Path, num_workers: int) -> None:
    """Rank 0: the server, the parameters, and all but one worker for each step."""
    table = gq.shared_table((ROWS, DIM), "float32")
    with gq.Server(directory / "server") as server:  # its address is the path: others need no handle of it
        acc = server.accumulator("float32", (ROWS, DIM), "table")
        (directory / "handle.part").write_bytes(pickle.dumps(table))
        (directory / "handle.part").rename(directory / "handle")  # whoever sees it sees all of it
        for gradient in itertools.islice(acc.rounds(max(num_workers - 1, 1)), STEPS):
            table[gradient.indices] -= 0.5 * gradient.values
    print(f"{STEPS} steps; mean distance to the optimum: {np.abs(table - 1).mean():.3f}")


def work(directory: Path, rank: int) -> None:
    """Every other rank: gradients of half the squared distance to 1, until the server is closed."""
    while not (directory / "handle").exists():
        time.sleep(0.05)
    rng = np.random.default_rng(rank)
    try:
        # To unpickle runs what its writer chose: it is rank 0's, as only this user can write to the directory.
        table = pickle.loads((directory / "handle").read_bytes())
        acc = gq.attach("table", directory / "server")
        worker = acc.worker(rank)
        while True:
            worker.begin()
            ids = rng.integers(ROWS, size=64)
            receipt = worker.apply_grad(ids, table[ids] - 1)
            acc.wait_published(receipt.step + bool(receipt))
    except (gq.CancelledError, gq.ClosedError, gq.UnavailableError):
        pass  # the others were done without us


if __name__ == "__main__":
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Path(sys.argv[1]).resolve()
    host(place, world_size - 1) if rank == 0 else work(place, rank)
