"""SEMANTICS 2, the table: what an apply refuses, in which order, with which words, and that nothing changes."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import gradquorum as gq
from tests.support import accept, apply, assert_rows, column, unchanged

F32 = np.float32

# Row of the table -> the words, given an accumulator of shape (5, None) whose round has rows of 2.
WORDS = {
    1: ["float64", "float32"],
    2: ["local_step must be scalar"],
    3: ["Input indices should be vector but received shape:"],
    4: ["Values cannot be 0-dimensional."],
    5: ["Expected 2 non-empty input values, got 3"],
    6: ["Shape mismatch: expected shape rank at least 2, got 1"],
    7: ["Shape mismatch: expected shape dim 0 to be 5, got 6"],
    8: ["Shape mismatch: index of slice 1 exceeded limits of shape; index is 9 exceeded 5"],
    9: ["index of slice 0 is negative", "-1"],
    10: ["Shape mismatch: expected values dim 1 to be 2, got 3"],
    11: ["Shape mismatch: expected values dim 1 to be 4, got "],
}
IMPOSSIBLE = [{4, 5}, {4, 10}, {4, 11}, {6, 11}]


def offer(acc, faults):
    """Apply one gradient that fails the given rows of the table, and those only."""
    indices = [-1 if 9 in faults else 0, 9 if 8 in faults else 1]
    if 3 in faults:
        indices = [indices]
    values = np.ones((3 if 5 in faults else 2, 3 if 10 in faults else 2), np.float64 if 1 in faults else F32)
    if 4 in faults:
        values = np.ones((), values.dtype)
    shape = None
    if faults & {6, 7, 11}:
        shape = [6 if 7 in faults else 5, 4 if 11 in faults else values.shape[-1] if values.ndim else 2]
        shape = shape[:1] if 6 in faults else shape
    acc.apply_grad(indices, values, shape, [0, 0] if 2 in faults else 0)


@pytest.fixture
def acc(make):
    """An accumulator whose round holds one gradient with rows of 2."""
    acc = make.sparse("float32", (5, None))
    accept(acc, [0, 1], np.array([[1, 2], [3, 4]], F32))
    yield acc
    taken = acc.take_grad(1, timeout=0)
    assert taken.num_gradients == 1
    np.testing.assert_array_equal(taken.indices, [0, 1])
    np.testing.assert_array_equal(taken.values, [[1, 2], [3, 4]])
    np.testing.assert_array_equal(taken.counts, [1, 1])


@pytest.mark.parametrize("row", WORDS)
def test_check_failing_raises_with_its_words_and_changes_nothing(acc, row):
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError) as caught:
        offer(acc, {row})
    assert isinstance(caught.value, ValueError)
    for words in WORDS[row]:
        assert words in str(caught.value)


PAIRS = [pair for pair in itertools.combinations(WORDS, 2) if set(pair) not in IMPOSSIBLE]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_checks_two_failing_the_first_of_the_table_is_reported(acc, pair):
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError) as caught:
        offer(acc, set(pair))
    for words in WORDS[pair[0]]:
        assert words in str(caught.value)


def test_check_of_nothing_failing_accepts(make):
    acc = make.sparse("float32", (5, None))
    offer(acc, set())
    assert acc.num_accumulated() == 1


def test_check_1_says_which_cast_to_write(make):
    acc = make.sparse("float32", (5, 1))
    with pytest.raises(gq.InvalidDTypeError, match=r"astype") as caught:
        acc.apply_grad([0], np.ones((1, 1), np.float64))
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "uint64", "complex64", "bool"])
def test_check_1_array_of_another_dtype_names_both(make, dtype):
    acc = make.sparse("float32", (5, 1))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError) as caught:
        acc.apply_grad([0], np.ones((1, 1), dtype))
    assert dtype in str(caught.value)
    assert "float32" in str(caught.value)


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int32", "int64"]
)
def test_check_1_arrays_of_no_other_dtype_are_taken_for_the_accumulator_s(make, dtype):
    acc = make.sparse(dtype, (5, 1), reduction_type="SUM")
    everything = [np.dtype(code) for code in np.typecodes["All"]] + [np.dtype(ml_dtypes.bfloat16), np.dtype("i4, f4")]
    taken = []
    for other in everything:
        for ids in ([0], np.array([0])):
            try:
                acc.apply_grad(ids, np.zeros((1, 1), other))
                taken.append(other)
            except gq.InvalidDTypeError:
                assert other != acc.dtype
    assert taken
    assert set(taken) == {acc.dtype}


@pytest.mark.parametrize("grad_shape", [None, [5, 1]])
@pytest.mark.parametrize("terms", [{"weight": 2.0}, {"sequence": 3}, {"timeout": -1}, {"worker": 1.5}])
def test_gradient_is_checked_before_its_terms(make, grad_shape, terms):
    acc = make.sparse("float32", (5, 1))
    with unchanged(acc), pytest.raises(gq.InvalidDTypeError, match="float64"):
        acc.apply_grad(np.array([0]), np.ones((1, 1)), grad_shape, **terms)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="exceeded limits"):
        acc.apply_grad(np.array([9]), column(1), grad_shape, **terms)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=next(iter(terms))):
        acc.apply_grad(np.array([0]), column(1), grad_shape, **terms)


def test_check_5_zero_ids_with_rows_is_refused(make):
    acc = make.sparse("float32", (5, 1))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="Expected 0 non-empty input values, got 2"):
        acc.apply_grad([], column(1, 2))


@pytest.mark.parametrize("grad_shape", [None, [5], [6, 2], [5, 9], [5, 2, 7]])
def test_check_5_zero_ids_with_values_of_shape_0_is_checked_against_nothing_further(acc, grad_shape):
    with_empty = acc.apply_grad([], np.zeros((0,), F32), grad_shape)
    assert with_empty.status is gq.ApplyStatus.ACCEPTED
    assert acc.num_accumulated() == 2
    taken = acc.take_grad(2, timeout=0)
    assert taken.num_gradients == 2
    accept(acc, [0, 1], np.array([[1, 2], [3, 4]], F32))  # for the check at the end


def test_check_5_zero_ids_with_values_of_shape_0_fixes_nothing_for_the_round(make):
    acc = make.sparse("float32", None)
    accept(acc, [], np.zeros((0,), F32))
    accept(acc, [3], np.ones((1, 2, 2), F32))
    assert acc.take_grad(2, timeout=0).values.shape == (1, 2, 2)


def test_check_10_zero_ids_with_a_row_shape_is_checked_and_fixes_it(make):
    acc = make.sparse("float32", None)
    accept(acc, [], np.zeros((0, 2), F32))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="expected values dim 1 to be 2, got 3"):
        apply(acc, [0], np.ones((1, 3), F32))


@pytest.mark.parametrize("grad_shape", [[5, 2], (5, 2), np.array([5, 2], np.int32), [-1, 2], [None, None], [5, 2, 9]])
def test_check_6_grad_shape_that_fits_or_is_unknown_is_accepted(make, grad_shape):
    acc = make.sparse("float32", (5, 2))
    assert apply(acc, [0], np.ones((1, 2), F32), grad_shape=grad_shape)


def test_check_6_grad_shape_empty_is_right_without_constraint(make):
    acc = make.sparse("float32", None)
    assert apply(acc, [0], np.ones((1,), F32), grad_shape=[])


def test_check_6_grad_shape_empty_with_a_declared_shape_is_an_error(make):
    acc = make.sparse("float32", (5, 2))
    with pytest.raises(gq.InvalidArgumentError, match="expected shape rank at least 2, got 0"):
        apply(acc, [0], np.ones((1, 2), F32), grad_shape=[])


@pytest.mark.parametrize("grad_shape", [[5.0, 2], [True, 2], [[5, 2]], "52", 5, [5, -2], [2**63, 2]])
def test_check_6_grad_shape_that_is_no_vector_of_integers_is_an_error(make, grad_shape):
    acc = make.sparse("float32", (5, 2))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        apply(acc, [0], np.ones((1, 2), F32), grad_shape=grad_shape)


def test_check_7_each_dim_known_on_both_sides_is_compared(make):
    acc = make.sparse("float32", (None, 2, 3))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="expected shape dim 2 to be 3, got 4"):
        apply(acc, [0], np.ones((1, 2, 3), F32), grad_shape=[7, -1, 4])


def test_check_8_limit_is_grad_shape_where_no_rows_are_declared(make):
    acc = make.sparse("float32", None)
    words = "index of slice 2 exceeded limits of shape; index is 6 exceeded 6"
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=words):
        apply(acc, [0, 5, 6], [1.0, 2.0, 3.0], grad_shape=[6, 1])
    for grad_shape in (None, [-1, 1], [None, 1], []):
        assert apply(acc, [6], [1.0], grad_shape=grad_shape)


def test_check_9_negative_id_is_named_without_any_shape(make):
    acc = make.sparse("float32", None)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=r"index of slice 1 is negative.*-7"):
        apply(acc, [0, -7], [1.0, 2.0])


@pytest.mark.parametrize(
    ("declared", "offered", "words"),
    [
        ((5, 2, 3), (1, 2, 4), "expected values dim 2 to be 3, got 4"),
        ((5, 2, 3), (1, 2), "expected values rank at least 3, got 2"),
        ((5, None, 3), (1, 9, 4), "expected values dim 2 to be 3, got 4"),
        ((5, 2), (1,), "expected values rank at least 2, got 1"),
    ],
)
def test_check_10_values_against_the_declared_shape(make, declared, offered, words):
    acc = make.sparse("float32", declared)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=f"Shape mismatch: {words}"):
        apply(acc, [0], np.ones(offered, F32))


def test_check_10_rank_against_the_round(make):
    acc = make.sparse("float32", None)
    accept(acc, [0], np.ones((1, 2), F32))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="expected values rank 2, got 3"):
        apply(acc, [0], np.ones((1, 2, 1), F32))


def test_check_10_values_of_more_dims_than_declared_are_accepted(make):
    acc = make.sparse("float32", (5,))
    assert apply(acc, [0], np.ones((1, 2, 3), F32))


def test_check_10_round_is_forgotten_by_the_take(make):
    acc = make.sparse("float32", None)
    accept(acc, [0], np.ones((1, 2), F32))
    acc.take_grad(1, timeout=0)
    assert apply(acc, [0], np.ones((1, 3), F32))


def test_check_10_against_the_round_is_skipped_for_a_stale_gradient(make):
    acc = make.sparse("float32", None)
    acc.set_global_step(3)
    accept(acc, [0], np.ones((1, 2), F32))
    assert apply(acc, [0], np.ones((1, 3), F32), local_step=2).status is gq.ApplyStatus.STALE


def test_check_10_against_the_declared_shape_holds_for_a_stale_gradient(make):
    acc = make.sparse("float32", (5, 2))
    acc.set_global_step(3)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="expected values dim 1 to be 2, got 3"):
        apply(acc, [0], np.ones((1, 3), F32), local_step=2)


def test_check_11_compares_as_many_entries_as_both_have(make):
    acc = make.sparse("float32", None)
    words = "Shape mismatch: expected values dim 2 to be 5, got 3"
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=words):
        apply(acc, [0], np.ones((1, 2, 3), F32), grad_shape=[9, 2, 5])
    assert apply(acc, [0], np.ones((1, 2, 3), F32), grad_shape=[9, 2])
    assert apply(acc, [0], np.ones((1, 2, 3), F32), grad_shape=[9, 2, 3, 8])
    assert apply(acc, [0], np.ones((1, 2, 3), F32), grad_shape=[9, -1, 3])


def test_failed_apply_leaves_its_mark_unused(make):
    acc = make.sparse("float32", (5, 1))
    with pytest.raises(gq.InvalidArgumentError):
        apply(acc, [9], [1.0], worker="w", sequence=4)
    assert acc.last_sequence("w") == -1
    assert apply(acc, [1], [1.0], worker="w", sequence=4)
    assert_rows(acc.take_grad(1, timeout=0), [1], [1.0])
