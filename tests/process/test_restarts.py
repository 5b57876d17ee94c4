"""A server is killed in the midst of rounds and restarted from its checkpoint: totals stay exact."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import gradquorum as gq
from tests.process import chaos, restarts
from tests.process.running import exit_code, kill, start
from tests.support import TIMEOUT, wait_until

pytest.importorskip("safetensors")
pytestmark = pytest.mark.timeout(300)

NUM_RESTARTS = 10
MOMENTS = ["half-filled round", "before an acknowledgement", "after an acknowledgement", "any"]


class Servers:
    """One server after the other, with one folder."""

    def __init__(self, tmp_path, board, every):
        self.address = str(tmp_path / "server")
        self.folder = tmp_path / "kept"
        self.num_half_filled = 0
        """How often a killed one left a round that was not empty."""
        self._board = board
        self._command = [sys.executable, "-m", "gradquorum", "serve", "--address", self.address]
        self._command += ["--checkpoint", str(self.folder), "--every", str(every)]

    def start(self):
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert "listening" in self._process.stdout.readline()
        self._board.server[()] = self._process.pid

    def wait_for_death(self):
        assert self._process.wait(TIMEOUT) == -signal.SIGKILL
        self._process.stdout.close()

    def kill(self):
        os.kill(self._process.pid, signal.SIGKILL)
        self.wait_for_death()

    def end(self):
        self._process.terminate()
        self._process.communicate(timeout=TIMEOUT)
        assert self._process.returncode == 0

    def num_saved(self):
        """Return how many gradients of the open round are in the folder."""
        from gradquorum.checkpoint import read_checkpoint

        try:
            state = read_checkpoint(self.folder / f"{chaos.NAME}.safetensors")
        except FileNotFoundError:
            return 0
        return sum(one["num_gradients"] for one in json.loads(state["header"].tobytes())["log"])


class Crew:
    """The workers and the taker."""

    def __init__(self, board, address):
        self._board, self._address = board, address
        self._processes = [self._start(role) for role in range(restarts.NUM_WORKERS + 1)]

    def _start(self, role):
        if role == restarts.TAKER:
            return start(restarts.take, self._board, self._address)
        return start(restarts.work, self._board, self._address, role)

    def check(self):
        assert {process.exitcode for process in self._processes} <= {None, -signal.SIGKILL}, "one failed by itself"

    def wait_for_progress(self, amount, roles=slice(None)):
        wanted = self._board.progress[roles].sum() + amount
        wait_until(lambda: self.check() or self._board.progress[roles].sum() >= wanted, "progress")

    def kill_worker(self, role):
        kill(self._processes[role])

    def replace_dead(self):
        for role, process in enumerate(self._processes):
            if process.exitcode is not None:
                self._processes[role] = self._start(role)

    def end(self):
        self._board.stop[()] = 1
        assert [exit_code(process) for process in self._processes] == [0] * len(self._processes)


def kill_server(moment, board, servers, crew, rng):
    """Kill the server at a moment of that kind."""
    if moment == "half-filled round":
        board.pause[()] = 1
        crew.wait_for_progress(6, slice(restarts.NUM_WORKERS))
        wait_until(lambda: servers.num_saved() > 0, "a saved gradient")
        servers.kill()
        servers.num_half_filled += servers.num_saved() > 0
        board.pause[()] = 0
    elif moment == "any":
        time.sleep(rng.random() * 0.05)
        servers.kill()
    else:
        board.strike[()] = restarts.BEFORE if "before" in moment else restarts.AFTER
        servers.wait_for_death()


def run(tmp_path, every, num_restarts, seed):
    rng = np.random.default_rng(seed)
    board = restarts.Board.new()
    servers = Servers(tmp_path, board, every)
    servers.start()
    crew = Crew(board, servers.address)
    for number in range(num_restarts):
        crew.wait_for_progress(int(rng.integers(1, 20)))
        worker = int(rng.integers(restarts.NUM_WORKERS))
        before = rng.random() < 0.5
        if before:
            crew.kill_worker(worker)
        kill_server(MOMENTS[number % len(MOMENTS)], board, servers, crew, rng)
        if not before:
            crew.kill_worker(worker)
        servers.start()
        crew.replace_dead()
    crew.wait_for_progress(20)
    crew.end()
    acc = gq.SparseConditionalAccumulator("int64", (None, 2), chaos.NAME, reduction_type="SUM", target=servers.address)
    while acc.num_undelivered or acc.num_accumulated():
        restarts.receive(board, acc.take_grad(1, timeout=TIMEOUT))
    for index in range(restarts.NUM_WORKERS):
        last = acc.last_sequence(chaos.worker_name(index))
        assert last > 0
        np.testing.assert_array_equal(board.taken[index, : last + 1], 1)
        assert not board.taken[index, last + 1 :].any()
    assert acc.global_step == board.next_step
    acc.close()
    servers.end()
    assert servers.num_half_filled > 0  # else nothing has tested that
    assert board.num_again > 0
    return board


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 0.05])
def test_totals_are_exact_however_often_the_server_is_killed(tmp_path, every):
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    board = run(tmp_path, every, NUM_RESTARTS, seed)
    if every == 0:
        assert not board.num_resent.any()


def test_totals_are_exact_when_the_server_is_killed_twice(tmp_path):
    run(tmp_path, 0.05, 2, 0)
