"""SEMANTICS 4: what a take returns, how long it waits, and how it fails."""

import time

import numpy as np
import pytest

import gradquorum as gq
from tests.support import (
    TIMEOUT,
    accept,
    apply,
    assert_rows,
    blocks_until,
    column,
    num_waiting,
    unchanged,
    wait_until,
)


@pytest.fixture
def acc(make):
    return make.sparse("float32", (5, 1))


@pytest.mark.parametrize("number", [0, -1, -(2**63)])
def test_num_required_not_positive_raises_at_once(acc, number):
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError) as caught:
        acc.take_grad(number)
    assert f"num_required must be positive, but was {number}" in str(caught.value)


@pytest.mark.parametrize("number", [1.0, 1.5, "1", None, [1], np.array([1]), np.float32(1)])
def test_num_required_that_is_no_integer_raises_at_once(acc, number):
    accept(acc, [0], [1.0])
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="num_required"):
        acc.take_grad(number)


@pytest.mark.parametrize("number", [np.int8(1), np.uint64(1), np.array(1)])
def test_num_required_of_any_integer_width_is_accepted(acc, number):
    accept(acc, [0], [1.0])
    assert acc.take_grad(number, timeout=0).num_gradients == 1


@pytest.mark.parametrize("number", [0, -3, 1.5])
def test_num_required_is_checked_by_every_form_of_take(acc, number):
    for take in (acc.take_indexed_slices_grad, acc.submit_take):
        with pytest.raises(gq.InvalidArgumentError, match="num_required"):
            take(number)
    with pytest.raises(gq.InvalidArgumentError, match="num_required"):
        next(iter(acc.rounds(number)))


def test_take_waits_until_the_quorum_is_reached(acc):
    accept(acc, [0], [1.0])
    taken, receipt = blocks_until(acc, lambda: acc.take_grad(2), lambda: apply(acc, [0], [3.0]))
    assert receipt.num_accumulated == 2
    assert_rows(taken, [0], [2.0])


def test_take_returns_everything_accumulated_not_only_the_number_required(acc):
    for value in (1, 2, 3):
        accept(acc, [0], [value])
    taken = acc.take_grad(2, timeout=0)
    assert taken.num_gradients == 3
    assert_rows(taken, [0], [2.0])
    assert acc.num_accumulated() == 0


def test_take_advances_the_step_by_one_and_empties_the_round(acc):
    acc.set_global_step(41)
    accept(acc, [0], [1.0])
    taken = acc.take_grad(1, timeout=0)
    assert (acc.global_step, acc.num_accumulated(), acc.num_undelivered) == (42, 0, 0)
    assert taken.step == 41


def test_result_unpacks_as_three_and_has_attributes(acc):
    accept(acc, [3, 0], [1.0, 2.0], worker="b")
    accept(acc, [3], [5.0], worker=2)
    accept(acc, [3], [6.0], worker="b")
    accept(acc, [3], [4.0])
    taken = acc.take_grad(4, timeout=0)
    indices, values, shape = taken
    assert len(taken) == 3
    assert taken[0] is taken.indices is indices
    assert taken[1] is taken.values is values
    assert taken[2] is taken.shape is shape
    assert (indices.dtype, values.dtype, shape.dtype, taken.counts.dtype) == (np.int64, np.float32, np.int64, np.int64)
    np.testing.assert_array_equal(indices, [0, 3])
    np.testing.assert_array_equal(values, [[2], [4]])
    np.testing.assert_array_equal(shape, [5, 1])
    np.testing.assert_array_equal(taken.counts, [1, 4])
    assert taken.num_gradients == 4
    assert taken.step == 0
    assert taken.workers == (2, "b")
    assert isinstance(taken, gq.SparseGradient)


@pytest.mark.parametrize(
    ("declared", "rows", "shape"),
    [
        (None, (2, 3), [-1, 3]), ((), (2,), [-1]), ((4,), (2, 3), [4, 3]), ((4, None), (2, 3), [4, 3]),
        ((None, 3), (2, 3), [-1, 3]), ((4, 3), (2, 3), [4, 3]), ((4,), (2,), [4]), ((None,), (2, 5), [-1, 5]),
        ((2, None), (1, 2, 2, 2), [2, 2, 2, 2]), ((None, None), (1, 2), [-1, 2]),
    ],
    ids=str,
)  # fmt: skip
def test_result_shape_is_the_declared_rows_then_the_dims_of_the_values(make, declared, rows, shape):
    acc = make.sparse("float32", declared)
    accept(acc, range(rows[0]), np.ones(rows, np.float32))
    taken = acc.take_grad(1, timeout=0)
    np.testing.assert_array_equal(taken.shape, shape)
    assert taken.shape.dtype == np.int64
    assert taken.values.shape == rows


@pytest.mark.parametrize(
    ("declared", "values", "shape"),
    [((5, 2), (0, 2), [5, 2]), (None, (0,), [-1]), ((None, None, 3), (0, 0, 3), [-1, 0, 3]),
     ((4, None), (0, 0), [4, 0]), ((4,), (0,), [4])],
    ids=str,
)  # fmt: skip
def test_result_of_nothing_but_empty_gradients_has_the_declared_dims_unknown_ones_as_0(make, declared, values, shape):
    acc = make.sparse("float32", declared)
    accept(acc, [], np.zeros((0,), np.float32))
    taken = acc.take_grad(1, timeout=0)
    assert taken.values.shape == values
    assert taken.values.dtype == np.float32
    np.testing.assert_array_equal(taken.shape, shape)
    assert taken.indices.shape == (0,)
    assert taken.num_gradients == 1


def test_result_of_empty_gradients_with_a_row_shape_keeps_it(make):
    acc = make.sparse("float32", None)
    accept(acc, [], np.zeros((0, 4), np.float32))
    taken = acc.take_grad(1, timeout=0)
    assert taken.values.shape == (0, 4)
    np.testing.assert_array_equal(taken.shape, [-1, 4])


def test_result_written_to_by_its_owner_changes_nothing_else(acc):
    accept(acc, [0], [1.0])
    first = acc.take_grad(1, timeout=0)
    first.values[:] = 99
    first.indices[:] = 4
    accept(acc, [0], [1.0])
    assert_rows(acc.take_grad(1, timeout=0), [0], [1.0])


def test_take_indexed_slices_is_the_same_as_slices(acc):
    accept(acc, [3, 1], [1.0, 2.0])
    slices = acc.take_indexed_slices_grad(1, timeout=0)
    np.testing.assert_array_equal(slices.indices, [1, 3])
    np.testing.assert_array_equal(slices.values, column(2, 1))
    np.testing.assert_array_equal(slices.dense_shape, [5, 1])
    assert acc.global_step == 1


def test_take_indexed_slices_takes_timeout_and_exact(make):
    acc = make.sparse("float32", (5, 1), compact=False)
    with pytest.raises(gq.DeadlineExceededError):
        acc.take_indexed_slices_grad(1, timeout=0)
    for value in (1, 2, 10):
        accept(acc, [0], [value])
    np.testing.assert_array_equal(acc.take_indexed_slices_grad(2, timeout=0, exact=True).values, [[1.5]])


def test_exact_takes_the_first_ones_and_leaves_the_rest_valid(make):
    acc = make.sparse("float32", (5, 1), compact=False)
    for value in (1, 2, 3, 10):
        accept(acc, [0], [value])
    assert_rows(acc.take_grad(2, timeout=0, exact=True), [0], [1.5])
    assert (acc.num_accumulated(), acc.global_step) == (2, 1)
    assert_rows(acc.take_grad(2, timeout=0), [0], [6.5])
    assert (acc.num_accumulated(), acc.global_step) == (0, 2)


def test_exact_waiting_leaves_the_rest_to_the_next_waiter(make):
    acc = make.sparse("float32", (5, 1), compact=False)
    first, second = acc.submit_take(2, exact=True), acc.submit_take(1, exact=True)
    for value in (1, 2, 3):
        accept(acc, [0], [value])
    assert_rows(first.result(TIMEOUT), [0], [1.5])
    assert_rows(second.result(TIMEOUT), [0], [3.0])


@pytest.mark.parametrize("options", [{}, {"order": "worker"}])
def test_exact_on_a_compacting_accumulator_raises_at_once(make, options):
    acc = make.sparse("float32", (5, 1), **options)
    accept(acc, [0], [1.0], worker=1)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="compact=False"):
        acc.take_grad(1, exact=True)


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "1", [1]])
def test_timeout_negative_or_no_number_raises(acc, timeout):
    accept(acc, [0], [1.0])
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="timeout"):
        acc.take_grad(1, timeout=timeout)


@pytest.mark.parametrize("timeout", [float("inf"), 1e20])
def test_timeout_huge_waits(acc, timeout):
    taken, _ = blocks_until(acc, lambda: acc.take_grad(1, timeout=timeout), lambda: accept(acc, [0], [1.0]))
    assert taken.num_gradients == 1


def test_timeout_zero_does_not_wait(acc):
    started = time.monotonic()
    with pytest.raises(gq.DeadlineExceededError):
        acc.take_grad(1, timeout=0)
    assert time.monotonic() - started < TIMEOUT


def test_timeout_error_carries_and_prints_the_figures(acc):
    acc.set_global_step(7)
    accept(acc, [0], [1.0])
    for _ in range(3):
        apply(acc, [0], [1.0], local_step=5)
    with unchanged(acc), pytest.raises(gq.DeadlineExceededError) as caught:
        acc.take_grad(4, timeout=0.001)
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert (error.have, error.need, error.step, error.num_stale) == (1, 4, 7, 3)
    for words in ("have 1", "need 4", "step 7", "3 dropped as stale"):
        assert words in str(error)


def test_timeout_waits_about_as_long_as_asked(acc):
    started = time.monotonic()
    with pytest.raises(gq.DeadlineExceededError):
        acc.take_grad(1, timeout=0.1)
    assert 0.1 <= time.monotonic() - started < TIMEOUT


def test_timeout_of_a_take_serves_the_next_waiter_at_once(acc, run_thread):
    first = run_thread(acc.take_grad, 3, timeout=0.2)
    wait_until(lambda: num_waiting(acc) or not first.running, "the first take")  # on a busy machine it is over already
    second = acc.submit_take(1)
    accept(acc, [0], [1.0])
    with pytest.raises(gq.DeadlineExceededError):
        first.result()
    assert_rows(second.result(TIMEOUT), [0], [1.0])


def test_take_after_a_timed_out_one_succeeds(acc):
    with pytest.raises(gq.DeadlineExceededError):
        acc.take_grad(1, timeout=0.01)
    accept(acc, [0], [1.0])
    assert acc.take_grad(1, timeout=0).num_gradients == 1


def test_discard_empties_the_open_round_and_tells_how_many(acc):
    accept(acc, [0], [1.0])
    accept(acc, [0], [2.0])
    assert acc.discard() == 2
    assert acc.discard() == 0
    assert (acc.num_accumulated(), acc.global_step) == (0, 0)
    accept(acc, [0], [5.0])
    assert_rows(acc.take_grad(1, timeout=0), [0], [5.0])


def test_discard_forgets_the_row_shape_but_not_the_marks(make):
    acc = make.sparse("float32", None)
    accept(acc, [0], np.ones((1, 2), np.float32), worker="w", sequence=0)
    acc.discard()
    assert apply(acc, [0], np.ones((1, 2), np.float32), worker="w", sequence=0).status is gq.ApplyStatus.DUPLICATE
    assert apply(acc, [0], np.ones((1, 3), np.float32))
