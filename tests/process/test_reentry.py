"""Server and client in one process: a finalizer that interrupts the server must not wait for it."""

import logging
import threading

import pytest

import gradquorum as gq
from gradquorum.targets.process import requests
from gradquorum.targets.process.messages import Ask
from tests.support import TIMEOUT, accept, wait_until


@pytest.fixture
def server(tmp_path):
    with gq.Server(tmp_path / "server") as running:
        yield running


@pytest.fixture
def acc(server):
    return gq.SparseConditionalAccumulator("float32", (2, 1), "emb", target=server.address, expected_workers=2)


def in_its_thread(monkeypatch, acc, call):
    """Let the server's thread of a connection make a call under a lock, as a finalizer may; return what comes of it."""
    outcome = []
    answer = requests.ANSWERS[Ask]

    def answer_and_call(link, message):
        try:
            with link.session._lock:
                outcome.append(call())
        except gq.GradQuorumError as error:
            outcome.append(error)
        return answer(link, message)

    with monkeypatch.context() as patch:
        patch.setitem(requests.ANSWERS, Ask, answer_and_call)
        acc.num_accumulated()
    return outcome[0]


def in_another_thread(call):
    """Make a call in a thread of its own, and return whether it ends."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return not thread.is_alive()


def test_call_by_a_thread_of_the_server_is_refused(acc, monkeypatch):
    for call in (acc.num_accumulated, lambda: acc.apply_grad([0], [[1.0]]), lambda: acc.take_grad(1)):
        error = in_its_thread(monkeypatch, acc, call)
        assert type(error) is gq.GradQuorumError
        assert "finalizer" in str(error)
    assert acc.num_accumulated() == 0


def test_first_call_on_the_server_by_a_thread_of_it_is_refused(acc, server, monkeypatch):
    error = in_its_thread(monkeypatch, acc, lambda: gq.attach("emb", server.address))
    assert "finalizer" in str(error)


def test_call_within_a_call_on_a_round_of_the_server_is_refused(acc, server):
    hosted = server.accumulator("float32", (2, 1), "other")
    with hosted._target._round._lock, pytest.raises(gq.GradQuorumError, match="finalizer"):
        acc.num_accumulated()
    assert acc.num_accumulated() == 0


def test_worker_that_leaves_by_a_thread_of_the_server_has_left_soon_after(acc, monkeypatch):
    worker = acc.worker("gone")
    assert acc.num_workers == 1
    assert in_its_thread(monkeypatch, acc, worker.leave) is None
    wait_until(lambda: acc.num_workers == 0, "the worker to leave")


def test_close_by_a_thread_of_the_server_says_what_it_discards(acc, server, monkeypatch, caplog):
    accept(acc, [0], [1.0])
    with caplog.at_level(logging.WARNING, logger="gradquorum"):
        assert in_its_thread(monkeypatch, acc, acc.close) == 0
        wait_until(lambda: "1 gradients were discarded" in caplog.text, "the close")
    assert acc.closed
    with pytest.raises(gq.InvalidArgumentError, match="no such round"):
        gq.attach("emb", server.address)


def test_close_of_a_hosted_handle_within_a_call_on_its_round_does_not_wait_for_other_closes(server):
    handles = [server.accumulator("float32", (2, 1), "emb") for _ in range(2)]
    rounds, inner = server._service.rounds, handles[0]._target._round._lock
    has_rounds = threading.Event()

    def close_another():
        with rounds._lock:
            has_rounds.set()
            handles[1].close()

    other = threading.Thread(target=close_another, daemon=True)

    def interrupted():
        with inner:
            other.start()
            assert has_rounds.wait(TIMEOUT)
            handles[0].close()

    assert in_another_thread(interrupted)
    other.join(TIMEOUT)
    assert not other.is_alive()
    wait_until(lambda: handles[0].closed, "the close")


def test_server_at_the_place_of_another_is_not_forgotten_when_that_one_is_closed_again(tmp_path, monkeypatch):
    first = gq.Server(tmp_path / "server")
    first.close()
    with gq.Server(tmp_path / "server") as second:
        first.close()
        acc = gq.SparseConditionalAccumulator("float32", (2, 1), "emb", target=second.address)
        assert "finalizer" in str(in_its_thread(monkeypatch, acc, acc.num_accumulated))
