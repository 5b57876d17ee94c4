"""Takes of operations whose run may end at any moment: nothing is lost, and nobody waits for them."""

import concurrent.futures
import itertools
import threading

import numpy as np
import pytest

import gradquorum as gq
from tests.support import TIMEOUT, round_of, wait_until

pytestmark = [pytest.mark.frameworks]


@pytest.fixture
def acc(target):
    with gq.SparseConditionalAccumulator("float32", [5, 1], target=target) as acc:
        yield acc


@pytest.fixture
def offers(gqtf, acc):
    from gradquorum.tensorflow.offers import AbstractListener, Offers

    class Listener(AbstractListener):
        def __init__(self):
            self.all_ended, self.all_delivered, self.all_gone = [], [], []
            self.wake = threading.Semaphore(0)

        def ended(self, number):
            self.all_ended.append(number)
            self.wake.release()

        def delivered(self, number):
            self.all_delivered.append(number)

        def gone(self, number):
            self.all_gone.append(number)

    listener = Listener()
    offers = Offers(acc, listener)
    offers.listener, offers.numbers = listener, itertools.count()
    return offers


def begin(offers, num_required=1):
    number = next(offers.numbers)
    return number, offers.begin(number, num_required)


def mark(line):
    """Do what the operation does after which a round counts as delivered."""
    from gradquorum.tensorflow import lifelines

    line[0] = lifelines._MARKED


def offer(acc, value):
    acc.apply_grad([1], np.float32([[value]]), local_step=None)


@pytest.mark.parametrize("is_marked", [True, False])
def test_round_that_was_read_is_delivered_if_its_line_is_marked(acc, offers, is_marked):
    number, line = begin(offers)
    offer(acc, 5.0)
    assert offers.listener.wake.acquire(timeout=TIMEOUT)
    assert offers.read(number).values.tolist() == [[5.0]]
    if is_marked:
        mark(line)
    line = None  # cut
    assert offers.listener.all_gone == [number]
    offer(acc, 6.0)
    assert acc.take_grad(1, timeout=TIMEOUT).values.tolist() == [[6.0 if is_marked else 5.0]]
    assert acc.num_undelivered == 0


def test_round_is_announced_read_and_delivered(acc, offers):
    number, line = begin(offers)
    assert not offers.has_ended(number)
    offer(acc, 5.0)
    assert offers.listener.wake.acquire(timeout=TIMEOUT)
    assert offers.has_ended(number)
    assert offers.read(number).values.tolist() == [[5.0]]
    assert (offers.listener.all_ended, offers.listener.all_gone) == ([number], [])
    mark(line)
    wait_until(lambda: offers.listener.all_delivered == [number])  # before the line is cut
    assert not round_of(acc).num_in_flight
    line = None  # cut
    assert offers.listener.all_gone == [number]
    assert acc.num_undelivered == 0


def test_take_that_is_cut_off_while_it_waits_leaves_its_line(acc, offers):
    number, line = begin(offers)
    del line
    offer(acc, 5.0)
    assert (acc.num_accumulated(), acc.global_step) == (1, 0)
    assert acc.take_grad(1, timeout=TIMEOUT).values.tolist() == [[5.0]]
    assert (offers.listener.all_ended, offers.listener.all_gone) == ([], [number])


def test_round_of_a_take_that_is_cut_off_goes_back(acc, offers):
    _, line = begin(offers)
    offer(acc, 5.0)
    assert offers.listener.wake.acquire(timeout=TIMEOUT)
    del line
    offer(acc, 6.0)
    assert acc.take_grad(1, timeout=TIMEOUT).values.tolist() == [[5.0]]
    assert acc.take_grad(1, timeout=TIMEOUT).values.tolist() == [[6.0]]


def test_takes_are_in_line_in_the_order_in_which_they_began(acc, offers):
    (first, _line), (second, _other_line) = begin(offers, 3), begin(offers, 1)
    for value in (1.0, 2.0):
        offer(acc, value)
    assert not offers.listener.all_ended
    offer(acc, 3.0)
    assert offers.listener.wake.acquire(timeout=TIMEOUT)
    assert offers.listener.all_ended == [first]
    assert offers.read(first).values.tolist() == [[2.0]]
    offer(acc, 4.0)
    assert offers.listener.wake.acquire(timeout=TIMEOUT)
    assert offers.read(second).values.tolist() == [[4.0]]


def test_end_of_the_accumulator_is_announced(acc, offers):
    number, _line = begin(offers)
    acc.close()
    wait_until(lambda: offers.has_ended(number))
    with pytest.raises(gq.CancelledError, match="TakeGrad operation was cancelled"):
        offers.read(number)


def test_take_that_cannot_begin_leaves_nothing(acc, offers):
    with pytest.raises(gq.InvalidArgumentError):
        begin(offers, 0)
    assert not offers._takes


def test_round_whose_delivery_could_not_be_told_is_logged(gqtf, run_thread, caplog):
    from gradquorum.tensorflow.offers import AbstractListener, Offers

    class Listener(AbstractListener):
        def __init__(self):
            self.wake = threading.Event()

        def ended(self, number):
            self.wake.set()

        def delivered(self, number):
            pass

        def gone(self, number):
            pass

    class Broken:
        """A target whose connection breaks when the round is on its way."""

        def _submit_offer(self, num_required, timeout, accept):
            future = concurrent.futures.Future()
            future.set_running_or_notify_cancel()

            def take():
                accept("a round")
                future.set_exception(gq.UnavailableError("injected"))

            self.taking = run_thread(take)
            return future

    broken, listener = Broken(), Listener()
    offers = Offers(broken, listener)
    line = offers.begin(1, 1)
    assert listener.wake.wait(TIMEOUT)
    assert offers.read(1) == "a round"
    mark(line)
    line = None  # cut
    broken.taking.result()
    assert "a round was delivered, but where it lives does not know" in caplog.text
