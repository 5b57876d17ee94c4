"""SEMANTICS 4: Ctrl-C interrupts a waiting take at once in the main thread, and loses nothing.

An interval timer raises KeyboardInterrupt at random moments of a take, thousands of times. CPython looks at signals at
function entries, backward jumps and after calls of C functions: so nothing comes between the return of `take_grad`
and the statement after the assignment, and what was returned is in our hands.
"""

import gc
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import gradquorum as gq
from tests.support import TIMEOUT, Call, accept, blocks_until, wait_for_waiters

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer"),
    pytest.mark.timeout(method="thread"),  # the other method needs the timer and the signal that we use
    # An interrupt during a weak reference's callback is printed and dropped by Python: no harm, and not ours.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Interrupts:
    """While entered: KeyboardInterrupts at random moments, only while `armed`."""

    def __init__(self, seed, longest=3e-4):
        self._random = random.Random(seed)
        self._longest = longest
        self._goes_on = False
        self.armed = False
        self.count = 0

    def _again(self):
        if self._goes_on:  # else the handler of a last alarm would set the next, which nobody handles
            signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-6, self._longest))

    def _on_alarm(self, signum, frame):
        self._again()
        if self.armed:
            self.armed = False  # one at a time: the handler of the test must run to its end
            self.count += 1
            raise KeyboardInterrupt

    def __enter__(self):
        self._callbacks, gc.callbacks[:] = list(gc.callbacks), []  # an interrupt in one of them is only printed
        self._before = signal.signal(signal.SIGALRM, self._on_alarm)
        self._goes_on = True
        self._again()
        return self

    def __exit__(self, *exception):
        self.armed = self._goes_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(1e-3)  # what is on its way is ours
        signal.signal(signal.SIGALRM, self._before)
        gc.callbacks[:] = self._callbacks


class Appliers:
    """Threads that apply gradients without end; each row of a round is a sum of ones, kept exactly."""

    def __init__(self, offer, count=2):
        self._stop = threading.Event()
        self._offer = offer
        self.accepted = [0] * count
        self._calls = [Call(self._run, number) for number in range(count)]

    def _run(self, number):
        while not self._stop.is_set():
            self.accepted[number] += bool(self._offer(number))
            if number == 0:
                time.sleep(0)

    def stop(self):
        self._stop.set()
        for call in self._calls:
            call.result()
        return sum(self.accepted)


def interrupted_takes(seconds, seed, take):
    """Call `take()` for some seconds under interrupts, longer until enough came, on a busy machine.

    Return what it returned and how many interrupts came.
    """
    results, until = [], time.monotonic() + seconds
    with Interrupts(seed) as interrupts:
        while time.monotonic() < until or (interrupts.count < LEAST_INTERRUPTS and time.monotonic() < until + TIMEOUT):
            try:
                interrupts.armed = True
                result = take()
                interrupts.armed = False
                results.append(result)
            except KeyboardInterrupt:
                pass
            except gq.DeadlineExceededError:
                interrupts.armed = False
    return results, interrupts.count


def offer_row(acc):
    row = np.ones((1, 1))
    return lambda number: acc.apply_grad([number], row, local_step=None)


SECONDS = [1.2, pytest.param(60.0, marks=pytest.mark.slow)]
LEAST_INTERRUPTS = 60


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("number", [1, 7])
def test_ctrl_c_at_any_moment_of_a_take_loses_nothing(make, seconds, number):
    acc = make.sparse("float64", (2, 1), reduction_type="SUM")
    appliers = Appliers(offer_row(acc))
    results, count = interrupted_takes(seconds, number, lambda: acc.take_grad(number, timeout=0.01))
    accepted = appliers.stop()
    while acc.num_undelivered or acc.num_accumulated():
        results.append(acc.take_grad(1, timeout=TIMEOUT))
    assert count >= LEAST_INTERRUPTS
    assert sum(grad.num_gradients for grad in results) == accepted
    assert sum(float(grad.values.sum()) for grad in results) == accepted
    assert sorted(grad.step for grad in results) == list(range(len(results)))
    assert acc.global_step == len(results)


@pytest.mark.parametrize("seconds", SECONDS)
def test_ctrl_c_at_any_moment_of_an_exact_take_loses_nothing(make, seconds):
    acc = make.sparse("float64", (2, 1), reduction_type="SUM", compact=False)
    appliers = Appliers(offer_row(acc))

    def take():
        return acc.take_grad(5, timeout=0.01, exact=True)

    results, count = interrupted_takes(seconds, 3, take)
    accepted = appliers.stop()
    assert count >= LEAST_INTERRUPTS
    assert all(grad.num_gradients == 5 for grad in results)
    while acc.num_undelivered or acc.num_accumulated():
        results.append(acc.take_grad(1, timeout=TIMEOUT))
    assert sum(float(grad.values.sum()) for grad in results) == accepted


def test_ctrl_c_at_any_moment_of_a_group_take_keeps_members_together(make):
    spec = gq.SparseSpec("float64", (2, 1), "SUM")
    group = make.group({"one": spec, "total": gq.DenseSpec("float64", (1,), "SUM")})

    def offer(number):
        return group.apply({"one": ([number], [[1.0]]), "total": [1.0]}, local_step=None)

    appliers = Appliers(offer)
    results, count = interrupted_takes(1.2, 9, lambda: group.take(3, timeout=0.01))
    accepted = appliers.stop()
    while group.num_undelivered or group.num_accumulated():
        results.append(group.take(1, timeout=TIMEOUT))
    assert count >= LEAST_INTERRUPTS
    assert all(taken["total"][0] == taken["one"].values.sum() == taken.num_gradients for taken in results)
    assert sum(taken.num_gradients for taken in results) == accepted


def test_ctrl_c_while_takes_of_others_wait_leaves_their_turn_to_them(make):
    acc = make.sparse("float64", (2, 1), reduction_type="SUM")
    stop, others = threading.Event(), []

    def take_too():
        while not stop.is_set():
            try:
                others.append(acc.take_grad(2, timeout=0.05))
            except gq.DeadlineExceededError:
                continue

    taking = Call(take_too)
    appliers = Appliers(offer_row(acc))
    results, count = interrupted_takes(1.2, 5, lambda: acc.take_grad(2, timeout=0.01))
    accepted = appliers.stop()
    stop.set()
    taking.result()
    results += others
    while acc.num_undelivered or acc.num_accumulated():
        results.append(acc.take_grad(1, timeout=TIMEOUT))
    assert count >= LEAST_INTERRUPTS
    assert sum(float(grad.values.sum()) for grad in results) == accepted


def test_ctrl_c_interrupts_a_waiting_take_at_once(make):
    acc = make.sparse("float64", (2, 1))
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        blocks_until(acc, lambda: acc.take_grad(1), lambda: os.kill(os.getpid(), signal.SIGINT))
    assert time.monotonic() - started < TIMEOUT
    accept(acc, [0], [1.0])
    assert (acc.num_accumulated(), acc.global_step) == (1, 0)  # nobody waits any more
    assert acc.take_grad(1, timeout=0).num_gradients == 1


def test_ctrl_c_of_the_oldest_take_lets_the_next_be_served_at_once(make):
    acc = make.sparse("float64", (2, 1))

    def trigger():
        wait_for_waiters(acc, 1)
        future = acc.submit_take(1)
        accept(acc, [0], [1.0])
        assert acc.global_step == 0
        os.kill(os.getpid(), signal.SIGINT)
        return future

    call = Call(trigger)
    with pytest.raises(KeyboardInterrupt):
        acc.take_grad(3)
    assert call.result().result(TIMEOUT).num_gradients == 1
