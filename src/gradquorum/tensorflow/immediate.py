"""Eager calls, and the same calls as stateful operations of a `tf.function`, on one accumulator of this library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradquorum.errors import InvalidArgumentError
from gradquorum.tensorflow.backend import AbstractBackend, as_tensor, plain, set_static_shapes, tensorflow_errors
from gradquorum.tensorflow.function_wait import FunctionWait
from gradquorum.tensorflow.operations import OperationsBackend, as_list

__all__ = ["ImmediateBackend"]


class ImmediateBackend(AbstractBackend):
    """Runs each operation when it is called or, while a `tf.function` is traced, when the function runs.

    A function's operations are stateful, so TensorFlow runs them in the order of the program.
    """

    def __init__(self, accumulator: Any, *, sparse: bool, dtype: Any) -> None:
        self.reference = accumulator
        self._acc = accumulator
        self._sparse = sparse
        self._operations = OperationsBackend(accumulator, FunctionWait(), sparse=sparse, dtype=dtype)

    def apply(self, gradient: Sequence[Any], local_step: Any, name: str | None) -> Any:
        if not tf.executing_eagerly():
            return self._traced().apply(gradient, local_step, name)
        with tensorflow_errors():
            self._acc.apply_grad(*map(plain, gradient), local_step=plain(local_step))
        return None

    def take(self, num_required: Any, name: str | None) -> Sequence[Any]:
        if tf.executing_eagerly():
            with tensorflow_errors():
                return [as_tensor(array) for array in as_list(self._acc.take_grad(plain(num_required)))]
        result = self._traced().take(num_required, name)
        if self._sparse:
            set_static_shapes(result, tf.TensorShape(self._acc.shape))
        return result

    def num_accumulated(self, name: str) -> Any:
        if not tf.executing_eagerly():
            return self._traced().num_accumulated(name)
        with tensorflow_errors():
            return tf.constant(self._acc.num_accumulated(), tf.int32)

    def set_global_step(self, step: Any, name: str | None) -> Any:
        if not tf.executing_eagerly():
            return self._traced().set_global_step(step, name)
        with tensorflow_errors():
            self._acc.set_global_step(plain(step))
        return None

    def _traced(self) -> OperationsBackend:
        if not tf.inside_function():
            raise InvalidArgumentError(
                "this accumulator was made in eager mode and cannot be used in a graph of TensorFlow 1; "
                "make it while that graph is the default one"
            )
        return self._operations
