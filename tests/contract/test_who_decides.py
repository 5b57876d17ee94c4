"""SEMANTICS 4: the decision falls where the quorum is reached. Strict FIFO."""

import pytest

import gradquorum as gq
from tests.support import TIMEOUT, GatedMerges, accept, apply, assert_rows, wait_for_waiters


@pytest.fixture
def acc(make):
    return make.sparse("float32", (5, 1))


def test_step_is_advanced_before_the_deciding_apply_returns(acc, run_thread):
    take = run_thread(acc.take_grad, 1)
    wait_for_waiters(acc, 1)
    accept(acc, [0], [1.0], local_step=0)
    assert (acc.global_step, acc.num_accumulated()) == (1, 0)
    assert_rows(take.result(), [0], [1.0])


def test_gradient_of_the_old_step_after_the_decision_is_stale_whenever_the_taker_wakes(acc, engine):
    acc.set_global_step(1)
    with GatedMerges(engine) as merges:
        future = acc.submit_take(2)
        accept(acc, [0], [1.0], local_step=1)
        accept(acc, [0], [3.0], local_step=1)
        assert apply(acc, [0], [100.0], local_step=1).status is gq.ApplyStatus.STALE
        accept(acc, [0], [7.0], local_step=2)
        merges.gate.set()
        assert_rows(future.result(TIMEOUT), [0], [2.0])
    assert acc.num_accumulated() == 1


def test_end_of_one_take_looks_at_the_next_waiter(make):
    acc = make.sparse("float32", (5, 1), compact=False)
    takes = [acc.submit_take(2, exact=True), acc.submit_take(1, exact=True), acc.submit_take(1, exact=True)]
    accept(acc, [0], [1.0])
    assert acc.num_accumulated() == 1
    accept(acc, [0], [3.0])
    assert takes[0].result(TIMEOUT).num_gradients == 2
    accept(acc, [0], [5.0])
    accept(acc, [0], [6.0])
    assert [take.result(TIMEOUT).values[0, 0] for take in takes[1:]] == [5.0, 6.0]
    assert acc.global_step == 3


def test_only_the_oldest_waiting_take_is_considered(acc):
    first, second = acc.submit_take(3), acc.submit_take(1)
    accept(acc, [0], [1.0])
    accept(acc, [0], [2.0])
    assert not first.done()
    assert not second.done()
    assert acc.num_accumulated() == 2
    accept(acc, [0], [3.0])
    assert_rows(first.result(TIMEOUT), [0], [2.0])
    assert not second.done()
    accept(acc, [0], [9.0])
    assert_rows(second.result(TIMEOUT), [0], [9.0])


def test_new_take_goes_behind_the_waiting_ones_although_it_could_be_served(acc):
    first = acc.submit_take(2)
    accept(acc, [0], [1.0])
    with pytest.raises(gq.DeadlineExceededError):
        acc.take_grad(1, timeout=0)
    assert acc.num_accumulated() == 1
    assert not first.done()
    accept(acc, [0], [1.0])
    assert first.result(TIMEOUT).num_gradients == 2


def test_cancelled_oldest_take_lets_the_next_be_served_at_once(acc):
    first, second = acc.submit_take(3), acc.submit_take(1)
    accept(acc, [0], [1.0])
    assert first.cancel()
    assert acc.global_step == 1
    assert_rows(second.result(TIMEOUT), [0], [1.0])


def test_take_served_at_once_gets_what_is_there(acc):
    accept(acc, [0], [1.0])
    future = acc.submit_take(1)
    assert acc.global_step == 1
    assert_rows(future.result(TIMEOUT), [0], [1.0])


def test_merge_does_not_hold_up_applies_and_other_takes(acc, engine):
    with GatedMerges(engine) as merges:
        slow = acc.submit_take(1)
        accept(acc, [0], [1.0])
        assert merges.begun.wait(TIMEOUT)
        for _ in range(5):
            accept(acc, [0], [2.0])
        assert acc.num_accumulated() == 5
        with pytest.raises(gq.DeadlineExceededError):
            acc.take_grad(6, timeout=0)
        assert not slow.done()
        merges.gate.set()
        assert slow.result(TIMEOUT).num_gradients == 1


def test_end_of_the_oldest_take_serves_as_many_waiters_as_there_is_for(make):
    acc = make.sparse("float32", (5, 1), compact=False)
    first = acc.submit_take(5)
    others = [acc.submit_take(1, exact=True) for _ in range(3)]
    accept(acc, [0], [1.0])
    accept(acc, [0], [2.0])
    assert first.cancel()
    assert (acc.global_step, acc.num_accumulated()) == (2, 0)
    assert [take.result(TIMEOUT).values[0, 0] for take in others[:2]] == [1.0, 2.0]
    assert not others[2].done()
