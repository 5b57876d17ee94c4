"""SEMANTICS 4: takes as futures and coroutines."""

import asyncio
import concurrent.futures
import threading

import numpy as np
import pytest

import gradquorum as gq
from tests.support import TIMEOUT, GatedMerges, accept, apply, assert_rows, only_local, unchanged, wait_for_waiters


@pytest.fixture
def acc(make):
    return make.sparse("float32", (5, 1))


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TIMEOUT))


def test_submit_take_returns_a_concurrent_future_that_is_served(acc):
    future = acc.submit_take(2)
    assert isinstance(future, concurrent.futures.Future)
    accept(acc, [0], [1.0])
    assert not future.done()
    accept(acc, [0], [3.0])
    assert_rows(future.result(TIMEOUT), [0], [2.0])
    assert concurrent.futures.wait([future], TIMEOUT).done == {future}


def test_submit_take_cancelled_before_it_is_detached_changes_nothing(acc):
    accept(acc, [0], [1.0])
    with unchanged(acc):
        future = acc.submit_take(2)
        assert future.cancel()
        assert future.cancelled()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(TIMEOUT)
    accept(acc, [0], [3.0])
    assert acc.num_accumulated() == 2


def test_submit_take_cannot_be_cancelled_once_detached(acc, engine):
    with GatedMerges(engine) as merges:
        future = acc.submit_take(1)
        accept(acc, [0], [1.0])
        assert not future.cancel()
        assert merges.begun.wait(TIMEOUT)
        assert not future.cancel()
        merges.gate.set()
        assert future.result(TIMEOUT).num_gradients == 1
    assert not future.cancel()


def test_submit_take_times_out_by_itself(acc):
    future = acc.submit_take(2, timeout=0.02)
    with pytest.raises(gq.DeadlineExceededError) as caught:
        future.result(TIMEOUT)
    assert (caught.value.have, caught.value.need) == (0, 2)
    accept(acc, [0], [1.0])
    assert acc.take_grad(1, timeout=0).num_gradients == 1


def test_submit_take_with_timeout_zero_does_not_wait(acc):
    with pytest.raises(gq.DeadlineExceededError):
        acc.submit_take(1, timeout=0).result(TIMEOUT)
    accept(acc, [0], [1.0])
    assert acc.submit_take(1, timeout=0).result(TIMEOUT).num_gradients == 1


def test_submit_take_timing_out_serves_the_next(acc):
    first, second = acc.submit_take(5, timeout=0.05), acc.submit_take(1)
    accept(acc, [0], [1.0])
    assert second.result(TIMEOUT).num_gradients == 1
    assert isinstance(first.exception(TIMEOUT), gq.DeadlineExceededError)


def test_submit_take_exact_gives_the_first_ones(make):
    acc = make.sparse("float32", (5, 1), compact=False)
    for value in (1, 2, 3):
        accept(acc, [0], [value])
    assert_rows(acc.submit_take(2, exact=True).result(TIMEOUT), [0], [1.5])


def test_submit_take_merges_in_the_library_s_thread_not_in_the_applier_s(acc, engine):
    with GatedMerges(engine) as merges:
        future = acc.submit_take(1)
        accept(acc, [0], [1.0])  # would block here if it merged
        assert not future.done()
        merges.gate.set()
        future.result(TIMEOUT)


def test_submit_take_callback_may_use_the_accumulator(acc):
    seen, called = [], threading.Event()

    def callback(future):
        seen.append((acc.global_step, bool(apply(acc, [0], [1.0])), future.result().num_gradients))
        called.set()

    acc.submit_take(1).add_done_callback(callback)
    accept(acc, [0], [1.0])
    assert called.wait(TIMEOUT)
    assert seen == [(1, True, 1)]


@only_local("a take that a server is asked for waits in a thread of its own")
def test_submit_take_many_waiting_at_once_need_no_thread_each(acc):
    before = threading.active_count()
    futures = [acc.submit_take(1) for _ in range(200)]
    assert threading.active_count() - before <= 16
    for value in range(200):
        accept(acc, [0], [float(value)])
    assert [float(future.result(TIMEOUT).values[0, 0]) for future in futures] == list(range(200))


def test_submit_take_on_a_closed_accumulator_raises_closed(acc):
    acc.close()
    with pytest.raises(gq.ClosedError):
        acc.submit_take(1)


def test_async_take_is_served(acc):
    async def take():
        task = asyncio.ensure_future(acc.take_grad_async(2))
        await asyncio.sleep(0)
        accept(acc, [0], [1.0])
        accept(acc, [0], [3.0])
        return await task

    assert_rows(run(take()), [0], [2.0])


def test_async_take_does_not_block_the_event_loop(acc):
    async def both():
        waiting = asyncio.ensure_future(acc.take_grad_async(1))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        accept(acc, [0], [1.0])
        return await waiting

    assert run(both()).num_gradients == 1


def test_async_take_applied_to_from_another_thread_is_served(acc, run_thread):
    def later():
        wait_for_waiters(acc, 1)
        accept(acc, [0], [1.0])

    run_thread(later)
    assert run(acc.take_grad_async(1)).num_gradients == 1


def test_async_take_times_out(acc):
    with pytest.raises(gq.DeadlineExceededError):
        run(acc.take_grad_async(1, timeout=0.01))
    with pytest.raises(gq.DeadlineExceededError):
        run(acc.take_grad_async(1, timeout=0))


def test_async_take_cancelled_before_it_is_detached_changes_nothing(acc):
    async def cancel():
        task = asyncio.ensure_future(acc.take_grad_async(2))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    accept(acc, [0], [1.0])
    with unchanged(acc):
        run(cancel())
    accept(acc, [0], [1.0])
    assert (acc.num_accumulated(), acc.global_step) == (2, 0)  # nobody waits any more


def test_async_takes_are_first_in_first_out_with_the_others(acc):
    async def takes():
        first = asyncio.ensure_future(acc.take_grad_async(1))
        await asyncio.sleep(0)
        second = acc.submit_take(1)
        accept(acc, [0], [1.0])
        accept(acc, [0], [2.0])
        return (await first).values[0, 0], second.result(TIMEOUT).values[0, 0]

    assert run(takes()) == (1.0, 2.0)


def test_async_take_raises_bad_arguments(acc):
    with pytest.raises(gq.InvalidArgumentError, match="num_required"):
        run(acc.take_grad_async(0))


def test_async_take_ended_by_close_is_cancelled(acc):
    async def close():
        task = asyncio.ensure_future(acc.take_grad_async(1))
        await asyncio.sleep(0)
        acc.close()
        await task

    with pytest.raises(gq.CancelledError, match="TakeGrad operation was cancelled"):
        run(close())


def test_async_take_of_the_dense_class_and_of_a_group(make):
    dense = make.dense("float32", (1,))
    dense.apply_grad([4.0])
    np.testing.assert_array_equal(run(dense.take_grad_async(1)), [4])
    np.testing.assert_array_equal(
        (dense.apply_grad([4.0], local_step=None), dense.submit_take(1).result(TIMEOUT))[1], [4]
    )
    group = make.group({"bias": gq.DenseSpec("float32", (1,))})
    group.apply({"bias": [4.0]})
    np.testing.assert_array_equal(run(group.take_async(1))["bias"], [4])
