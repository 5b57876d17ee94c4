"""Plain processes that know their RANK and the WORLD_SIZE, as torchrun starts them: rank 0 hosts and updates.

    torchrun --nproc-per-node 4 examples/torchrun_style.py DIRECTORY

or without torch, from a shell:

    for RANK in 0 1 2 3; do RANK=$RANK WORLD_SIZE=4 python examples/torchrun_style.py DIRECTORY & done; wait

DIRECTORY, made if it is not there, is one that only this user can write to: the processes meet there. One run at a time
uses it.
"""

import contextlib
import itertools
import os
import pickle
import sys
import time
from pathlib import Path

import numpy as np

import gradquorum as gq

ROWS, DIM, STEPS = 1000, 8, 200
SECONDS = 60  # that anybody waits for the others: who has not come by then has failed


def host(directory: Path, num_workers: int) -> None:
    """Rank 0: the server, the parameters, and all but one worker for each step."""
    table = gq.shared_table((ROWS, DIM), "float32")
    handle = directory / "handle"
    handle.unlink(missing_ok=True)  # of a run that was killed
    with gq.Server(directory / "server") as server:  # its address is the path: others need no handle of it
        acc = server.accumulator("float32", (ROWS, DIM), "table")
        (directory / "handle.part").write_bytes(pickle.dumps(table))
        (directory / "handle.part").rename(handle)  # whoever sees it sees all of it
        try:
            _wait_for_all(acc, num_workers)  # one that starts late would find no server any more
            for gradient in itertools.islice(acc.rounds(max(num_workers - 1, 1), timeout=SECONDS), STEPS):
                table[gradient.indices] -= 0.5 * gradient.values
        finally:
            handle.unlink()
    print(f"{STEPS} steps; mean distance to the optimum: {np.abs(table - 1).mean():.3f}")


def _wait_for_all(acc: gq.SparseConditionalAccumulator, num_workers: int) -> None:
    until = time.monotonic() + SECONDS
    while acc.num_workers < num_workers:
        if time.monotonic() >= until:
            raise SystemExit(f"rank 0: {acc.num_workers} of {num_workers} workers are here after {SECONDS} s")
        time.sleep(0.01)


def find(directory: Path, rank: int) -> tuple[np.ndarray, gq.SparseConditionalAccumulator]:
    """Return the table and the round of rank 0, once they are there."""
    until = time.monotonic() + SECONDS
    while True:
        # To unpickle runs what its writer chose: it is rank 0's, as only this user can write to the directory.
        try:
            return pickle.loads((directory / "handle").read_bytes()), gq.attach("table", directory / "server")
        except (FileNotFoundError, gq.UnavailableError) as error:  # not there yet, or that of a run that was killed
            if time.monotonic() >= until:
                raise SystemExit(f"rank {rank}: no rank 0 in {directory} after {SECONDS} s: {error}") from None
        time.sleep(0.05)


def work(directory: Path, rank: int) -> None:
    """Every other rank: gradients of half the squared distance to 1, until the server is closed."""
    table, acc = find(directory, rank)
    rng = np.random.default_rng(rank)
    with contextlib.suppress(gq.CancelledError, gq.ClosedError):  # UnavailableError would say that rank 0 has died
        worker = acc.worker(rank)
        while True:
            worker.begin()
            ids = rng.integers(ROWS, size=64)
            receipt = worker.apply_grad(ids, table[ids] - 1)
            acc.wait_published(receipt.step + bool(receipt))


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {sys.argv[0]} DIRECTORY, with RANK and WORLD_SIZE set")
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise SystemExit(f"RANK and WORLD_SIZE: expected numbers, as torchrun sets them; got {error}") from None
    if world_size < 2:
        raise SystemExit(f"WORLD_SIZE: expected 2 or more (rank 0 updates, the others work), got {world_size}")
    directory = Path(sys.argv[1]).resolve()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    host(directory, world_size - 1) if rank == 0 else work(directory, rank)


if __name__ == "__main__":
    main()
