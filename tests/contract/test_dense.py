"""SEMANTICS 8: the dense sibling."""

import numpy as np
import pytest

import gradquorum as gq
from tests.arithmetic import as_dtype
from tests.support import TIMEOUT, assert_same_bits, blocks_until, unchanged


def add(acc, *values, **options):
    options.setdefault("local_step", None)
    for value in values:
        assert acc.apply_grad(value, **options)


@pytest.fixture
def acc(make):
    return make.dense("float32", (2, 3))


def test_dense_mean_divides_by_the_number_of_gradients(acc):
    add(acc, np.full((2, 3), 1, np.float32), np.full((2, 3), 2, np.float32), np.full((2, 3), 6, np.float32))
    taken = acc.take_grad(2, timeout=0)
    assert_same_bits(taken, np.full((2, 3), 3, np.float32))
    assert (acc.num_accumulated(), acc.global_step) == (0, 1)


def test_dense_take_returns_an_array(acc):
    add(acc, np.ones((2, 3), np.float32))
    assert type(acc.take_grad(1, timeout=0)) is np.ndarray


@pytest.mark.parametrize(
    ("reduction", "expected"), [("MEAN", 5), ("SUM", 10), ("MEAN_BY_COUNT", 5), ("MEAN_BY_WEIGHT", 6.5)]
)
def test_dense_reductions(make, reduction, expected):
    acc = make.dense("float32", (), reduction_type=reduction)
    weight = {"weight": 3.0} if reduction == "MEAN_BY_WEIGHT" else {}
    add(acc, 2.0)
    add(acc, 8.0, **weight)
    assert acc.take_grad(2, timeout=0) == expected


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("options", [{}, {"compact": False}, {"order": "worker"}])
def test_dense_sum_has_the_bits_of_additions_in_order(make, dtype, options):
    rng = np.random.default_rng(2)
    grads = [rng.standard_normal((4, 5)).astype(dtype) for _ in range(9)]
    acc = make.dense(dtype, (4, 5), **options)
    add(acc, *grads, worker="w")
    wide = np.float32 if dtype == "float16" else as_dtype(dtype)
    total = grads[0].astype(wide)
    for grad in grads[1:]:
        total = total + grad.astype(wide)
    real = total.view("f4" if wide in (np.float32, np.complex64) else "f8")
    assert_same_bits(acc.take_grad(9, timeout=0), (real / real.dtype.type(9)).view(wide).astype(dtype))


def test_dense_negative_zero_stays(make):
    acc = make.dense("float32", (1,))
    add(acc, [-0.0], [-0.0])
    assert np.signbit(acc.take_grad(1, timeout=0)[0])


@pytest.mark.parametrize(
    "value", [np.ones((2, 3)), np.ones((2, 3), np.int8), [[1, 1, 1], [1, 1, 1]], np.ones((2, 3), "f2")]
)
def test_dense_gradient_is_converted_to_the_dtype(acc, value):
    add(acc, value)
    assert_same_bits(acc.take_grad(1, timeout=0), np.ones((2, 3), np.float32))


@pytest.mark.parametrize("value", [np.ones((2, 3), np.complex64), [["a"] * 3] * 2, None, np.ones((2, 3), object)])
def test_dense_gradient_that_would_lose_its_kind_is_an_error(acc, value):
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.apply_grad(value)


def test_dense_gradient_of_a_wrong_shape_is_an_error(acc):
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=r"Shape mismatch: expected \[2,3\], got \[2,4\]"):
        acc.apply_grad(np.ones((2, 4), np.float32))


@pytest.mark.parametrize("shape", [(), (2,), (2, 3, 1), (3, 2)])
def test_dense_gradient_of_another_rank_is_an_error(acc, shape):
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=r"Shape mismatch: expected \[2,3\]"):
        acc.apply_grad(np.ones(shape, np.float32))


def test_dense_unknown_dims_are_fixed_by_the_round(make):
    for declared in (None, (None, 2)):
        acc = make.dense("float32", declared)
        add(acc, np.ones((3, 2), np.float32))
        with (
            unchanged(acc),
            pytest.raises(gq.InvalidArgumentError, match=r"Shape mismatch: expected \[3,2\], got \[4,2\]"),
        ):
            acc.apply_grad(np.ones((4, 2), np.float32), local_step=None)
        acc.take_grad(1, timeout=0)
        add(acc, np.ones((4, 2), np.float32))


def test_dense_bad_apply_between_good_ones_changes_nothing(acc):
    add(acc, np.ones((2, 3), np.float32))
    with pytest.raises(gq.InvalidArgumentError):
        acc.apply_grad(np.ones((9, 3), np.float32))
    add(acc, np.full((2, 3), 3, np.float32))
    np.testing.assert_array_equal(acc.take_grad(2, timeout=0), np.full((2, 3), 2))


def test_dense_take_waits_and_times_out(acc):
    with pytest.raises(gq.DeadlineExceededError):
        acc.take_grad(1, timeout=0.01)
    taken, _ = blocks_until(acc, lambda: acc.take_grad(1), lambda: add(acc, np.ones((2, 3), np.float32)))
    np.testing.assert_array_equal(taken, np.ones((2, 3)))


def test_dense_exact_takes_the_first_ones(make):
    acc = make.dense("float32", (1,), compact=False)
    add(acc, [1.0], [2.0], [9.0])
    np.testing.assert_array_equal(acc.take_grad(2, timeout=0, exact=True), [1.5])
    np.testing.assert_array_equal(acc.take_grad(1, timeout=0), [9.0])


def test_dense_exact_on_a_running_sum_is_an_error(acc):
    add(acc, np.ones((2, 3), np.float32))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="compact=False"):
        acc.take_grad(1, timeout=0, exact=True)


def test_dense_order_worker_gives_the_same_bits_for_both_orders(make):
    results = []
    for order in ((0, 1, 2), (2, 1, 0)):
        acc = make.dense("float32", (), order="worker", reduction_type="SUM")
        for worker in order:
            add(acc, [1e8, 1.0, -1e8][worker], worker=worker)
        results.append(acc.take_grad(3, timeout=0))
    assert results[0] == results[1] == 0


def test_dense_rounds_steps_and_futures_work_as_in_the_sparse_class(acc):
    add(acc, np.ones((2, 3), np.float32), worker="w", sequence=3)
    assert acc.last_sequence("w") == 3
    assert acc.submit_take(1).result(TIMEOUT).shape == (2, 3)
    add(acc, np.ones((2, 3), np.float32))
    rounds = acc.rounds(1)
    assert next(rounds).shape == (2, 3)
    assert acc.published_step == 0
    with pytest.raises(gq.DeadlineExceededError):
        next(acc.rounds(1, timeout=0))
    add(acc, np.ones((2, 3), np.float32))
    next(rounds)
    assert acc.published_step == 2
    worker = acc.worker("w")
    assert worker.begin() == 2
    acc.set_global_step(2)
    assert worker.apply_grad(np.ones((2, 3), np.float32))
    assert acc.last_sequence("w") == 4


def test_dense_class_has_no_slices(acc):
    assert not hasattr(acc, "take_indexed_slices_grad")
    assert not hasattr(acc, "apply_indexed_slices_grad")


def test_dense_empty_array_is_a_gradient(make):
    acc = make.dense("float32", (0, 3))
    add(acc, np.zeros((0, 3), np.float32))
    assert acc.take_grad(1, timeout=0).shape == (0, 3)
