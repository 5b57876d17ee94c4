"""The workers and the taker of the test of restarts: they outlive the server, and go on with the next one.

A worker asks where to go on. The taker knows by its step whether a round comes again.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass

import numpy as np

import gradquorum as gq
from gradquorum.targets.process import messages as m
from gradquorum.targets.process.client import Client
from tests.process import chaos

NUM_WORKERS = 4
TAKER = NUM_WORKERS

BEFORE, AFTER = 1, 2  # the acknowledgement of a round


@dataclass(frozen=True)
class Board:
    """What the processes tell each other, in shared memory. It pickles as handles."""

    stop: np.ndarray
    pause: np.ndarray
    """Whether the taker is to leave rounds alone."""
    strike: np.ndarray
    """At which side of its next acknowledgement the taker is to kill the server: `BEFORE`, `AFTER` or 0."""
    server: np.ndarray
    """The number of the server's process."""
    progress: np.ndarray
    """For each role, what it has done."""
    next_step: np.ndarray
    """That of the round which the taker has not had yet."""
    num_again: np.ndarray
    """Rounds that came again."""
    num_resent: np.ndarray
    """For each worker, gradients that had been accepted, and were sent again to the next server."""
    taken: np.ndarray
    """For each worker and sequence, the rounds in which it was, those that came again not counted."""

    @classmethod
    def new(cls):
        shapes = [(), (), (), (), NUM_WORKERS + 1, (), (), NUM_WORKERS, (NUM_WORKERS, chaos.MAX_SEQUENCES)]
        return cls(*[gq.shared_table(shape, "int64") for shape in shapes])


def reach(board, address):
    """Return a handle on the round, once there is a server."""
    while not board.stop:
        with contextlib.suppress(gq.UnavailableError):
            return gq.SparseConditionalAccumulator("int64", (None, 2), chaos.NAME, reduction_type="SUM", target=address)
        time.sleep(0.01)
    raise SystemExit


def work(board, address, index):
    """Offer gradient after gradient, each numbered."""
    name, accepted = chaos.worker_name(index), -1
    while not board.stop:
        acc = reach(board, address)
        with contextlib.suppress(gq.UnavailableError):
            sequence = acc.last_sequence(name) + 1
            while not board.stop:
                gradient = chaos.gradient(index, sequence)
                receipt = acc.apply_grad(*gradient, local_step=None, worker=name, sequence=sequence)
                assert receipt.status is gq.ApplyStatus.ACCEPTED, receipt
                board.num_resent[index] += sequence <= accepted
                board.progress[index] += 1
                accepted, sequence = sequence, sequence + 1
                with contextlib.suppress(gq.DeadlineExceededError):
                    acc.wait_published(receipt.step + 1, timeout=0.05)


def take(board, address):
    """Take round after round, and record what is in it."""
    install_striker(board)
    rng = np.random.default_rng(os.getpid())
    while not board.stop:
        acc = reach(board, address)
        with contextlib.suppress(gq.UnavailableError):
            while not board.stop:
                if board.pause:
                    time.sleep(0.001)
                    continue
                with contextlib.suppress(gq.DeadlineExceededError):
                    taken = acc.take_grad(int(rng.integers(1, NUM_WORKERS + 1)), timeout=0.05)
                    receive(board, taken)
                    board.progress[TAKER] += 1
                    acc.publish()


def receive(board, taken):
    if taken.step < board.next_step:  # the server died before it heard that this had arrived
        workers, sequences = np.divmod(np.unique(taken.indices // chaos.MAX_ROWS), chaos.MAX_SEQUENCES)
        np.testing.assert_array_equal(board.taken[workers, sequences], 1)  # whole and alone
        assert taken.step == board.next_step - 1
        assert len(workers) == taken.num_gradients
        board.num_again[()] += 1
        return
    assert taken.step == board.next_step
    chaos.record(board, taken)
    board.next_step[()] += 1


def install_striker(board):
    """Let this process kill the server when it is told to."""
    send = Client.send

    def striking(self, connection, message):
        strike(message, BEFORE)
        send(self, connection, message)
        strike(message, AFTER)

    def strike(message, side):
        if isinstance(message, m.Acknowledge) and board.strike == side:
            board.strike[()] = 0
            os.kill(int(board.server), signal.SIGKILL)

    Client.send = striking
