"""SEMANTICS 4, CASES S7 and S15 as races: back to back, no pause, many times."""

import itertools
import threading
import warnings

import numpy as np
import pytest

import gradquorum as gq
from gradquorum import ApplyStatus
from tests.support import (
    TIMEOUT,
    Call,
    accept,
    apply,
    assert_rows,
    column,
    drain,
    num_waiting,
    times,
    wait_for_waiters,
    wait_until,
)


@pytest.fixture
def repetitions(target):
    return times(1000, target)


@pytest.fixture
def acc(make):
    return make.sparse("float32", (5, 1))


def take_in_thread(acc, number, *, after=0):
    """Start a blocking take and return once it waits behind `after` others."""
    call = Call(acc.take_grad, number, timeout=TIMEOUT)
    wait_for_waiters(acc, after + 1)
    return call


def take_in_background(acc, number, *, after=0):
    return acc.submit_take(number, timeout=TIMEOUT)


FORMS = {"thread": take_in_thread, "future": take_in_background}


@pytest.mark.parametrize("form", FORMS)
def test_s15_late_gradient_is_stale_in_1000_of_1000_repetitions(acc, form, repetitions):
    rows = [column(value) for value in (1, 3, 100)]
    for repetition in range(repetitions):
        take = FORMS[form](acc, 2)
        step = acc.global_step
        receipts = [acc.apply_grad([0], row, local_step=step, worker=1) for row in rows]
        assert [receipt.status for receipt in receipts] == [
            ApplyStatus.ACCEPTED,
            ApplyStatus.ACCEPTED,
            ApplyStatus.STALE,
        ]
        assert_rows(take.result(), [0], [2.0])
        assert acc.global_step == repetition + 1


@pytest.fixture(autouse=True)
def expected_warnings(recwarn):
    """A gradient of step 0 is dropped in these tests on purpose."""
    warnings.simplefilter("ignore", gq.StaleGradientWarning)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_s15_from_three_threads_exactly_two_are_in(acc, first, repetitions):
    """Whoever comes first: two are accepted, the third is stale, and the mean is that of the two."""
    values = (1.0, 3.0, 100.0)
    for _ in range(repetitions // 5):
        take = acc.submit_take(2)
        step = acc.global_step
        gate = threading.Barrier(3)

        def offer(number, step=step, gate=gate):
            gate.wait(TIMEOUT)
            return apply(acc, [0], [values[number]], local_step=step)

        order = sorted(range(3), key=lambda number: (number != first, number))
        calls = {number: Call(offer, number) for number in order}
        receipts = {number: call.result() for number, call in calls.items()}
        accepted = [number for number, receipt in receipts.items() if receipt]
        assert len(accepted) == 2
        (late,) = set(range(3)) - set(accepted)
        assert receipts[late].status is ApplyStatus.STALE
        assert_rows(take.result(TIMEOUT), [0], [sum(values[number] for number in accepted) / 2])


@pytest.mark.parametrize("form", FORMS)
def test_s7_four_applies_back_to_back_serve_both_takes_in_order(acc, form, repetitions):
    rows = [column(value) for value in (1, 2, 3, 9)]
    for _ in range(repetitions // 5):
        first = FORMS[form](acc, 3)
        second = FORMS[form](acc, 1, after=1)
        for row in rows:
            assert acc.apply_grad([0], row, local_step=None)
        assert_rows(first.result(), [0], [2.0])
        assert_rows(second.result(), [0], [9.0])


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])), ids=str)
def test_s7_takes_of_all_sizes_are_served_in_the_order_they_came(acc, order):
    takes = [take_in_thread(acc, number, after=i) for i, number in enumerate(order)]
    value, expected = 0, []
    for number in order:
        mine = range(value, value + number)
        expected.append(sum(mine) / number)
        value += number
    for i in range(6):
        accept(acc, [0], [float(i)])
    for take, mean in zip(takes, expected, strict=True):
        assert_rows(take.result(), [0], [float(column(mean)[0, 0])])


def test_s7_first_timing_out_lets_the_second_be_served_at_once(acc):
    for _ in range(50):
        first = Call(acc.take_grad, 3, timeout=0.005)
        wait_until(lambda first=first: not first.running or num_waiting(acc), "the first take")
        second = acc.submit_take(1)
        accept(acc, [0], [1.0])
        assert isinstance(first.error(), gq.DeadlineExceededError)
        assert_rows(second.result(TIMEOUT), [0], [1.0])


def test_many_takers_and_appliers_every_gradient_is_in_exactly_one_take(make):
    """Each gradient is a row of its own id: one that came twice, or never, shows."""
    acc = make.sparse("float64", None, reduction_type="SUM")
    total, takers, appliers = 900, 3, 3
    taken, numbers = [], itertools.count()
    done = threading.Event()

    def take(number):
        while not done.is_set():
            try:
                taken.append(acc.take_grad(number, timeout=0.05))
            except gq.DeadlineExceededError:
                continue

    def add():
        while (number := next(numbers)) < total:
            accept(acc, [number], [1.0])

    calls = [Call(take, number + 1) for number in range(takers)]
    for call in [Call(add) for _ in range(appliers)]:
        call.result()
    done.set()
    for call in calls:
        call.result()
    taken += drain(acc)
    assert sum(grad.num_gradients for grad in taken) == total
    assert sorted(grad.step for grad in taken) == list(range(len(taken)))
    ids = np.concatenate([grad.indices for grad in taken])
    np.testing.assert_array_equal(np.sort(ids), np.arange(total))
    assert all((grad.values == 1).all() for grad in taken)
