"""Operations of functions and of graphs that call an accumulator of this library."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradquorum.tensorflow.backend import AbstractBackend, GradientTensors, as_integer_tensor, as_step_tensor
from gradquorum.tensorflow.offers import AbstractListener, Offers

__all__ = ["AbstractWait", "OperationsBackend", "as_list"]


class AbstractWait(AbstractListener):
    """How operations wait for a round without holding the threads that other operations need."""

    @abstractmethod
    def build(self, offers: Offers, num_required: Any, empty: list[Any], name: str) -> list[Any]:
        """Build the operations of a take and return its results, of the dtypes of `empty` and of that name."""


class OperationsBackend(AbstractBackend):
    """Builds operations that call an accumulator of this library. They are stateful."""

    def __init__(self, accumulator: Any, wait: AbstractWait, *, sparse: bool, dtype: Any) -> None:
        self.reference = accumulator
        self._acc = accumulator
        self._offers = Offers(accumulator, wait)
        self._wait = wait
        self._sparse = sparse
        self._kind = "Sparse" if sparse else "Resource"
        """What the names of TensorFlow's operations begin with."""
        self._dtype = dtype

    def apply(self, gradient: Sequence[Any], local_step: Any, name: str | None) -> Any:
        step = as_step_tensor("local_step", local_step)
        name = name or f"{self._kind}AccumulatorApplyGradient"
        if self._sparse:
            tensors = GradientTensors.of(gradient, self._dtype)
            call = functools.partial(self._apply_sparse, has_shape=tensors.has_shape)
            return tf.numpy_function(call, [*tensors[:3], step], [], name=name)
        grad = tf.convert_to_tensor(gradient[0], self._dtype)
        return tf.numpy_function(self._apply_dense, [grad, step], [], name=name)

    def take(self, num_required: Any, name: str | None) -> Sequence[Any]:
        number = as_integer_tensor("num_required", num_required)
        values = np.zeros(0, self._dtype.as_numpy_dtype)
        empty = [np.zeros(0, np.int64), values, np.zeros(0, np.int64)] if self._sparse else [values]
        with tf.name_scope(name or f"{self._kind}AccumulatorTakeGradient") as scope:
            return self._wait.build(self._offers, number, empty, scope)

    def num_accumulated(self, name: str) -> Any:
        return tf.ensure_shape(tf.numpy_function(self._count, [], tf.int32), [], name=name)

    def set_global_step(self, step: Any, name: str | None) -> Any:
        step = as_step_tensor("new_global_step", step)
        name = name or f"{'' if self._sparse else 'Resource'}AccumulatorSetGlobalStep"
        return tf.numpy_function(self._acc.set_global_step, [step], [], name=name)

    # What operations call

    def _apply_sparse(self, indices: Any, values: Any, shape: Any, step: Any, *, has_shape: bool) -> None:
        self._acc.apply_grad(indices, values, shape if has_shape else None, local_step=step)

    def _apply_dense(self, grad: Any, step: Any) -> None:
        self._acc.apply_grad(grad, local_step=step)

    def _count(self) -> Any:
        return np.int32(self._acc.num_accumulated())


def as_list(result: Any) -> list[Any]:
    """Return what a take returned, a sparse gradient or one array, as a list."""
    return [result] if isinstance(result, np.ndarray) else list(result)
