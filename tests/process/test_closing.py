"""What becomes of calls and handles while a server or a round is being closed, and of calls to a busy server."""

import pickle
import socket

import numpy as np
import pytest

import gradquorum as gq
from gradquorum.targets.process import address as addresses
from gradquorum.targets.process.channel import Channel
from gradquorum.targets.process.client import Client
from tests.support import accept, servers, wait_for_waiters, wait_until

ROW = np.ones((1, 4), np.float32)


@pytest.fixture
def closing(tmp_path):
    """A server of this test's own."""
    with gq.Server(tmp_path / "server") as server:
        servers[server.address] = server
        yield server
        del servers[server.address]


def sparse(address, name="emb", **options):
    return gq.SparseConditionalAccumulator("float32", (None, 4), name, target=address, **options)


def during(monkeypatch, owner, step, when, call):
    """Make a call just before or after the server takes a step of its close."""
    original, outcomes = getattr(owner, step), []

    def stepping(*arguments):
        done = original(*arguments) if when == "after" else None
        for _ in range(3):
            try:
                outcomes.append(call())
            except gq.GradQuorumError as error:
                outcomes.append(error)
        return original(*arguments) if when == "before" else done

    monkeypatch.setattr(owner, step, stepping)
    return outcomes


STEPS = [("_place", "remove"), ("rounds", "close_all")]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("part", "step"), STEPS)
@pytest.mark.parametrize("what", ["ask", "apply", "ask over a new connection"])
def test_call_while_the_server_closes_is_answered_or_closed(closing, monkeypatch, part, step, when, what):
    acc = sparse(closing.address)
    accept(acc, [0], ROW)

    def call():
        if what == "apply":
            return acc.apply_grad([0], ROW, local_step=None)
        if "new" in what:
            for idle in acc._target._client._idle.values():
                while idle:
                    idle.pop().channel.close()
        return acc.num_accumulated()

    outcomes = during(monkeypatch, getattr(closing._service, part), step, when, call)
    closing.close()
    assert len(outcomes) == 3
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert {type(error) for error in errors} == {gq.ClosedError}
    with pytest.raises(gq.ClosedError, match="server has been closed"):
        acc.num_accumulated()


@pytest.mark.parametrize(("part", "step"), STEPS)
def test_take_that_waits_while_the_server_closes_is_cancelled(closing, run_thread, monkeypatch, part, step):
    acc = sparse(closing.address)
    call, future = run_thread(acc.take_grad, 1), acc.submit_take(1)
    wait_for_waiters(acc, 2)
    during(monkeypatch, getattr(closing._service, part), step, "before", acc.num_accumulated)
    closing.close()
    assert isinstance(call.error(), gq.CancelledError)
    assert isinstance(future.exception(), gq.CancelledError)


def test_client_that_is_about_to_say_hello_while_the_server_closes_is_told(closing, run_thread, monkeypatch):
    show_key = Channel.show_key

    def closing_first(channel, key):
        wait_until(lambda: closing._service._links, "a connection")
        run_thread(closing.close)
        wait_until(lambda: closing._service.closing, "a server that closes")
        show_key(channel, key)

    monkeypatch.setattr(Channel, "show_key", closing_first)
    with pytest.raises(gq.ClosedError, match="server has been closed"):
        Client(closing.address)


# Handles that were pickled


@pytest.mark.parametrize("here", ["of the server", "over the socket"])
def test_pickled_handle_of_a_closed_round_is_closed_and_makes_none(server, here):
    acc = gq.SparseConditionalAccumulator(
        "float32", (None, 4), f"pickled {here}", target=server if "server" in here else server.address
    )
    pickled = pickle.dumps(acc)
    again = pickle.loads(pickled)
    accept(again, [0], ROW)
    assert acc.num_accumulated() == 1
    acc.close(for_all=True)
    with pytest.raises(gq.ClosedError, match="has been closed"):
        pickle.loads(pickled)
    with pytest.raises(gq.InvalidArgumentError, match="no such round"):
        gq.attach(f"pickled {here}", server.address)


def test_pickled_handle_at_a_new_server_is_closed(tmp_path):
    path = tmp_path / "server"
    with gq.Server(path) as server:
        pickled = pickle.dumps(sparse(server.address))
    with gq.Server(path) as server:
        with pytest.raises(gq.ClosedError, match="never at this server"):
            pickle.loads(pickled)
        assert sparse(server.address).num_accumulated() == 0


def test_pickled_handle_of_a_round_whose_name_another_has_is_refused(server):
    acc = sparse(server.address, "renamed")
    pickled = pickle.dumps(acc)
    acc.close()
    other = gq.SparseConditionalAccumulator("float64", (7, 1), "renamed", target=server.address)
    with pytest.raises(gq.InvalidArgumentError, match="expected the spec it was made with"):
        pickle.loads(pickled)
    other.close()


# A full queue


@pytest.fixture
def full(tmp_path):
    """A listener whose queue is full."""
    path, clients = str(tmp_path / "socket"), []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(0)
        try:
            while True:
                clients.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                clients[-1].setblocking(False)
                clients[-1].connect(path)
        except BlockingIOError:
            yield path, listener
        finally:
            for client in clients:
                client.close()


def test_dial_when_the_queue_is_full_waits_for_its_turn(full, monkeypatch):
    path, listener = full
    naps = []

    def accept_one(seconds):
        naps.append(seconds)
        listener.accept()[0].close()

    monkeypatch.setattr(addresses.time, "sleep", accept_one)
    with addresses.dial(path) as sock:
        assert sock.getpeername() == path
    assert len(naps) >= 1


def test_dial_when_the_queue_stays_full_is_unavailable_after_the_deadline(full, monkeypatch):
    path, _ = full
    now = [0.0]
    monkeypatch.setattr(addresses.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(addresses.time, "sleep", lambda seconds: now.append(now.pop() + 7.0))
    with pytest.raises(gq.UnavailableError, match="no server"):
        addresses.dial(path)
    assert 30 <= now[0] < 45
