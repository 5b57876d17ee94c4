"""Norms of and clipping on what a take returns."""

import copy
import math
import pickle
import warnings

import ml_dtypes
import numpy as np
import pytest

import gradquorum as gq

FLOATING = ["float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128"]


def gradient(values, dtype="float32"):
    values = np.asarray(values, dtype)
    counts = np.ones(len(values), np.int64)
    return gq.SparseGradient(np.arange(len(values)), values, np.array([-1, *values.shape[1:]]), 1, 0, counts)


def group_gradient(**members):
    return gq.GroupGradient(dict(members), 2, 7, ("a",))


def norm_by_fractions(values):
    """Return the norm with integers of any size: no overflow, no rounding but the last."""
    numbers = np.asarray(values).reshape(-1)
    parts = [*numbers.real.tolist(), *numbers.imag.tolist()] if numbers.dtype.kind == "c" else numbers.tolist()
    ratios = [float(part).as_integer_ratio() for part in parts]
    common = math.lcm(*(bottom for _, bottom in ratios))
    total = sum((top * (common // bottom)) ** 2 for top, bottom in ratios)
    return math.isqrt(total << 2400) / (common << 1200)


# The norm


@pytest.mark.parametrize("dtype", [*FLOATING, "int32", "int64"])
def test_norm_of_every_dtype_is_that_of_exact_arithmetic(dtype):
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((300, 7)) * 100).astype(np.dtype(dtype))
    if values.dtype.kind == "c":
        values += 1j * rng.standard_normal((300, 7)).astype(values.real.dtype)
    exact = norm_by_fractions(values.astype(np.float64) if values.dtype.kind in "V" else values)
    assert gradient(values, dtype).norm() == pytest.approx(exact, rel=1e-14)


def test_norm_of_more_values_than_are_looked_at_at_once():
    assert gradient(np.full((200_000, 2), 3.0)).norm() == pytest.approx(3 * math.sqrt(400_000), rel=1e-14)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(3e38, "float32"), (1e-45, "float32"), (3e38, ml_dtypes.bfloat16), (6e4, "float16"), (1e300, "float64"),
     (5e-324, "float64"), (1e-200, "float64"), (3e38 + 3e38j, "complex64"), (1e300 - 1e300j, "complex128")],
)  # fmt: skip
def test_norm_neither_overflows_nor_underflows_on_the_way(value, dtype):
    values = np.full((4, 3), value, dtype)
    wide = values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
    assert gradient(values, dtype).norm() == pytest.approx(norm_by_fractions(wide), rel=1e-12)
    assert gq.GroupGradient({"a": gradient(values, dtype)}, 1, 0, ()).norm() == gradient(values, dtype).norm()


def test_norm_that_itself_passes_float64_is_infinite_and_still_clips_to_finite_values():
    huge = gradient(np.full((4, 1), 1.5e308), "float64")
    assert huge.norm() == math.inf
    assert huge.is_finite()
    np.testing.assert_allclose(huge.clip_by_norm(2.0).values, 1.0, rtol=1e-15)
    np.testing.assert_allclose(group_gradient(a=huge).clip_by_norm(2.0)["a"].values, 1.0, rtol=1e-15)
    wide = gradient(np.full((1, 4), 1.5e308), "float64")
    assert wide.row_norms()[0] == math.inf
    np.testing.assert_allclose(wide.clip_rows_by_norm(2.0).values, 1.0, rtol=1e-15)


@pytest.mark.parametrize("values", [[[np.nan], [np.inf]], [[np.inf], [np.nan]], [[1.0], [np.nan]]])
def test_norm_is_nan_if_a_value_is_and_else_infinite_if_a_value_is(values):
    assert math.isnan(gradient(values).norm())
    assert math.isnan(group_gradient(a=gradient([[np.inf]]), b=gradient(values)).norm())
    assert gradient([[1.0], [-np.inf]]).norm() == math.inf
    assert gradient([[1.0], [-np.inf]], "float64").norm() == math.inf


def test_norm_of_no_rows_and_of_zeros_is_zero():
    assert gradient(np.zeros((0, 3))).norm() == 0
    assert gradient(np.zeros((2, 0))).norm() == 0
    assert gradient(np.zeros((2, 3))).norm() == 0
    assert group_gradient(a=gradient(np.zeros((0, 3)))).norm() == 0


def test_norm_of_rows_of_one_number_and_of_rows_of_several_dims():
    assert gradient([3.0, 4.0]).norm() == 5.0
    assert gradient(np.ones((2, 2, 2, 2))).norm() == 4.0
    np.testing.assert_array_equal(gradient([3.0, -4.0]).row_norms(), [3.0, 4.0])
    np.testing.assert_allclose(gradient(np.ones((2, 2, 2))).row_norms(), 2.0)


@pytest.mark.parametrize("dtype", FLOATING)
def test_row_norms_are_the_norms_of_the_rows(dtype):
    values = np.random.default_rng(1).standard_normal((50, 5)).astype(np.dtype(dtype))
    expected = [gradient(values[i : i + 1], dtype).norm() for i in range(50)]
    found = gradient(values, dtype).row_norms()
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_global_norm_is_that_of_all_members_together():
    members = group_gradient(a=gradient([[1.0, 2.0]]), b=np.float32([2.0]), c=np.float64(4.0).reshape(()))
    assert members.norm() == 5.0


def test_global_norm_of_members_of_very_different_size_is_that_of_the_largest():
    members = group_gradient(a=gradient([[1e300]], "float64"), b=gradient([[1e-300]], "float64"))
    assert members.norm() == 1e300


# Finite


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_is_finite_sees_one_bad_value(dtype, bad):
    values = np.ones((40_000, 3), np.dtype(dtype))
    assert gradient(values, dtype).is_finite()
    assert group_gradient(a=gradient(values, dtype), b=values).is_finite()
    values[-1, -1] = bad * 1j if values.dtype.kind == "c" and math.isinf(bad) else bad
    assert not gradient(values, dtype).is_finite()
    assert not group_gradient(a=gradient([[1.0]]), b=values).is_finite()


def test_is_finite_of_integers_is_true():
    assert gradient([[2**62]], "int64").is_finite()


# Clipping


@pytest.mark.parametrize("dtype", FLOATING)
def test_clip_by_norm_scales_to_the_bound_and_rounds_once(dtype):
    dtype = np.dtype(dtype)
    values = np.random.default_rng(2).standard_normal((100, 3)).astype(dtype)
    clipped = gradient(values, dtype).clip_by_norm(1.5)
    assert clipped.values.dtype == dtype
    digits = {"float16": 1e-3, "bfloat16": 1e-2}.get(dtype.name, 1e-6)
    assert clipped.norm() == pytest.approx(1.5, rel=digits)
    wide = values.astype(np.complex128 if dtype.kind == "c" else np.float64)
    expected = wide * (1.5 / gradient(values, dtype).norm())
    if dtype.kind != "V":
        np.testing.assert_array_equal(clipped.values, expected.astype(dtype))


def test_clip_by_norm_below_the_bound_keeps_the_bits():
    values = np.float32([[3.0], [-0.0], [4.0]])
    for bound in (5.0, 6, np.float32(7), math.inf):
        assert gradient(values).clip_by_norm(bound).values.tobytes() == values.tobytes()
        assert gradient(values).clip_rows_by_norm(bound).values.tobytes() == values.tobytes()
        assert group_gradient(a=values).clip_by_norm(bound)["a"].tobytes() == values.tobytes()


def test_clip_to_zero_gives_zeros():
    assert not gradient([[3.0], [4.0]]).clip_by_norm(0).values.any()
    assert not gradient([[3.0], [4.0]]).clip_rows_by_norm(0).values.any()
    assert not gradient([[0.0]]).clip_by_norm(0).values.any()


def test_bound_beyond_all_floats_clips_nothing():
    before = gradient([[3e38], [1.0]])
    for after in (before.clip_by_norm(10**400), before.clip_rows_by_norm(10**400)):
        assert after.values.tobytes() == before.values.tobytes()


def test_clip_returns_a_new_gradient_that_shares_nothing_and_leaves_the_old_one():
    for bound in (1.0, 100.0):
        before = gradient([[3.0], [4.0]])
        for after in (before.clip_by_norm(bound), before.clip_rows_by_norm(bound)):
            after.values[:] = after.indices[:] = after.counts[:] = 9
            after.shape[:] = 9
            assert (after.num_gradients, after.step, after.workers) == (1, 0, ())
        np.testing.assert_array_equal(before.values, [[3.0], [4.0]])
        np.testing.assert_array_equal(before.indices, [0, 1])
        np.testing.assert_array_equal(before.counts, [1, 1])
        np.testing.assert_array_equal(before.shape, [-1, 1])


def test_clip_rows_touches_only_the_rows_above_the_bound():
    values = np.float32([[0.1, 0.2], [3.0, 4.0], [0.0, 0.0], [3e38, 3e38], [1e-45, 0.0]])
    clipped = gradient(values).clip_rows_by_norm(1.0)
    assert clipped.values[[0, 2, 4]].tobytes() == values[[0, 2, 4]].tobytes()
    np.testing.assert_allclose(clipped.row_norms()[[1, 3]], 1.0, rtol=1e-6)
    np.testing.assert_allclose(clipped.values[1], [0.6, 0.8], rtol=1e-6)


def test_clip_rows_of_more_rows_than_are_looked_at_at_once():
    values = np.ones((70_000, 2), np.float32)
    values[::7] = 0.1
    clipped = gradient(values).clip_rows_by_norm(1.0).values
    np.testing.assert_array_equal(clipped[::7], values[::7])
    np.testing.assert_allclose(clipped[1::7], math.sqrt(0.5), rtol=1e-6)


def test_clip_rows_of_no_rows_and_of_empty_rows():
    assert gradient(np.zeros((0, 3))).clip_rows_by_norm(1.0).values.shape == (0, 3)
    assert gradient(np.zeros((2, 0))).clip_rows_by_norm(1.0).values.shape == (2, 0)


def test_clip_of_what_is_not_finite_is_nan_and_cannot_pass_unseen():
    for bad in (np.nan, np.inf):
        assert np.isnan(gradient([[bad], [0.0]]).clip_by_norm(1.0).values).all()
        members = group_gradient(a=gradient([[1.0]]), b=np.float32([bad, 0.0])).clip_by_norm(1.0)
        assert np.isnan(members["a"].values).all()
        assert np.isnan(members["b"]).all()
        rows = gradient([[bad, 1.0], [3.0, 4.0]]).clip_rows_by_norm(1.0).values
        assert np.isnan(rows[0]).all()
        np.testing.assert_allclose(rows[1], [0.6, 0.8], rtol=1e-6)


def test_clip_of_a_group_scales_all_members_by_one_factor():
    members = group_gradient(a=gradient([[3.0, 0.0]]), b=np.float64([0.0, 4.0]), c=np.array(12j, np.complex64))
    clipped = members.clip_by_norm(1.3)
    np.testing.assert_allclose(clipped["a"].values, [[0.3, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], [0.0, 0.4], rtol=1e-15)
    np.testing.assert_allclose(clipped["c"], 1.2j, rtol=1e-6)
    assert clipped["b"].dtype == np.float64
    assert clipped["c"].shape == ()
    assert clipped["b"] is not members["b"]
    assert (clipped.num_gradients, clipped.step, clipped.workers) == (2, 7, ("a",))
    assert members.norm() == 13.0


def test_clip_of_a_group_agrees_with_the_global_norm_of_numpy():
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((20, 4)).astype(np.float32), rng.standard_normal(9).astype(np.float32)
    norm = np.sqrt(np.square(a, dtype=np.float64).sum() + np.square(b, dtype=np.float64).sum())
    clipped = group_gradient(a=gradient(a), b=b).clip_by_norm(0.5)
    np.testing.assert_allclose(clipped["a"].values, a * (0.5 / norm), rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], b * (0.5 / norm), rtol=1e-6)


@pytest.mark.parametrize("bound", [-1, -0.5, math.nan, np.float32(-1)])
def test_clip_refuses_a_bound_that_cannot_be(bound):
    for clip in (gradient([[1.0]]).clip_by_norm, gradient([[1.0]]).clip_rows_by_norm, group_gradient().clip_by_norm):
        with pytest.raises(gq.InvalidArgumentError, match="max_norm: expected 0 or more"):
            clip(bound)


@pytest.mark.parametrize("bound", ["1", None, True, 1j, [1.0]])
def test_clip_refuses_a_bound_that_is_no_number(bound):
    with pytest.raises(gq.InvalidDTypeError, match="max_norm: expected a number"):
        gradient([[1.0]]).clip_by_norm(bound)


def test_clip_refuses_integers_as_a_scaled_integer_is_none():
    for clip in (
        gradient([[1]], "int64").clip_by_norm,
        gradient([[1]], "int32").clip_rows_by_norm,
        group_gradient(a=gradient([[1.0]]), b=np.int64([1])).clip_by_norm,
    ):
        with pytest.raises(gq.InvalidDTypeError, match="expected a gradient of floating or complex dtype, got int"):
            clip(0.5)


def test_a_clipped_gradient_pickles_and_can_be_applied_again(make):
    acc = make.sparse("float32", (5, 1))
    acc.apply_grad([3, 1], [[30.0], [40.0]], local_step=None)
    clipped = pickle.loads(pickle.dumps(acc.take_grad(1).clip_by_norm(5.0)))
    acc.apply_grad(*clipped, local_step=None)
    np.testing.assert_allclose(acc.take_grad(1).values, [[4.0], [3.0]], rtol=1e-6)


def taken():
    with gq.SparseConditionalAccumulator("float32", (None, 2, 3)) as acc:
        acc.apply_grad([4, 1], np.ones((2, 2, 3), np.float32))
        return acc.take_grad(1)


def test_shape_when_read_during_its_first_read_expect_one_array_for_both(monkeypatch):
    gradient, inner = taken(), []
    make_array = np.array

    def array(*args):  # another thread, or a handler, comes in when the first reader makes the array
        if not inner:
            inner.append(None)
            inner[0] = gradient.shape
        return make_array(*args)

    monkeypatch.setattr(np, "array", array)
    outer = gradient.shape
    assert outer is inner[0] is gradient.shape
    np.testing.assert_array_equal(outer, [-1, 2, 3])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda gradient: pickle.loads(pickle.dumps(gradient))])
def test_shape_when_copied_before_it_was_read_expect_the_same(copied):
    gradient = taken()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy 2.5
        gradient.values.shape = (2, 6)  # its owner may; the shape is that of the round all the same
    twin = copied(gradient)
    assert twin.shape.dtype == np.int64
    np.testing.assert_array_equal(twin.shape, [-1, 2, 3])
    np.testing.assert_array_equal(twin[2], gradient.as_indexed_slices().dense_shape)


def test_shape_when_written_expect_what_was_written():
    gradient = taken()
    gradient.shape = np.array([7, 2, 3])
    np.testing.assert_array_equal(gradient.shape, [7, 2, 3])
