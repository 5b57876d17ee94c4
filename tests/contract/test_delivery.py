"""SEMANTICS 4: detached and delivered. What is cut off between the two is kept whole."""

import asyncio

import numpy as np
import pytest

import gradquorum as gq
from tests.support import TIMEOUT, GatedMerges, accept, apply, assert_rows, failing_merges, only_local, unchanged


@pytest.fixture
def acc(make):
    return make.sparse("float32", (5, 1))


def _lose_one_delivery(acc, engine, values=(1.0, 3.0), error=MemoryError):
    for value in values:
        accept(acc, [0], [value])
    with failing_merges(engine, error), pytest.raises(error):
        acc.take_grad(len(values), timeout=0)


def test_take_without_memory_for_the_result_raises_resource_exhausted_or_memory_error(acc, engine):
    accept(acc, [0], [1.0])
    with failing_merges(engine), pytest.raises(MemoryError):
        acc.take_grad(1, timeout=0)


@only_local("in a server only a lack of memory cuts a merge off")
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, SystemExit, RuntimeError])
def test_take_cut_off_during_the_merge_keeps_the_step_advanced_and_the_round(acc, engine, error):
    _lose_one_delivery(acc, engine, error=error)
    assert (acc.global_step, acc.num_accumulated(), acc.num_undelivered) == (1, 0, 1)


def test_next_take_gets_that_round_and_only_that_one_without_a_further_step(acc, engine):
    _lose_one_delivery(acc, engine)
    accept(acc, [0], [100.0])
    again = acc.take_grad(1, timeout=0)
    assert_rows(again, [0], [2.0])
    assert (again.num_gradients, again.step) == (2, 0)
    assert (acc.global_step, acc.num_accumulated(), acc.num_undelivered) == (1, 1, 0)
    assert_rows(acc.take_grad(1, timeout=0), [0], [100.0])
    assert acc.global_step == 2


@pytest.mark.parametrize("number", [1, 3, 2**40])
def test_next_take_gets_it_whatever_its_num_required(acc, engine, number):
    _lose_one_delivery(acc, engine)
    assert_rows(acc.take_grad(number, timeout=0), [0], [2.0])


def test_next_take_gets_it_whole_even_if_exact(make, engine):
    acc = make.sparse("float32", (5, 1), compact=False)
    _lose_one_delivery(acc, engine)
    assert acc.take_grad(1, timeout=0, exact=True).num_gradients == 2


def test_undelivered_round_failing_again_stays_in_front(acc, engine):
    _lose_one_delivery(acc, engine)
    accept(acc, [0], [100.0])
    for _ in range(3):
        with failing_merges(engine), pytest.raises(MemoryError):
            acc.take_grad(1, timeout=0)
        assert (acc.num_undelivered, acc.num_accumulated(), acc.global_step) == (1, 1, 1)
    assert_rows(acc.take_grad(1, timeout=0), [0], [2.0])


def test_undelivered_round_goes_to_a_take_that_waits_already(acc, engine):
    gates = GatedMerges(engine)
    with gates:
        first = acc.submit_take(1)
        accept(acc, [0], [1.0])
        assert gates.begun.wait(TIMEOUT)
        second = acc.submit_take(5)
        merge = gates._merge
        calls = iter([_raise_memory_error])
        gates._merge = lambda *args, **kwargs: next(calls, merge)(*args, **kwargs)
        gates.gate.set()
        with pytest.raises(MemoryError):
            first.result(TIMEOUT)
        assert_rows(second.result(TIMEOUT), [0], [1.0])
    assert (acc.num_undelivered, acc.global_step) == (0, 1)


def test_two_rounds_undelivered_at_once_are_counted_and_come_back_in_order(acc, engine):
    gates = GatedMerges(engine)
    with gates:
        takes = [acc.submit_take(1), acc.submit_take(1)]
        accept(acc, [0], [1.0])
        accept(acc, [0], [2.0])
        assert gates.begun.wait(TIMEOUT)
        gates._merge, merge = _raise_memory_error, gates._merge
        gates.gate.set()
        for take in takes:
            with pytest.raises(MemoryError):
                take.result(TIMEOUT)
        gates._merge = merge
        assert (acc.num_undelivered, acc.global_step) == (2, 2)
        assert_rows(acc.take_grad(1, timeout=0), [0], [1.0])
        assert acc.num_undelivered == 1
        assert_rows(acc.take_grad(1, timeout=0), [0], [2.0])
    assert (acc.num_undelivered, acc.global_step) == (0, 2)


def _raise_memory_error(*args, **kwargs):
    raise MemoryError("injected")


def test_gradients_of_the_old_step_are_stale_while_a_round_is_undelivered(acc, engine):
    _lose_one_delivery(acc, engine)
    assert apply(acc, [0], [1.0], local_step=-1).status is gq.ApplyStatus.STALE
    accept(acc, [0], [1.0], local_step=1)


def test_discard_leaves_undelivered_rounds(acc, engine):
    _lose_one_delivery(acc, engine)
    accept(acc, [0], [100.0])
    assert acc.discard() == 1
    assert acc.num_undelivered == 1
    assert_rows(acc.take_grad(1, timeout=0), [0], [2.0])


def test_close_reports_undelivered_and_open_gradients_as_discarded(acc, engine):
    _lose_one_delivery(acc, engine)
    accept(acc, [0], [100.0])
    assert acc.close() == 3


def test_delivery_of_a_future_that_fails_keeps_the_round(acc, engine):
    with failing_merges(engine):
        future = acc.submit_take(1)
        accept(acc, [0], [1.0])
        with pytest.raises(MemoryError):
            future.result(TIMEOUT)
    assert (acc.num_undelivered, acc.global_step) == (1, 1)
    assert_rows(acc.take_grad(1, timeout=0), [0], [1.0])


def test_async_take_cancelled_during_the_merge_keeps_the_round(acc, engine):
    async def cancel_during_the_merge():
        task = asyncio.ensure_future(acc.take_grad_async(1))
        await asyncio.sleep(0)
        accept(acc, [0], [5.0])
        while not merges.begun.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        merges.gate.set()

    with GatedMerges(engine) as merges:
        asyncio.run(asyncio.wait_for(cancel_during_the_merge(), TIMEOUT))
        assert_rows(acc.take_grad(1, timeout=TIMEOUT), [0], [5.0])
    assert (acc.num_undelivered, acc.global_step) == (0, 1)


def test_dense_take_cut_off_during_the_merge_keeps_the_round(make, engine):
    acc = make.dense("float32", (2,))
    acc.apply_grad([1.0, 2.0])
    with failing_merges(engine, kind="dense"), pytest.raises(MemoryError):
        acc.take_grad(1, timeout=0)
    assert acc.num_undelivered == 1
    np.testing.assert_array_equal(acc.take_grad(9, timeout=0), [1, 2])


def test_take_that_ends_before_it_is_detached_changes_nothing(acc):
    accept(acc, [0], [1.0])
    with unchanged(acc), pytest.raises(gq.DeadlineExceededError):
        acc.take_grad(2, timeout=0.01)
    with unchanged(acc):
        assert acc.submit_take(2).cancel()
