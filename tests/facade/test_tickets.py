"""What lies behind the gate: blocks by ticket, kept exactly as long as a take may ask for them."""

import numpy as np
import pytest

import gradquorum as gq

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

GATE = 1


@pytest.fixture
def tickets(gqtf):
    from gradquorum.tensorflow import tickets

    return tickets


@pytest.fixture
def store(tickets):
    return tickets.TicketStore(gq.SparseSpec("float32", (None, 1)))


def offer(store, value, gate=GATE, arrive=True):
    ticket, row = store.offer(gate, np.array([1]), np.float32([[value]]), None, 0)
    assert row.shape == (1, 1)
    if arrive:
        store.arrive(ticket, seems_counted=True)
    return ticket


def take(store, *tickets, gate=GATE):
    return store.finish_take(gate, store.begin_take(gate), np.array(tickets, np.int64))[1].tolist()


def test_take_merges_exactly_its_tickets(store):
    one, _, three = (offer(store, value) for value in (1.0, 100.0, 5.0))
    assert take(store, one, three) == [[3.0]]
    assert store.num_held == 1


def test_gradient_of_a_take_that_is_late_is_still_there(tickets, store):
    """The gate has served it, and more takes than there will ever be in between come here first."""
    late = offer(store, 7.0)
    number = store.begin_take(GATE)
    for _ in range(tickets.STALE_AFTER - 1):
        assert take(store, offer(store, 1.0)) == [[1.0]]
    assert store.finish_take(GATE, number, np.array([late]))[1].tolist() == [[7.0]]


def test_takes_that_began_before_a_gradient_came_do_not_count(tickets, store):
    numbers = [store.begin_take(GATE) for _ in range(2 * tickets.STALE_AFTER)]
    waiting = offer(store, 7.0)
    for number in numbers:
        assert store.finish_take(GATE, number, np.array([offer(store, 1.0)]))[1].tolist() == [[1.0]]
    assert take(store, waiting) == [[7.0]]


def test_takes_of_another_session_do_not_count(tickets, store):
    mine = offer(store, 7.0)
    for _ in range(2 * tickets.STALE_AFTER):
        take(store, offer(store, 1.0, gate=2), gate=2)
    assert take(store, mine) == [[7.0]]


def test_refused_gradients_are_forgotten_too(tickets, store):
    offer(store, 7.0, arrive=False)
    for _ in range(tickets.REFUSED_AFTER - 1):
        take(store, offer(store, 1.0))
    assert store.num_held == 1
    take(store, offer(store, 1.0))
    assert store.num_held == 0


def test_ticket_that_is_not_here_is_an_error_and_no_wrong_mean(store):
    with pytest.raises(RuntimeError, match="1 of 2 gradients of the round are not here"):
        take(store, offer(store, 1.0), 2**60)
