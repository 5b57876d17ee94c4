"""SEMANTICS 4: close, `with`, and what calls of a closed handle do."""

import pytest

import gradquorum as gq
from tests.support import TIMEOUT, Call, GatedMerges, accept, apply, assert_rows, wait_for_waiters


@pytest.fixture
def acc(make):
    return make.sparse("float32", (5, 1))


def test_close_frees_a_blocked_take_with_cancelled(acc, run_thread):
    take = run_thread(acc.take_grad, 1)
    wait_for_waiters(acc, 1)
    acc.close()
    with pytest.raises(gq.CancelledError, match="TakeGrad operation was cancelled"):
        take.result()


def test_close_ends_every_waiting_take_of_the_handle(acc):
    takes = [acc.submit_take(n) for n in (1, 2, 1)]
    acc.close()
    for take in takes:
        assert isinstance(take.exception(TIMEOUT), gq.CancelledError)


CALLS = {
    "apply_grad": lambda acc: acc.apply_grad([0], [[1.0]]),
    "apply_indexed_slices_grad": lambda acc: acc.apply_indexed_slices_grad(gq.IndexedSlices([[1.0]], [0])),
    "take_grad": lambda acc: acc.take_grad(1),
    "take_indexed_slices_grad": lambda acc: acc.take_indexed_slices_grad(1),
    "submit_take": lambda acc: acc.submit_take(1),
    "num_accumulated": lambda acc: acc.num_accumulated(),
    "set_global_step": lambda acc: acc.set_global_step(3),
    "publish": lambda acc: acc.publish(),
    "wait_published": lambda acc: acc.wait_published(9),
    "discard": lambda acc: acc.discard(),
    "last_sequence": lambda acc: acc.last_sequence("w"),
    "worker": lambda acc: acc.worker("w"),
}


@pytest.mark.parametrize("call", CALLS)
def test_call_after_close_raises_closed(acc, call):
    acc.close()
    with pytest.raises(gq.ClosedError):
        CALLS[call](acc)


def test_apply_of_a_wrong_shape_after_close_raises_invalid_argument(acc):
    acc.close()
    with pytest.raises(gq.InvalidArgumentError, match="expected values dim 1 to be 1, got 2"):
        acc.apply_grad([0], [[1.0, 2.0]])


def test_apply_after_close_of_another_shape_than_the_round_s_raises_closed(make):
    acc = make.sparse("float32")
    accept(acc, [0], [[1.0]])
    acc.close()
    with pytest.raises(gq.ClosedError):
        acc.apply_grad([0], [[1.0, 2.0]])


def test_closed_tells_and_what_was_declared_can_still_be_read(acc):
    assert not acc.closed
    acc.close()
    assert acc.closed
    assert acc.name == "sparse_conditional_accumulator"
    assert acc.dtype == "float32"
    assert "closed" in repr(acc)


def test_close_returns_the_number_of_gradients_discarded(acc):
    for _ in range(3):
        accept(acc, [0], [1.0])
    assert acc.close() == 3


def test_close_twice_does_nothing(acc):
    accept(acc, [0], [1.0])
    assert acc.close() == 1
    assert acc.close() == 0


def test_with_closes(make):
    with make.sparse("float32", (5, 1)) as acc:
        accept(acc, [0], [1.0])
        assert isinstance(acc, gq.SparseConditionalAccumulator)
    assert acc.closed


def test_with_closes_when_the_body_raises(make):
    with pytest.raises(KeyError), make.sparse("float32", (5, 1)) as acc:
        raise KeyError
    assert acc.closed


def test_close_during_a_merge_lets_the_take_deliver(acc, engine):
    with GatedMerges(engine) as merges:
        take = Call(acc.take_grad, 1)
        wait_for_waiters(acc, 1)
        accept(acc, [0], [1.0])
        assert merges.begun.wait(TIMEOUT)
        assert acc.close() == 0
        merges.gate.set()
        assert_rows(take.result(), [0], [1.0])


def test_close_of_one_handle_ends_only_its_own_takes(make):
    shared = make.shared_name()
    one, other = (make.sparse("float32", (5, 1), shared_name=shared) for _ in range(2))
    accept(one, [0], [1.0])
    takes = one.submit_take(3), other.submit_take(2)
    assert one.close() == 0
    assert isinstance(takes[0].exception(TIMEOUT), gq.CancelledError)
    with pytest.raises(gq.ClosedError):
        one.num_accumulated()
    assert not other.closed
    accept(other, [0], [3.0])
    assert_rows(takes[1].result(TIMEOUT), [0], [2.0])


def test_close_of_the_handle_of_the_oldest_take_serves_the_next(make):
    shared = make.shared_name()
    one, other = (make.sparse("float32", (5, 1), shared_name=shared) for _ in range(2))
    one.submit_take(3)
    take = other.submit_take(1)
    accept(other, [0], [3.0])
    assert other.global_step == 0
    one.close()
    assert other.global_step == 1
    assert_rows(take.result(TIMEOUT), [0], [3.0])


def test_close_of_the_last_handle_closes_the_round(make):
    shared = make.shared_name()
    one, other = (make.sparse("float32", (5, 1), shared_name=shared) for _ in range(2))
    accept(one, [0], [1.0])
    assert one.close() == 0
    assert other.num_accumulated() == 1
    assert other.close() == 1


def test_close_for_all_closes_the_round_of_every_handle(make):
    shared = make.shared_name()
    one, other = (make.sparse("float32", (5, 1), shared_name=shared) for _ in range(2))
    take = other.submit_take(2)
    accept(one, [0], [1.0])
    assert one.close(for_all=True) == 1
    assert other.closed
    assert isinstance(take.exception(TIMEOUT), gq.CancelledError)
    with pytest.raises(gq.ClosedError):
        apply(other, [0], [1.0])


def test_rounds_of_a_closed_accumulator_end(acc):
    rounds = acc.rounds(1)
    accept(acc, [0], [1.0])
    next(rounds)
    acc.close()
    assert next(rounds, "ended") == "ended"


def test_close_ends_a_blocked_wait_published_and_apply(make, run_thread):
    acc = make.sparse("float32", (5, 1))
    waiting = run_thread(acc.wait_published, 5)
    acc.close()
    with pytest.raises((gq.CancelledError, gq.ClosedError)):
        waiting.result()
