"""`SyncReplicas`: a round that is emptied or goes back to an earlier step leaves no worker without a next step."""

import contextlib

import pytest

import gradquorum as gq
from tests.replicas import ignore, make_acc, one
from tests.support import TIMEOUT

pytestmark = pytest.mark.usefixtures("look_often")


@pytest.fixture
def look_often(monkeypatch):
    monkeypatch.setattr("gradquorum.training.worker._LOOK_SECONDS", 0.02)


def begin_and_apply(worker):
    assert worker.begin(timeout=TIMEOUT) is not None
    assert worker.apply(one(worker.name))


def lower(acc, older):
    acc.discard()
    acc.set_global_step(2)
    acc.publish(2)


def lower_and_let_run_publish(acc, older):
    acc.discard()
    acc.set_global_step(2)


def load(acc, older):
    while True:
        acc.discard()
        with contextlib.suppress(gq.InvalidArgumentError):  # a worker came between
            return acc.load_state_dict(older)


def discard(acc, older):
    acc.discard()


@pytest.mark.parametrize("go_back", [lower, lower_and_let_run_publish, load, discard])
def test_a_training_goes_on_from_where_its_round_was_put(make, run_thread, go_back):
    acc = make_acc(make, 2)

    def work(sync, index):
        with sync.worker(index) as worker:
            for _ in worker:
                worker.apply(one(index))

    with gq.SyncReplicas(acc, 2, num_workers=2, update=ignore) as sync:
        calls = [run_thread(work, sync, index) for index in range(2)]
        assert sync.run(2, timeout=TIMEOUT) == 2
        older = acc.state_dict()
        assert sync.run(3, timeout=TIMEOUT) == 3
        go_back(acc, older)
        first = acc.global_step
        assert sync.run(4, timeout=TIMEOUT) == 4
        assert (acc.global_step, acc.published_step) == (first + 4, first + 4)
    for call in calls:
        call.result()


def test_a_worker_whose_gradient_is_in_the_round_goes_on_waiting_after_the_step_was_lowered(make):
    acc = make_acc(make, 2)
    acc.set_global_step(5)
    acc.publish()
    with gq.SyncReplicas(acc, 2, num_workers=2, update=ignore) as sync:
        first, second = sync.worker(0), sync.worker(1)
        begin_and_apply(first)
        acc.set_global_step(2)
        acc.publish()
        with pytest.raises(gq.DeadlineExceededError, match=r"begin: have 2, need 6 after 0.05 s") as caught:
            first.begin(timeout=0.05)
        assert (caught.value.have, caught.value.need) == (2, 6)
        begin_and_apply(second)
        assert sync.run(1, timeout=TIMEOUT) == 1
        assert first.begin(timeout=TIMEOUT) == 3


def test_a_stale_worker_begins_with_a_step_below_the_one_it_waited_for(make):
    acc = make_acc(make, 2)
    acc.publish(4)
    with gq.SyncReplicas(acc, 1, num_workers=2, update=ignore) as sync:
        worker = sync.worker(0)
        assert worker.begin() == 4
        acc.set_global_step(6)
        assert worker.apply(one(0)).status is gq.ApplyStatus.STALE
        acc.set_global_step(5)
        with pytest.raises(gq.DeadlineExceededError):
            worker.begin(timeout=0)  # no parameters of the round's step are out
        acc.publish(5)
        assert worker.begin(timeout=TIMEOUT) == 5


def test_a_chief_whose_round_went_back_names_those_who_are_not_in_it(make):
    acc = make_acc(make, 2)
    with gq.SyncReplicas(acc, 2, num_workers=2, update=ignore) as sync:
        workers = [sync.worker(index) for index in range(2)]
        for _ in range(3):
            for worker in workers:
                begin_and_apply(worker)
            sync.run(1, timeout=TIMEOUT)
        for worker in workers:
            begin_and_apply(worker)
        lower(acc, None)
        begin_and_apply(workers[1])
        with pytest.raises(gq.DeadlineExceededError, match="published: 0;") as caught:
            sync.run(1, timeout=0)
        assert (caught.value.have, caught.value.step, caught.value.missing) == (1, 2, (0,))
        begin_and_apply(workers[0])
        assert sync.run(1, timeout=TIMEOUT) == 1


def test_a_worker_whose_late_gradient_is_refused_begins_with_the_step_that_it_is_late_for(make):
    acc = make_acc(make, 2, staleness=gq.Defer())
    with gq.SyncReplicas(acc, 2, num_workers=2, update=ignore) as sync:
        fast, late = sync.worker(0), sync.worker(1)
        late.begin()
        acc.set_global_step(1)
        assert late.apply(one(1)).status is gq.ApplyStatus.DEFERRED
        assert late.apply(one(1)).status is gq.ApplyStatus.REFUSED  # the next round has one of it
        with pytest.raises(gq.DeadlineExceededError, match="begin: have 0, need 1"):
            late.begin(timeout=0)
        acc.publish(1)
        assert late.begin(timeout=0) == 1
        assert late.apply(one(1))
        begin_and_apply(fast)
        assert sync.run(1, timeout=TIMEOUT) == 1


def test_a_worker_that_the_open_round_refuses_waits_for_the_next_one_also_within_a_window(make):
    acc = make_acc(make, 2, staleness=gq.Window(1))
    with gq.SyncReplicas(acc, 1, num_workers=2, update=ignore) as sync:
        worker = sync.worker(0)
        acc.set_global_step(1)
        assert worker.apply(one(0)).lag == 1
        assert worker.apply(one(0)).status is gq.ApplyStatus.REFUSED
        acc.publish(1)
        with pytest.raises(gq.DeadlineExceededError, match="begin: have 1, need 2"):
            worker.begin(timeout=0)
        assert sync.run(1, timeout=TIMEOUT) == 1
        assert worker.begin(timeout=TIMEOUT) == 2
