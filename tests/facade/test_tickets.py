"""What lies behind the gate: blocks by ticket, kept exactly as long as a take may ask for them."""

import gc
import threading
import weakref

import numpy as np
import pytest

import gradquorum as gq

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

GATE = 1


@pytest.fixture
def store(gqtf):
    from gradquorum.tensorflow.tickets import TicketStore

    return TicketStore(gq.SparseSpec("float32", (None, 1)))


def offer(store, value, gate=GATE):
    """Offer a gradient that its gate has let pass, and return its ticket."""
    offered = store.offer(gate, np.array([1]), np.float32([[value]]), None, 0)
    assert offered.row.shape == (1, 1)
    store.arrive(gate, offered.ticket, seems_counted=True)
    return offered.ticket


class Take:
    """A take, at whose gate there are what tickets one says."""

    def __init__(self, store, gate=GATE, num_required=1):
        self._store, self._gate = store, gate
        self.number, self.has_round, self._line = store.begin_take(gate, num_required)

    def merge(self, *tickets):
        return self._store.merge_take(self._gate, self.number, np.array(tickets, np.int64))[1].tolist()

    def mark(self):
        """Do what the operation does after which a round counts as delivered."""
        from gradquorum.tensorflow import lifelines

        self._line[0] = lifelines._MARKED

    def cut(self):
        self._line = None

    def fetch(self, *tickets):
        """Return the result; the run has ended well."""
        result = self.merge(*tickets)
        self.mark()
        self.cut()
        return result


def test_take_merges_exactly_its_tickets(store):
    one, _, three = (offer(store, value) for value in (1.0, 100.0, 5.0))
    assert Take(store).fetch(one, three) == [[3.0]]


def test_gradient_that_was_dropped_while_nobody_took_is_forgotten_at_once(store):
    offer(store, 1.0)
    stale = store.offer(GATE, np.array([1]), np.float32([[7.0]]), None, 0)
    store.arrive(GATE, stale.ticket, seems_counted=False)
    assert store.num_held == 1


@pytest.mark.parametrize("began", ["before", "meanwhile"])
def test_gradient_that_a_take_may_have_got_is_not_forgotten(store, began):
    """The count was no higher afterwards, perhaps because a take has emptied the gate."""
    take = Take(store) if began == "before" else None
    offered = store.offer(GATE, np.array([1]), np.float32([[7.0]]), None, 0)
    take = take or Take(store)
    store.arrive(GATE, offered.ticket, seems_counted=False)
    assert take.fetch(offered.ticket) == [[7.0]]
    assert store.num_held == 0


def test_stale_gradient_is_forgotten_with_the_first_take_that_began_afterwards(store):
    waiting = Take(store)
    offer(store, 100.0)
    assert waiting.fetch(offer(store, 1.0)) == [[1.0]]
    assert store.num_held == 1  # for all that is known it came after that take
    assert Take(store).fetch(offer(store, 2.0)) == [[2.0]]
    assert store.num_held == 0


def test_gradient_of_a_take_that_is_late_is_still_there(store):
    """The gate has served it, and many other takes come here first."""
    late, ticket = Take(store), offer(store, 7.0)
    for _ in range(100):
        assert Take(store).fetch(offer(store, 1.0)) == [[1.0]]
    assert late.fetch(ticket) == [[7.0]]
    assert store.num_held == 0


def test_takes_that_are_cut_off_keep_no_gradient_for_ever(store):
    waiting = Take(store)
    offer(store, 100.0)
    assert Take(store).fetch(offer(store, 1.0)) == [[1.0]]
    assert store.num_held == 1
    waiting.cut()
    assert store.num_held == 0


def test_takes_of_another_session_do_not_count(store):
    mine = offer(store, 7.0)
    for _ in range(3):
        Take(store, gate=2).fetch(offer(store, 1.0, gate=2))
    assert Take(store).fetch(mine) == [[7.0]]


def test_refused_gradients_are_forgotten_too(store):
    offered = store.offer(GATE, np.array([1]), np.float32([[7.0]]), None, 0)
    Take(store).fetch(offer(store, 1.0))
    assert store.num_held == 1  # it may still be on its way
    del offered
    Take(store).fetch(offer(store, 1.0))
    assert store.num_held == 0


def test_ticket_that_is_not_here_is_an_error_and_no_wrong_mean(store):
    with pytest.raises(RuntimeError, match="1 of 2 gradients of the round are not here"):
        Take(store).fetch(offer(store, 1.0), 2**60)


def test_rounds_of_cut_off_takes_are_what_the_next_takes_get_oldest_first(store):
    takes = [Take(store) for _ in range(3)]
    for value, take in enumerate(takes):
        take.merge(offer(store, float(value)))
    for take in (takes[1], takes[2], takes[0]):
        take.cut()
    refused = Take(store, num_required=0)
    assert not refused.has_round
    again = [Take(store) for _ in range(3)]
    assert [take.has_round for take in again] == [True] * 3
    assert [take.fetch() for take in again] == [[[0.0]], [[1.0]], [[2.0]]]
    assert not Take(store).has_round


def test_round_whose_take_was_marked_does_not_come_again(store):
    take = Take(store)
    take.merge(offer(store, 1.0))
    take.mark()
    take.cut()
    assert not Take(store).has_round


def test_takes_that_begin_at_once_do_not_both_get_a_round(store):
    cut = Take(store)
    cut.merge(offer(store, 1.0))
    cut.cut()
    takes = [Take(store) for _ in range(2)]
    assert [take.has_round for take in takes] == [True, False]


def test_round_that_came_back_is_what_a_waiting_take_gets_too(store):
    cut, waiting = Take(store), Take(store)
    cut.merge(offer(store, 1.0))
    cut.cut()
    assert waiting.fetch(offer(store, 2.0)) == [[1.0]]
    assert Take(store).fetch() == [[2.0]]


def test_round_whose_merge_failed_is_kept(store, monkeypatch):
    def failing(*_):
        raise MemoryError("injected")

    take, ticket = Take(store), offer(store, 7.0)
    monkeypatch.setattr(type(store._reducer), "merge", failing)
    with pytest.raises(MemoryError):
        take.merge(ticket)
    monkeypatch.undo()
    take.cut()
    assert Take(store).fetch() == [[7.0]]


def test_lifeline_that_is_cut_while_the_store_is_at_work_is_no_deadlock(store):
    take = Take(store)
    take.merge(offer(store, 7.0))
    with store._locked():
        take.cut()  # in the thread that holds the lock
        cutting = threading.Thread(target=Take.cut, args=(take,))
        cutting.start()
        cutting.join(10)
        assert not cutting.is_alive()
    assert Take(store).fetch() == [[7.0]]


def test_store_does_not_outlive_its_owner(gqtf):
    from gradquorum.tensorflow.tickets import TicketStore

    store = TicketStore(gq.SparseSpec("float32", (None, 1)))
    reference, take, _ = weakref.ref(store), Take(store), offer(store, 1.0)
    take._store = store = None
    gc.collect()
    assert reference() is None
    take.cut()
