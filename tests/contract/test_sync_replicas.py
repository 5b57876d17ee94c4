"""`SyncReplicas`: what M workers and a chief do, whoever is late, leaves, fails or comes back."""

import contextlib
import inspect
import logging
import pickle
import threading

import numpy as np
import pytest

import gradquorum as gq
from tests.support import TIMEOUT, assert_same_bits, wait_for_waiters, wait_until

MEMBERS = ("MEAN", "SUM", "MEAN_BY_COUNT")


def ignore(gradient):
    """An update that changes nothing."""


def members(reduction="MEAN"):
    return {
        "left": gq.SparseSpec("float32", (50, 3), reduction),
        "right": gq.SparseSpec("float32", (20, 3), reduction),
        "bias": gq.DenseSpec("float32", (3,), reduction),
    }


def make_acc(make, num_workers, max_per_worker=1, **options):
    return make.sparse(
        "float32", (10, 1), expected_workers=num_workers, max_per_worker=max_per_worker, order="worker", **options
    )


def one(index, value=1.0):
    return [index], np.float32([[value]])


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


# Exactness


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


# Who is late


def test_backup_worker_that_is_late_is_stale_and_begins_with_the_next_step(make):
    taken = []
    acc = make_acc(make, 3)
    with gq.SyncReplicas(acc, 2, num_workers=3, update=taken.append) as sync:
        fast, steady, slow = (sync.worker(index) for index in range(3))
        for worker in (fast, steady, slow):
            assert worker.begin() == 0
        assert fast.apply(one(0))
        assert steady.apply(one(1))
        assert sync.run(1, timeout=TIMEOUT) == 1
        late = slow.apply(one(2))
        assert (late.status, late.lag) == (gq.ApplyStatus.STALE, 1)
        assert [worker.begin(timeout=TIMEOUT) for worker in (fast, steady, slow)] == [1, 1, 1]
        assert slow.apply(one(2))
        assert fast.apply(one(0))
        sync.run(1, timeout=TIMEOUT)
    assert [gradient.workers for gradient in taken] == [(0, 1), (0, 2)]


def test_a_stale_worker_waits_for_the_parameters_that_made_it_stale(make, run_thread):
    acc = make_acc(make, 2)
    updating, may_go_on = threading.Event(), threading.Event()

    def update(gradient):
        updating.set()
        assert may_go_on.wait(TIMEOUT)

    with gq.SyncReplicas(acc, 1, num_workers=2, update=update) as sync:
        fast, slow = sync.worker(0), sync.worker(1)
        fast.begin()
        slow.begin()
        fast.apply(one(0))
        run = run_thread(sync.run, 1, timeout=TIMEOUT)
        assert updating.wait(TIMEOUT)  # the step has advanced; its parameters are not out
        assert slow.apply(one(1)).status is gq.ApplyStatus.STALE
        with pytest.raises(gq.DeadlineExceededError):
            slow.begin(timeout=0)
        may_go_on.set()
        assert slow.begin(timeout=TIMEOUT) == 1
        assert run.result() == 1


def test_a_worker_counts_max_per_worker_times_and_then_waits_for_the_next_step(make):
    acc = make_acc(make, 2, max_per_worker=2)
    with gq.SyncReplicas(acc, 3, num_workers=2, update=ignore, max_per_worker=2) as sync:
        first, second = sync.worker(0), sync.worker(1)
        for _ in range(2):
            assert first.begin(timeout=0) == 0
            assert first.apply(one(0))
        with pytest.raises(gq.DeadlineExceededError):
            first.begin(timeout=0)
        assert first.apply(one(0)).status is gq.ApplyStatus.REFUSED
        second.begin()
        assert second.apply(one(1))
        assert sync.run(1, timeout=TIMEOUT) == 1
        for _ in range(2):
            assert first.begin(timeout=0) == 1
            assert first.apply(one(0))


def test_a_skipped_gradient_does_not_starve_the_round(make, run_thread):
    acc = make_acc(make, 1, on_nonfinite="skip")

    def work(sync):
        with sync.worker(0) as worker:
            for value, _ in zip((np.nan, np.inf, 2.0), worker, strict=False):
                worker.apply(one(0, value))

    with gq.SyncReplicas(acc, 1, num_workers=1, update=ignore) as sync:
        call = run_thread(work, sync)
        assert sync.run(1, timeout=TIMEOUT) == 1
        call.result()


def test_workers_begin_with_the_step_that_the_group_is_at(make, run_thread):
    acc = make_acc(make, 1)
    acc.set_global_step(5)
    steps = []

    def work(sync):
        with sync.worker(0) as worker:
            for step in worker:
                if worker.apply(one(0)):
                    steps.append(step)

    with gq.SyncReplicas(acc, 1, num_workers=1, update=ignore) as sync:
        call = run_thread(work, sync)
        assert sync.run(2, timeout=TIMEOUT) == 2
        assert acc.published_step == 7
    call.result()
    assert steps[:2] == [5, 6]


# Who leaves


def test_s8_take_that_those_who_are_left_cannot_reach_ends_at_once(make, run_thread):
    acc = make_acc(make, 64)
    with gq.SyncReplicas(acc, 60, num_workers=64, update=ignore) as sync:
        workers = [sync.worker(index) for index in range(64)]
        run = run_thread(sync.run, 1)
        wait_for_waiters(acc, 1)
        for worker in workers[:27]:
            worker.leave()
        error = run.error()
    assert isinstance(error, gq.UnavailableError)
    assert error.needed == 60
    assert error.live < 60
    assert len(error.left) >= 5


def test_s12_a_fast_worker_does_not_close_the_step_without_the_slow_one(make):
    acc = make_acc(make, 2)
    with gq.SyncReplicas(acc, 2, num_workers=2, update=ignore) as sync:
        fast = sync.worker(0)
        fast.begin()
        assert fast.apply(one(0))
        assert fast.apply(one(0)).status is gq.ApplyStatus.REFUSED
        with pytest.raises(gq.DeadlineExceededError) as caught:
            sync.run(1, timeout=0)
        assert (caught.value.have, caught.value.missing) == (1, (1,))


def test_s18_no_gradient_of_old_parameters_passes_as_fresh(make, run_thread):
    """Each gradient says the step of the parameters that it was computed on: all of a round are of its step."""
    table = np.zeros((10, 1), np.float32)
    acc = make_acc(make, 3)

    def update(gradient, step):
        np.testing.assert_array_equal(gradient.values, step)
        table[:] = step + 1

    def work(sync, index):
        with sync.worker(index) as worker:
            for _ in worker:
                worker.apply(([index], table[[index]].copy()))

    with gq.SyncReplicas(acc, 2, num_workers=3, update=update) as sync:
        calls = [run_thread(work, sync, index) for index in range(3)]
        assert sync.run(200, timeout=TIMEOUT) == 200
    for call in calls:
        call.result()


def apply_and_leave(sync, index):
    with sync.worker(index) as worker:
        worker.begin()
        assert worker.apply(one(index))


def test_all_follows_the_workers_that_leave_and_come_back(make):
    taken = []
    acc = make_acc(make, 3)
    with gq.SyncReplicas(acc, "all", num_workers=3, update=taken.append) as sync:
        workers = [sync.worker(index) for index in range(3)]
        workers[2].leave()
        for worker in workers[:2]:
            worker.begin()
            worker.apply(one(worker.name))
        sync.run(1, timeout=TIMEOUT)
        workers[2] = sync.worker(2)
        for worker in workers[:2]:
            worker.begin()
            worker.apply(one(worker.name))
        with pytest.raises(gq.DeadlineExceededError) as caught:
            sync.run(1, timeout=0)  # the one that came back is waited for
        assert (caught.value.have, caught.value.need, caught.value.missing) == (2, 3, (2,))
        workers[2].begin()
        workers[2].apply(one(2))
        sync.run(1, timeout=TIMEOUT)
    assert [gradient.workers for gradient in taken] == [(0, 1), (0, 1, 2)]


def test_all_waits_for_those_who_have_not_joined_yet(make):
    acc = make_acc(make, 3)
    with gq.SyncReplicas(acc, "all", num_workers=3, update=ignore) as sync:
        apply_and_leave(sync, 0)
        apply_and_leave(sync, 1)
        with pytest.raises(gq.DeadlineExceededError) as caught:
            sync.run(1, timeout=0)
        assert (caught.value.have, caught.value.need, caught.value.missing) == (2, 3, (2,))
        apply_and_leave(sync, 2)
        assert sync.run(1, timeout=TIMEOUT) == 1


def test_all_counts_who_applied_before_leaving_and_waits_for_who_is_left(make, run_thread):
    taken = []
    acc = make_acc(make, 3)
    with gq.SyncReplicas(acc, "all", num_workers=3, update=taken.append) as sync:
        staying, leaving = sync.worker(1), sync.worker(2)
        apply_and_leave(sync, 0)
        run = run_thread(sync.run, 1, timeout=TIMEOUT)
        wait_for_waiters(acc, 1)
        leaving.leave()
        with pytest.raises(gq.DeadlineExceededError):
            acc.wait_published(1, timeout=0.05)  # one gradient is here, and one worker: two are waited for
        staying.begin()
        staying.apply(one(1))
        assert run.result() == 1
    assert taken[0].workers == (0, 1)


def test_all_but_b_does_not_wait_for_b_of_those_that_are_there(make):
    taken = []
    acc = make_acc(make, 4)
    with gq.SyncReplicas(acc, "all-1", num_workers=4, update=taken.append) as sync:
        workers = [sync.worker(index) for index in range(4)]
        for worker in workers[:3]:
            worker.begin()
            worker.apply(one(worker.name))
        sync.run(1, timeout=TIMEOUT)
        workers[0].leave()
        for worker in workers[1:3]:
            worker.begin()
            worker.apply(one(worker.name))
        sync.run(1, timeout=TIMEOUT)
        for worker in workers[1:3]:
            worker.leave()
        workers[3].begin()
        workers[3].apply(one(3))
        sync.run(1, timeout=TIMEOUT)  # of one, one is required
    assert [gradient.workers for gradient in taken] == [(0, 1, 2), (1, 2), (3,)]


def test_all_but_b_follows_a_worker_that_leaves_while_the_chief_waits(make, run_thread):
    acc = make_acc(make, 3)
    with gq.SyncReplicas(acc, "all-1", num_workers=3, update=ignore) as sync:
        workers = [sync.worker(index) for index in range(3)]
        workers[0].begin()
        workers[0].apply(one(0))
        run = run_thread(sync.run, 1, timeout=TIMEOUT)
        wait_for_waiters(acc, 1)
        workers[1].leave()  # two can come, so one is enough, though the take for two could still be served
        assert run.result() == 1


def test_fixed_number_that_the_rest_cannot_reach_ends_at_once_and_names_who_left(make, run_thread):
    acc = make_acc(make, 4)
    with gq.SyncReplicas(acc, 3, num_workers=4, update=ignore) as sync:
        workers = [sync.worker(index) for index in range(4)]
        run = run_thread(sync.run, 1)
        wait_for_waiters(acc, 1)
        workers[1].leave()
        workers[3].leave()
        error = run.error()
    assert isinstance(error, gq.UnavailableError)
    assert (error.live, error.needed, error.left) == (2, 3, (1, 3))
    assert "left: 1, 3" in str(error)


def test_run_without_a_number_ends_when_all_have_left(make, run_thread):
    acc = make_acc(make, 3)

    def work(sync, index):
        with sync.worker(index) as worker:
            for _, _ in zip(range(index + 1), worker, strict=False):
                worker.apply(one(index))

    counts = []
    with gq.SyncReplicas(
        acc, "all", num_workers=3, update=lambda gradient: counts.append(gradient.num_gradients)
    ) as sync:
        calls = [run_thread(work, sync, index) for index in range(3)]
        assert sync.run(None, timeout=TIMEOUT) == 3
        for call in calls:
            call.result()
    assert counts == [3, 2, 1]


def test_run_with_a_number_says_when_all_have_left(make):
    acc = make_acc(make, 1)
    with gq.SyncReplicas(acc, "all", num_workers=1, update=ignore) as sync:
        sync.worker(0).leave()
        with pytest.raises(gq.UnavailableError, match="left: 0"):
            sync.run(1, timeout=TIMEOUT)


# Who fails


@pytest.mark.parametrize("num_required", [2, 1, "all"])
def test_exception_of_a_worker_reaches_run(make, run_thread, num_required):
    acc = make_acc(make, 2)

    def work(sync):
        with sync.worker(1) as worker:
            worker.begin()
            raise ZeroDivisionError("a bug")

    with gq.SyncReplicas(acc, num_required, num_workers=2, update=ignore) as sync:
        other = sync.worker(0)
        other.begin()
        run = run_thread(sync.run, 100, timeout=TIMEOUT)
        wait_for_waiters(acc, 1)
        call = run_thread(work, sync)
        error = run.error()
        assert error is call.error()
        assert isinstance(error, ZeroDivisionError)
        assert error.__notes__ == ["raised by worker 1 of SyncReplicas"]


def test_exception_of_a_worker_is_raised_after_the_round_at_hand(make):
    taken = []
    acc = make_acc(make, 2)
    with gq.SyncReplicas(acc, 1, num_workers=2, update=taken.append) as sync:
        worker = sync.worker(0)
        worker.begin()
        worker.apply(one(0))

        def fail():
            with sync.worker(1):
                raise ZeroDivisionError

        def update_while_failing(gradient):
            taken.append(gradient)
            with contextlib.suppress(ZeroDivisionError):
                fail()

        sync._update._function = update_while_failing
        with pytest.raises(ZeroDivisionError):
            sync.run(1, timeout=TIMEOUT)
        assert len(taken) == 1
        assert acc.published_step == 1
        worker.begin(timeout=TIMEOUT)
        worker.apply(one(0))
        sync._update._function = taken.append
        assert sync.run(1, timeout=TIMEOUT) == 1  # it was raised once


def test_exception_of_the_update_is_raised_and_nothing_is_published(make):
    acc = make_acc(make, 1)

    def update(gradient):
        raise ZeroDivisionError

    with gq.SyncReplicas(acc, 1, num_workers=1, update=update) as sync:
        apply_and_leave(sync, 0)
        with pytest.raises(ZeroDivisionError):
            sync.run(1, timeout=TIMEOUT)
        assert (acc.global_step, acc.published_step) == (1, 0)


def test_a_closed_error_of_the_users_own_is_raised_and_not_taken_for_the_end(make):
    acc, other = make_acc(make, 1), make.sparse("float32")
    other.close()
    with gq.SyncReplicas(acc, 1, num_workers=1, update=lambda gradient: other.take_grad(1)) as sync:
        with pytest.raises(gq.ClosedError), sync.worker(0):
            other.take_grad(1)
        with pytest.raises(gq.ClosedError):
            sync.run(1)
        apply_and_leave(sync, 0)
        with pytest.raises(gq.ClosedError):
            sync.run(1)


# Deadlines and the end


def test_run_whose_time_is_over_says_have_need_and_who_is_missing(make):
    acc = make_acc(make, 4)
    with gq.SyncReplicas(acc, 3, num_workers=4, update=ignore) as sync:
        workers = [sync.worker(index) for index in range(3)]
        for worker in workers:
            worker.begin()
            worker.apply(one(worker.name))
        sync.run(1, timeout=TIMEOUT)
        workers[0].begin()
        workers[0].apply(one(0))
        with pytest.raises(gq.DeadlineExceededError) as caught:
            sync.run(1, timeout=0.01)
        error = pickle.loads(pickle.dumps(caught.value))
        assert (error.have, error.need, error.step, error.num_stale, error.missing) == (1, 3, 1, 0, (1, 2, 3))
        assert "have 1, need 3 (3 of 4) at step 1 after 0.01 s; 3 workers live" in str(error)
        assert "not heard from since that step was published: 1, 2, 3;" in str(error)
        for worker in workers[1:]:
            worker.begin()
            worker.apply(one(worker.name))
        assert sync.run(1, timeout=0) == 1  # nothing had changed


def test_a_chief_that_waits_long_logs_who_is_missing(make, monkeypatch, caplog):
    monkeypatch.setattr("gradquorum.training.sync_replicas._FIRST_LOG_SECONDS", 0.0)
    acc = make_acc(make, 2)
    with gq.SyncReplicas(acc, 2, num_workers=2, update=ignore) as sync, caplog.at_level(logging.WARNING, "gradquorum"):
        apply_and_leave(sync, 1)
        with pytest.raises(gq.DeadlineExceededError):
            sync.run(1, timeout=0.25)
    lines = [record.getMessage() for record in caplog.records if "run: have 1, need 2" in record.getMessage()]
    assert len(lines) == 1
    assert "published: 0;" in lines[0]


def test_close_ends_run_and_all_workers_and_leaves_no_thread(make, run_thread):
    acc = make_acc(make, 3)
    threads_before = threading.active_count()
    entered = []

    def work(sync, index):
        with sync.worker(index) as worker:
            entered.append(index)
            for _ in worker:
                worker.apply(one(index))

    sync = gq.SyncReplicas(acc, 3, num_workers=3, update=ignore)
    calls = [run_thread(work, sync, index) for index in range(2)]
    run = run_thread(sync.run, None)
    wait_for_waiters(acc, 1)
    wait_until(lambda: len(entered) == 2 and acc.num_accumulated() == 2)
    assert not sync.closed
    assert sync.close() == 2
    assert sync.closed
    assert sync.close() == 0
    assert run.result() == 0
    for call in calls:
        call.result()
    wait_until(lambda: threading.active_count() <= threads_before)
    with pytest.raises(gq.ClosedError):
        sync.run(1)
    with pytest.raises(gq.ClosedError):
        sync.worker(0)


def test_a_worker_whose_apply_comes_after_the_end_ends_quietly(make):
    acc = make_acc(make, 1)
    sync = gq.SyncReplicas(acc, 1, num_workers=1, update=ignore)
    with sync.worker(0) as worker:
        worker.begin()
        sync.close()
        worker.apply(one(0))
        raise AssertionError("the apply went on")


def test_workers_wait_for_the_next_run(make, run_thread):
    acc = make_acc(make, 2)

    def work(sync, index):
        with sync.worker(index) as worker:
            for _ in worker:
                worker.apply(one(index))

    with gq.SyncReplicas(acc, 2, num_workers=2, update=ignore) as sync:
        calls = [run_thread(work, sync, index) for index in range(2)]
        assert [sync.run(number, timeout=TIMEOUT) for number in (2, 0, 3)] == [2, 0, 3]
        assert acc.published_step == 5
    for call in calls:
        call.result()


def test_a_round_that_was_cut_off_is_applied_before_its_step_is_published(make, monkeypatch):
    taken, published = [], []
    acc = make_acc(make, 1)

    def update(gradient):
        taken.append(gradient)
        published.append(acc.published_step)

    with gq.SyncReplicas(acc, 1, num_workers=1, update=update) as sync:
        apply_and_leave(sync, 0)
        build = type(acc)._build
        monkeypatch.setattr(type(acc), "_build", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sync.run(1, timeout=TIMEOUT)
        monkeypatch.setattr(type(acc), "_build", build)
        assert (acc.global_step, acc.published_step, acc.num_undelivered) == (1, 0, 1)
        assert sync.run(1, timeout=TIMEOUT) == 1
        assert (acc.global_step, acc.published_step, acc.num_undelivered) == (1, 1, 0)
    assert (taken[0].step, published) == (0, [0])


@pytest.mark.usefixtures("switch_often")
def test_nobody_starves_and_nothing_is_lost_when_workers_come_and_go(make, run_thread):
    num_workers, lives = 6, 12
    acc = make_acc(make, num_workers)
    total, accepted = [], [0] * num_workers

    def work(sync, index):
        rng = np.random.default_rng(index)
        for _ in range(lives):
            with sync.worker(index) as worker:
                for _, _ in zip(range(rng.integers(1, 4)), worker, strict=False):
                    accepted[index] += bool(worker.apply(one(index)))

    with gq.SyncReplicas(
        acc, "all-2", num_workers=num_workers, update=lambda gradient: total.append(gradient.num_gradients)
    ) as sync:
        calls = [run_thread(work, sync, index) for index in range(num_workers)]
        while any(call.running for call in calls):
            sync.run(None, timeout=TIMEOUT)
        for call in calls:
            call.result()
        sync.run(None, timeout=TIMEOUT)
        assert sum(total) + acc.num_accumulated() == sum(accepted)
        assert sum(accepted) > num_workers * lives / 2


# Kinds of groups


def test_dense_accumulator_gives_the_update_arrays_and_steps(make, run_thread):
    acc = make.dense("float32", (2,), expected_workers=2, max_per_worker=1)
    taken = []

    def work(sync, index):
        with sync.worker(index) as worker:
            for step in worker:
                worker.apply(np.float32([index, step]))

    with gq.SyncReplicas(acc, 2, num_workers=2, update=lambda *both: taken.append(both)) as sync:
        sync._update._wants_step = True
        calls = [run_thread(work, sync, index) for index in range(2)]
        sync.run(3, timeout=TIMEOUT)
    for call in calls:
        call.result()
    assert [step for _, step in taken] == [0, 1, 2]
    np.testing.assert_array_equal([gradient for gradient, _ in taken], [[0.5, 0], [0.5, 1], [0.5, 2]])


def test_pickled_one_has_workers_and_no_run_and_a_local_one_says_what_to_do(make):
    acc = make_acc(make, 2, shared_name=make.shared_name())
    with gq.SyncReplicas(acc, 1, num_workers=2, update=ignore) as sync:
        if make.target == "local":
            with pytest.raises(TypeError, match="target="):
                pickle.dumps(sync)
            return
        with pickle.loads(pickle.dumps(sync)) as elsewhere:
            apply_and_leave(elsewhere, 1)
            with pytest.raises(gq.InvalidArgumentError, match="the chief's process"):
                elsewhere.run(1)
        assert elsewhere.closed
        assert sync.run(1, timeout=TIMEOUT) == 1


def test_process_of_workers_only_cannot_run_and_closes_only_its_own_handle(make):
    name = make.shared_name()
    acc = make_acc(make, 1, shared_name=name)
    other = make_acc(make, 1, shared_name=name)
    with gq.SyncReplicas(other, 1, num_workers=1, update=None) as sync:
        apply_and_leave(sync, 0)
        with pytest.raises(gq.InvalidArgumentError, match="update= was given"):
            sync.run(1)
        assert sync.params is None
    assert other.closed
    assert not acc.closed
    assert acc.num_accumulated() == 1


# Arguments


def test_signatures_are_the_specified_ones():
    def names(function):
        parameters = inspect.signature(function).parameters.values()
        return ", ".join(
            ("*" if one.kind is one.KEYWORD_ONLY else "")
            + one.name
            + ("" if one.default is one.empty else f"={one.default!r}")
            for one in parameters
        )

    assert names(gq.SyncReplicas) == ("group, num_required, *num_workers, *update, *max_per_worker=1, *params=None")
    assert names(gq.SyncReplicas.run) == "self, rounds, *timeout=None"
    assert names(gq.SyncReplicas.worker) == "self, worker"
    assert names(gq.SyncReplicas.close) == "self"


@pytest.mark.parametrize(
    ("num_required", "options", "words"),
    [
        (0, {}, "num_required: expected 1 to num_workers x max_per_worker = 3, got 0"),
        (4, {}, "= 3, got 4"),
        (1.5, {}, "num_required: expected an integer"),
        (True, {}, "num_required: expected an integer"),
        (None, {}, "num_required: expected an integer"),
        ("", {}, "got ''"),
        ("all-", {}, "'all' or 'all-b' with a number b, got 'all-'"),
        ("all-x", {}, "got 'all-x'"),
        ("all--1", {}, "got 'all--1'"),
        ("All", {}, "got 'All'"),
        ("all-3", {}, "expected to spare fewer than num_workers=3"),
        (1, {"num_workers": 0}, "num_workers: expected 1 or more, got 0"),
        (1, {"max_per_worker": 0}, "max_per_worker: expected 1 or more, got 0"),
        (1, {"num_workers": 4}, "made with expected_workers=4, max_per_worker=1, got expected_workers=3"),
        (1, {"max_per_worker": 2}, "made with expected_workers=3, max_per_worker=2, got"),
        ("all", {"max_per_worker": 2}, "expected a number with max_per_worker=2"),
        (1, {"update": 3}, "update: expected a function of the gradient, a torch optimizer or an optax"),
        (1, {"update": lambda: None}, "update: expected a function of the gradient"),
        (1, {"update": lambda a, b, c: None}, "with 3 required arguments"),
        (1, {"params": {}}, "params: expected None with a function"),
        (1, {"group": "emb"}, "group: expected an AccumulatorGroup or an accumulator, got 'emb'"),
    ],
)
def test_arguments_that_cannot_be_are_refused_and_nothing_has_changed(make, num_required, options, words):
    acc = make_acc(make, 3)
    arguments = {"group": acc, "num_workers": 3, "update": ignore, **options}
    with pytest.raises(gq.InvalidArgumentError) as caught:
        gq.SyncReplicas(arguments.pop("group"), num_required, **arguments)
    assert words in str(caught.value)
    assert (acc.closed, acc.num_workers) == (False, 0)


def test_group_that_does_not_know_its_workers_is_refused_and_told_how(make):
    with pytest.raises(gq.InvalidArgumentError, match="make the group with these options"):
        gq.SyncReplicas(make.sparse("float32"), 2, num_workers=3, update=ignore)


def test_run_and_worker_refuse_what_cannot_be(make, run_thread):
    acc = make_acc(make, 2)
    with gq.SyncReplicas(acc, 2, num_workers=2, update=ignore) as sync:
        for number in (-1, 2, "0", None, 0.0):
            with pytest.raises(gq.InvalidArgumentError, match="worker: expected"):
                sync.worker(number)
        with pytest.raises(gq.InvalidArgumentError, match="rounds: expected 0 or more, or None; got -1"):
            sync.run(-1)
        with pytest.raises(gq.InvalidArgumentError, match="timeout"):
            sync.run(1, timeout=-1)
        run = run_thread(sync.run, 1)
        wait_for_waiters(acc, 1)
        with pytest.raises(gq.InvalidArgumentError, match="run: expected one at a time"):
            sync.run(1)
        sync.close()
        assert run.result() == 0


def test_update_is_given_the_step_if_it_asks_for_one(make):
    calls = []

    def with_a_default_of_another_kind(gradient, rate=0.1):
        calls.append(rate)

    def with_a_step(gradient, step=None):
        calls.append(step)

    acc = make_acc(make, 1)
    functions = [
        lambda gradient: calls.append("gradient"),
        lambda gradient, step: calls.append(step),
        lambda gradient, anything: calls.append(anything),
        with_a_default_of_another_kind,
        with_a_step,
        lambda *both: calls.append(len(both)),
    ]
    for function in functions:
        sync = gq.SyncReplicas(acc, 1, num_workers=1, update=function)
        apply_and_leave(sync, 0)
        sync.run(1, timeout=TIMEOUT)
    assert calls == ["gradient", 1, 2, 0.1, 4, 1]


def test_repr_says_what_it_is(make):
    acc = make_acc(make, 3)
    sync = gq.SyncReplicas(acc, "all-1", num_workers=3, update=ignore)
    assert repr(sync).startswith("<SyncReplicas 'all-1' of 3 on <")
    assert repr(sync.worker(2)) == "<ReplicaWorker 2: step 0>"
    assert sync.group is acc


@pytest.mark.parametrize("staleness", [gq.Window(2), gq.Weighted("inverse"), gq.Defer()], ids=str)
def test_late_gradient_that_a_policy_keeps_counts_and_its_worker_goes_on(make, staleness):
    taken = []
    acc = make_acc(make, 4, staleness=staleness)

    def make_round(workers):
        for worker in workers:
            worker.begin(timeout=TIMEOUT)
            assert worker.apply(one(worker.name))
        assert sync.run(1, timeout=TIMEOUT) == 1

    with gq.SyncReplicas(acc, 3, num_workers=4, update=taken.append) as sync:
        first, second, third, late = (sync.worker(index) for index in range(4))
        late.begin()
        make_round([first, second, third])
        receipt = late.apply(one(3))
        assert receipt.lag == 1
        if receipt.status is gq.ApplyStatus.DEFERRED:  # it joins the next round
            assert late.begin(timeout=0) == 1
            make_round([first, second, third])
        else:
            assert receipt.status is gq.ApplyStatus.ACCEPTED
        make_round([first, second])
        assert taken[-1].workers == (0, 1, 3)
        assert late.begin(timeout=0) == acc.published_step
        make_round([first, second, late])
        assert taken[-1].workers == (0, 1, 3)
