"""Kills workers, a shard, the coordinator and a raylet at random, and checks what became of every gradient.

``python -m tests.ray.chaos --kills 30 --seed 1``: a program of its own, because it starts a cluster of several raylets.
"""

import argparse
import contextlib
import time
from collections import Counter

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import gradquorum as gq
from gradquorum.ray import Target

NUM_WORKERS = 3
ROWS = 4  # of each gradient, on both shards; no other gradient has them
SPACE = 1_000_000  # ids of one worker
SHARDS = Target(2, resources={"shard": 1})
FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10000,  # a raylet that was killed is noticed at once; one may be slow for want of a core
    "health_check_failure_threshold": 3,
}
LOOK_SECONDS = 5.0
WAIT_SECONDS = 90.0


@ray.remote(num_cpus=0)
class Board:
    """What the workers have seen, in a place that is not killed."""

    def __init__(self):
        self.receipts = Counter()
        self.highest = Counter()
        self.named = Counter()
        self.events = []
        self.stop = False

    def begin(self, worker, sequence):
        self.events.append((worker, sequence, "first of this life"))

    def accepted(self, worker, sequence, receipt):
        self.receipts[worker, sequence] += 1
        self.events.append((worker, sequence, receipt))
        self.highest[worker] = max(self.highest[worker], sequence)
        # Who takes the place of a killed worker begins further back, if the round was void: it has to get as far.
        return self.stop and sequence >= self.highest[worker]

    def lost(self, worker, sequence, error):
        self.named.update(error.resend)
        self.events.append((worker, sequence, error))

    def end(self):
        self.stop = True

    def read(self):
        return self.receipts, self.named, self.events


@ray.remote(num_cpus=0)
class Worker:
    def work(self, name, board, worker):
        """Offer gradients until told to stop. A worker that takes the place of a killed one goes on where that was."""
        acc = gq.attach(name, "ray")
        todo = []
        following = acc.last_sequence(worker) + 1  # nothing of ours can be lost yet
        ray.get(board.begin.remote(worker, following))
        while True:
            sequence = todo.pop(0) if todo else following
            try:
                receipt = offer(acc, worker, sequence)
            except gq.UnavailableError as error:
                ray.get(board.lost.remote(worker, sequence, error))
                todo = sorted({*todo, sequence, *(lost for _, lost in error.resend)})  # the window is 64 wide
                continue
            following = max(following, sequence + 1)
            assert (receipt.first_status or receipt.status) is gq.ApplyStatus.ACCEPTED, receipt
            if receipt and ray.get(board.accepted.remote(worker, sequence, receipt)) and not todo:
                return sequence


def offer(acc, worker, sequence):
    ids = worker * SPACE + sequence * ROWS + np.arange(ROWS)
    return acc.apply_grad(ids, np.ones((ROWS, 1), np.int64), local_step=None, worker=worker, sequence=sequence)


def patiently(start):
    """Start what Ray gives up to start too soon where all cores are busy."""
    for left in (4, 3, 2, 1, 0):
        try:
            return start()
        except Exception as error:
            if not left:
                raise
            print(f"not started, once more: {error}", flush=True)


def make_cluster():
    head = {"num_cpus": 2, "object_store_memory": 128 << 20, "_system_config": FAST_HEALTH_CHECKS}
    return Cluster(initialize_head=True, head_node_args=head)


class Chaos:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.cluster = patiently(make_cluster)
        self.nodes = [self.add_node() for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False)
        self.acc = gq.SparseConditionalAccumulator("int64", (None, 1), "chaos", reduction_type="SUM", target=SHARDS)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.board = Board.options(scheduling_strategy=here).remote()  # on the head, which is not killed
        self.workers = [None] * NUM_WORKERS
        self.replaced = Counter()
        self.taken = Counter()
        self.voids = 0
        for worker in range(NUM_WORKERS):
            self.start(worker)

    def add_node(self):
        options = {"num_cpus": 1, "resources": {"shard": 1}, "object_store_memory": 128 << 20}
        return patiently(lambda: self.cluster.add_node(**options))

    def start(self, worker):
        actor = Worker.remote()
        self.workers[worker] = actor, actor.work.remote("chaos", self.board, worker)

    def take(self, num_required):
        """Take a round and note which gradients are in it, each whole."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                result = self.acc.take_grad(num_required, timeout=LOOK_SECONDS)
                break
            except gq.DeadlineExceededError:
                assert time.monotonic() < deadline, [ray.wait([call], timeout=0) for _, call in self.workers]
                self.revive()  # Ray may have needed a while to see that a node, and all workers with it, is gone
            except gq.UnavailableError:
                self.voids += 1
                return False
        assert (result.values == 1).all() and len(result.indices) == ROWS * result.num_gradients
        firsts = result.indices[::ROWS]
        np.testing.assert_array_equal(result.indices.reshape(-1, ROWS), firsts[:, None] + np.arange(ROWS))
        self.taken.update((int(first) // SPACE, int(first) % SPACE // ROWS) for first in firsts)
        return True

    def strike(self, kind):
        client = self.acc._target._client
        if kind == "worker":
            worker = int(self.rng.integers(NUM_WORKERS))
            ray.kill(self.workers[worker][0])
            self.replaced[worker] += 1
            self.start(worker)
        elif kind == "shard":
            ray.kill(client.shards[int(self.rng.integers(2))], no_restart=False)
        elif kind == "coordinator":
            ray.kill(client.coordinator, no_restart=False)
        else:
            node = self.nodes.pop(int(self.rng.integers(2)))
            self.cluster.remove_node(node, allow_graceful=False)
            self.nodes.append(self.add_node())
            self.revive()

    def revive(self):
        """Start the workers again that went with their node. One that failed in itself fails the test."""
        for worker, (_, call) in enumerate(self.workers):
            done, _ = ray.wait([call], timeout=0)
            if done:
                with contextlib.suppress(ray.exceptions.RayActorError):
                    ray.get(call)
                self.replaced[worker] += 1
                self.start(worker)

    def run(self, num_kills):
        kinds = ["worker", "shard", "coordinator", "worker", "raylet"]
        for number in range(num_kills):
            kind = kinds[number % len(kinds)] if number < len(kinds) else kinds[int(self.rng.integers(len(kinds)))]
            since, voids = time.monotonic(), self.voids
            for _ in range(int(self.rng.integers(1, 4))):
                self.take(int(self.rng.integers(1, 6)))
            self.strike(kind)
            while not self.take(3):
                self.revive()
            self.revive()
            print(f"{number}: {kind}; {self.voids - voids} voids, {time.monotonic() - since:.1f} s", flush=True)
        ray.get(self.board.end.remote())
        last = [ray.get(call, timeout=WAIT_SECONDS) for _, call in self.workers]
        while self.acc.num_undelivered or self.acc.num_accumulated():
            self.take(1)
        self.check(last)

    def check(self, last):
        receipts, named, events = ray.get(self.board.read.remote())
        assert set(self.taken.values()) == {1}, "a gradient was in two takes"
        for (worker, sequence), times in receipts.items():
            if not self.taken[worker, sequence]:
                near = [event for event in events if event[0] == worker and abs(event[1] - sequence) < 4]
                lines = "\n".join(f"{offered}: {what}" for _, offered, what in near)
                raise AssertionError(f"gradient {sequence} of worker {worker} is in no take:\n{lines}")
            # Each further receipt was for one that is named, or that its worker did not live to hear of.
            assert times - 1 <= named[worker, sequence] + self.replaced[worker], (worker, sequence, times)
            if not self.replaced[worker]:
                assert times - 1 == named[worker, sequence], (worker, sequence, times)
        for worker, sequence in enumerate(last):
            assert all(self.taken[worker, earlier] for earlier in range(sequence + 1))
        print(
            f"{len(receipts)} gradients, {sum(named.values())} named as lost, {self.voids} takes ended by a void round"
        )

    def end(self):
        ray.shutdown()
        self.cluster.shutdown()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chaos = Chaos(arguments.seed)
    try:
        chaos.run(arguments.kills)
    finally:
        chaos.end()


if __name__ == "__main__":
    main()
