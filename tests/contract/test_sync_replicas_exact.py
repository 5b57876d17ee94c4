"""`SyncReplicas` computes what one process computes."""

import contextlib
import threading

import numpy as np
import pytest

import gradquorum as gq
from tests.support import TIMEOUT, assert_same_bits

MEMBERS = ("MEAN", "SUM", "MEAN_BY_COUNT")


def members(reduction="MEAN"):
    return {
        "left": gq.SparseSpec("float32", (50, 3), reduction),
        "right": gq.SparseSpec("float32", (20, 3), reduction),
        "bias": gq.DenseSpec("float32", (3,), reduction),
    }


class Turns:
    """Lets workers go one after another, in an order given for each step."""

    def __init__(self, orders):
        self._orders = orders
        self._condition = threading.Condition()
        self._done = dict.fromkeys(range(len(orders)), 0)

    @contextlib.contextmanager
    def turn(self, step, worker):
        with self._condition:
            mine = lambda: self._orders[step][self._done[step]] == worker  # noqa: E731
            assert self._condition.wait_for(mine, TIMEOUT)
            yield
            self._done[step] += 1
            self._condition.notify_all()


class Model:
    """A small factorisation whose gradients depend on its parameters in every bit."""

    def __init__(self):
        rng = np.random.default_rng(5)
        self.left = rng.standard_normal((50, 3)).astype(np.float32)
        self.right = rng.standard_normal((20, 3)).astype(np.float32)
        self.bias = np.zeros(3, np.float32)

    def gradients(self, worker, step, size=16):
        rng = np.random.default_rng([worker, step])
        users, items = rng.integers(0, 50, size), rng.integers(0, 20, size)  # unsorted, repeated
        targets = rng.standard_normal(size).astype(np.float32)
        return self.gradients_of(users, items, targets)

    def gradients_of(self, users, items, targets):
        left, right = self.left[users] + self.bias, self.right[items]
        errors = ((left * right).sum(axis=1) - targets)[:, None] / np.float32(len(users))
        return {
            "left": (users, errors * right),
            "right": (items, errors * left),
            "bias": (errors * right).sum(axis=0),
        }

    def update(self, gradients):
        for name in ("left", "right"):
            indices, rows, _ = gradients[name]
            getattr(self, name)[indices] -= np.float32(0.1) * rows
        self.bias -= np.float32(0.1) * gradients["bias"]


@pytest.mark.parametrize("reduction", MEMBERS)
@pytest.mark.parametrize("num_required", [4, "all"])
def test_all_of_m_in_worker_order_equals_one_process_bit_for_bit(make, run_thread, reduction, num_required):
    num_workers, num_rounds = 4, 6
    rng = np.random.default_rng(0)
    turns = Turns([rng.permutation(num_workers).tolist() for _ in range(num_rounds)])
    trained = Model()

    def work(sync, index):
        with sync.worker(index) as worker:
            for step in worker:
                if step == num_rounds:
                    break
                gradients = trained.gradients(index, step)
                with turns.turn(step, index):
                    assert worker.apply(gradients)

    options = {"order": "worker", "expected_workers": num_workers, "max_per_worker": 1}
    group = make.group(members(reduction), **options)
    with gq.SyncReplicas(group, num_required, num_workers=num_workers, update=trained.update) as sync:
        calls = [run_thread(work, sync, index) for index in range(num_workers)]
        assert sync.run(num_rounds, timeout=TIMEOUT) == num_rounds
        for call in calls:
            call.result()

    serial, alone = Model(), make.group(members(reduction), order="worker")
    for step in range(num_rounds):
        computed = [serial.gradients(index, step) for index in range(num_workers)]
        for index in range(num_workers):
            alone.apply(computed[index], local_step=step, worker=index)
        serial.update(alone.take(num_workers))
    for name in ("left", "right", "bias"):
        assert_same_bits(getattr(trained, name), getattr(serial, name))


def test_all_of_m_by_count_agrees_with_the_concatenated_batch(make, run_thread):
    num_workers, num_rounds, size = 4, 10, 16
    trained = Model()

    def work(sync, index):
        with sync.worker(index) as worker:
            for step in worker:
                worker.apply(trained.gradients(index, step, size))

    group = make.group(members("MEAN_BY_COUNT"), order="worker", expected_workers=num_workers, max_per_worker=1)
    with gq.SyncReplicas(group, num_workers, num_workers=num_workers, update=trained.update) as sync:
        calls = [run_thread(work, sync, index) for index in range(num_workers)]
        sync.run(num_rounds, timeout=TIMEOUT)
    for call in calls:
        call.result()

    concatenated, alone = Model(), make.group(members("SUM"))
    for step in range(num_rounds):
        batches = []
        for index in range(num_workers):
            rng = np.random.default_rng([index, step])
            batches.append((rng.integers(0, 50, size), rng.integers(0, 20, size), rng.standard_normal(size)))
        users, items, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        alone.apply(concatenated.gradients_of(users, items, targets.astype(np.float32)), local_step=None)
        concatenated.update(alone.take(1))
    for name in ("left", "right", "bias"):
        np.testing.assert_allclose(getattr(trained, name), getattr(concatenated, name), rtol=1e-5, atol=1e-7)
