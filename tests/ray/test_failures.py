"""Whoever dies: what was accepted is in one take, or named in one error and then in one take, and nobody hangs."""

import os

import numpy as np
import pytest

import gradquorum as gq
from gradquorum.targets.ray.ground import Ground
from gradquorum.targets.ray.records import Part
from gradquorum.targets.ray.wire import pack_rows
from tests.support import Call, assert_rows, wait_for_waiters, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(params=["shard", "coordinator"])
def strike(request, ray_cluster, actors):
    """Kill a shard or the coordinator of an accumulator; Ray starts another one."""

    def kill(acc):
        coordinator, shards = actors(acc)
        client = acc._target._client
        before = client.incarnation
        ray_cluster.kill(shards[-1] if request.param == "shard" else coordinator, no_restart=False)
        wait_until(lambda: acc.global_step >= 0 and client.incarnation > before, "the next incarnation")

    return kill


def offer(acc, worker, sequence, **options):
    return acc.apply_grad([worker, 50], [[1.0], [10.0**sequence]], worker=worker, sequence=sequence, **options)


def hear(call, *arguments, **options):
    """Return the UnavailableError that a call raises."""
    with pytest.raises(gq.UnavailableError) as caught:
        call(*arguments, **options)
    return caught.value


def test_waiting_take_ends_and_each_worker_hears_what_to_send_again(make, strike):
    acc = make()
    take = Call(acc.take_grad, 3)
    wait_for_waiters(acc, 1)
    assert offer(acc, 1, 0)
    assert offer(acc, 2, 0)
    strike(acc)
    assert isinstance(take.error(), gq.UnavailableError)
    assert hear(acc.last_sequence, 1).resend == ((1, 0),)
    assert hear(offer, acc, 2, 1).resend == ((2, 0),)
    assert acc.num_accumulated() == 0
    for worker, sequence in ((1, 0), (2, 0), (2, 1)):
        assert offer(acc, worker, sequence)
    assert_rows(acc.take_grad(3, timeout=30), [1, 2, 50], [1, 2, 12])


def test_marks_go_back_to_the_last_delivered_take(make, strike):
    acc = make()
    acc.set_global_step(5)
    assert offer(acc, 1, 0, local_step=5)
    acc.take_grad(1)
    acc.publish()
    assert offer(acc, 1, 1, local_step=6)
    strike(acc)
    assert hear(acc.last_sequence, 1).resend == ((1, 1),)
    assert acc.last_sequence(1) == 0
    assert (acc.global_step, acc.published_step) == (6, 6)
    assert offer(acc, 1, 0).status is gq.ApplyStatus.DUPLICATE
    assert offer(acc, 1, 1, local_step=6).status is gq.ApplyStatus.ACCEPTED
    assert_rows(acc.take_grad(1, timeout=30), [1, 50], [1, 10])


def test_detached_round_that_did_not_arrive_is_void_and_its_step_comes_back(make, strike):
    acc = make()
    assert offer(acc, 1, 0)

    def cut_off(merged):
        strike(acc)
        return merged

    hear(acc._target.take, 1, None, False, cut_off)
    assert acc.global_step == 0
    assert hear(acc.last_sequence, 1).resend == ((1, 0),)
    assert offer(acc, 1, 0)
    assert_rows(acc.take_grad(1, timeout=30), [1, 50], [1, 1])


def test_worker_that_waits_for_the_next_step_hears_it_too(make, strike, run_thread):
    acc = make()

    def work():
        offer(acc, 1, 0)
        acc.wait_published(1)

    call = run_thread(work)
    wait_until(lambda: acc.num_accumulated() == 1)
    strike(acc)
    assert isinstance(call.error(), gq.UnavailableError)
    assert call.error().resend == ((1, 0),)


def test_gradients_without_a_sequence_are_counted_in_the_error(make, strike):
    acc = make()
    acc.apply_grad([1], [[1.0]])
    acc.take_grad(1)
    acc.apply_grad([1], [[1.0]], local_step=None)
    strike(acc)
    assert hear(acc.apply_grad, [1], [[1.0]], local_step=None).num_lost == 1


def test_void_round_loses_nothing_of_those_who_had_nothing_in_it(make, strike):
    acc = make()
    assert offer(acc, 1, 0)
    acc.take_grad(1)
    strike(acc)
    assert offer(acc, 1, 1, local_step=None)
    assert_rows(acc.take_grad(1, timeout=30), [1, 50], [1, 10])


def test_process_that_dies_before_its_offer_leaves_nothing(ray_cluster, make, actors):
    acc = make()
    _, shards = actors(acc)

    @ray_cluster.remote(num_cpus=0)
    class Worker:
        def die_halfway(self, acc):
            client = acc._target._client
            item = (client.token, client.new_number()), {0: Part(1, (1,), (np.array([1]), np.array([1.0])))}
            packed = client.token, *pack_rows([item])
            ray_cluster.get([shard.put.remote(client.incarnation, *packed) for shard in client.shards])

        def die(self):
            os._exit(1)

    worker = Worker.remote()
    ray_cluster.get(worker.die_halfway.remote(acc))

    def held():
        return sum(ray_cluster.get([shard.num_held.remote() for shard in shards]))

    assert held() == 2
    worker.die.remote()
    wait_until(lambda: held() == 0, "empty shards")
    assert acc.num_accumulated() == 0


def test_what_a_process_had_offered_outlives_it(ray_cluster, make):
    acc = make()

    @ray_cluster.remote(num_cpus=0)
    class Worker:
        def offer(self, acc):
            rows = np.arange(64 * 1024, dtype=np.float64).reshape(-1, 1)  # in Ray's shared memory, which it owns
            acc.apply_grad(np.arange(64 * 1024) % 100, rows)

        def die(self):
            os._exit(1)

    worker = Worker.remote()
    ray_cluster.get(worker.offer.remote(acc))
    worker.die.remote()
    wait_until(lambda: _is_dead(ray_cluster, worker), "its death")
    result = acc.take_grad(1, timeout=30)
    assert result.values.sum() == np.arange(64 * 1024, dtype=np.float64).sum()


def _is_dead(ray, worker):
    try:
        ray.get(worker.die.remote())
    except ray.exceptions.RayActorError:
        return True
    return False


def test_taker_that_dies_loses_no_round(ray_cluster, make):
    acc = make()
    assert offer(acc, 1, 0)

    @ray_cluster.remote(num_cpus=0)
    class Taker:
        def take(self, acc):
            acc._target.take(1, None, False, lambda merged: os._exit(1))

    with pytest.raises(ray_cluster.exceptions.RayActorError):
        ray_cluster.get(Taker.remote().take.remote(acc))
    assert_rows(acc.take_grad(1, timeout=30), [1, 50], [1, 1])
    assert acc.global_step == 1


def test_taker_that_dies_with_its_result_does_not_leave_it_to_the_next(ray_cluster, make):
    acc = make()
    assert offer(acc, 1, 0)

    @ray_cluster.remote(num_cpus=0)
    class Taker:
        def take(self, acc):  # in its main thread: until it takes again it might still give the round back
            return acc.take_grad(1).num_gradients, acc._target._client.token

        def die(self):
            os._exit(1)

    taker = Taker.remote()
    number, _ = ray_cluster.get(taker.take.remote(acc))
    assert number == 1
    sessions = acc._target._ask("num_sessions")
    taker.die.remote()
    wait_until(lambda: acc._target._ask("num_sessions") < sessions, "the end of its session")
    assert acc.num_undelivered == 0
    assert offer(acc, 1, 1, local_step=None)
    assert_rows(acc.take_grad(1, timeout=30), [1, 50], [1, 10])


def test_who_takes_the_place_of_a_dead_worker_hears_what_that_had_offered(ray_cluster, make, strike):
    acc = make()

    @ray_cluster.remote(num_cpus=0)
    class Worker:
        def work(self, acc):
            assert offer(acc, 1, 0)
            assert offer(acc, 1, 1)

        def die(self):
            os._exit(1)

    worker = Worker.remote()
    ray_cluster.get(worker.work.remote(acc))
    worker.die.remote()
    assert acc.last_sequence(1) == 1  # whether the death has been noticed or not
    strike(acc)
    assert hear(offer, acc, 1, 2).resend == ((1, 0), (1, 1))
    assert acc.last_sequence(1) == -1
    for sequence in range(3):
        assert offer(acc, 1, sequence)
    assert_rows(acc.take_grad(3, timeout=30), [1, 50], [3, 111])


def test_round_goes_on_for_who_is_silent_when_another_closes_after_a_restart(ray_cluster, make, actors, name):
    acc = make()
    coordinator, _ = actors(acc)
    client = acc._target._client
    before = client.incarnation

    @ray_cluster.remote(num_cpus=0)
    def attach_and_close():
        gq.attach(name, "ray").close()

    ray_cluster.kill(coordinator, no_restart=False)
    ray_cluster.get(attach_and_close.remote())
    wait_until(lambda: client.incarnation > before, "the next incarnation, though nothing is asked")
    assert offer(acc, 1, 0)


@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("who", ["worker", "taker"])
def test_shard_that_knows_nothing_of_the_incarnation_makes_the_round_void(ray_cluster, make, who):
    acc = make()
    assert offer(acc, 1, 0)
    client = acc._target._client
    later = Ground(None).record()[0]._replace(incarnation=client.incarnation + 1)
    ray_cluster.get(client.shards[0].begin.remote(later))  # as if it had been restarted unseen
    if who == "taker":
        hear(acc.take_grad, 1)
    assert hear(acc.apply_grad, list(range(100)), np.ones((100, 1)), worker=1, sequence=1).resend == ((1, 0),)


@pytest.mark.usefixtures("pooled")
def test_take_that_was_given_up_before_it_came_takes_nothing(make):
    acc = make()
    assert offer(acc, 1, 0)
    client = acc._target._client
    take = client.new_number()
    client.get(client.coordinator.give_back.remote(client.token, take))
    terms = client.token, client.incarnation, acc._target._number, take, 1, None, False
    client.get(client.coordinator.take.remote(*terms), timeout=60)
    assert acc.num_accumulated() == 1


def test_take_ends_when_the_workers_left_cannot_satisfy_it(ray_cluster, make):
    acc = make(expected_workers=2, max_per_worker=1)

    @ray_cluster.remote(num_cpus=0)
    class Worker:
        def join(self, acc, name):
            self.worker = acc.worker(name)

        def die(self):
            os._exit(1)

    workers = [Worker.remote() for _ in range(2)]
    ray_cluster.get([worker.join.remote(acc, i) for i, worker in enumerate(workers)])
    take = Call(acc.take_grad, 2)
    wait_for_waiters(acc, 1)
    workers[1].die.remote()
    error = take.error()
    assert isinstance(error, gq.UnavailableError)
    assert error.left == (1,)


@pytest.mark.usefixtures("pooled")
def test_actor_that_fails_in_itself_is_an_error_and_no_wait_without_end(make):
    acc = make()
    with pytest.raises(gq.GradQuorumError, match="AttributeError"):
        acc._target._ask("what_there_is_not")
