"""`SyncReplicas`: who is late, who leaves, who comes back."""

import logging
import threading

import numpy as np
import pytest

import gradquorum as gq
from tests.replicas import apply_and_leave, ignore, make_acc, one
from tests.support import TIMEOUT, times, wait_for_waiters

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


def test_s18_no_gradient_of_old_parameters_passes_as_fresh(make, run_thread, target):
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
        assert sync.run(times(200, target), timeout=TIMEOUT) == times(200, target)
    for call in calls:
        call.result()


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


def test_run_without_a_number_returns_its_rounds_when_too_few_are_left_for_another_one(make, caplog):
    acc = make_acc(make, 3)
    with gq.SyncReplicas(acc, 2, num_workers=3, update=ignore) as sync, caplog.at_level(logging.INFO, "gradquorum"):
        staying = sync.worker(2)
        apply_and_leave(sync, 0)
        apply_and_leave(sync, 1)
        assert sync.run(None, timeout=TIMEOUT) == 1
        staying.begin()
        assert staying.apply(one(2))
        assert sync.run(None, timeout=TIMEOUT) == 0
        assert acc.num_accumulated() == 1
        with pytest.raises(gq.UnavailableError, match="left: 0, 1"):
            sync.run(1, timeout=TIMEOUT)
    assert "run: ended after 1 rounds: num_required=2: 1 of 3 workers live, 2 gradients needed" in caplog.text


@pytest.mark.parametrize("rule", ["all", "all-1", "all-2"])
def test_run_with_a_number_says_when_all_have_left(make, rule):
    acc = make_acc(make, 3)
    with gq.SyncReplicas(acc, rule, num_workers=3, update=ignore) as sync:
        for index in range(3):
            sync.worker(index).leave()
        words = f"^num_required='{rule}': 0 of 3 workers live, 1 gradients needed .0 are here.; left: 0, 1, 2$"
        with pytest.raises(gq.UnavailableError, match=words) as caught:
            sync.run(1, timeout=TIMEOUT)
    assert (caught.value.live, caught.value.needed, caught.value.left) == (0, 1, (0, 1, 2))
