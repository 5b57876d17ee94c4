"""Eager mode: immediate effect, TensorFlow's tensors, errors and dtypes."""

import numpy as np
import pytest

import gradquorum as gq
from tests.support import wait_for_waiters

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_slices_in_and_out_with_repeats_are_summed(tf, gqtf):
    acc = gqtf.SparseConditionalAccumulator(tf.float32, shape=[5, 1])
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([3, 1, 3]), tf.constant([5, 1]))
    assert acc.apply_indexed_slices_grad(slices) is None
    count = acc.num_accumulated()
    assert (count.dtype, int(count)) == (tf.int32, 1)
    taken = acc.take_indexed_slices_grad(1)
    assert isinstance(taken, tf.IndexedSlices)
    assert taken.indices.numpy().tolist() == [1, 3]
    assert taken.values.numpy().tolist() == [[2.0], [5.0]]
    assert taken.dense_shape.numpy().tolist() == [5, 1]


def test_gradient_of_an_embedding_passes_as_it_is(tf, gqtf):
    table = tf.Variable(tf.ones([5, 2]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [4, 1, 4]))
    acc = gqtf.SparseConditionalAccumulator(table.dtype, table.shape)
    acc.apply_indexed_slices_grad(tape.gradient(loss, table), local_step=tf.Variable(0, dtype=tf.int64))
    indices, values, shape = acc.take_grad(tf.constant(1))
    assert indices.numpy().tolist() == [1, 4]
    assert values.numpy().tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert shape.numpy().tolist() == [5, 2]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_dtypes_come_back_as_they_went_in(tf, gqtf, name):
    dtype = tf.as_dtype(name)
    acc = gqtf.SparseConditionalAccumulator(dtype)
    acc.apply_grad([2, 2], tf.cast([[1], [2]], dtype))
    acc.apply_grad([2], [[5]])
    _, values, _ = acc.take_grad(2)
    assert values.dtype == dtype
    assert complex(values[0, 0].numpy()) == 4


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda acc: acc.apply_grad([9], [[1.0]]), "InvalidArgumentError", "index of slice 0 exceeded limits of shape"),
        (lambda acc: acc.apply_grad([1], np.ones((1, 1))), "InvalidArgumentError", "float64"),
        (lambda acc: acc.apply_grad([1.5], [[1.0]]), "InvalidArgumentError", "expected integers"),
        (lambda acc: acc.take_grad(0), "InvalidArgumentError", "num_required must be positive, but was 0"),
    ],
)
def test_refusals_are_tensorflows_errors(tf, gqtf, call, error, words):
    acc = gqtf.SparseConditionalAccumulator(tf.float32, shape=[5, 1])
    with pytest.raises(getattr(tf.errors, error), match=words):
        call(acc)
    assert int(acc.num_accumulated()) == 0


def test_unknown_reduction_is_refused_as_by_tensorflow(tf, gqtf):
    for classes in (gqtf, tf.compat.v1):
        with pytest.raises(tf.errors.InvalidArgumentError, match="Invalid"):
            classes.ConditionalAccumulator(tf.float32, reduction_type="Invalid")


def test_take_waits_for_other_threads(tf, gqtf, run_thread):
    acc = gqtf.SparseConditionalAccumulator(tf.float32)
    taking = run_thread(acc.take_grad, 1)
    wait_for_waiters(acc.accumulator_ref, 1)
    acc.apply_grad([1], [[1.0]])
    assert taking.result().indices.numpy().tolist() == [1]


def test_take_when_closed_meanwhile_is_cancelled(tf, gqtf, run_thread):
    acc = gqtf.SparseConditionalAccumulator(tf.float32)
    taking = run_thread(acc.take_grad, 1)
    wait_for_waiters(acc.accumulator_ref, 1)
    acc.accumulator_ref.close()
    error = taking.error()
    assert isinstance(error, tf.errors.CancelledError)
    assert "TakeGrad operation was cancelled" in error.message
    with pytest.raises(tf.errors.FailedPreconditionError):
        acc.num_accumulated()


def test_values_of_a_result_are_not_copied(tf, gqtf, monkeypatch):
    seen = []
    take = gq.SparseConditionalAccumulator.take_grad
    monkeypatch.setattr(
        gq.SparseConditionalAccumulator, "take_grad", lambda *args: seen.append(take(*args)) or seen[-1]
    )
    acc = gqtf.SparseConditionalAccumulator(tf.float32)
    acc.apply_grad(np.arange(1000), np.ones((1000, 64), np.float32))
    _, values, _ = acc.take_grad(1)
    if seen[0].values.ctypes.data % 64 == 0:  # what TensorFlow asks of memory that it takes over
        assert np.asarray(values).ctypes.data == seen[0].values.ctypes.data
    assert float(tf.reduce_sum(values)) == 64000


def test_dense(tf, gqtf):
    acc = gqtf.ConditionalAccumulator(tf.float32, shape=[2])
    theirs = tf.compat.v1.ConditionalAccumulator(tf.float32, shape=[2])
    for each in (acc, theirs):
        assert each.apply_grad([1.0, 2.0]) is None
        each.apply_grad(tf.constant([3.0, 4.0]))
        with pytest.raises(ValueError, match=r"Shapes \(3,\) and \(2,\) are incompatible"):
            each.apply_grad(np.ones(3, np.float32))
        assert each.take_grad(2).numpy().tolist() == [2.0, 3.0]
        assert int(each.num_accumulated()) == 0


def test_variables_of_keras_are_steps_and_numbers(tf, gqtf):
    keras = pytest.importorskip("keras")
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([keras.Variable([1.0])])
    acc = gqtf.SparseConditionalAccumulator(tf.float32, [5, 2])
    optimizer.iterations.assign(3)
    acc.set_global_step(optimizer.iterations)
    assert acc.accumulator_ref.global_step == 3
    acc.apply_grad(keras.Variable([1], dtype="int64"), keras.Variable([[1.0, 2.0]]), local_step=optimizer.iterations)
    acc.apply_grad([1], [[9.0, 9.0]], local_step=keras.Variable(2, dtype="int64"))
    assert int(acc.num_accumulated()) == 1
    assert acc.take_grad(keras.Variable(1, dtype="int32")).values.numpy().tolist() == [[1.0, 2.0]]
