"""SEMANTICS 5: steps, publishing, rounds."""

import logging

import numpy as np
import pytest

import gradquorum as gq
from tests.support import TIMEOUT, accept, apply, assert_rows, column, unchanged, wait_for_waiters


@pytest.fixture
def acc(make):
    return make.sparse("float32", (5, 1))


@pytest.mark.parametrize("step", [5, np.int8(5), np.uint64(5), np.array(5), -3, 2**63 - 1, -(2**63)])
def test_set_global_step_sets_any_int64(acc, step):
    acc.set_global_step(step)
    assert acc.global_step == int(step)
    assert type(acc.global_step) is int


@pytest.mark.parametrize("step", [2**63, -(2**63) - 1, 1.0, True, "1", None, [1], np.array([1])])
def test_set_global_step_to_what_is_no_int64_raises(acc, step):
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.set_global_step(step)


def test_set_global_step_takes_a_name(acc):
    acc.set_global_step(3, name="set")
    acc.set_global_step(new_global_step=4)
    assert acc.num_accumulated(name="count") == 0
    assert acc.global_step == 4


def test_set_global_step_lower_logs_a_warning_and_is_done(acc, caplog):
    acc.set_global_step(5)
    with caplog.at_level(logging.WARNING, "gradquorum"):
        acc.set_global_step(1)
    assert acc.global_step == 1
    (record,) = caplog.records
    assert record.name.startswith("gradquorum")
    assert record.levelno == logging.WARNING
    assert "5" in record.getMessage()
    assert "1" in record.getMessage()


@pytest.mark.parametrize("step", [5, 6])
def test_set_global_step_not_lower_logs_nothing(acc, caplog, step):
    acc.set_global_step(5)
    with caplog.at_level(logging.DEBUG, "gradquorum"):
        acc.set_global_step(step)
    assert not caplog.records


def test_set_global_step_keeps_what_is_accumulated(acc):
    accept(acc, [0], [1.0])
    acc.set_global_step(9)
    assert acc.num_accumulated() == 1
    taken = acc.take_grad(1, timeout=0)
    assert_rows(taken, [0], [1.0])
    assert (taken.step, acc.global_step) == (9, 10)


def test_step_past_int64_raises_and_never_wraps(acc):
    acc.set_global_step(2**63 - 1)
    accept(acc, [0], [1.0])
    with unchanged(acc), pytest.raises((gq.GradQuorumError, OverflowError)):
        acc.take_grad(1, timeout=0)
    acc.set_global_step(3)
    assert_rows(acc.take_grad(1, timeout=0), [0], [1.0])


def test_publish_by_default_is_of_the_current_step(acc):
    assert acc.published_step == 0
    acc.set_global_step(4)
    assert acc.published_step == 0
    assert acc.publish() == 4
    assert acc.published_step == 4


def test_publish_of_a_given_step(acc):
    assert acc.publish(7) == 7
    assert acc.publish(np.int32(9)) == 9
    assert (acc.published_step, acc.global_step) == (9, 0)
    assert type(acc.published_step) is int


@pytest.mark.parametrize("step", [1.0, True, "1", 2**63, [1]])
def test_publish_of_what_is_no_step_raises(acc, step):
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.publish(step)


def test_take_does_not_publish(acc):
    accept(acc, [0], [1.0])
    acc.take_grad(1, timeout=0)
    assert (acc.published_step, acc.global_step) == (0, 1)


def test_wait_published_returns_at_once_if_it_is_out(acc):
    acc.publish(3)
    assert acc.wait_published(2, timeout=0) == 3
    assert acc.wait_published(3, timeout=0) == 3


def test_wait_published_waits_for_the_step(acc, run_thread):
    waits = [run_thread(acc.wait_published, step, timeout=TIMEOUT) for step in (1, 2, 2)]
    acc.publish(1)
    assert waits[0].result() >= 1
    assert waits[1].running
    acc.publish(2)
    assert [wait.result() for wait in waits[1:]] == [2, 2]


def test_wait_published_at_its_deadline_raises_with_figures(acc):
    acc.publish(3)
    for timeout in (0, 0.01):
        with unchanged(acc), pytest.raises(gq.DeadlineExceededError) as caught:
            acc.wait_published(5, timeout=timeout)
        assert (caught.value.have, caught.value.need) == (3, 5)


@pytest.mark.parametrize("arguments", [("1",), (1.0,), (None,), (True,)])
def test_wait_published_for_what_is_no_step_raises(acc, arguments):
    with pytest.raises(gq.InvalidArgumentError):
        acc.wait_published(*arguments, timeout=0)


def test_rounds_takes_yields_and_publishes_when_the_body_ends(acc):
    seen = []
    accept(acc, [0], [1.0])
    for grad in acc.rounds(1):
        seen.append((grad.step, acc.published_step, acc.global_step))
        if grad.step == 2:
            break
        accept(acc, [0], [2.0])
    assert seen == [(0, 0, 1), (1, 1, 2), (2, 2, 3)]


def test_rounds_publishes_the_step_of_the_parameters_not_the_current_one(acc):
    accept(acc, [0], [1.0])
    rounds = acc.rounds(1)
    next(rounds)
    accept(acc, [0], [2.0])
    acc.take_grad(1, timeout=0)  # somebody else: the step is 2 now
    later = acc.submit_take(9)  # keeps the next round of the iterator waiting until it is cancelled
    accept(acc, [0], [3.0])
    later.cancel()
    next(rounds)
    assert acc.published_step == 1


def test_rounds_ends_when_closed_while_it_waits(acc, run_thread):
    rounds = run_thread(lambda: [grad.num_gradients for grad in acc.rounds(1)])
    accept(acc, [0], [1.0])
    assert acc.wait_published(1, timeout=TIMEOUT) == 1
    wait_for_waiters(acc, 1)
    acc.close()
    assert rounds.result() == [1]


def test_rounds_raises_at_the_deadline_of_each_take(acc):
    accept(acc, [0], [1.0])
    rounds = acc.rounds(1, timeout=0)
    assert next(rounds).num_gradients == 1
    with pytest.raises(gq.DeadlineExceededError):
        next(rounds)


def test_local_step_of_published_parameters_labels_gradients_right(acc):
    accept(acc, [0], [1.0])
    acc.take_grad(1, timeout=0)  # the taker has not updated yet
    assert apply(acc, [0], [1.0], local_step=acc.published_step - 1).status is gq.ApplyStatus.STALE
    with pytest.warns(gq.StaleGradientWarning):
        assert acc.apply_grad([0], column(1), local_step=acc.published_step).status is gq.ApplyStatus.STALE
    acc.publish()
    assert acc.apply_grad([0], column(1), local_step=acc.published_step)


def test_worker_handle_keeps_identity_sequence_and_step(acc):
    acc.publish(3)
    acc.set_global_step(3)
    worker = acc.worker("a")
    assert worker.name == "a"
    assert worker.begin() == 3
    assert worker.step == 3
    for expected in range(3):
        assert worker.apply_grad([0], column(1))
        assert acc.last_sequence("a") == expected
    assert acc.take_grad(3, timeout=0).workers == ("a",)
    receipt = worker.apply_grad([0], column(1))
    assert (receipt.status, receipt.lag) == (gq.ApplyStatus.STALE, 1)
    acc.publish()
    assert worker.begin() == 4
    assert worker.apply_indexed_slices_grad(gq.IndexedSlices(column(1), [0]))


def test_worker_handle_restarted_goes_on_with_the_next_sequence(acc):
    accept(acc, [0], [1.0], worker="a", sequence=17)
    worker = acc.worker("a")
    worker.begin()
    assert worker.apply_grad([0], column(1))
    assert acc.last_sequence("a") == 18


def test_worker_handle_drop_at_step_0_issues_no_warning(acc):
    worker = acc.worker("a")
    worker.begin()
    acc.set_global_step(1)
    assert worker.apply_grad([0], column(1)).status is gq.ApplyStatus.STALE  # warnings are errors here


def test_worker_handle_after_a_failed_apply_goes_on(acc):
    worker = acc.worker("a")
    worker.begin()
    with pytest.raises(gq.InvalidArgumentError):
        worker.apply_grad([9], column(1))
    assert worker.apply_grad([1], column(1))
    assert worker.apply_grad([1], column(1))
    assert acc.num_accumulated() == 2


def test_worker_handle_leave_and_with_end_it(acc):
    with acc.worker("a") as worker:
        worker.begin()
        worker.apply_grad([0], column(1))
        assert acc.num_workers == 1
    assert acc.num_workers == 0
    with pytest.raises(gq.ClosedError):
        worker.apply_grad([0], column(1))
    assert acc.num_accumulated() == 1
    other = acc.worker(2)
    other.leave()
    assert acc.num_workers == 0
