"""Accumulators of a server in graphs of TensorFlow 1: the round lives there, and TensorFlow has no part in it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradquorum.errors import DeadlineExceededError
from gradquorum.tensorflow.backend import AbstractBackend, GradientTensors, as_step_tensor

__all__ = ["PolledBackend"]

POLL_SECONDS = 0.1
"""How long a take waits before it lets its session look whether it has been closed or its time is over."""


class PolledBackend(AbstractBackend):
    """Builds operations that call an accumulator of this library.

    A take is a loop of short takes, between which its session may end it. So takes of several sessions are served in
    the order in which they happen to come back, and not strictly in that in which they began.
    """

    def __init__(self, accumulator: Any, *, sparse: bool, dtype: Any) -> None:
        self.reference = accumulator
        self._acc = accumulator
        self._sparse = sparse
        self._dtype = dtype

    def apply(self, gradient: Sequence[Any], local_step: Any, name: str | None) -> Any:
        step = as_step_tensor("local_step", local_step)
        if self._sparse:
            tensors = GradientTensors.of(gradient, self._dtype)
            call = functools.partial(self._apply_sparse, has_shape=tensors.has_shape)
            return tf.numpy_function(call, [*tensors[:3], step], [], name=name or "SparseAccumulatorApplyGradient")
        grad = tf.convert_to_tensor(gradient[0], self._dtype)
        return tf.numpy_function(self._apply_dense, [grad, step], [], name=name or "AccumulatorApplyGradient")

    def take(self, num_required: Any, name: str | None) -> Sequence[Any]:
        dtypes = [tf.int64, self._dtype, tf.int64] if self._sparse else [self._dtype]
        nothing = [tf.zeros([0], dtype) for dtype in dtypes]
        anything = [tf.TensorShape(None)] * len(dtypes)
        with tf.name_scope(name or ("SparseAccumulatorTakeGradient" if self._sparse else "AccumulatorTakeGradient")):
            _, *result = tf.while_loop(
                lambda done, *_: tf.logical_not(done),
                lambda *_: self._try(num_required, dtypes),
                [tf.constant(False), *nothing],
                shape_invariants=[tf.TensorShape([]), *anything],
            )
            return list(result)

    def num_accumulated(self, name: str) -> Any:
        return tf.ensure_shape(tf.numpy_function(self._count, [], tf.int32), [], name=name)

    def set_global_step(self, step: Any, name: str | None) -> Any:
        step = as_step_tensor("new_global_step", step)
        return tf.numpy_function(self._set_step, [step], [], name=name or "AccumulatorSetGlobalStep")

    def _try(self, num_required: Any, dtypes: list[Any]) -> list[Any]:
        done, *result = tf.numpy_function(self._take, [tf.cast(num_required, tf.int64)], [tf.bool, *dtypes])
        return [tf.ensure_shape(done, []), *result]

    # What operations call

    def _take(self, num_required: Any) -> list[Any]:
        try:
            result = self._acc.take_grad(num_required, timeout=POLL_SECONDS)
        except DeadlineExceededError:
            dtype = self._acc.dtype
            empty = [np.zeros(0, np.int64), np.zeros(0, dtype), np.zeros(0, np.int64)]
            return [False, *(empty if self._sparse else empty[1:2])]
        return [True, *(result if self._sparse else [result])]

    def _apply_sparse(self, indices: Any, values: Any, shape: Any, step: Any, *, has_shape: bool) -> None:
        self._acc.apply_grad(indices, values, shape if has_shape else None, local_step=step)

    def _apply_dense(self, grad: Any, step: Any) -> None:
        self._acc.apply_grad(grad, local_step=step)

    def _count(self) -> Any:
        return np.int32(self._acc.num_accumulated())

    def _set_step(self, step: Any) -> None:
        self._acc.set_global_step(step)
