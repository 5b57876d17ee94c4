"""What stands behind a facade: one way to run its operations, and the conversions that all ways share."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from gradquorum import errors
from gradquorum.dtypes import is_bfloat16

__all__ = ["AbstractBackend", "GradientTensors", "as_index_tensor", "as_integer_tensor", "as_shape_tensor"]
__all__ += ["as_step_tensor", "as_tensor", "as_value_tensor", "plain", "set_static_shapes", "tensorflow_errors"]

_CLASSES = (
    (errors.InvalidArgumentError, tf.errors.InvalidArgumentError),
    (errors.DeadlineExceededError, tf.errors.DeadlineExceededError),
    (errors.CancelledError, tf.errors.CancelledError),
    (errors.ResourceExhaustedError, tf.errors.ResourceExhaustedError),
    (errors.UnavailableError, tf.errors.UnavailableError),
    (errors.ClosedError, tf.errors.FailedPreconditionError),
)


class AbstractBackend(ABC):
    """One way to run the operations of one accumulator. Results are tensors or, in graphs, operations.

    Threads: as the accumulator behind it.
    """

    reference: Any
    """What `accumulator_ref` returns."""

    @abstractmethod
    def apply(self, gradient: Sequence[Any], local_step: Any, name: str | None) -> Any:
        """Offer a gradient: sparse `(indices, values, shape or None)`, dense `(value,)`."""

    @abstractmethod
    def take(self, num_required: Any, name: str | None) -> Sequence[Any]:
        """Take a round: sparse `(indices, values, shape)`, dense `(value,)`."""

    @abstractmethod
    def num_accumulated(self, name: str) -> Any:
        """Return the count of the round, int32."""

    @abstractmethod
    def set_global_step(self, step: Any, name: str | None) -> Any:
        """Set the step of the round."""


@contextlib.contextmanager
def tensorflow_errors() -> Iterator[None]:
    """Let this library's errors leave the block as TensorFlow's, with the same words."""
    try:
        yield
    except errors.GradQuorumError as error:
        for ours, theirs in _CLASSES:
            if isinstance(error, ours):
                raise theirs(None, None, str(error)) from error
        raise


def plain(value: Any) -> Any:
    """Return a tensor's or a variable's memory, also of Keras, as an array without a copy; all else as it is."""
    if tf.is_tensor(value) and hasattr(value, "__array__"):
        return np.asarray(value)
    return value


def as_tensor(array: Any) -> Any:
    """Return an array of which nobody else knows as a tensor, of the same memory where TensorFlow can."""
    if array.size and not is_bfloat16(array.dtype) and array.ctypes.data % 64 == 0:
        to_tensor: Callable[[Any], Any] = tf.experimental.dlpack.from_dlpack
        return to_tensor(array.__dlpack__())
    return tf.constant(array)


def set_static_shapes(result: Sequence[Any], declared: Any) -> None:
    """Tell a graph what a sparse take returns, which optimizers read: the declared shape, though rows may be deeper."""
    indices, values, shape = result
    indices.set_shape([None])
    shape.set_shape([None])
    if declared.rank:
        values.set_shape([None, *declared.as_list()[1:]])


class GradientTensors(NamedTuple):
    """A sparse gradient on its way into a graph."""

    indices: Any
    values: Any
    shape: Any
    has_shape: bool

    @classmethod
    def of(cls, gradient: Sequence[Any], dtype: Any) -> GradientTensors:
        """Convert `(indices, values, shape or None)`.

        Raises:
            TypeError: a dtype does not fit. A plain one, as TensorFlow raises: autograph would hide any other class.
        """
        indices, values, shape = gradient
        tensors = as_index_tensor(indices), as_value_tensor(values, dtype), as_shape_tensor(shape)
        return cls(*tensors, has_shape=shape is not None)


def as_index_tensor(indices: Any) -> Any:
    """Return ids as a tensor of integers."""
    is_empty_list = isinstance(indices, (list, tuple)) and not len(indices)
    return _integers("grad_indices", tf.convert_to_tensor(indices, tf.int64 if is_empty_list else None))


def as_step_tensor(what: str, step: Any) -> Any:
    """Return a step as a tensor of int64."""
    if step is None:
        raise ValueError(f"{what}: expected an integer, got None, which only an eager call can resolve")
    return as_integer_tensor(what, step)


def as_integer_tensor(what: str, number: Any) -> Any:
    """Return a number as a tensor of int64.

    Raises:
        TypeError: it is no integer.
        ValueError: it is known to be no scalar.
    """
    tensor = _integers(what, tf.convert_to_tensor(number))
    if tensor.shape.rank:
        raise ValueError(f"{what} must be scalar, got shape {tensor.shape}")
    return tf.cast(tensor, tf.int64)


def as_shape_tensor(shape: Any) -> Any:
    """Return a shape as a tensor of int64, unknown sizes as -1; None as an empty one."""
    if hasattr(shape, "as_list"):  # tf.TensorShape
        shape = [] if shape.rank is None else shape.as_list()
    if isinstance(shape, (list, tuple)):
        shape = [-1 if size is None else size for size in shape]
    if shape is None or (isinstance(shape, list) and not shape):
        return tf.constant([], tf.int64)
    return tf.cast(_integers("grad_shape", tf.convert_to_tensor(shape)), tf.int64)


def as_value_tensor(values: Any, dtype: Any) -> Any:
    """Return values as a tensor of `dtype`: lists are converted, arrays and tensors of another dtype are refused."""
    if hasattr(values, "dtype") and tf.as_dtype(values.dtype).base_dtype != dtype:
        raise TypeError(
            f"grad_values: expected {dtype.name}, got {tf.as_dtype(values.dtype).name}; "
            f"write tf.cast(values, tf.{dtype.name}) to convert them"
        )
    return tf.convert_to_tensor(values, dtype)


def _integers(what: str, tensor: Any) -> Any:
    if not tensor.dtype.is_integer:
        raise TypeError(f"{what}: expected integers, got {tensor.dtype.name}")
    return tensor
