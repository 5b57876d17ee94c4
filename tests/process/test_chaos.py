"""Any worker and the taker can be killed at any moment, and every gradient is in exactly one delivered take."""

import os
import signal
import time

import numpy as np
import pytest

import gradquorum as gq
from tests.process import chaos
from tests.process.leftovers import leftovers, start_helpers
from tests.process.running import exit_code, start
from tests.support import TIMEOUT

pytestmark = pytest.mark.timeout(300)

POINTS_OF_WORKERS = list(chaos.POINTS)[:3]
POINTS_OF_TAKER = list(chaos.POINTS)[3:]
NUM_KILLS = 200


class Crew:
    """The processes, one for each role; a killed one is replaced."""

    def __init__(self, address, rng):
        self.board = chaos.Board.new()
        self._address = address
        self._rng = rng
        self._processes = [self._start(role) for role in range(chaos.NUM_WORKERS + 1)]

    def _start(self, role):
        if role == chaos.TAKER:
            return start(chaos.take, self.board, self._address)
        return start(chaos.work, self.board, self._address, role)

    def wait_for_progress(self, amount):
        wanted = self.board.progress.sum() + amount
        self._wait(lambda: self.board.progress.sum() >= wanted, "progress")

    def _wait(self, condition, what):
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, f"no {what} in {TIMEOUT} s; {self.board.progress}"
            for role, process in enumerate(self._processes):
                assert process.exitcode in (None, -signal.SIGKILL), f"{role} failed by itself"
            time.sleep(0.001)

    def kill(self, role, arm=None):
        """Kill at a random moment, but a taker not between its acknowledgement and its record."""
        process = self._processes[role]
        time.sleep(self._rng.random() * 0.01)
        while True:
            os.kill(process.pid, signal.SIGSTOP)
            self._wait(lambda: state_of(process.pid) == "T", "stop")
            if role != chaos.TAKER or not self.board.recording:
                break
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        self._replace(role, arm)

    def kill_at(self, role, point):
        """Let it kill itself at a point, or, if it may not come to that again, the one that replaces it."""
        if point == "waiting for memory to copy to":
            self.kill(role, arm=point)
        else:
            self._arm(role, point)
        self._replace(role)

    def _arm(self, role, point):
        self.board.armed[role] = 0 if point is None else 1 + list(chaos.POINTS).index(point)

    def _replace(self, role, arm=None):
        process = self._processes[role]
        assert exit_code(process) == -signal.SIGKILL
        process.close()
        self._arm(role, arm)
        self._processes[role] = self._start(role)

    def end(self):
        self.board.stop[()] = 1
        for process in self._processes:
            assert exit_code(process) == 0
            process.close()


def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def drain(acc, board):
    """Take what the last taker left."""
    while acc.num_undelivered or acc.num_accumulated():
        chaos.record(board, acc.take_grad(1, timeout=TIMEOUT))


def check_that_each_is_in_exactly_one_take(acc, board):
    for index in range(chaos.NUM_WORKERS):
        last = acc.last_sequence(chaos.worker_name(index))
        assert last > 0
        np.testing.assert_array_equal(board.taken[index, : last + 1], 1)
        assert not board.taken[index, last + 1 :].any()
        assert board.receipts[index].max() == 1
        assert (board.receipts[index] <= board.taken[index]).all()


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [pytest.param(NUM_KILLS, id=f"{NUM_KILLS} kills")])
def test_every_gradient_is_in_one_take_whoever_is_killed_and_when(tmp_path, num_kills):
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    run_chaos(tmp_path, np.random.default_rng(seed), num_kills)


def test_every_gradient_is_in_one_take_when_each_point_was_hit(tmp_path):
    run_chaos(tmp_path, np.random.default_rng(0), 15)


def run_chaos(directory, rng, num_kills):
    """Kill that often, then check that each gradient is in one take, that all points were hit, and what is left."""
    start_helpers()
    before = leftovers()
    with gq.Server(directory / "server") as server:
        acc = server.accumulator("int64", (None, 2), chaos.NAME, reduction_type="SUM")
        crew = Crew(server.address, rng)
        points = [*POINTS_OF_WORKERS, *POINTS_OF_TAKER]
        for number in range(num_kills):
            crew.wait_for_progress(int(rng.integers(1, 20)))
            point = points[number % 10] if number % 10 < len(points) else None  # the other half at random moments
            if point is None:
                crew.kill(int(rng.integers(chaos.NUM_WORKERS + 1)))
            elif point in POINTS_OF_TAKER:
                crew.kill_at(chaos.TAKER, point)
            else:
                crew.kill_at(int(rng.integers(chaos.NUM_WORKERS)), point)
        crew.end()
        drain(acc, crew.board)
        check_that_each_is_in_exactly_one_take(acc, crew.board)
        fired = dict(zip(chaos.POINTS, crew.board.fired.tolist(), strict=True))
        assert min(fired.values()) >= num_kills // 10, fired
        assert sum(fired.values()) == sum(number % 10 < len(points) for number in range(num_kills))
        del acc
    del crew, server
    assert leftovers(before) == {}
    assert list(directory.iterdir()) == []
