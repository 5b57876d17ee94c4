"""SEMANTICS 2: what an apply accepts as ids, shapes, steps and values."""

import numpy as np
import pytest

import gradquorum as gq
from tests.support import accept, assert_rows, assert_same_bits, column, unchanged

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i4", ">u8"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_indices_of_any_integer_width_give_the_same_result(make, dtype):
    acc = make.sparse("float32", (90, 1))
    acc.apply_grad(np.array([77, 3], dtype), column(1, 2))
    assert_rows(acc.take_grad(1, timeout=0), [3, 77], [2, 1])


@pytest.mark.parametrize("indices", [[3, 1], (3, 1), [np.int32(3), np.int64(1)], np.array([0, 3, 0, 1])[1::2]])
def test_indices_as_lists_tuples_and_strided_arrays_are_accepted(make, indices):
    acc = make.sparse("float32", (5, 1))
    acc.apply_grad(indices, column(30, 10))
    assert_rows(acc.take_grad(1, timeout=0), [1, 3], [10, 30])


@pytest.mark.parametrize(
    "indices",
    [
        np.array([3.0]), [3.7], np.array([True]), [True], ["3"], np.array(["3"]), [None],
        np.array([2**63], np.uint64), [2**63], [2**64], np.array([1 + 0j]), np.zeros(0, np.float32), ...,
        np.array([3], object),
    ],
    ids=repr,
)  # fmt: skip
def test_indices_that_are_no_integers_or_too_large_are_an_error(make, indices):
    acc = make.sparse("float32", None)
    values = np.ones((1 if np.size(indices) else 0, 1), np.float32)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.apply_grad(indices, values)


@pytest.mark.parametrize("indices", [np.array([3.0]), np.array([True])])
def test_indices_array_of_a_wrong_dtype_is_an_invalid_dtype_error(make, indices):
    acc = make.sparse("float32", None)
    with pytest.raises(gq.InvalidDTypeError, match=str(indices.dtype)):
        acc.apply_grad(indices, column(1))


def test_indices_uint64_below_the_limit_are_accepted(make):
    acc = make.sparse("float32", None)
    acc.apply_grad(np.array([2**63 - 1], np.uint64), column(1))
    assert acc.take_grad(1, timeout=0).indices[0] == 2**63 - 1


@pytest.mark.parametrize("values", [np.zeros((0,), np.float32), np.zeros((0, 1), np.float32), []])
def test_indices_empty_list_is_an_empty_vector(make, values):
    acc = make.sparse("float32", (5, 1))
    assert acc.apply_grad([], values)
    taken = acc.take_grad(1, timeout=0)
    assert taken.indices.shape == (0,)
    assert taken.values.shape == (0, 1)


@pytest.mark.parametrize("step", [0, np.int8(0), np.uint64(0), np.array(0), np.array(0, np.int16), None])
def test_local_step_of_any_integer_width_is_accepted(make, step):
    acc = make.sparse("float32", (5, 1))
    assert acc.apply_grad([0], column(1), local_step=step)


@pytest.mark.parametrize(
    "step", [0.0, True, "0", np.array(0.0), np.float32(0), np.bool_(True), np.uint64(2**63), 2**63]
)
def test_local_step_that_is_no_integer_is_an_error(make, step):
    acc = make.sparse("float32", (5, 1))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="local_step"):
        acc.apply_grad([0], column(1), local_step=step)


@pytest.mark.parametrize("step", [[0], [], np.array([0]), np.array([[1]])], ids=repr)
def test_local_step_that_is_no_scalar_is_an_error(make, step):
    acc, dense = make.sparse("float32", (5, 1)), make.dense("float32", (1,))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="local_step must be scalar"):
        acc.apply_grad([0], column(1), local_step=step)
    with unchanged(dense), pytest.raises(gq.InvalidArgumentError, match="local_step must be scalar"):
        dense.apply_grad([1.0], local_step=step)


@pytest.mark.parametrize("values", [[[1.5], [2]], ((1.5,), (2,)), [np.array([1.5]), [2]]])
def test_values_as_lists_are_converted_to_the_dtype(make, values):
    acc = make.sparse("float32", (5, 1))
    acc.apply_grad([0, 1], values)
    taken = acc.take_grad(1, timeout=0)
    assert_rows(taken, [0, 1], [1.5, 2])
    assert taken.values.dtype == np.float32


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int32", [[1.5]]), ("int64", [[1.0]]), ("int32", [[1j]]), ("float32", [[1j]]), ("bfloat16", [[1j]]),
        ("float32", [["1"]]), ("float32", [[None]]), ("float32", [[1.0], [1.0, 2.0]]), ("int32", [[2**31]]),
    ],
    ids=str,
)  # fmt: skip
def test_values_as_lists_that_would_lose_their_kind_are_an_error(make, dtype, values):
    acc = make.sparse(dtype, None, reduction_type="SUM")
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.apply_grad(range(len(values)), values)


@pytest.mark.parametrize(("dtype", "values"), [("complex64", [[1]]), ("complex64", [[1.5]]), ("float16", [[3]])])
def test_values_as_lists_that_gain_kind_are_converted(make, dtype, values):
    acc = make.sparse(dtype, None)
    acc.apply_grad([0], values)
    assert_same_bits(acc.take_grad(1, timeout=0).values, np.array(values, dtype))


def _read_only(values):
    values = values.copy()
    values.flags.writeable = False
    return values


FORMS = {
    "strided": lambda values: np.repeat(values, 2, axis=0)[::2],
    "reversed": lambda values: values[::-1].copy()[::-1],
    "columns": lambda values: np.repeat(values, 3, axis=1)[:, ::3],
    "fortran": np.asfortranarray,
    "read_only": _read_only,
    "big_endian": lambda values: values.astype(values.dtype.newbyteorder(">")),
    "unaligned": lambda values: np.frombuffer(b"x" + values.tobytes(), values.dtype, offset=1).reshape(values.shape),
    "subclass": lambda values: values.view(np.recarray),
}


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("indices", [[0, 2, 3], [3, 0, 2], [2, 0, 2]])
def test_values_in_any_memory_layout_are_right(make, form, indices, copy):
    values = np.arange(12, dtype=np.float32).reshape(3, 4) + 1
    expected = np.zeros((5, 4), np.float32)
    np.add.at(expected, indices, values)
    acc = make.sparse("float32", (5, 4))
    acc.apply_grad(indices, FORMS[form](values), copy=copy)
    taken = acc.take_grad(1, timeout=0)
    np.testing.assert_array_equal(taken.values, expected[np.unique(indices)])
    assert taken.values.dtype == np.dtype("float32")


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_dense_values_in_any_memory_layout_are_right(make, form, copy):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    acc = make.dense("float32", (3, 4))
    acc.apply_grad(FORMS[form](values), copy=copy)
    np.testing.assert_array_equal(acc.take_grad(1, timeout=0), values)


class ArrayInterface:
    """Something of a framework that NumPy can read through `__array_interface__`."""

    def __init__(self, array):
        self._array = array
        self.__array_interface__ = array.__array_interface__


class DLPack:
    """Something of a framework that NumPy can read through DLPack only."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("wrap", [ArrayInterface, DLPack])
def test_arrays_of_a_framework_are_accepted_and_later_writes_change_nothing(make, wrap):
    indices, values = np.array([7, 1, 3]), column(1, 2, 3)
    acc = make.sparse("float32", (10, 1))
    acc.apply_grad(wrap(indices), wrap(values))
    indices[:], values[:] = 0, -9
    assert_rows(acc.take_grad(1, timeout=0), [1, 3, 7], [2, 3, 1])


@pytest.mark.parametrize("wrap", [ArrayInterface, DLPack])
def test_arrays_of_a_framework_of_another_dtype_are_an_error(make, wrap):
    acc = make.sparse("float32", (10, 1))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=r"float64.*float32|float32.*float64"):
        acc.apply_grad([1], wrap(np.ones((1, 1))))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.apply_grad(wrap(np.array([3.7])), column(1))


class Slices:
    """Slices of a framework: three attributes, nothing else."""

    def __init__(self, values, indices, dense_shape=None):
        self.values, self.indices, self.dense_shape = values, indices, dense_shape


@pytest.mark.parametrize("kind", [Slices, gq.IndexedSlices])
@pytest.mark.parametrize("dense_shape", [None, [5, 1], np.array([5, 1])])
def test_indexed_slices_are_applied_with_or_without_dense_shape(make, kind, dense_shape):
    acc = make.sparse("float32", (5, 1))
    assert acc.apply_indexed_slices_grad(kind(column(10, 30), np.array([1, 3]), dense_shape))
    assert_rows(acc.take_grad(1, timeout=0), [1, 3], [10, 30])


def test_indexed_slices_of_a_wrong_dense_shape_are_an_error(make):
    acc = make.sparse("float32", (5, 1))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="expected shape dim 0 to be 5, got 6"):
        acc.apply_indexed_slices_grad(gq.IndexedSlices(column(10), [1], [6, 1]))


def test_indexed_slices_has_the_fields_of_tensorflow(make):
    acc = make.sparse("float32", (5, 1))
    accept(acc, [2], [4])
    taken = acc.take_indexed_slices_grad(1, timeout=0)
    assert isinstance(taken, gq.IndexedSlices)
    np.testing.assert_array_equal(taken.indices, [2])
    np.testing.assert_array_equal(taken.values, [[4]])
    np.testing.assert_array_equal(taken.dense_shape, [5, 1])
    assert gq.IndexedSlices(column(1), [0]).dense_shape is None


@pytest.mark.parametrize("bad", [None, 3, column(1), "slices"], ids=repr)
def test_indexed_slices_that_are_none_are_an_error(make, bad):
    acc = make.sparse("float32", (5, 1))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.apply_indexed_slices_grad(bad)
