"""SEMANTICS 1: construction and members."""

import ml_dtypes
import numpy as np
import pytest

import gradquorum as gq
from tests.support import accept, assert_rows, assert_same_bits, column

FLOATING = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
REDUCTIONS = ["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"]


def numpy_dtype(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_dtype_floating_or_complex_works_with_every_reduction(make, dtype, reduction):
    acc = make.sparse(dtype, (5, 2), reduction_type=reduction)
    values = np.array([[1, 2], [3, 4]], numpy_dtype(dtype))
    accept(acc, [0, 3], values)
    indices, taken, shape = acc.take_grad(1, timeout=0)
    assert_same_bits(taken, values)
    np.testing.assert_array_equal(indices, [0, 3])
    np.testing.assert_array_equal(shape, [5, 2])
    assert acc.dtype == numpy_dtype(dtype)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_dense_dtype_floating_or_complex_works_with_every_reduction(make, dtype, reduction):
    acc = make.dense(dtype, (2,), reduction_type=reduction)
    acc.apply_grad(np.array([1, 2], numpy_dtype(dtype)), local_step=None)
    acc.apply_grad(np.array([3, 4], numpy_dtype(dtype)), local_step=None)
    expected = [4, 6] if reduction == "SUM" else [2, 3]
    assert_same_bits(acc.take_grad(2, timeout=0), np.array(expected, numpy_dtype(dtype)))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_dtype_integer_with_sum_works(make, dtype):
    acc = make.sparse(dtype, (5, 1), reduction_type="SUM")
    accept(acc, [1], [2])
    accept(acc, [1], [5])
    taken = acc.take_grad(2, timeout=0)
    assert_rows(taken, [1], [7])
    assert taken.values.dtype == np.dtype(dtype)


@pytest.mark.parametrize("reduction", ["MEAN", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_dtype_integer_with_a_mean_raises(make, dtype, reduction):
    for kind in (make.sparse, make.dense):
        with pytest.raises(gq.InvalidArgumentError):
            kind(dtype, (5, 1), reduction_type=reduction)


@pytest.mark.parametrize("dtype", ["bool", "U5", "S3", "O", object, str, "datetime64[s]", "no such thing", None])
def test_dtype_unsupported_raises_invalid_dtype_error_also_a_type_error(make, dtype):
    for kind in (make.sparse, make.dense):
        with pytest.raises(gq.InvalidDTypeError) as caught:
            kind(dtype, (5, 1))
        assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("dtype", [np.float32, "float32", "f4", ">f4", np.dtype("float32")])
def test_dtype_given_as_anything_numpy_calls_a_dtype_is_float32(make, dtype):
    assert make.sparse(dtype, (5, 1)).dtype == np.dtype("float32")


def test_dtype_bfloat16_arrays_are_those_of_ml_dtypes(make):
    acc = make.sparse(ml_dtypes.bfloat16, (5, 1))
    accept(acc, [0], np.array([[1.5]], ml_dtypes.bfloat16))
    assert acc.take_grad(1, timeout=0).values.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("shape", [None, (), []])
def test_shape_none_or_empty_is_no_constraint(make, shape):
    acc = make.sparse("float32", shape)
    accept(acc, [7], np.ones((1, 2, 3), np.float32))
    np.testing.assert_array_equal(acc.take_grad(1, timeout=0).shape, [-1, 2, 3])
    accept(acc, [9], np.ones((1,), np.float32))
    np.testing.assert_array_equal(acc.take_grad(1, timeout=0).shape, [-1])


def test_shape_with_unknown_dims_leaves_them_to_the_gradients(make):
    acc = make.sparse("float32", (None, 2))
    accept(acc, [2**40], np.ones((1, 2), np.float32))
    assert acc.take_grad(1, timeout=0).indices[0] == 2**40
    assert list(acc.shape) == [None, 2]


@pytest.mark.parametrize("shape", [(-1, 2), (5, -1), (-2,)])
def test_shape_with_minus_one_is_refused(make, shape):
    for kind in (make.sparse, make.dense):
        with pytest.raises(gq.InvalidArgumentError):
            kind("float32", shape)


@pytest.mark.parametrize("shape", [(2.5, 2), "ab", (True, 2), ("5",)])
def test_shape_that_is_no_shape_raises(make, shape):
    with pytest.raises(gq.InvalidArgumentError):
        make.sparse("float32", shape)


def test_shape_of_a_huge_dim_zero_allocates_no_rows(make):
    acc = make.sparse("float32", (2**62, 3))
    accept(acc, [2**61], np.ones((1, 3), np.float32))
    assert acc.take_grad(1, timeout=0).indices[0] == 2**61


@pytest.mark.parametrize("reduction", ["mean", "Sum", "AVERAGE", "", None, 3])
def test_reduction_type_unknown_is_a_value_error_naming_the_allowed_set(make, reduction):
    for kind in (make.sparse, make.dense):
        with pytest.raises(ValueError, match=r"MEAN\b.*") as caught:
            kind("float32", (5, 1), reduction_type=reduction)
        assert isinstance(caught.value, gq.InvalidArgumentError)
        for allowed in REDUCTIONS:
            assert allowed in str(caught.value)


def test_reduction_type_default_is_mean(make):
    assert make.sparse().reduction_type == "MEAN"
    assert make.dense().reduction_type == "MEAN"


def test_weight_under_another_reduction_is_an_error(make):
    acc = make.sparse("float32", (5, 1))
    with pytest.raises(gq.InvalidArgumentError, match="weight"):
        acc.apply_grad([0], [[1.0]], weight=2.0)
    assert acc.num_accumulated() == 0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300, "heavy", None])
def test_weight_not_finite_and_positive_is_an_error(make, weight):
    acc = make.sparse("float32", (5, 1), reduction_type="MEAN_BY_WEIGHT")
    with pytest.raises(gq.InvalidArgumentError, match="weight"):
        acc.apply_grad([0], [[1.0]], weight=weight)
    assert acc.num_accumulated() == 0


def test_mean_by_weight_divides_by_the_weights_of_all_gradients_of_the_round(make):
    acc = make.sparse("float32", (5, 1), reduction_type="MEAN_BY_WEIGHT")
    accept(acc, [0], [3.0], weight=1.0)
    accept(acc, [1], [8.0], weight=3.0)
    assert_rows(acc.take_grad(2, timeout=0), [0, 1], [0.75, 6.0])


def test_mean_divides_each_row_by_the_gradients_that_touched_it(make):
    acc = make.sparse("float32", (5, 1))
    accept(acc, [0, 1], [2.0, 4.0])
    accept(acc, [1], [8.0])
    taken = acc.take_grad(2, timeout=0)
    assert_rows(taken, [0, 1], [2.0, 6.0])
    np.testing.assert_array_equal(taken.counts, [1, 2])


def test_name_is_the_last_path_component(make):
    assert make.sparse(name="sc/Q").name == "Q"
    assert make.dense(name="a/b/c").name == "c"
    assert make.group({"x": gq.DenseSpec("float32", (1,))}, name="g/H").name == "H"


def test_name_left_is_that_of_the_op(make):
    assert make.sparse().name == "sparse_conditional_accumulator"
    assert make.dense().name == "conditional_accumulator"
    assert make.group({"x": gq.DenseSpec("float32", (1,))}).name == "accumulator_group"


def test_properties_of_a_new_accumulator(make, engine):
    acc = make.sparse("float64", (5, None), reduction_type="SUM")
    assert acc.dtype == np.float64
    assert list(acc.shape) == [5, None]
    assert acc.reduction_type == "SUM"
    assert (acc.global_step, acc.published_step, acc.num_undelivered, acc.num_workers) == (0, 0, 0, 0)
    assert acc.num_accumulated() == 0
    assert type(acc.num_accumulated()) is int
    assert acc.engine == engine
    assert not acc.closed


def test_base_class_is_the_abstract_parent_of_the_two_classes(make):
    assert issubclass(gq.SparseConditionalAccumulator, gq.ConditionalAccumulatorBase)
    assert issubclass(gq.ConditionalAccumulator, gq.ConditionalAccumulatorBase)
    with pytest.raises(TypeError):
        gq.ConditionalAccumulatorBase()
    assert not hasattr(make.sparse(), "accumulator_ref")


@pytest.mark.parametrize(
    "option",
    [
        {"target": "nowhere"}, {"order": "random"}, {"on_nonfinite": "ignore"}, {"on_full": "wait"},
        {"staleness": "loose"}, {"engine": "abacus"}, {"num_threads": 0}, {"num_threads": -1}, {"max_bytes": -1},
        {"expected_workers": 0}, {"max_per_worker": 0}, {"accumulate_dtype": "float16"}, {"compact": "no"},
        {"accumulate_dtype": "int64"}, {"max_per_worker": 1.5}, {"expected_workers": "many"},
    ],
    ids=str,
)  # fmt: skip
def test_option_of_an_unknown_value_raises_and_names_itself(make, option):
    for kind in (make.sparse, make.dense):
        with pytest.raises(gq.InvalidArgumentError, match=next(iter(option))):
            kind("float32", (5, 1), **option)


def test_repr_helps(make):
    text = repr(make.sparse("float32", (5, 1), name="embedding"))
    assert "SparseConditionalAccumulator" in text
    assert "float32" in text
    assert "embedding" in text


def test_values_of_one_accumulator_are_not_another_s(make):
    one, other = make.sparse("float32", (5, 1)), make.sparse("float32", (5, 1))
    accept(one, [0], column(1.0))
    assert other.num_accumulated() == 0


@pytest.mark.frameworks
def test_dtype_of_torch_is_that_of_numpy(make):
    torch = pytest.importorskip("torch")
    for name in FLOATING:
        assert make.sparse(getattr(torch, name), (5, 1)).dtype == numpy_dtype(name)
    with pytest.raises(gq.InvalidDTypeError):
        make.sparse(torch.bool, (5, 1))


class FrameworkDType:
    """A dtype of a framework that says which of NumPy's it is."""

    as_numpy_dtype = np.float64


def test_dtype_of_a_framework_that_names_numpy_s_is_accepted(make):
    assert make.sparse(FrameworkDType(), (5, 1)).dtype == np.float64
