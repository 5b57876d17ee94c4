"""`SyncReplicas`: who fails, deadlines, and the end."""

import contextlib
import logging
import pickle
import threading

import numpy as np
import pytest

import gradquorum as gq
from tests.replicas import apply_and_leave, ignore, make_acc, one
from tests.support import TIMEOUT, wait_for_waiters, wait_until

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


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_a_worker_that_exits_has_left_and_the_chief_goes_on(make, end):
    acc = make_acc(make, 2)
    with gq.SyncReplicas(acc, "all", num_workers=2, update=ignore) as sync:
        apply_and_leave(sync, 0)
        with pytest.raises(end), sync.worker(1):
            raise end
        assert sync.run(None, timeout=TIMEOUT) == 1


def test_exception_of_a_worker_is_raised_also_by_a_run_without_a_number(make):
    acc = make_acc(make, 2)
    with gq.SyncReplicas(acc, 2, num_workers=2, update=ignore) as sync:
        apply_and_leave(sync, 0)
        with pytest.raises(ZeroDivisionError), sync.worker(1):
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError):
            sync.run(None, timeout=TIMEOUT)


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


def num_threads():
    """Return how many threads there are, but for those of the tests' server, one for each connection."""
    return sum(thread.name != "gradquorum-connection" for thread in threading.enumerate())


def test_close_ends_run_and_all_workers_and_leaves_no_thread(make, run_thread):
    acc = make_acc(make, 3)
    threads_before = num_threads()
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
    wait_until(lambda: num_threads() <= threads_before)
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


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_update_gets_the_step_of_its_round_whatever_becomes_of_the_step_meanwhile(make, monkeypatch, kind):
    options = {"expected_workers": 1, "max_per_worker": 1}
    acc = getattr(make, kind)("float32", (1, 1), **options)
    steps = []
    with gq.SyncReplicas(acc, 1, num_workers=1, update=lambda gradient, step: steps.append(step)) as sync:
        with sync.worker(0) as worker:
            worker.begin()
            worker.apply([[1.0]] if kind == "dense" else ([0], [[1.0]]))
        build = type(acc)._build
        monkeypatch.setattr(type(acc), "_build", lambda acc, merged: acc.set_global_step(7) or build(acc, merged))
        assert sync.run(1, timeout=TIMEOUT) == 1
    assert steps == [0]


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
