"""A take that ends by itself (timeout, cancel, close) races with the apply that decides it: one of the two wins."""

import concurrent.futures
import threading

import pytest

import gradquorum as gq
from tests.support import TIMEOUT, Call, accept, drain, num_waiting, times


@pytest.fixture
def repetitions(target):
    return times(300, target)


class Race:
    """Two calls in two threads, released at the same moment, by turns the one or the other first."""

    def __init__(self, first, second):
        gate = threading.Barrier(2)

        def at_the_gate(function):
            gate.wait(TIMEOUT)
            return function()

        self.calls = [Call(at_the_gate, first), Call(at_the_gate, second)]


@pytest.fixture
def acc(make):
    return make.sparse("float64", (5, 1))


def check_nothing_left(acc, accepted, taken):
    """Whatever was accepted and not taken is still there, once."""
    assert num_waiting(acc) == 0
    taken += [grad.num_gradients for grad in drain(acc)]
    assert sum(taken) == accepted
    assert acc.global_step == len(taken)


@pytest.mark.parametrize("apply_first", [True, False])
def test_timeout_racing_with_the_deciding_apply_is_one_or_the_other(acc, apply_first, repetitions):
    taken, timed_out = [], 0
    for repetition in range(repetitions):
        timeout = (repetition % 30) * 1e-5
        deciding, taking = (
            (lambda: accept(acc, [0], [1.0])),
            (lambda timeout=timeout: acc.take_grad(1, timeout=timeout)),
        )
        calls = Race(deciding, taking).calls if apply_first else Race(taking, deciding).calls[::-1]
        calls[0].result()
        error = calls[1].error()
        if error is None:
            taken.append(calls[1].result().num_gradients)
        else:
            assert isinstance(error, gq.DeadlineExceededError)
            timed_out += 1
    check_nothing_left(acc, repetitions, taken)


@pytest.mark.parametrize("apply_first", [True, False])
def test_timeout_of_a_future_racing_with_the_deciding_apply_is_one_or_the_other(acc, apply_first, repetitions):
    taken = []
    for repetition in range(repetitions):
        future = acc.submit_take(1, timeout=(repetition % 30) * 2e-5 if apply_first else 1e-4)
        accept(acc, [0], [1.0])
        error = future.exception(TIMEOUT)
        if error is None:
            taken.append(future.result().num_gradients)
        else:
            assert isinstance(error, gq.DeadlineExceededError)
    check_nothing_left(acc, repetitions, taken)


@pytest.mark.parametrize("apply_first", [True, False])
def test_cancel_racing_with_the_deciding_apply_is_one_or_the_other(acc, apply_first, repetitions):
    taken = []
    for _ in range(repetitions):
        future = acc.submit_take(1)
        deciding = lambda: accept(acc, [0], [1.0])  # noqa: E731
        calls = Race(deciding, future.cancel).calls if apply_first else Race(future.cancel, deciding).calls[::-1]
        calls[0].result()
        if calls[1].result():
            assert future.cancelled()
            with pytest.raises(concurrent.futures.CancelledError):
                future.result(TIMEOUT)
        else:
            taken.append(future.result(TIMEOUT).num_gradients)
    check_nothing_left(acc, repetitions, taken)


@pytest.mark.parametrize("apply_first", [True, False])
@pytest.mark.parametrize("form", ["take", "future"])
def test_close_racing_with_the_deciding_apply_delivers_or_reports_every_gradient(make, apply_first, form, repetitions):
    for _ in range(repetitions):
        acc = make.sparse("float64", (5, 1))
        taking = Call(acc.take_grad, 1) if form == "take" else None
        future = None if taking else acc.submit_take(1)

        def deciding(acc=acc):
            try:
                return int(bool(accept(acc, [0], [1.0])))
            except gq.ClosedError:
                return 0

        calls = Race(deciding, acc.close).calls if apply_first else Race(acc.close, deciding).calls[::-1]
        accepted, discarded = calls[0].result(), calls[1].result()
        error = taking.error() if taking else future.exception(TIMEOUT)
        if error is None:
            delivered = (taking.result() if taking else future.result()).num_gradients
        else:
            assert isinstance(error, (gq.CancelledError, gq.ClosedError))
            delivered = 0
        assert accepted == delivered + discarded


def test_close_of_one_handle_racing_with_the_other_s_take_loses_nothing(make, repetitions):
    for _ in range(repetitions // 3):
        name = make.shared_name()
        one, other = (make.sparse("float64", (5, 1), shared_name=name) for _ in range(2))
        blocking, waiting = one.submit_take(3), other.submit_take(1)
        race = Race(one.close, lambda other=other: accept(other, [0], [1.0]))
        assert race.calls[0].result() == 0
        race.calls[1].result()
        assert isinstance(blocking.exception(TIMEOUT), gq.CancelledError)
        assert waiting.result(TIMEOUT).num_gradients == 1
        other.close()


def test_discard_racing_with_applies_and_takes_counts_each_gradient_once(acc, repetitions):
    accepted, taken, discarded = 0, [], 0
    for _ in range(repetitions):
        race = Race(lambda: accept(acc, [0], [1.0]), acc.discard)
        race.calls[0].result()
        accepted += 1
        discarded += race.calls[1].result()
        if accepted % 7 == 0:
            taken += [grad.num_gradients for grad in drain(acc)]
    check_nothing_left(acc, accepted - discarded, taken)


@pytest.mark.parametrize("number", [2, 4])
def test_same_gradient_sent_by_several_threads_at_once_counts_once(acc, number, repetitions):
    for sequence in range(repetitions // 2):
        gate = threading.Barrier(number)

        def send(gate=gate, sequence=sequence):
            gate.wait(TIMEOUT)
            return acc.apply_grad([0], [[1.0]], local_step=None, worker="w", sequence=sequence)

        receipts = [call.result() for call in [Call(send) for _ in range(number)]]
        assert sum(map(bool, receipts)) == 1
        assert acc.num_accumulated() == sequence + 1


def test_publish_racing_with_wait_published_wakes_it(acc, repetitions):
    for step in range(1, repetitions):
        race = Race(lambda step=step: acc.publish(step), lambda step=step: acc.wait_published(step, timeout=TIMEOUT))
        race.calls[0].result()
        assert race.calls[1].result() == step


def test_leave_racing_with_a_new_take_ends_it(make, repetitions):
    for _ in range(repetitions // 3):
        acc = make.sparse("float64", (5, 1), expected_workers=1, max_per_worker=1)
        worker = acc.worker("w")
        race = Race(worker.leave, lambda acc=acc: acc.take_grad(1, timeout=TIMEOUT))
        race.calls[0].result()
        assert isinstance(race.calls[1].error(), gq.UnavailableError)


def test_future_of_the_shortest_of_timeouts_always_ends(acc, switch_often):
    futures = [acc.submit_take(1, timeout=(repetition % 50) * 1e-6) for repetition in range(2000)]
    for future in futures:
        assert isinstance(future.exception(TIMEOUT), gq.DeadlineExceededError)
    assert (num_waiting(acc), acc.global_step) == (0, 0)
