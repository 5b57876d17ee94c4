"""SEMANTICS 1: a group is one round with several members."""

import numpy as np
import pytest

import gradquorum as gq
from tests.support import TIMEOUT, assert_rows, column, failing_merges, unchanged, wait_for_waiters

SPECS = {"emb": gq.SparseSpec("float32", (5, 1)), "bias": gq.DenseSpec("float32", (2,), "SUM")}


@pytest.fixture
def group(make):
    return make.group(SPECS)


def offer(group, value, **options):
    options.setdefault("local_step", None)
    emb = gq.IndexedSlices(column(value), np.array([1]))
    return group.apply({"emb": emb, "bias": np.array([value, 0], np.float32)}, **options)


def test_group_take_returns_a_mapping_with_num_gradients_and_step(group):
    group.set_global_step(4)
    offer(group, 1, worker="a")
    offer(group, 3, worker=2)
    taken = group.take(2, timeout=0)
    assert set(taken) == {"emb", "bias"}
    assert len(taken) == 2
    assert_rows(taken["emb"], [1], [2])
    assert isinstance(taken["emb"], gq.SparseGradient)
    np.testing.assert_array_equal(taken["bias"], [4, 0])
    assert (taken.num_gradients, taken.step, taken.workers) == (2, 4, (2, "a"))
    assert (taken["emb"].num_gradients, taken["emb"].step) == (2, 4)
    assert (group.num_accumulated(), group.global_step) == (0, 5)
    with pytest.raises(KeyError):
        taken["other"]


@pytest.mark.parametrize(
    "emb",
    [gq.IndexedSlices(column(2, 4), [0, 3]), ([0, 3], column(2, 4)), ([0, 3], [[2.0], [4.0]], [5, 1]),
     [gq.IndexedSlices(column(2), [0]), ([3], column(4))]],
    ids=["slices", "pair", "triple", "parts"],
)  # fmt: skip
def test_group_accepts_slices_tuples_and_parts(group, emb):
    assert group.apply({"emb": emb, "bias": [1.0, 2.0]})
    taken = group.take(1, timeout=0)
    assert_rows(taken["emb"], [0, 3], [2, 4])
    assert taken.num_gradients == 1


def test_group_member_left_out_is_an_empty_contribution(group):
    group.apply({"emb": ([1], column(4))})
    group.apply({"bias": [1.0, 2.0]})
    group.apply({})
    taken = group.take(3, timeout=0)
    assert_rows(taken["emb"], [1], [4])
    np.testing.assert_array_equal(taken["bias"], [1, 2])
    assert taken.num_gradients == 3


def test_group_mean_of_a_dense_member_divides_by_the_gradients_that_carried_it(make):
    group = make.group(
        {"mean": gq.DenseSpec("float32", (1,)), "by_count": gq.DenseSpec("float32", (1,), "MEAN_BY_COUNT")}
    )
    group.apply({"mean": [2.0], "by_count": [2.0]})
    group.apply({"mean": [4.0], "by_count": [4.0]})
    group.apply({})
    taken = group.take(3, timeout=0)
    np.testing.assert_array_equal(taken["mean"], [3])
    np.testing.assert_array_equal(taken["by_count"], [2])


def test_group_member_of_nobody_is_empty_or_zero(group):
    group.apply({})
    taken = group.take(1, timeout=0)
    assert taken["emb"].values.shape == (0, 1)
    np.testing.assert_array_equal(taken["emb"].shape, [5, 1])
    np.testing.assert_array_equal(taken["bias"], [0, 0])


@pytest.mark.parametrize(
    "bad",
    [{"emb": ([9], column(1))}, {"bias": [1.0]}, {"other": [1.0]}, {"emb": [1.0]}, {"emb": ([0], np.ones((1, 1)))},
     {"emb": "rows"}, {0: [1.0]}],
    ids=str,
)  # fmt: skip
def test_group_apply_of_which_one_member_is_bad_changes_nothing(group, bad):
    good = {"emb": ([1], column(4)), "bias": [1.0, 2.0]}
    with unchanged(group), pytest.raises(gq.InvalidArgumentError, match=str(next(iter(bad)))):
        group.apply({**good, **bad})
    offer(group, 3)
    taken = group.take(1, timeout=0)
    assert_rows(taken["emb"], [1], [3])
    np.testing.assert_array_equal(taken["bias"], [3, 0])


@pytest.mark.parametrize("bad", [None, [1.0], "emb", 3])
def test_group_apply_of_no_mapping_is_an_error(group, bad):
    with unchanged(group), pytest.raises(gq.InvalidArgumentError):
        group.apply(bad)


@pytest.mark.parametrize("members", [{}, None, {"emb": "float32"}, {1: gq.DenseSpec("float32", (1,))}, [1]])
def test_group_of_bad_members_raises(make, members):
    with pytest.raises(gq.InvalidArgumentError):
        make.group(members)


@pytest.mark.parametrize(
    ("spec", "arguments", "error"),
    [(gq.SparseSpec, ("bool", (1,)), gq.InvalidDTypeError), (gq.DenseSpec, ("float32", (-1,)), gq.InvalidArgumentError),
     (gq.SparseSpec, ("int32", (1,), "MEAN"), gq.InvalidArgumentError),
     (gq.DenseSpec, ("float32", (1,), "mean"), gq.InvalidArgumentError)],
)  # fmt: skip
def test_group_spec_is_checked(make, spec, arguments, error):
    with pytest.raises(error):
        make.group({"x": spec(*arguments)})


def test_group_stale_duplicate_and_skipped_gradients_touch_no_member(make):
    group = make.group(SPECS, on_nonfinite="skip")
    group.set_global_step(2)
    assert offer(group, 9, local_step=1).status is gq.ApplyStatus.STALE
    assert group.apply({"emb": ([1], column(9)), "bias": [np.nan, 0]}, 2).status is gq.ApplyStatus.SKIPPED
    assert offer(group, 1, worker="w", sequence=0)
    assert offer(group, 9, worker="w", sequence=0).status is gq.ApplyStatus.DUPLICATE
    taken = group.take(1, timeout=0)
    assert_rows(taken["emb"], [1], [1])
    np.testing.assert_array_equal(taken["bias"], [1, 0])


def test_group_takes_all_members_in_one_decision(group, run_thread):
    take = run_thread(group.take, 2)
    wait_for_waiters(group, 1)
    for value in (1, 3):
        assert offer(group, value, local_step=0)
    with pytest.warns(gq.StaleGradientWarning):
        assert offer(group, 100, local_step=0).status is gq.ApplyStatus.STALE
    taken = take.result()
    assert_rows(taken["emb"], [1], [2])
    np.testing.assert_array_equal(taken["bias"], [4, 0])


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_group_cut_off_in_the_merge_of_one_member_keeps_the_round_whole(group, engine, kind):
    offer(group, 1)
    with failing_merges(engine, kind=kind), pytest.raises(MemoryError):
        group.take(1, timeout=0)
    assert (group.num_undelivered, group.global_step) == (1, 1)
    offer(group, 9)
    taken = group.take(5, timeout=0)
    assert_rows(taken["emb"], [1], [1])
    np.testing.assert_array_equal(taken["bias"], [1, 0])


def test_group_exact(make):
    group = make.group(SPECS, compact=False)
    for value in (1, 3, 9):
        offer(group, value)
    taken = group.take(2, timeout=0, exact=True)
    assert_rows(taken["emb"], [1], [2])
    np.testing.assert_array_equal(taken["bias"], [4, 0])
    assert group.num_accumulated() == 1


def test_group_weight_applies_to_the_members_that_weigh(make):
    group = make.group(
        {"w": gq.DenseSpec("float32", (1,), "MEAN_BY_WEIGHT"), "e": gq.SparseSpec("float32", None, "MEAN_BY_WEIGHT")}
    )
    group.apply({"w": [2.0], "e": ([0], [[2.0]])}, weight=1.0)
    group.apply({"w": [10.0], "e": ([0], [[10.0]])}, weight=3.0)
    taken = group.take(2, timeout=0)
    np.testing.assert_array_equal(taken["w"], [8])
    assert_rows(taken["e"], [0], [8])


def test_group_weight_without_a_member_that_weighs_is_an_error(group):
    with unchanged(group), pytest.raises(gq.InvalidArgumentError, match="weight"):
        offer(group, 1, weight=2.0)


def test_group_futures_rounds_publish_and_workers(group):
    future = group.submit_take(1)
    with group.worker("a") as worker:
        worker.begin()
        assert worker.apply({"emb": ([1], column(4)), "bias": [1.0, 2.0]})
        assert group.last_sequence("a") == 0
    assert_rows(future.result(TIMEOUT)["emb"], [1], [4])
    offer(group, 1)
    rounds = group.rounds(1)
    assert next(rounds).step == 1
    offer(group, 2)
    assert next(rounds).step == 2
    assert group.published_step == 2
    assert group.wait_published(2, timeout=0) == 2
    offer(group, 2)
    assert group.discard() == 1


def test_group_close_and_with(make):
    with make.group(SPECS) as group:
        take = group.submit_take(1)
    assert group.closed
    with pytest.raises(gq.CancelledError):
        take.result(TIMEOUT)
    with pytest.raises(gq.ClosedError):
        group.take(1)


def test_group_row_shapes_of_members_are_fixed_each_by_itself(make):
    group = make.group({"a": gq.SparseSpec("float32", None), "b": gq.SparseSpec("float32", None)})
    group.apply({"a": ([0], np.ones((1, 2), np.float32))})
    group.apply({"b": ([0], np.ones((1, 3), np.float32))})
    with unchanged(group), pytest.raises(gq.InvalidArgumentError, match="expected values dim 1 to be 3, got 2"):
        group.apply({"a": ([0], np.ones((1, 2), np.float32)), "b": ([0], np.ones((1, 2), np.float32))})
    taken = group.take(2, timeout=0)
    assert (taken["a"].values.shape, taken["b"].values.shape) == ((1, 2), (1, 3))
