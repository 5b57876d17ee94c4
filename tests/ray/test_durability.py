"""With durability="checkpoint" nothing is lost, whoever dies, and nobody is told anything."""

import pytest

import gradquorum as gq
from gradquorum.ray import Target
from tests.support import TIMEOUT, Call, assert_rows, wait_for_waiters, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def acc(ray_cluster, name, tmp_path):
    pytest.importorskip("safetensors")
    target = Target(2, durability="checkpoint", folder=tmp_path)
    acc = gq.SparseConditionalAccumulator("float64", (100, 1), name, reduction_type="SUM", target=target)
    yield acc
    acc.close(for_all=True)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=["shard", "coordinator", "all"])
def strike(request, ray_cluster):
    def kill(acc):
        client = acc._target._client
        before = client.incarnation
        victims = {"shard": client.shards[:1], "coordinator": [client.coordinator]}
        victims["all"] = [*client.shards, client.coordinator]
        for victim in victims[request.param]:
            ray_cluster.kill(victim, no_restart=False)
        wait_until(lambda: acc.global_step >= 0 and client.incarnation > before, "the next incarnation")

    return kill


def offer(acc, worker, sequence, **options):
    return acc.apply_grad([worker, 50], [[1.0], [10.0**sequence]], worker=worker, sequence=sequence, **options)


def test_accepted_gradients_and_marks_survive(acc, strike):
    assert offer(acc, 1, 0)
    acc.take_grad(1)
    acc.publish()
    for sequence in (1, 2):
        assert offer(acc, 1, sequence, local_step=1)
    strike(acc)
    assert (acc.last_sequence(1), acc.global_step, acc.published_step, acc.num_accumulated()) == (2, 1, 1, 2)
    assert offer(acc, 1, 2, local_step=1).status is gq.ApplyStatus.DUPLICATE
    assert_rows(acc.take_grad(2, timeout=TIMEOUT), [1, 50], [2, 110])


def test_waiting_takes_go_on(acc, strike):
    take, future = Call(acc.take_grad, 2), None
    wait_for_waiters(acc, 1)
    future = acc.submit_take(1)
    assert offer(acc, 1, 0)
    strike(acc)
    for worker in (2, 3):  # the takes queue again, in any order
        assert offer(acc, worker, 0, local_step=None)
    results = [result.num_gradients for result in (take.result(), future.result(TIMEOUT))]
    assert sum(results) == 3


def test_detached_round_that_did_not_arrive_comes_again(acc, strike):
    assert offer(acc, 1, 0)
    struck = []

    def cut_off(merged):
        if not struck:
            struck.append(strike(acc))
        return merged.num_gradients

    with pytest.raises(gq.UnavailableError):  # it had its round, and cannot know whether somebody else gets it
        acc._target.take(1, None, False, cut_off)
    assert_rows(acc.take_grad(1, timeout=TIMEOUT), [1, 50], [1, 1])
