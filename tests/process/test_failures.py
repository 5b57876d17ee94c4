"""What happens when a server, a taker or a worker dies, stops, or is forked."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import gradquorum as gq
from benchmarks.bench_process import be_idle_clients
from gradquorum.targets.process import channel, client
from tests.process import children
from tests.process.running import exit_code, hear, kill, start, start_connected
from tests.support import STRICT_PYTHON, TIMEOUT, accept, assert_rows, num_blocked, wait_for_waiters, wait_until

SOON = 20.0
"""Seconds: far less than the 30 after which a silent server counts as dead; a death is seen at once."""


class Hosts:
    """Servers in processes of their own, all at one address."""

    def __init__(self, address):
        self.address = str(address)
        self.processes = []

    def start(self, *arguments):
        process, connection = start_connected(children.host, self.address, *arguments)
        self.processes.append((process, connection))
        assert hear(connection) == "ready"
        return process

    def end(self):
        for process, connection in self.processes:
            process.kill()
            process.join()
            connection.close()


@pytest.fixture
def hosts(tmp_path):
    hosts = Hosts(tmp_path / "server")
    yield hosts
    hosts.end()


@pytest.fixture
def name(request):
    return request.node.nodeid


def sparse(address, **options):
    return gq.SparseConditionalAccumulator("float32", (None, 4), target=address, **options)


ROWS = np.ones((1000, 4), np.float32)


# The server


def drop_first(monkeypatch, count):
    """Make servers of this process drop that many connections before their key is proven, as slow ones are."""
    demand_key, drops = channel.Channel.demand_key, iter(range(count))

    def demand_or_drop(self, key):
        if next(drops, None) is not None:
            raise channel.BrokenChannel("too slow")
        demand_key(self, key)

    monkeypatch.setattr(channel.Channel, "demand_key", demand_or_drop)


def test_client_too_slow_to_prove_its_key_tries_again(monkeypatch):
    monkeypatch.setattr(client, "AUTHENTICATE_SECONDS", 0.0)  # any client counts as slow
    drop_first(monkeypatch, 3)
    with gq.Server() as server, sparse(server.address) as acc:
        assert acc.num_accumulated() == 0


def test_client_that_is_dropped_at_once_does_not_try_again(monkeypatch):
    drop_first(monkeypatch, 1)
    with gq.Server() as server, pytest.raises(gq.UnavailableError, match="cannot be reached"):
        sparse(server.address)


def test_client_that_is_dropped_again_and_again_gives_up(monkeypatch):
    monkeypatch.setattr(client, "AUTHENTICATE_SECONDS", 0.0)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.5)
    drop_first(monkeypatch, 10**9)
    with gq.Server() as server, pytest.raises(gq.UnavailableError, match="cannot be reached"):
        sparse(server.address)


@pytest.fixture
def sent(monkeypatch):
    """The names of the messages that this process has sent, in order."""
    names, send = [], client.Client.send

    def sending(self, connection, message):
        send(self, connection, message)
        names.append(type(message).__name__)

    monkeypatch.setattr(client.Client, "send", sending)
    return names


def take(acc):
    acc.take_grad(1)


def take_by_future(acc):
    acc.submit_take(1).result(TIMEOUT)


def apply_until_full(acc):
    for _ in range(5):
        acc.apply_grad(np.arange(1000), ROWS, local_step=None)


def wait_for_parameters(acc):
    acc.wait_published(1)


WAITS = {"Take": (take, 1), "take by future": (take_by_future, 1), "Apply": (apply_until_full, 5)}
WAITS["WaitPublished"] = (wait_for_parameters, 1)


def start_waiting(run_thread, address, sent, what):
    """Make a call that waits, and return it when its request has been sent."""
    blocking, times = WAITS[what]
    acc = sparse(address, max_bytes=100_000, on_full="block", compact=False)
    call = run_thread(blocking, acc)
    kind = what if what[0].isupper() else "Take"
    wait_until(lambda: sent.count(kind) == times, "a request")
    return call


@pytest.mark.parametrize("what", WAITS)
def test_server_killed_under_a_call_that_waits_is_unavailable_at_once(hosts, run_thread, sent, what):
    process = hosts.start()
    call = start_waiting(run_thread, hosts.address, sent, what)
    killed = time.monotonic()
    kill(process)
    error = call.error()
    assert isinstance(error, gq.UnavailableError)
    assert hosts.address in str(error)
    assert error.outcome_known is (what != "Apply")
    assert time.monotonic() - killed < SOON


@pytest.mark.parametrize("what", WAITS)
def test_server_that_stops_is_unavailable_when_the_deadline_has_passed(hosts, run_thread, sent, monkeypatch, what):
    monkeypatch.setattr(client, "ANSWER_SECONDS", 2.0)
    process = hosts.start(2.0)
    call = start_waiting(run_thread, hosts.address, sent, what)
    os.kill(process.pid, signal.SIGSTOP)
    error = call.error()
    assert isinstance(error, gq.UnavailableError)
    assert error.outcome_known is (what != "Apply")


def has_stopped(process):
    """Whether all its threads have: a signal reaches one after the other."""
    return all(b") T " in stat.read_bytes() for stat in Path(f"/proc/{process.pid}/task").glob("*/stat"))


CHANGES = {
    "publish": lambda acc: acc.publish(1),
    "set_global_step": lambda acc: acc.set_global_step(1),
    "discard": lambda acc: acc.discard(),
}
READS = {"num_accumulated": lambda acc: acc.num_accumulated(), "global_step": lambda acc: acc.global_step}


@pytest.mark.parametrize("what", [*CHANGES, *READS])
def test_outcome_of_a_change_without_an_answer_is_not_known(hosts, monkeypatch, what):
    monkeypatch.setattr(client, "ANSWER_SECONDS", 2.0)
    process = hosts.start(2.0)
    acc = sparse(hosts.address)
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: has_stopped(process), "a server that has stopped")
    with pytest.raises(gq.UnavailableError) as error:
        (CHANGES | READS)[what](acc)
    assert error.value.outcome_known is (what in READS)


def test_server_that_is_only_busy_is_waited_for(hosts, run_thread, monkeypatch):
    monkeypatch.setattr(client, "ANSWER_SECONDS", 1.5)
    hosts.start(0.5)  # it says three times as often as it must that it is there, also on a busy machine
    acc = sparse(hosts.address)
    with pytest.raises(gq.DeadlineExceededError):
        acc.take_grad(1, timeout=3.5)  # two deadlines long
    assert acc.num_accumulated() == 0


def test_new_server_at_the_same_address_works_and_old_handles_say_that_theirs_is_gone(hosts, name):
    first = hosts.start()
    old = sparse(hosts.address, shared_name=name)
    old.apply_grad([0], [[1.0] * 4])
    kill(first)
    hosts.start()
    with pytest.raises(gq.UnavailableError, match="gone"):
        old.num_accumulated()
    new = sparse(hosts.address, shared_name=name)
    assert new.num_accumulated() == 0
    accept(new, [0], np.ones((1, 4), np.float32))
    assert new.take_grad(1, timeout=0).num_gradients == 1
    for call in (old.num_accumulated, lambda: old.take_grad(1), lambda: old.apply_grad([0], [[1.0] * 4])):
        with pytest.raises(gq.UnavailableError):
            call()
    old.close()


def test_no_server_at_the_address_is_unavailable(tmp_path):
    with pytest.raises(gq.UnavailableError, match="no server"):
        sparse(str(tmp_path / "nobody"))


# Takers and workers


@pytest.mark.parametrize("num_rows", [1, 1000], ids=["small", "large"])
def test_taker_killed_before_it_acknowledges_leaves_its_round_to_the_next_take(server, name, num_rows):
    acc = sparse(server.address, shared_name=name)
    accept(acc, np.arange(num_rows), ROWS[:num_rows])
    assert exit_code(start(children.take_and_die, server.address, name, "Acknowledge")) == -signal.SIGKILL
    wait_until(lambda: acc.num_undelivered == 1, "the round of the dead")
    assert (acc.global_step, acc.num_accumulated()) == (1, 0)
    accept(acc, [0], np.full((1, 4), 9, np.float32))
    taken = acc.take_grad(5, timeout=0)  # whatever it asks for
    assert (taken.num_gradients, taken.step, acc.global_step) == (1, 0, 1)
    np.testing.assert_array_equal(taken.values, ROWS[:num_rows])
    assert acc.take_grad(1, timeout=0).values[0, 0] == 9


def test_round_that_arrived_without_the_server_knowing_is_logged_and_is_what_the_next_take_gets(
    server, name, monkeypatch, caplog
):
    acc = sparse(server.address, shared_name=name)
    other, connection = start_connected(children.be_worker, server.address, name, "w")
    assert hear(connection) == "joined"  # so that the round outlives this process's session
    accept(acc, [0], ROWS[:1])
    send = client.Client.send

    def breaking(self, connection, message):
        if type(message).__name__ == "Acknowledge":
            connection.channel.shut_down()
        send(self, connection, message)

    monkeypatch.setattr(client.Client, "send", breaking)
    np.testing.assert_array_equal(acc.take_grad(1).values, ROWS[:1])
    assert "a round has arrived, but its server may not know" in caplog.text
    monkeypatch.undo()
    again = sparse(server.address, shared_name=name)
    np.testing.assert_array_equal(again.take_grad(1, timeout=TIMEOUT).values, ROWS[:1])
    kill(other)


def test_taker_killed_while_it_waits_leaves_its_turn_to_the_next(server, name, run_thread):
    acc = sparse(server.address, shared_name=name)
    process = start(children.take_and_die, server.address, name, "none")
    wait_for_waiters(acc, 1)
    next_take = run_thread(acc.take_grad, 1)
    wait_for_waiters(acc, 2)
    kill(process)
    accept(acc, [0], ROWS[:1])
    assert next_take.result().num_gradients == 1
    assert acc.num_undelivered == 0


@pytest.mark.parametrize("num_rows", [1, 1000], ids=["small", "large"])
def test_h4_worker_killed_between_copy_and_commit_has_added_nothing_and_its_memory_is_freed(server, name, num_rows):
    acc = sparse(server.address, shared_name=name)
    before = server._service.held_bytes
    process = start(children.apply_and_die, server.address, name, num_rows, "Apply")
    assert exit_code(process) == -signal.SIGKILL
    wait_until(lambda: server._service.held_bytes == before, "the memory")
    assert (acc.num_accumulated(), acc.global_step) == (0, 0)


def test_s13_restarted_worker_goes_on_after_the_last_sequence(server, name):
    acc = gq.SparseConditionalAccumulator("float32", (5, 1), name, target=server.address)
    for life in (1, 2, 3):
        process = start(children.apply_numbered, server.address, name, "w", 5)
        assert exit_code(process) == -signal.SIGKILL
        assert acc.last_sequence("w") == 5 * life - 1
    again = acc.apply_grad([0], [[1.0]], local_step=None, worker="w", sequence=14)
    assert (again.status, again.first_status) == (gq.ApplyStatus.DUPLICATE, gq.ApplyStatus.ACCEPTED)
    assert acc.take_grad(15, timeout=0).num_gradients == 15


def test_s8_take_ends_as_soon_as_too_many_workers_have_been_killed(server, name, run_thread):
    acc = gq.SparseConditionalAccumulator(
        "float32", (5, 1), name, target=server.address, expected_workers=4, max_per_worker=1
    )
    workers = [start_connected(children.be_worker, server.address, name, number) for number in range(4)]
    for _, connection in workers:
        assert hear(connection) == "joined"
    take = run_thread(acc.take_grad, 3)
    wait_for_waiters(acc, 1)
    kill(workers[0][0])
    wait_until(lambda: acc.num_workers == 3, "a death that is noticed")
    assert take.running
    kill(workers[2][0])
    error = take.error()
    assert isinstance(error, gq.UnavailableError)
    assert (error.live, error.needed, set(error.left)) == (2, 3, {0, 2})
    for number in (1, 3):  # the others go on
        workers[number][1].send("apply")
        assert hear(workers[number][1]) == 0
        workers[number][1].send(None)
        assert exit_code(workers[number][0]) == 0
    assert acc.take_grad(2, timeout=0).num_gradients == 2


# Handles in children


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("here", ["of the server", "over the socket"])
def test_handle_given_to_a_child_is_on_the_same_round(server, method, here):
    target = server if here == "of the server" else server.address
    acc = gq.SparseConditionalAccumulator("float32", (5, 1), target=target)
    processes = [start(children.apply_once, acc, value, method=method) for value in (1.0, 3.0)]
    assert [exit_code(process) for process in processes] == [0, 0]
    assert_rows(acc.take_grad(2, timeout=0), [3], [2.0])


FORK = """
import os, sys
import gradquorum as gq
server = gq.Server()
acc = gq.SparseConditionalAccumulator("float32", (5, 1), "forked", target=server.address)
mine = server.accumulator("float32", (5, 1), "forked")
acc.apply_grad([0], [[1.0]])
group = gq.SparseConditionalAccumulator("float32", target=server.address, expected_workers=1, max_per_worker=1)
worker = gq.SyncReplicas(group, 1, num_workers=1, update=print).worker(0)
child = os.fork()
if child == 0:
    status = 0
    calls = [lambda: acc.apply_grad([0], [[1.0]]), lambda: acc.take_grad(1, timeout=0), acc.num_accumulated,
             lambda: acc.submit_take(1), acc.publish, acc.discard, lambda: acc.wait_published(1, timeout=0),
             mine.num_accumulated, lambda: list(worker)]
    for number, call in enumerate(calls):
        try:
            call()
            status = 10 + number
        except gq.ClosedError as error:
            if "fork" not in str(error):
                status = 30
    again = gq.SparseConditionalAccumulator("float32", (5, 1), "forked", target=server.address)
    again.apply_grad([0], [[3.0]])
    os._exit(status)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, acc.take_grad(2, timeout=10).values[0, 0], acc.global_step)
"""


def test_fork_after_use_raises_in_the_child_where_a_new_handle_works():
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "2.0", "1"], done.stderr


# Budgets


def test_max_bytes_of_a_server_refuses_what_does_not_fit_and_loses_nothing(tmp_path):
    with gq.Server(tmp_path / "server", max_bytes=100_000) as server:
        acc, other = sparse(server.address, compact=False), sparse(server.address)
        count = 0
        with pytest.raises(gq.ResourceExhaustedError):
            while count < 100:
                accept(acc, np.arange(1000), ROWS)
                count += 1
        assert 1 <= count < 10
        assert server._service.held_bytes <= 100_000  # with the block that the last one was copied from
        with pytest.raises(gq.ResourceExhaustedError):
            other.apply_grad(np.arange(1000), ROWS)
        assert acc.num_accumulated() == count
        taken = acc.take_grad(1, timeout=0)
        assert taken.num_gradients == count
        del taken
        accept(other, np.arange(1000), ROWS)


def test_blocked_apply_waits_until_a_take_makes_room(server, run_thread):
    acc = sparse(server.address, max_bytes=100_000, on_full="block", compact=False)
    for _ in range(4):
        accept(acc, np.arange(1000), ROWS)
    call = run_thread(acc.apply_grad, np.arange(1000), ROWS, local_step=None)
    wait_until(lambda: num_blocked(acc) == 1, "a blocked apply")
    assert acc.take_grad(4, timeout=0).num_gradients == 4
    assert call.result().step == 1


# `gradquorum serve`


def serve(address, *options):
    command = [*STRICT_PYTHON, "-m", "gradquorum", "serve", "--address", str(address), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "listening" in process.stdout.readline()
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_when_told_to_end_cancels_waiting_takes_and_exits_with_0(tmp_path, run_thread, number):
    address = tmp_path / "server"
    with serve(address) as process:
        try:
            acc = sparse(str(address))
            call = run_thread(acc.take_grad, 1)
            future = acc.submit_take(1)
            accept(acc, [0], ROWS[:1])
            accept(acc, [0], ROWS[:1])
            assert call.result().num_gradients == future.result(TIMEOUT).num_gradients == 1  # both had been waiting
            call, future = run_thread(acc.take_grad, 1), acc.submit_take(2)
            process.send_signal(number)
            errors = [call.error(), future.exception(TIMEOUT)]
            assert process.wait(TIMEOUT) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
    assert {type(error) for error in errors} <= {gq.CancelledError, gq.ClosedError}
    assert isinstance(errors[1], gq.CancelledError)
    assert "TakeGrad operation was cancelled" in str(errors[1])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(gq.ClosedError):
        acc.num_accumulated()


@pytest.mark.slow
def test_200_idle_clients_cost_no_processor_time(server, name):
    acc = gq.SparseConditionalAccumulator("float32", (5, 1), name, target=server.address)
    process, connection = start_connected(be_idle_clients, server.address, name, 200, True, method="spawn")
    assert connection.poll(300)
    assert connection.recv() == "ready"
    assert acc.num_accumulated() == 200
    used, until = time.process_time(), time.monotonic() + 1.0
    while time.monotonic() < until:
        time.sleep(0.5)
    assert time.process_time() - used < 0.5
    connection.send(None)
    assert exit_code(process) == 0
    acc.close(for_all=True)
