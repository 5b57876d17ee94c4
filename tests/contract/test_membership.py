"""SEMANTICS 6: expected workers, contributions per worker, takes that nobody can satisfy any more."""

import pytest

import gradquorum as gq
from tests.support import TIMEOUT, accept, apply, assert_rows, unchanged


@pytest.fixture
def acc(make):
    """Two workers are expected; each may add one gradient to a round."""
    return make.sparse("float32", (5, 1), expected_workers=2, max_per_worker=1)


@pytest.mark.parametrize("number", [3, 2**40])
def test_num_required_beyond_all_workers_together_is_an_error_at_once(acc, number):
    for take in (acc.take_grad, acc.submit_take):
        with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="num_required"):
            take(number)


def test_num_required_of_all_workers_together_is_right(make):
    acc = make.sparse("float32", (5, 1), expected_workers=2, max_per_worker=3)
    future = acc.submit_take(6)
    for worker in (1, 2):
        for _ in range(3):
            accept(acc, [0], [1.0], worker=worker)
    assert future.result(TIMEOUT).num_gradients == 6


def test_apply_beyond_max_per_worker_is_refused_and_changes_nothing(acc):
    accept(acc, [0], [1.0], worker="a")
    with unchanged(acc):
        receipt = apply(acc, [0], [9.0], worker="a")
    assert receipt.status is gq.ApplyStatus.REFUSED
    assert not receipt
    assert receipt.num_accumulated == 1
    accept(acc, [0], [3.0], worker="b")
    assert_rows(acc.take_grad(2, timeout=0), [0], [2.0])


def test_max_per_worker_counts_per_round(acc):
    for _ in range(3):
        accept(acc, [0], [1.0], worker="a")
        acc.take_grad(1, timeout=0)
    accept(acc, [0], [1.0], worker="a")
    acc.discard()
    accept(acc, [0], [1.0], worker="a")


def test_max_per_worker_with_exact_counts_what_is_left_for_the_next_round(make):
    acc = make.sparse("float32", (5, 1), max_per_worker=1, compact=False)
    accept(acc, [0], [1.0], worker="a")
    accept(acc, [0], [2.0], worker="b")
    acc.take_grad(1, timeout=0, exact=True)
    assert apply(acc, [0], [1.0], worker="b").status is gq.ApplyStatus.REFUSED
    accept(acc, [0], [1.0], worker="a")


def test_max_per_worker_alone_refuses_too(make):
    acc = make.sparse("float32", (5, 1), max_per_worker=2)
    accept(acc, [0], [1.0], worker="a")
    accept(acc, [0], [1.0], worker="a")
    assert apply(acc, [0], [1.0], worker="a").status is gq.ApplyStatus.REFUSED


def test_stale_gradient_does_not_use_up_the_worker_s_part(acc):
    assert apply(acc, [0], [1.0], worker="a", local_step=-1).status is gq.ApplyStatus.STALE
    accept(acc, [0], [1.0], worker="a")


def test_max_per_worker_without_worker_is_an_error(acc):
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="worker"):
        apply(acc, [0], [1.0])


def test_waiting_take_ends_as_soon_as_too_few_are_left(acc):
    a, _b = acc.worker("a"), acc.worker("b")
    future = acc.submit_take(2)
    a.leave()
    error = future.exception(TIMEOUT)
    assert isinstance(error, gq.UnavailableError)
    assert (error.live, error.needed, tuple(error.left)) == (1, 2, ("a",))
    assert error.outcome_known
    for words in ("1", "2", "'a'"):
        assert words in str(error)


def test_new_take_ends_at_once_when_too_few_are_left(acc):
    acc.worker("a").leave()
    acc.worker("b").leave()
    with unchanged(acc), pytest.raises(gq.UnavailableError) as caught:
        acc.take_grad(1)
    assert (caught.value.live, caught.value.needed) == (0, 1)
    assert set(caught.value.left) == {"a", "b"}


def test_what_a_worker_added_before_it_left_counts(acc):
    a, b = acc.worker("a"), acc.worker("b")
    a.begin()
    b.begin()
    a.apply_grad([0], [[1.0]])
    future = acc.submit_take(2)
    a.leave()
    assert not future.done()
    b.apply_grad([0], [[3.0]])
    assert_rows(future.result(TIMEOUT), [0], [2.0])
    with pytest.raises(gq.UnavailableError):
        acc.take_grad(2)
    b.begin()
    assert not acc.submit_take(1).done()


def test_discard_of_what_a_gone_worker_added_ends_the_take(acc):
    accept(acc, [0], [1.0], worker="a")
    worker = acc.worker("a")
    acc.worker("b")
    future = acc.submit_take(2)
    worker.leave()
    assert not future.done()
    acc.discard()
    assert isinstance(future.exception(TIMEOUT), gq.UnavailableError)


def test_take_ended_as_hopeless_lets_the_next_waiter_be_served(acc):
    a = acc.worker("a")
    acc.worker("b")
    hopeless, other = acc.submit_take(2), acc.submit_take(1)
    a.leave()
    accept(acc, [0], [1.0], worker="b")
    assert isinstance(hopeless.exception(TIMEOUT), gq.UnavailableError)
    assert_rows(other.result(TIMEOUT), [0], [1.0])


def test_before_all_have_joined_a_take_waits(acc):
    acc.worker("a").leave()
    with pytest.raises(gq.DeadlineExceededError):
        acc.take_grad(2, timeout=0.01)


def test_worker_that_comes_back_is_live_again(acc):
    acc.worker("a").leave()
    acc.worker("b")
    acc.worker("a")
    future = acc.submit_take(2)
    accept(acc, [0], [1.0], worker="a")
    accept(acc, [0], [3.0], worker="b")
    assert_rows(future.result(TIMEOUT), [0], [2.0])


def test_workers_join_by_applying_too(acc):
    assert acc.num_workers == 0
    accept(acc, [0], [1.0], worker="a")
    accept(acc, [0], [1.0], worker="b")
    assert acc.num_workers == 2


def test_failed_apply_does_not_join(acc):
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        apply(acc, [9], [1.0], worker="a")


@pytest.mark.parametrize("options", [{"expected_workers": 2}, {"max_per_worker": 1}, {}])
def test_without_both_settings_a_take_waits(make, options):
    acc = make.sparse("float32", (5, 1), **options)
    a, b = acc.worker("a"), acc.worker("b")
    future = acc.submit_take(2)
    a.leave()
    b.leave()
    with pytest.raises(gq.DeadlineExceededError):
        acc.take_grad(10, timeout=0)
    assert not future.done()
    accept(acc, [0], [1.0], worker="a")
    accept(acc, [0], [3.0], worker="c")
    assert future.result(TIMEOUT).num_gradients == 2
