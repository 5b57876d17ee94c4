"""What only Ray has: pipelines, results that stay in parts, workers watched by their calls."""

import gc
import time
import weakref

import numpy as np
import pytest

import gradquorum as gq
import gradquorum.ray as gqr
from gradquorum.targets.ray import coordinator
from gradquorum.targets.ray.taking import Taker
from tests.support import TIMEOUT, Call, assert_rows, num_blocked, wait_for_waiters, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.usefixtures("pooled")
def test_pipeline_counts_each_gradient_once_and_copies_it(make):
    acc = make()
    rows = np.zeros((2, 1))
    with gqr.Pipeline(acc, 8) as pipeline:
        futures = []
        for sequence in range(50):
            rows[:] = sequence
            futures.append(pipeline.submit_apply([7, 60], rows, local_step=None, worker=1, sequence=sequence))
        with pytest.raises(gq.InvalidArgumentError):
            pipeline.submit_apply([-1], [[1.0]])
    assert {future.result(0).status for future in futures} == {gq.ApplyStatus.ACCEPTED}
    result = acc.take_grad(50, timeout=TIMEOUT)
    assert_rows(result, [7, 60], [sum(range(50))] * 2)
    assert result.num_gradients == 50
    with pytest.raises(gq.ClosedError):
        pipeline.submit_apply([1], [[1.0]])


@pytest.mark.usefixtures("pooled")
def test_pipeline_waits_when_too_many_are_in_flight(make):
    acc = make(max_bytes=100, on_full="block")
    rows = [1, 2, 3, 4, 5], np.ones((5, 1))  # 80 bytes: there is room for one such gradient
    assert acc.apply_grad(*rows)
    with gqr.Pipeline(acc, 1) as pipeline:
        second = pipeline.submit_apply(*rows, local_step=None)
        third = Call(pipeline.submit_apply, *rows, local_step=None)
        wait_until(lambda: num_blocked(acc) == 1)
        assert third.running and not second.done()
        acc.take_grad(1)
        assert second.result(TIMEOUT)
        acc.take_grad(1)
        assert third.result().result(TIMEOUT)


@pytest.mark.usefixtures("pooled")
def test_pipeline_of_a_group_and_errors_of_the_round_come_by_the_future(ray_cluster, name):
    members = {"emb": gq.SparseSpec("float32", (None, None)), "bias": gq.DenseSpec("float32", (2,))}
    with gq.AccumulatorGroup(members, name, target=gqr.Target(2)) as group, gqr.Pipeline(group) as pipeline:
        good = pipeline.submit_apply({"emb": ([3], [[1.0, 2.0]]), "bias": [1.0, 1.0]})
        assert good.result(TIMEOUT)
        bad = pipeline.submit_apply({"emb": ([3], [[1.0, 2.0, 3.0]])})
        assert isinstance(bad.exception(TIMEOUT), gq.InvalidArgumentError)
        taken = group.take(1)
        assert_rows(taken["emb"], [3], [1, 2])
        np.testing.assert_array_equal(taken["bias"], [1, 1])


def test_pipeline_names_what_a_void_round_lost_once(ray_cluster, make, actors):
    acc = make()
    coordinator, _ = actors(acc)
    with gqr.Pipeline(acc, 4) as pipeline:
        first = [pipeline.submit_apply([1], [[1.0]], worker=1, sequence=sequence) for sequence in range(3)]
        assert all(future.result(TIMEOUT) for future in first)
        ray_cluster.kill(coordinator, no_restart=False)
        second = [pipeline.submit_apply([1], [[1.0]], worker=1, sequence=sequence) for sequence in (3, 4)]
        errors = [future.exception(2 * TIMEOUT) for future in second]
        named = [error.resend for error in errors if error is not None]
        assert named == [((1, 0), (1, 1), (1, 2))]
        again = [0, 1, 2] + [3 + i for i, error in enumerate(errors) if error is not None]
        assert all(
            pipeline.submit_apply([1], [[1.0]], worker=1, sequence=sequence).result(TIMEOUT) for sequence in again
        )
    assert_rows(acc.take_grad(5, timeout=TIMEOUT), [1], [5])


@pytest.mark.usefixtures("pooled")
def test_take_shards_leaves_each_part_by_itself(ray_cluster, make):
    acc = make(3)
    rng = np.random.default_rng(0)
    for worker in range(3):
        acc.apply_grad(rng.permutation(100)[:40], rng.normal(size=(40, 1)), worker=worker, sequence=0)
    state = acc.state_dict()
    sharded = gqr.take_shards(acc, 3)
    assert (sharded.num_gradients, sharded.step, sharded.workers) == (3, 0, (0, 1, 2))
    parts = [part[0] for part in ray_cluster.get(sharded.parts)]
    acc.load_state_dict(state)
    whole = acc.take_grad(3)
    order = np.argsort(np.concatenate([ids for ids, _, _ in parts]))
    for i, expected in enumerate((whole.indices, whole.values, whole.counts)):
        np.testing.assert_array_equal(np.concatenate([part[i] for part in parts])[order], expected)
    assert all((np.diff(ids) > 0).all() for ids, _, _ in parts)


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_error_of_a_watched_worker_reaches_the_waiting_take(ray_cluster, make, how):
    acc = make(expected_workers=2, max_per_worker=1)

    @ray_cluster.remote(num_cpus=0, max_retries=0)
    def work(acc, worker):
        if worker == 3:
            import os

            raise ValueError("no data") if how == "raises" else SystemExit(os._exit(1))
        acc.apply_grad([worker], [[1.0]], worker=worker, sequence=0)

    take = Call(acc.take_grad, 2)
    wait_for_waiters(acc, 1)
    gqr.watch(acc, {worker: work.remote(acc, worker) for worker in (3, 4)})
    error = take.error()
    assert isinstance(error, gq.UnavailableError)
    assert 3 in error.left
    assert ("3 raised ValueError: no data" if how == "raises" else "3 raised ") in str(error)


def test_watching_what_is_no_call_is_refused_and_nobody_has_joined(ray_cluster, make):
    acc = make(expected_workers=2, max_per_worker=1)
    with pytest.raises(gq.InvalidArgumentError, match=r"calls\['b'\]: expected a ray.ObjectRef, got 'x'"):
        gqr.watch(acc, {"a": ray_cluster.put(1), "b": "x"})
    assert acc.num_workers == 0


@pytest.mark.usefixtures("pooled")
def test_waiting_takes_do_not_block_applies(make):
    acc = make()
    takes = [Call(acc.take_grad, 1) for _ in range(20)]
    wait_for_waiters(acc, 20)
    for _ in range(20):
        assert acc.apply_grad([1], [[1.0]], local_step=None)
    assert sorted(take.result().step for take in takes) == list(range(20))


def test_only_accumulators_on_ray_have_these():
    with gq.SparseConditionalAccumulator("float32") as acc:
        for call in (gqr.Pipeline, lambda acc: gqr.take_shards(acc, 1), lambda acc: gqr.watch(acc, {})):
            with pytest.raises(gq.InvalidArgumentError, match="on Ray"):
                call(acc)


@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("when", ["take", "num_undelivered"])
def test_second_ctrl_c_while_a_round_is_given_back_loses_nothing(make, monkeypatch, when):
    acc = make()
    acc.apply_grad([1], [[1.0]])
    deliver = Taker._deliver

    def deliver_and_interrupt(self, take):
        deliver(self, take)
        raise KeyboardInterrupt

    def interrupt(self, take):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Taker, "_deliver", deliver_and_interrupt)
        patch.setattr(Taker, "_give_back", interrupt)
        with pytest.raises(KeyboardInterrupt):
            acc.take_grad(1)
    if when == "num_undelivered":
        assert acc.num_undelivered == 1
    result = acc.take_grad(1, timeout=TIMEOUT)
    assert_rows(result, [1], [1.0])
    assert (result.step, acc.global_step, acc.num_undelivered) == (0, 1, 0)


@pytest.mark.parametrize("form", ["take", "future"])
def test_round_that_was_decided_before_the_last_close_arrives_all_the_same(make, monkeypatch, form):
    acc = make()
    acc.apply_grad([1], [[1.0]])
    deliver, discarded = Taker._deliver, []

    def close_and_deliver(self, take):
        discarded.append(acc.close())
        time.sleep(5 * coordinator._END_SECONDS)  # nobody else waits: the actors may go, but for us
        deliver(self, take)

    monkeypatch.setattr(Taker, "_deliver", close_and_deliver)
    result = acc.take_grad(1) if form == "take" else acc.submit_take(1).result(TIMEOUT)
    assert_rows(result, [1], [1.0])
    assert discarded == [0]


@pytest.mark.usefixtures("pooled")
def test_pipeline_keeps_the_handle_of_an_accumulator_that_nobody_else_refers_to(make, name):
    acc = make()
    attached = gq.attach(name, "ray")
    handle = weakref.ref(attached._target)
    with gqr.Pipeline(attached) as pipeline:
        del attached
        gc.collect()
        assert handle() is not None
        assert pipeline.submit_apply([1], [[1.0]]).result(TIMEOUT)
    assert acc.num_accumulated() == 1
