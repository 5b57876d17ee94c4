"""Eager calls, and the same calls as stateful operations of a `tf.function`, on one accumulator of this library."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradquorum.dtypes import is_bfloat16
from gradquorum.errors import InvalidArgumentError
from gradquorum.tensorflow.backend import (
    AbstractBackend,
    GradientTensors,
    as_integer_tensor,
    as_step_tensor,
    plain,
    set_static_shapes,
    tensorflow_errors,
)

__all__ = ["ImmediateBackend"]

_queue_numbers = itertools.count()


class ImmediateBackend(AbstractBackend):
    """Runs each operation when it is called or, while a `tf.function` is traced, when the function runs.

    A function's operations are stateful, so TensorFlow runs them in the order of the program. A take must not wait
    inside a Python operation, where it would hold one of the few threads that run all operations: 8 waiting takes
    kept an apply waiting until they ended. So it is three operations: one puts the take in the round's line, one waits
    for a queue of TensorFlow's, which holds no thread, and one fetches the result.

    Guarded by ``_lock``: ``_waiting``.
    """

    def __init__(self, accumulator: Any, *, sparse: bool, dtype: Any) -> None:
        self.reference = accumulator
        self._acc = accumulator
        self._sparse = sparse
        self._dtype = dtype
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Any, Any]] = {}
        """The takes of functions by number: the future, and the queue that is fed when it is done."""

    # Operations

    def apply(self, gradient: Sequence[Any], local_step: Any, name: str | None) -> Any:
        if tf.executing_eagerly():
            with tensorflow_errors():
                if self._sparse:
                    indices, values, shape = map(plain, gradient)
                    self._acc.apply_grad(indices, values, shape, local_step=plain(local_step))
                else:
                    self._acc.apply_grad(plain(gradient[0]), local_step=plain(local_step))
            return None
        self._check_traced()
        step = as_step_tensor("local_step", local_step)
        if self._sparse:
            tensors = GradientTensors.of(gradient, self._dtype)
            call = functools.partial(self._apply_sparse, has_shape=tensors.has_shape)
            return tf.numpy_function(call, [*tensors[:3], step], [], name=name)
        return tf.numpy_function(self._apply_dense, [tf.convert_to_tensor(gradient[0]), step], [], name=name)

    def take(self, num_required: Any, name: str | None) -> Sequence[Any]:
        if tf.executing_eagerly():
            with tensorflow_errors():
                return [_as_tensor(array) for array in self._arrays(self._acc.take_grad(plain(num_required)))]
        self._check_traced()
        num_required = as_integer_tensor("num_required", num_required)
        with tf.name_scope(name or "TakeGradient"):
            number, queue = tf.py_function(self._line_up, [num_required], [tf.int64, tf.resource])
            woken = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.bool])
            with tf.control_dependencies(woken):
                dtypes = [tf.int64, self._dtype, tf.int64] if self._sparse else [self._dtype]
                result = list(tf.numpy_function(self._fetch, [number], dtypes))
        if self._sparse:
            set_static_shapes(result, tf.TensorShape(self._acc.shape))
        return result

    def num_accumulated(self, name: str) -> Any:
        if tf.executing_eagerly():
            with tensorflow_errors():
                return tf.constant(self._acc.num_accumulated(), tf.int32)
        self._check_traced()
        return tf.ensure_shape(tf.numpy_function(self._count, [], tf.int32, name=name), [])

    def set_global_step(self, step: Any, name: str | None) -> Any:
        if tf.executing_eagerly():
            with tensorflow_errors():
                self._acc.set_global_step(plain(step))
            return None
        self._check_traced()
        return tf.numpy_function(self._set_step, [as_step_tensor("new_global_step", step)], [], name=name)

    # What operations of a function call

    def _apply_sparse(self, indices: Any, values: Any, shape: Any, step: Any, *, has_shape: bool) -> None:
        self._acc.apply_grad(indices, values, shape if has_shape else None, local_step=step)

    def _apply_dense(self, grad: Any, step: Any) -> None:
        self._acc.apply_grad(grad, local_step=step)

    def _count(self) -> Any:
        return np.int32(self._acc.num_accumulated())

    def _set_step(self, step: Any) -> None:
        self._acc.set_global_step(step)

    def _line_up(self, num_required: Any) -> tuple[int, Any]:
        """Put a take in the round's line; return its number and the queue that will hold one entry when it is done."""
        number = next(_queue_numbers)
        queue = tf.raw_ops.FIFOQueueV2(
            component_types=[tf.bool], shapes=[[]], capacity=1, shared_name=f"gradquorum_take_{id(self)}_{number}"
        )
        future = self._acc.submit_take(plain(num_required))
        with self._lock:
            self._waiting[number] = future, queue
        future.add_done_callback(lambda _: tf.raw_ops.QueueEnqueueV2(handle=queue, components=[tf.constant(True)]))
        return number, queue

    def _fetch(self, number: Any) -> list[Any]:
        with self._lock:
            future, queue = self._waiting.pop(int(number))
        tf.raw_ops.DestroyResourceOp(resource=queue)
        return self._arrays(future.result(timeout=0))

    def _arrays(self, result: Any) -> list[Any]:
        return list(result) if self._sparse else [result]

    def _check_traced(self) -> None:
        if not tf.inside_function():
            raise InvalidArgumentError(
                "this accumulator was made in eager mode and cannot be used in a graph of TensorFlow 1; "
                "make it while that graph is the default one"
            )


def _as_tensor(array: Any) -> Any:
    """Return an array of which nobody else knows as a tensor, of the same memory where TensorFlow can."""
    if array.size and not is_bfloat16(array.dtype) and array.ctypes.data % 64 == 0:
        to_tensor: Callable[[Any], Any] = tf.experimental.dlpack.from_dlpack
        return to_tensor(array.__dlpack__())
    return tf.constant(array)
