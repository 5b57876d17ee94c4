"""CASES, values (V1-V12), each named after its number."""

import itertools

import numpy as np
import pytest

import gradquorum as gq
from tests.support import accept, accept_many, apply, assert_rows, column, times

REDUCTIONS = ["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"]


@pytest.mark.parametrize(
    ("reduction", "expected"), [("MEAN", [2, 5]), ("MEAN_BY_COUNT", [2 / 3, 10 / 3]), ("SUM", [2, 10])]
)
def test_v1_mean_has_one_meaning_for_each_name(make, reduction, expected):
    acc = make.sparse("float64", (3, 1), reduction_type=reduction)
    for i, value in ((0, 2), (1, 4), (1, 6)):
        accept(acc, [i], [value])
    assert_rows(acc.take_grad(3, timeout=0), [0, 1], expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_v2_repeated_id_comes_back_once(make, reduction):
    acc = make.sparse("float32", (4, 1), reduction_type=reduction)
    accept(acc, [1, 1], [1, 3])
    assert_rows(acc.take_grad(1, timeout=0), [1], [4])


def test_v3_unsorted_ids_are_summed_right(make):
    acc = make.sparse("float32", (5, 1))
    accept(acc, [3, 1], [30, 10])
    accept(acc, [1, 3], [1, 3])
    assert_rows(acc.take_grad(2, timeout=0), [1, 3], [5.5, 16.5])


def test_v4_rows_of_sum_zero_are_not_lost(make):
    acc = make.sparse("float32", (5, 2))
    accept(acc, [0], np.array([[1, -1]], np.float32))
    accept(acc, [1], np.array([[2, 0]], np.float32))
    np.testing.assert_array_equal(acc.take_grad(2, timeout=0).indices, [0, 1])
    other = make.sparse("float32", (5, 1))
    accept(other, [0], [1])
    accept(other, [0], [-1])
    assert_rows(other.take_grad(2, timeout=0), [0], [0])


def test_v5_float16_mean_does_not_overflow(make):
    acc = make.sparse("float16", (5, 1))
    accept(acc, [2], [40000])
    accept(acc, [2], [40000])
    assert_rows(acc.take_grad(2, timeout=0), [2], [40000])


def test_v6_float16_sum_does_not_stick_at_2048(make):
    acc = make.sparse("float16", (5, 1))
    accept_many(acc, 3000, [0], [1])
    assert_rows(acc.take_grad(3000, timeout=0), [0], [1])


@pytest.mark.parametrize("options", [{"order": "worker"}, {"accumulate_dtype": "float64"}])
def test_v7_sum_does_not_depend_on_the_order_of_arrival(make, options):
    results = []
    for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0)):
        acc = make.sparse("float32", (1, 1), reduction_type="SUM", **options)
        for worker in order:
            accept(acc, [0], [[1e8, 1, -1e8][worker]], worker=worker)
        results.append(float(acc.take_grad(3, timeout=0).values[0, 0]))
    assert len(set(results)) == 1
    if "accumulate_dtype" in options:
        assert results[0] == 1


def test_v8_all_720_orders_of_arrival_give_one_bit_pattern(make, target):
    rows = np.random.default_rng(0).standard_normal((6, 1, 4)).astype(np.float32) * 1000
    acc = make.sparse("float32", (1, 4), order="worker")
    patterns = set()
    orders = list(itertools.permutations(range(6)))
    for order in orders[:: len(orders) // times(len(orders), target)]:
        for worker in order:
            accept(acc, [0], rows[worker], worker=worker)
        patterns.add(acc.take_grad(6, timeout=0).values.tobytes())
    assert len(patterns) == 1


def test_v9_nan_of_one_is_skipped(make):
    acc = make.sparse("float32", (5, 1), on_nonfinite="skip")
    assert apply(acc, [0], [np.nan]).status is gq.ApplyStatus.SKIPPED
    accept(acc, [0, 1], [1, 2])
    assert_rows(acc.take_grad(1, timeout=0), [0, 1], [1, 2])


def test_v10_means_are_weighted(make):
    acc = make.sparse("float32", (5, 1), reduction_type="MEAN_BY_WEIGHT")
    accept(acc, [0], [2], weight=1.0)
    accept(acc, [0], [10], weight=3.0)
    assert_rows(acc.take_grad(2, timeout=0), [0], [8])


def test_v11_what_is_left_of_micro_batches_is_taken_with_its_own_count(make):
    acc = make.sparse("float32", (5, 1), reduction_type="MEAN_BY_COUNT")
    means = []
    for value in range(1, 11):
        accept(acc, [0], [value])
        if acc.num_accumulated() == 4:
            means.append(acc.take_grad(4, timeout=0).values[0, 0])
    left = acc.take_grad(1, timeout=0)
    assert left.num_gradients == 2
    assert [*means, left.values[0, 0]] == [2.5, 6.5, 9.5]


@pytest.mark.parametrize(
    ("reduction", "expected"), [("SUM", [1, 2, 1]), ("MEAN", [1, 2, 1]), ("MEAN_BY_COUNT", [1, 2, 1])]
)
def test_v12_layer_called_twice_counts_as_one_gradient(make, reduction, expected):
    acc = make.sparse("float32", (5, 1), reduction_type=reduction)
    parts = [gq.IndexedSlices(column(1, 1), np.array([1, 2])), gq.IndexedSlices(column(1, 1), np.array([2, 3]))]
    assert acc.apply_indexed_slices_grad(parts).num_accumulated == 1
    taken = acc.take_grad(1, timeout=0)
    assert_rows(taken, [1, 2, 3], expected)
    assert taken.num_gradients == 1
