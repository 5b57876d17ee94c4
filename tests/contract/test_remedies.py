"""Refusals say what to do: TensorFlow's own words first, where SEMANTICS has them, then the remedy."""

import re

import numpy as np
import pytest

import gradquorum as gq
from tests.support import unchanged

REFUSED = {
    "values without rows, declared": (
        lambda acc: acc.apply_grad([1, 2], [1.0, 2.0]),
        "Shape mismatch: expected values rank at least 2, got 1; values have a row for each id: "
        "for rows of one number write values[:, None]",
    ),
    "an id beyond": (
        lambda acc: acc.apply_grad([1, 10], [[1.0], [2.0]]),
        "Shape mismatch: index of slice 1 exceeded limits of shape; index is 10 exceeded 10; ids go from 0 to 9",
    ),
    "too few values": (
        lambda acc: acc.apply_grad([1, 2], [[1.0]]),
        "Expected 2 non-empty input values, got 1; give a row for each id",
    ),
    "no quorum": (
        lambda acc: acc.take_grad(0),
        "num_required must be positive, but was 0; give the gradients to wait for, 1 or more",
    ),
    "exact": (lambda acc: acc.take_grad(1, exact=True), "exact=True: expected .* got one made with compact=True"),
    "step": (lambda acc: acc.apply_grad([1], [[1.0]], local_step=[1]), "local_step must be scalar, got [1]; write the"),
    "ragged": (lambda acc: acc.apply_grad([1, 2], [[1], [2, 3]]), "grad_values: expected an array, got a ragged list"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusal_of_a_sparse_call_says_what_to_do(make, what):
    acc = make.sparse("float32", (10, 1))
    call, words = REFUSED[what]
    pattern = "^" + re.escape(words).replace(re.escape(".*"), ".*")
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=pattern):
        call(acc)


def test_values_without_rows_in_a_round_that_has_them_expect_what_to_write(make):
    acc = make.sparse("float32", None)
    acc.apply_grad([1], [[1.0]])
    words = r"^Shape mismatch: expected values rank 2, got 1; .*write values\[:, None\]$"
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=words):
        acc.apply_grad([1, 2], [1.0, 2.0])
    values = np.array([1.0, 2.0], np.float32)
    assert acc.apply_grad([1, 2], values[:, None])


def test_id_of_a_table_without_rows_expect_that_it_has_none(make):
    acc = make.sparse("float32", (0, 1))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=r"exceeded 0; a table of 0 rows has no ids$"):
        acc.apply_grad([0], [[1.0]])


def test_sparse_call_on_a_dense_accumulator_expect_the_class_to_use(make):
    acc = make.dense("float32", (1,))
    words = r"^local_step must be scalar, got \[\[1.0\]\]; for \(indices, values\) make a SparseConditionalAccumulator$"
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=words):
        acc.apply_grad([0], [[1.0]])
