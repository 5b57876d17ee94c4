"""Arguments that look right, of which each was once taken wrongly."""

import ml_dtypes
import numpy as np
import pytest

import gradquorum as gq
from tests.support import accept, assert_rows, column, unchanged


@pytest.mark.parametrize("indices", [[True, 5], [np.True_, 5], b"31", "31", bytearray(b"1")])
def test_indices_with_a_bool_among_them_or_as_text_are_an_error(make, indices):
    acc = make.sparse("float32", (100, 1))
    with unchanged(acc), pytest.raises(gq.InvalidDTypeError):
        acc.apply_grad(indices, column(*range(len(indices))))


@pytest.mark.parametrize("shape", [(100, 1), None])
@pytest.mark.parametrize("place", [0, 1], ids=["indices", "values"])
@pytest.mark.parametrize("nothing", [None, ..., object()], ids=["None", "...", "object"])
def test_what_is_no_array_is_an_error_of_ours(make, shape, place, nothing):
    acc = make.sparse("float32", shape)
    arguments = [np.array([3]), column(1)]
    arguments[place] = nothing
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=["indices", "grad_values"][place]):
        acc.apply_grad(*arguments)


@pytest.mark.parametrize("shape", [{3, 2}, frozenset((2,)), {2: 3}, "32", iter((3, 2)), (1,) * 70, 5])
def test_shape_that_is_no_vector_of_sizes_or_has_too_many_is_an_error(make, shape):
    with pytest.raises(gq.InvalidArgumentError):
        make.sparse("float32", shape)


@pytest.mark.parametrize("timeout", [np.True_, bytearray(b"1"), memoryview(b"1"), "1", -(10**400), np.nan, [1]])
def test_timeout_that_is_no_number_of_seconds_is_an_error(make, timeout):
    acc = make.sparse("float32")
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.take_grad(1, timeout=timeout)


def test_timeout_beyond_all_numbers_waits_without_end(make):
    acc = make.sparse("float32")
    accept(acc, [0], column(1))
    assert acc.take_grad(1, timeout=10**400).num_gradients == 1


@pytest.mark.parametrize("exact", [np.array([]), 1, "yes", None])
def test_exact_that_is_no_bool_is_an_error(make, exact):
    acc = make.sparse("float32", compact=False)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.take_grad(1, timeout=0, exact=exact)


def test_values_in_float64_are_rounded_once_to_bfloat16(make):
    number = 1 + 2.0**-8 + 2.0**-40  # by way of float32 it would be a tie, and become 1
    nearest = ml_dtypes.bfloat16(1 + 2.0**-7)
    sparse, dense = make.sparse("bfloat16"), make.dense("bfloat16")
    sparse.apply_grad([0], [[number]])
    assert sparse.take_grad(1, timeout=0).values[0, 0] == nearest
    for values in ([number], np.array([number])):
        dense.apply_grad(values, local_step=None)
        assert dense.take_grad(1, timeout=0)[0] == nearest


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_weight_is_rounded_for_each_member_of_a_group_by_itself(make, names):
    dtypes = {"a": "float32", "b": "float64"}
    group = make.group({name: gq.DenseSpec(dtypes[name], (1,), "MEAN_BY_WEIGHT") for name in names})
    for value, weight in ((1.0, 0.1), (2.0, 0.3)):
        group.apply({name: [value] for name in names}, weight=weight)
    assert group.take(2, timeout=0)["b"][0] == (0.1 * 1.0 + 0.3 * 2.0) / (0.1 + 0.3)
    with unchanged(group), pytest.raises(gq.InvalidArgumentError, match="float32"):
        group.apply({name: [1.0] for name in names}, local_step=None, weight=1e-46)


def test_parts_of_one_gradient_whose_shapes_contradict_each_other_are_an_error(make):
    acc = make.sparse("float32")
    parts = [gq.IndexedSlices(column(1), [0], (5, 1)), gq.IndexedSlices(column(1), [0], (6, 1))]
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="expected shape dim 0 to be 5, got 6"):
        acc.apply_indexed_slices_grad(parts)


def test_integers_come_out_as_the_very_dtype_that_numpy_calls_int64(make):
    acc = make.sparse("int64", reduction_type="SUM")
    acc.apply_grad([3], np.array([[1]]))
    indices, values, shape = acc.take_grad(1, timeout=0)
    assert {array.dtype.char for array in (indices, values, shape)} == {np.dtype(np.int64).char}


def test_take_behind_another_that_may_still_end_is_not_given_up(make):
    acc = make.sparse("float32", (5, 1), expected_workers=2, max_per_worker=1)
    b = acc.worker("b")
    with acc.worker("a") as a:
        a.apply_grad([0], column(1))
    first, second = acc.submit_take(2), acc.submit_take(2)
    assert first.cancel()
    b.apply_grad([1], column(1))
    assert_rows(second.result(20), [0, 1], [1, 1])


def test_rounds_never_lower_what_their_body_has_published(make):
    acc = make.sparse("float32", (5, 1))
    accept(acc, [0], [1.0])
    for _ in acc.rounds(1):
        acc.set_global_step(10)
        acc.publish()
        accept(acc, [0], [1.0])
        if acc.published_step == 10 and acc.num_undelivered == 0:
            break
    assert acc.published_step == 10
    for _ in acc.rounds(1):
        acc.publish(20)
        break
    assert acc.published_step == 20
