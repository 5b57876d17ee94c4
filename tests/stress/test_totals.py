"""Eight threads, a switch interval of 1 microsecond, exact totals on integers stored as floats."""

import random
import threading
import time

import numpy as np
import pytest

import gradquorum as gq
from tests.support import TIMEOUT, Call

SECONDS = [1.5, pytest.param(15.0, marks=pytest.mark.slow)]
NUM_ROWS = 50


pytestmark = pytest.mark.usefixtures("switch_often")


class Tally:
    """What one thread offered: the sum of each row, and how many gradients were accepted."""

    def __init__(self):
        self.sums = np.zeros(NUM_ROWS)
        self.accepted = 0
        self.statuses = set()

    def add(self, receipt, indices, values):
        self.statuses.add(receipt.status)
        if receipt:
            np.add.at(self.sums, indices, values[:, 0])
            self.accepted += 1


def run_workers(work, seconds, count=8):
    """Run `work(number, tally, until)` in threads; return their tallies."""
    tallies = [Tally() for _ in range(count)]
    until = time.monotonic() + seconds
    calls = [Call(work, number, tally, until) for number, tally in enumerate(tallies)]
    return tallies, calls


def finish(calls, seconds):
    deadline = time.monotonic() + seconds + TIMEOUT
    for call in calls:
        while call.running and time.monotonic() < deadline:
            time.sleep(0.01)
        call.result()


def random_gradient(rng, number):
    size = rng.randrange(0, 6)
    indices = np.array([rng.randrange(NUM_ROWS) for _ in range(size)], np.int64)
    values = np.array([[float(rng.randrange(-9, 10))] for _ in range(size)]).reshape(size, 1)
    return indices, values


@pytest.mark.filterwarnings("ignore::gradquorum.StaleGradientWarning")
@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("options", [{}, {"compact": False}, {"order": "worker"}], ids=str)
def test_totals_of_eight_threads_are_exact(make, seconds, options):
    acc = make.sparse("float64", (NUM_ROWS, 1), reduction_type="SUM", **options)
    sums, counted = np.zeros(NUM_ROWS), [0, 0]
    stop = threading.Event()

    def work(number, tally, until):
        rng = random.Random(number)
        sequence = 0
        while time.monotonic() < until:
            indices, values = random_gradient(rng, number)
            step = acc.global_step - rng.choice([0, 0, 0, 1])
            marks = {"worker": number, "sequence": sequence}
            tally.add(acc.apply_grad(indices, values, local_step=step, **marks), indices, values)
            if rng.random() < 0.1:
                again = acc.apply_grad(indices, values, local_step=None, **marks)
                assert again.status is gq.ApplyStatus.DUPLICATE
            sequence += 1

    def take():
        while not stop.is_set():
            try:
                grad = acc.take_grad(3, timeout=0.05)
            except gq.DeadlineExceededError:
                continue
            sums[grad.indices] += grad.values[:, 0]
            counted[0] += grad.num_gradients
            counted[1] += 1

    taker = Call(take)
    tallies, calls = run_workers(work, seconds)
    finish(calls, seconds)
    stop.set()
    taker.result()
    while acc.num_accumulated():
        grad = acc.take_grad(1, timeout=TIMEOUT)
        sums[grad.indices] += grad.values[:, 0]
        counted[0] += grad.num_gradients
        counted[1] += 1
    np.testing.assert_array_equal(sums, sum(tally.sums for tally in tallies))
    assert counted == [sum(tally.accepted for tally in tallies), acc.global_step]
    assert gq.ApplyStatus.ACCEPTED in set().union(*(tally.statuses for tally in tallies))


@pytest.mark.parametrize("seconds", SECONDS)
def test_totals_with_cancels_timeouts_and_discards_are_exact(make, seconds):
    acc = make.sparse("float64", (NUM_ROWS, 1), reduction_type="SUM")
    delivered, discarded = [], []
    stop = threading.Event()

    def work(number, tally, until):
        rng = random.Random(number)
        while time.monotonic() < until:
            indices, values = random_gradient(rng, number)
            tally.add(acc.apply_grad(indices, values, local_step=None), indices, values)
            if rng.random() < 0.01:
                discarded.append(acc.discard())

    def take():
        rng = random.Random(99)
        while not stop.is_set():
            future = acc.submit_take(rng.randrange(1, 9), timeout=rng.random() * 0.002)
            if rng.random() < 0.5 and future.cancel():
                continue
            try:
                delivered.append(future.result(TIMEOUT).num_gradients)
            except gq.DeadlineExceededError:
                continue

    takers = [Call(take) for _ in range(2)]
    tallies, calls = run_workers(work, seconds, 6)
    finish(calls, seconds)
    stop.set()
    for taker in takers:
        taker.result()
    left = acc.close()
    assert sum(delivered) + sum(discarded) + left == sum(tally.accepted for tally in tallies)


@pytest.mark.parametrize("seconds", SECONDS)
def test_totals_under_a_budget_that_blocks_are_exact(make, seconds):
    acc = make.sparse("float64", None, reduction_type="SUM", max_bytes=20_000, on_full="block")
    rows = np.ones((10, 16))
    total, taken = [0, 0.0], threading.Event()

    def work(number, tally, until):
        rng = random.Random(number)
        while time.monotonic() < until:
            indices = np.array(rng.sample(range(10_000), 10))
            try:
                tally.accepted += bool(acc.apply_grad(indices, rows, local_step=None, timeout=0.05))
            except gq.DeadlineExceededError:
                continue
            except gq.ResourceExhaustedError:  # the waiting take could not be satisfied within the budget
                continue

    def take():
        while not taken.is_set():
            try:
                grad = acc.take_grad(2, timeout=0.02)
            except gq.DeadlineExceededError:
                continue
            total[0] += grad.num_gradients
            total[1] += float(grad.values.sum())

    taker = Call(take)
    tallies, calls = run_workers(work, seconds)
    finish(calls, seconds)
    taken.set()
    taker.result()
    while acc.num_accumulated():
        grad = acc.take_grad(1, timeout=TIMEOUT)
        total[0] += grad.num_gradients
        total[1] += float(grad.values.sum())
    accepted = sum(tally.accepted for tally in tallies)
    assert total == [accepted, accepted * rows.sum()]
