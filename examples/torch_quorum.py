"""PyTorch with a quorum of processes: each step takes the gradients of the fastest ones, and SparseAdam applies them.

    torchrun --nproc-per-node 4 examples/torch_quorum.py DIRECTORY

DIRECTORY is one of this run, which only this user can write to: the processes meet there.
"""

import os
import pickle
import sys
import time
from pathlib import Path

import torch

import gradquorum as gq
import gradquorum.torch as gqt

ROWS, DIM, STEPS = 500, 8, 100


def host(directory: Path, num_workers: int) -> None:
    """Rank 0: the server, the parameters, and all but one worker for each step."""
    table = gq.shared_table((ROWS, DIM), "float32")
    weight = torch.nn.Parameter(torch.from_numpy(table))  # the same memory
    optimizer = torch.optim.SparseAdam([weight], lr=0.1)
    with gq.Server(directory / "server") as server:
        acc = server.accumulator("float32", (ROWS, DIM), "table", reduction_type="MEAN_BY_COUNT")
        (directory / "handle.part").write_bytes(pickle.dumps(table))
        (directory / "handle.part").rename(directory / "handle")  # whoever sees it sees all of it
        for step in range(STEPS):
            gqt.assign_grads(weight, acc.take_grad(max(num_workers - 1, 1)))
            optimizer.step()
            acc.publish(step + 1)
    print(f"{STEPS} steps; mean distance to the optimum: {(weight.detach() - 1).abs().mean():.3f}")


def work(directory: Path, rank: int) -> None:
    """Every other rank: two micro-batches for each gradient that it offers, until the server is closed."""
    while not (directory / "handle").exists():
        time.sleep(0.05)
    torch.manual_seed(rank)
    try:
        # To unpickle runs what its writer chose: it is rank 0's, as only this user can write to the directory.
        weight = torch.nn.Parameter(torch.from_numpy(pickle.loads((directory / "handle").read_bytes())))
        acc = gq.attach("table", directory / "server")
        worker = acc.worker(rank)
        micro_batches = gqt.MicroBatchAccumulator([weight], 2)  # its own: not shared
        while True:
            worker.begin()
            done = False
            while not done:
                rows = torch.nn.functional.embedding(torch.randint(ROWS, (64,)), weight, sparse=True)
                ((rows - 1) ** 2).sum().backward()
                done = micro_batches.step()
            receipt = gqt.apply_grad(worker, weight)
            weight.grad = None
            acc.wait_published(receipt.step + bool(receipt))  # after a stale one: the step that came instead
    except (gq.CancelledError, gq.ClosedError, gq.UnavailableError):
        pass  # the others were done without us


if __name__ == "__main__":
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)  # as torchrun advises for several processes
    place = Path(sys.argv[1]).resolve()
    host(place, world_size - 1) if rank == 0 else work(place, rank)
