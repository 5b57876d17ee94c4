"""The workers and the taker of the chaos test: processes of their own, any of which may be killed at any moment.

Every gradient has rows that no other one has, so that what a take delivers tells which gradients are in it, each whole.
"""

import contextlib
import os
import signal
from dataclasses import dataclass

import numpy as np

import gradquorum as gq
from gradquorum.targets.process import messages as m
from gradquorum.targets.process.client import Client

NAME = "chaos"
NUM_WORKERS = 6
TAKER = NUM_WORKERS  # its role; those of the workers are 0, 1, ...
MAX_SEQUENCES = 50_000
MAX_ROWS = 1000

POINTS = {
    "waiting for memory to copy to": (m.Lend, "sent"),
    "between copy and commit": (m.Apply, "about to be sent"),
    "between commit and receipt": (m.Apply, "sent"),
    "waiting for a round": (m.Take, "sent"),
    "between detach and acknowledge": (m.Acknowledge, "about to be sent"),
}
"""Where a process can be made to kill itself: the message, and on which side of it."""


@dataclass(frozen=True)
class Board:
    """What the processes tell each other, in shared memory. It pickles as handles."""

    stop: np.ndarray
    armed: np.ndarray
    """For each role 1 + the number of the point where it is to kill itself, or 0."""
    fired: np.ndarray
    """For each point, how often that came about."""
    progress: np.ndarray
    """For each role, what it has done."""
    recording: np.ndarray
    """Whether the taker has, or is about to have, a round that it has not recorded."""
    receipts: np.ndarray
    """For each worker and sequence, the receipts that the worker has seen."""
    taken: np.ndarray
    """For each worker and sequence, the takes in which it was."""

    @classmethod
    def new(cls):
        sequences = (NUM_WORKERS, MAX_SEQUENCES)
        shapes = [(), NUM_WORKERS + 1, len(POINTS), NUM_WORKERS + 1, (), sequences, sequences]
        return cls(*[gq.shared_table(shape, "int64") for shape in shapes])


def worker_name(index):
    return f"worker {index}"


def num_rows(sequence):
    """Some gradients travel in the message, some in shared memory of several sizes."""
    return np.array([1, 30, 700, 90, 1000])[sequence % 5]


def gradient(index, sequence):
    first = (index * MAX_SEQUENCES + sequence) * MAX_ROWS
    ids = np.arange(first, first + num_rows(sequence))
    return ids, np.stack([np.full(len(ids), sequence + 1), ids % 97], axis=1)


def record(board, taken):
    """Write down which gradients a round holds. Each must be whole, and exact."""
    keys, rows = np.divmod(taken.indices, MAX_ROWS)
    workers, sequences = np.divmod(keys, MAX_SEQUENCES)
    np.testing.assert_array_equal(taken.values, np.stack([sequences + 1, taken.indices % 97], axis=1))
    np.testing.assert_array_equal(taken.counts, np.ones_like(taken.counts))
    found, first, counts = np.unique(keys, return_index=True, return_counts=True)
    np.testing.assert_array_equal(counts, num_rows(found % MAX_SEQUENCES))
    assert len(found) == taken.num_gradients
    assert not rows[first].any()
    board.taken[workers[first], sequences[first]] += 1


def install_injector(board, role):
    """Let this process kill itself at the point that it is armed for."""
    send = Client.send

    def injected(self, connection, message):
        fire(message, "about to be sent")
        if role == TAKER and isinstance(message, m.Acknowledge):
            board.recording[()] = 1
        send(self, connection, message)
        fire(message, "sent")

    def fire(message, side):
        point = board.armed[role] - 1
        if point >= 0:
            kind, when = list(POINTS.values())[point]
            if isinstance(message, kind) and when == side:
                board.fired[point] += 1
                os.kill(os.getpid(), signal.SIGKILL)

    Client.send = injected


def work(board, address, index):
    """Offer gradient after gradient, each numbered; go on where the last process of this name was."""
    install_injector(board, index)
    acc, name = gq.attach(NAME, address), worker_name(index)
    sequence = acc.last_sequence(name) + 1
    while not board.stop:
        receipt = acc.apply_grad(*gradient(index, sequence), local_step=None, worker=name, sequence=sequence)
        assert receipt.status is gq.ApplyStatus.ACCEPTED, receipt
        board.receipts[index, sequence] += 1
        board.progress[index] += 1
        sequence += 1
        with contextlib.suppress(gq.DeadlineExceededError):
            acc.wait_published(receipt.step + 1, timeout=0.2)


def take(board, address):
    """Take round after round, and record what is in it."""
    install_injector(board, TAKER)
    acc, rng = gq.attach(NAME, address), np.random.default_rng(os.getpid())
    while not board.stop:
        with contextlib.suppress(gq.DeadlineExceededError):
            taken = acc.take_grad(int(rng.integers(1, NUM_WORKERS + 1)), timeout=0.2)
            record(board, taken)
            board.recording[()] = 0
            board.progress[TAKER] += 1
            acc.publish()
