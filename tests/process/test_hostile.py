"""CASES H3, H5, H6: clients that send nonsense, too much, too little, or nothing. Nothing is ever unpickled."""

import ast
import contextlib
import os
import random
import re
import socket
import struct
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import msgspec
import numpy as np
import pytest

import gradquorum as gq
from gradquorum.targets.process import messages
from tests.process import children
from tests.process.running import exit_code, hear, start_connected
from tests.support import TIMEOUT, wait_until

MIB = 1 << 20
MOST_GROWTH = 16 * MIB
if "ASAN_OPTIONS" in os.environ:
    MOST_GROWTH *= 2  # AddressSanitizer keeps what was freed for a while, to find who still uses it
SOURCES = Path(gq.__file__).parent / "targets" / "process"


@pytest.fixture
def host(tmp_path):
    """A server in a process of its own: its number and its address."""
    address = str(tmp_path / "server")
    process, connection = start_connected(children.host, address)
    assert hear(connection) == "ready"
    yield process.pid, address
    connection.send(None)
    assert exit_code(process) == 0, "the server has not survived"


def numbers(pid):
    """Descriptors, threads, and bytes of memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    threads, memory = (int(re.search(rf"{field}:\s+(\d+)", status)[1]) for field in ("Threads", "VmRSS"))
    return len(os.listdir(f"/proc/{pid}/fd")), threads, memory * 1024


def connect(address):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)  # waits for its turn, as it would not with a timeout
    sock.settimeout(TIMEOUT)
    return sock


def frame(message):
    return struct.pack("!i", len(message)) + message


def show_key(sock, address):
    """Show the key, and say hello."""
    key = Path(address + ".key").read_bytes()
    sock.setblocking(True)  # with a timeout it would not block, and the steps below fail before the server answers
    with Connection(os.dup(sock.fileno())) as connection:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send_bytes(messages.encode(messages.Hello(messages.VERSION, None)))
        connection.recv_bytes()


# Attacks. The server may close the connection as soon as it does not understand.


def says_nonsense(rng, sock):
    sock.sendall(rng.randbytes(rng.randrange(1, 4096)))


def says_it_is_long(rng, sock):
    sock.sendall(struct.pack("!i", rng.choice([2**31 - 1, 2**30, 1 << 21, -1, -5])) + struct.pack("!Q", 2**63 - 1))


def stops_in_the_midst(rng, sock):
    sock.sendall(frame(rng.randbytes(64))[: rng.randrange(1, 60)])
    sock.shutdown(socket.SHUT_WR)


def answers_wrongly(rng, sock):
    sock.sendall(frame(rng.randbytes(rng.choice([16, 20, 32, 48]))))


def goes_at_once(rng, sock):
    sock.close()


def knows_the_key_and_says_nonsense(rng, sock):
    show_key(sock, sock.getpeername())
    sock.sendall(frame(rng.randbytes(rng.randrange(0, 300))))


def knows_the_key_and_is_too_long(rng, sock):
    show_key(sock, sock.getpeername())
    sock.sendall(struct.pack("!i", messages.MAX_MESSAGE_BYTES + 1) + rng.randbytes(1 << 16))


def knows_the_key_and_sends_odd_messages(rng, sock):
    """Send messages of the right form, or nearly, in an order and with numbers that make no sense."""

    def anything(depth=0):
        kind = rng.randrange(8 if depth < 3 else 6)
        if kind < 2:
            return rng.choice([0, 1, 2, -1, 7, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, rng.randrange(2**16)])
        if kind < 6:
            return [None, rng.random(), rng.randbytes(rng.randrange(40)), "global_step"][kind - 2]
        return [anything(depth + 1) for _ in range(rng.randrange(4))]

    show_key(sock, sock.getpeername())
    for _ in range(rng.randrange(1, 5)):
        message = [rng.randrange(1, 19), *[anything() for _ in range(rng.randrange(10))]]
        sock.sendall(frame(msgspec.msgpack.encode(message)))


ATTACKS = [
    says_nonsense,
    says_it_is_long,
    stops_in_the_midst,
    answers_wrongly,
    goes_at_once,
    knows_the_key_and_says_nonsense,
    knows_the_key_and_is_too_long,
    knows_the_key_and_sends_odd_messages,
]


class Bystander:
    """A client that does its work meanwhile."""

    def __init__(self, address):
        self.acc = gq.SparseConditionalAccumulator("float32", (None, 4), target=address)

    def work(self, number):
        for value in (1.0, 3.0):
            assert self.acc.apply_grad(np.arange(number), np.full((number, 4), value, np.float32), local_step=None)
        taken = self.acc.take_grad(2, timeout=TIMEOUT)
        np.testing.assert_array_equal(taken.values, np.full((number, 4), 2.0))


def attack(host, number, seed):
    """Attack that often, and check that others are served meanwhile and that the server does not grow."""
    pid, address = host
    rng = random.Random(seed)
    bystander = Bystander(address)
    open_ones = []

    def one():
        open_ones.append(connect(address))
        with contextlib.suppress(OSError, EOFError):  # it was closed under us
            rng.choice(ATTACKS)(rng, open_ones[-1])
        if len(open_ones) > 64:
            open_ones.pop(rng.randrange(64)).close()

    for _ in range(min(number // 4, 500)):  # until the server has grown to what such clients make of it
        one()
    bystander.work(500)
    while open_ones:
        open_ones.pop().close()
    wait_until(lambda: numbers(pid)[1] <= 12, "the end of the connections' threads")
    before = numbers(pid)
    for i in range(number):
        one()
        if i % 100 == 0:
            bystander.work(i % 1000 + 1)
    while open_ones:
        open_ones.pop().close()
    wait_until(lambda: numbers(pid)[:2] <= before[:2], f"the descriptors and threads of before, {before}")
    assert numbers(pid)[2] - before[2] < MOST_GROWTH
    bystander.work(100)


def test_h3_nonsense_harms_neither_the_server_nor_others(host):
    attack(host, 400, seed=1)


@pytest.mark.slow
def test_h3_nonsense_10_000_times_harms_neither_the_server_nor_others(host):
    attack(host, 10_000, seed=2)


def test_h5_silent_clients_stop_nobody_and_are_dropped(host):
    pid, address = host
    bystander = Bystander(address)
    bystander.work(10)
    before = numbers(pid)
    silent = [connect(address) for _ in range(200)]
    Bystander(address).work(1000)
    bystander.work(10)
    for sock in silent:
        assert sock.recv(1) != b""  # the challenge
        while sock.recv(4096):  # the end, at the latest TIMEOUT s after
            pass
        sock.close()
    wait_until(lambda: numbers(pid)[1] <= before[1] + 1, "the threads of before")  # one more client than before


def test_messages_that_come_in_one_piece_are_answered_one_by_one(server):
    acc = server.accumulator("float32", (None, 1), "emb")
    take = messages.Take(0, 1, 1, None, exact=False, announce=True)
    requests = [messages.Open(b"emb", None, create=False), take, messages.Cancel(), messages.Ask(0, "num_accumulated")]
    with connect(server.address) as sock, Connection(os.dup(sock.fileno())) as connection:
        show_key(sock, server.address)
        sock.sendall(b"".join(frame(messages.encode(request)) for request in requests))
        answers = []
        while len(answers) < 4:
            assert connection.poll(TIMEOUT)
            answers.append(messages.FROM_SERVER.decode(connection.recv_bytes()))
    kinds = [messages.Opened, messages.Queued, messages.Withdrawn, messages.Number]
    assert [type(answer) for answer in answers] == kinds
    assert acc.num_accumulated() == 0


def test_client_with_another_key_is_refused_and_told_so(host, tmp_path):
    _, address = host
    with pytest.raises(gq.UnavailableError, match="key"):
        gq.connect(address, b"wrong")
    gq.connect(address, None)
    gq.connect("local")


def test_h6_memory_that_a_client_rewrites_harms_only_its_own_gradient(server, monkeypatch):
    """The block is written to after it was committed: ids and values were the client's to choose, and are checked."""
    from gradquorum.targets.process.client import Client

    honest = gq.SparseConditionalAccumulator("float32", (2000, 4), "h6", target=server.address, compact=False)
    acc = gq.attach("h6", server.address)
    blocks, send = [], Client.send

    def keeping(self, connection, message):
        if isinstance(message, messages.Apply) and message.block is not None:
            blocks.append(connection.lent[message.block])
        send(self, connection, message)

    monkeypatch.setattr(Client, "send", keeping)
    assert acc.apply_grad(np.arange(1000), np.ones((1000, 4), np.float32))
    monkeypatch.undo()
    assert honest.apply_grad(np.arange(1000, 2000), np.ones((1000, 4), np.float32))
    for block in blocks:
        np.frombuffer(block, np.uint8)[:] = 0xFF
        with pytest.raises((OSError, SystemError, ValueError, BufferError)):
            block.resize(1)
    taken = honest.take_grad(2, timeout=0)
    np.testing.assert_array_equal(taken.indices, np.arange(2000))
    np.testing.assert_array_equal(taken.values[1000:], np.ones((1000, 4)))
    honest.close(for_all=True)


# Nothing is ever unpickled


UNPICKLERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "ForkingPickler",
    "loads",
}


def names_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def makes_objects(tree):
    """Whether anything calls `eval`, `exec`, a `load`, or the `recv` of a connection, which unpickles."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in {"eval", "exec", "load"} or (name == "recv" and not node.args):  # that of a socket takes a size
            return True
    return False


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: path.name)
def test_nothing_in_the_process_target_can_unpickle(path):
    tree = ast.parse(path.read_text())
    assert UNPICKLERS & set(names_in(tree)) == set()
    assert not makes_objects(tree)


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from multiprocessing.reduction import ForkingPickler", "c.recv()", "pickle.loads(b)", "eval(x)"],
)
def test_search_for_what_can_unpickle_finds_it(text):
    tree = ast.parse(text)
    assert UNPICKLERS & set(names_in(tree)) or makes_objects(tree)


def test_unpickling_is_never_called_while_clients_talk(server, monkeypatch):
    """Not by what we call, either."""
    import pickle
    from multiprocessing import connection

    def refuse(*_):
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(connection._ForkingPickler, "loads", refuse)
    with gq.SparseConditionalAccumulator("float32", (None, 4), target=server.address) as acc:
        for number in (1, 2000):
            acc.apply_grad(np.arange(number), np.ones((number, 4), np.float32), local_step=None)
            assert acc.take_grad(1, timeout=0).num_gradients == 1
