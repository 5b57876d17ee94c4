"""Handles go into tasks and actors, results are the local ones, and closing leaves nothing behind."""

import pickle
import threading

import numpy as np
import pytest

import gradquorum as gq
from gradquorum.ray import Pipeline, Target
from gradquorum.targets.ray import client
from tests.support import TIMEOUT, Call, assert_rows, assert_same_bits, wait_for_waiters, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def names(ray):
    from ray.util import list_named_actors

    return [actor["name"] for actor in list_named_actors(all_namespaces=True) if "gradquorum:ray-" in actor["name"]]


def test_handle_in_tasks_and_actors_is_one_on_the_same_round(ray_cluster, make):
    acc = make()

    @ray_cluster.remote(num_cpus=0)
    def offer(acc, worker):
        return acc.apply_grad([worker, 50], [[1.0], [2.0]], worker=worker, sequence=0).status.name

    @ray_cluster.remote(num_cpus=0)
    class Taker:
        def take(self, acc):
            return acc.take_grad(2, timeout=30)

    assert ray_cluster.get([offer.remote(acc, worker) for worker in range(2)]) == ["ACCEPTED"] * 2
    result = ray_cluster.get(Taker.remote().take.remote(acc))
    assert_rows(result, [0, 1, 50], [1, 1, 4])
    assert result.workers == (0, 1)
    assert acc.global_step == 1


class Dropped:
    """Stands for a session of which a handle is dropped."""

    usable = True

    def __init__(self, error=None):
        self.closed, self._error = threading.Event(), error

    def close(self, number, *, for_all):
        self.closed.set()
        if self._error is not None:
            raise self._error


@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("error", [SystemExit(0), gq.UnavailableError("gone"), gq.ClosedError("closed")], ids=repr)
def test_dropped_handles_are_closed_although_ray_was_shut_down_during_an_earlier_one(make, error):
    make()
    first, second = Dropped(error), Dropped()
    for dropped in (first, second):
        client.drop(dropped, 0)
    assert first.closed.wait(TIMEOUT)
    assert second.closed.wait(TIMEOUT)


@pytest.mark.usefixtures("pooled")
def test_attach_by_name_finds_the_spec_and_another_spec_is_refused(make, name):
    acc = make()
    assert gq.attach(name, "ray").dtype == acc.dtype
    with pytest.raises(gq.InvalidArgumentError, match="float64"):
        gq.SparseConditionalAccumulator("float32", (100, 1), name, target="ray")


def test_close_for_all_ends_waiting_takes_and_removes_all_actors(ray_cluster, make, name):
    acc, other = make(), make()
    pickled = pickle.dumps(acc)
    take = Call(other.take_grad, 1)
    wait_for_waiters(acc, 1)
    acc.apply_grad([1], [[1.0]], local_step=-1)
    assert acc.close(for_all=True) == 0
    assert isinstance(take.error(), gq.CancelledError)
    wait_until(lambda: not names(ray_cluster), "the end of all actors")
    with pytest.raises(gq.ClosedError):
        other.num_accumulated()
    with pytest.raises(gq.ClosedError):
        pickle.loads(pickled)
    again = make()
    again.apply_grad([1], [[5.0]])
    assert_rows(again.take_grad(1, timeout=30), [1], [5])


def test_close_of_the_last_handle_removes_all_actors(ray_cluster, make):
    acc = make()
    acc.apply_grad([1], [[1.0]])
    assert acc.close() == 1
    wait_until(lambda: not names(ray_cluster), "the end of all actors")


@pytest.mark.usefixtures("pooled")
def test_nothing_stays_on_the_shards_when_it_was_delivered_dropped_or_discarded(ray_cluster, make, actors):
    acc = make()
    _, shards = actors(acc)

    def held():
        return sum(ray_cluster.get([shard.num_held.remote() for shard in shards]))

    acc.apply_grad([1, 2, 3], [[1.0]] * 3, worker=1, sequence=0)
    assert held() > 0
    acc.apply_grad([1, 2, 3], [[1.0]] * 3, worker=1, sequence=0)  # a duplicate
    acc.take_grad(1)
    acc.apply_grad([1, 2, 3], [[1.0]] * 3, local_step=-1, worker=1, sequence=1)  # stale
    acc.apply_grad([1], [[1.0]], local_step=None)
    assert acc.discard() == 1
    acc.apply_grad([], np.zeros((0, 1)), local_step=None)
    acc.take_grad(1)
    acc.num_accumulated()  # the last take may be given back until here
    wait_until(lambda: (acc.num_undelivered, held()) == (0, 0), "empty shards")


@pytest.mark.usefixtures("pooled")
def test_same_ids_again_and_again_are_merged_on_the_shards(ray_cluster, make, actors):
    acc = make(row=(64,))
    _, shards = actors(acc)
    rows = np.ones((100, 64))
    with Pipeline(acc) as pipeline:
        for _ in range(200):  # of 50 kB: a shard would hold 200 parts of them
            pipeline.submit_apply(np.arange(100), rows, local_step=None)
    wait_until(lambda: max(ray_cluster.get([shard.num_held.remote() for shard in shards])) < 60, "merged logs")
    result = acc.take_grad(200, timeout=TIMEOUT)
    np.testing.assert_array_equal(result.values, 200 * rows)


def gradients(rng):
    """Yield worker, sequence and a gradient with repeats, of which rows the sums depend on the order."""
    for sequence in range(3):
        for worker in range(5):
            ids = rng.integers(0, 60, 40)
            yield worker, sequence, ids, rng.normal(0, 10.0 ** rng.integers(-6, 6), (40, 3)).astype(np.float32)


@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_order_by_worker_gives_the_same_bits_on_any_number_of_shards(ray_cluster, name, dtype):
    options = {"order": "worker", "reduction_type": "MEAN_BY_WEIGHT"}
    results = []
    for num_shards in (0, 1, 2, 4):
        rng = np.random.default_rng(7)
        offers = list(gradients(rng))
        np.random.default_rng(num_shards).shuffle(offers)
        target = Target(num_shards) if num_shards else "local"
        with gq.SparseConditionalAccumulator(dtype, (60, 3), f"{name}-{num_shards}", target=target, **options) as acc:
            for worker, sequence, ids, values in offers:
                weight = 1.0 + worker
                acc.apply_grad(ids, values.astype(dtype), worker=worker, sequence=sequence, weight=weight)
            results.append(acc.take_grad(len(offers)))
    for result in results[1:]:
        np.testing.assert_array_equal(result.indices, results[0].indices)
        np.testing.assert_array_equal(result.counts, results[0].counts)
        assert_same_bits(result.values, results[0].values)


@pytest.mark.usefixtures("pooled")
def test_bounds_put_ranges_of_ids_on_shards(ray_cluster, name, actors):
    target = Target(3, bounds=[10, 50])
    acc = gq.SparseConditionalAccumulator("float32", (100, 1), name, target=target)
    _, shards = actors(acc)
    acc.apply_grad([5, 9, 70], [[1.0], [2.0], [3.0]])
    assert ray_cluster.get([shard.num_held.remote() for shard in shards]) == [1, 0, 1]
    assert_rows(acc.take_grad(1), [5, 9, 70], [1, 2, 3])


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_shards": 0},
        {"lifetime": "long"},
        {"durability": "disk"},
        {"resources": 3},
        {"num_shards": 2, "bounds": []},
    ],
)
def test_target_refuses_what_cannot_be(arguments):
    with pytest.raises(gq.InvalidArgumentError):
        Target(**arguments)
