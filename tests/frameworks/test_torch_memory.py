"""Sparse tensors read where they lie: lent, oddly strided, of another dtype; and tensors of every known shape out."""

import gc
import weakref

import numpy as np
import pytest

import gradquorum as gq
from tests.support import only_local, unchanged

torch = pytest.importorskip("torch")
gqt = pytest.importorskip("gradquorum.torch")
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]


@only_local("arrays are lent within a process")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_parameters_gradient_is_lent_where_it_lies_and_lives_as_long(make, dtype):
    acc = make.sparse(dtype, (10, 2))
    gradient = torch.sparse_coo_tensor([[1, 3, 7]], torch.arange(6, dtype=dtype).reshape(3, 2), (10, 2))
    values = gradient._values()
    receipt = gqt.apply_grad(acc, gradient, copy=False)
    assert receipt.lent
    values.mul_(2)  # allowed for nobody: it shows that there is no copy
    alive = weakref.ref(values)
    del gradient, values
    gc.collect()
    np.testing.assert_array_equal(gqt.take_grad(acc, 1, timeout=0).values(), 2 * np.arange(6).reshape(3, 2))
    gc.collect()
    assert alive() is None


ODD = {
    "expanded": lambda values: values[:1].expand(3, 2),
    "transposed": lambda values: values.T.contiguous().T,
    "strided": lambda values: torch.cat([values, values], 1)[:, ::2],
    "offset": lambda values: torch.cat([values, values])[3:],
}


@pytest.mark.parametrize("odd", ODD)
def test_values_that_do_not_lie_one_after_the_other_are_right(make, odd):
    values = ODD[odd](torch.arange(6.0).reshape(3, 2))
    acc = make.sparse("float32", (10, 2))
    gradient = torch.sparse_coo_tensor(torch.tensor([[7, 1, 3]]), values, (10, 2), check_invariants=False)
    assert gqt.apply_grad(acc, gradient)
    np.testing.assert_array_equal(gqt.take_grad(acc, 1, timeout=0).values(), values[[1, 2, 0]])


def test_a_gradient_of_another_dtype_or_size_is_refused_with_what_to_write(make):
    acc = make.sparse("float32", (10, 2))
    weight = torch.nn.Parameter(torch.zeros(10, 2, dtype=torch.float64))
    weight.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2, dtype=torch.float64), (10, 2))
    with unchanged(acc), pytest.raises(gq.InvalidDTypeError, match=r"\.to\(torch\.float32\)"):
        gqt.apply_grad(acc, weight)
    for ids, words in (([[10]], "index is 10 exceeded 10"), ([[-1]], "slice 0 is negative")):
        wrong = torch.sparse_coo_tensor(ids, torch.ones(1, 2), (10, 2), check_invariants=False)
        with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=words):
            gqt.apply_grad(acc, wrong)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int64"])
@pytest.mark.parametrize("row", [(), (2,), (2, 1, 3), (0,), (1,) * 12], ids=str)
def test_a_tensor_that_is_taken_outlives_all_else_and_is_the_owners(make, dtype, row):
    acc = make.sparse(dtype, (10, *row), reduction_type="SUM")
    rows = torch.ones(2, *row).to(getattr(torch, dtype))
    acc.apply_grad(torch.tensor([7, 1]), rows)
    grad = gqt.take_grad(acc, 1, timeout=0)
    values, indices = grad._values(), grad._indices()
    acc.close()
    del grad, acc
    gc.collect()
    assert indices.tolist() == [[1, 7]]
    assert values.dtype is rows.dtype
    values.mul_(3)
    assert torch.equal(values, rows * 3)


def test_a_round_without_rows_comes_out_as_a_tensor_without_rows(make):
    acc = make.sparse("float32", (10, 2))
    acc.apply_grad(np.empty(0, np.int64), np.empty((0, 2), np.float32))
    grad = gqt.take_grad(acc, 1, timeout=0)
    assert grad.shape == (10, 2)
    assert grad.indices().shape == (1, 0)
    assert grad.values().shape == (0, 2)


def test_a_table_of_more_numbers_than_a_tensor_has_is_an_error_and_the_round_is_kept(make):
    acc = make.sparse("float32", (2**62, 4))
    acc.apply_grad([2**61], np.ones((1, 4), np.float32))
    with pytest.raises(gq.InvalidArgumentError, match="as a tensor holds no more"):
        gqt.take_grad(acc, 1, timeout=0)
    assert acc.take_grad(1, timeout=0).indices.tolist() == [2**61]


@pytest.mark.parametrize("timeout", [False, "", "1", -1, float("nan")])
def test_a_take_with_a_timeout_that_cannot_be_is_refused(make, timeout):
    acc = make.sparse("float32", (10, 2))
    gqt.apply_grad(acc, torch.sparse_coo_tensor([[7, 1]], torch.ones(2, 2), (10, 2)))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="timeout"):
        gqt.take_grad(acc, 1, timeout=timeout)


@pytest.mark.parametrize("shape", [None, (None, 2), (10, None), (10, 2), (10,), (None,)])
def test_gradients_come_out_whatever_the_shape_says(make, shape):
    acc = make.sparse("float32", shape)
    gqt.apply_grad(acc, torch.sparse_coo_tensor([[7, 1]], torch.ones(2, 2), (10, 2)))
    grad = gqt.take_grad(acc, 1, timeout=0)
    assert grad.is_coalesced()
    assert grad.shape == (10 if shape and shape[0] else 8, 2)
