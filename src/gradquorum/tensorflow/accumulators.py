"""The facades: TensorFlow's constructors and methods, over whatever can run them where they are called."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import tensorflow as tf

import gradquorum as gq
from gradquorum.targets import default_target
from gradquorum.tensorflow.backend import AbstractBackend, tensorflow_errors
from gradquorum.tensorflow.gated import GatedBackend
from gradquorum.tensorflow.immediate import ImmediateBackend
from gradquorum.tensorflow.native_dense import NativeDenseBackend
from gradquorum.tensorflow.operations import OperationsBackend
from gradquorum.tensorflow.session_wait import SessionWait

__all__ = ["ConditionalAccumulator", "ConditionalAccumulatorBase", "SparseConditionalAccumulator"]


class SparseAccumulatorTakeGradient(NamedTuple):
    """What a sparse `take_grad` returns, called as in TensorFlow."""

    indices: Any
    values: Any
    shape: Any


class ConditionalAccumulatorBase:
    """What the sparse and the dense accumulator share.

    Args:
        dtype: of the gradients.
        shape: of the table or gradient, or None.
        accumulator_ref: what `accumulator_ref` returns.

    Source:
        `tf.compat.v1.ConditionalAccumulatorBase`.
    """

    def __init__(self, dtype: Any, shape: Any, accumulator_ref: Any) -> None:
        self._dtype = tf.as_dtype(dtype).base_dtype
        self._shape = tf.TensorShape(shape)
        self._accumulator_ref = accumulator_ref
        self._name = ""

    _backend: AbstractBackend

    def _open(self, ours: type[Any], in_graph: type[Any], arguments: tuple[Any, ...], target: Any) -> None:
        """Do what the constructors share; `arguments` are the five that TensorFlow has, for both classes."""
        dtype, given, shared_name, name, reduction_type = arguments
        shape = _as_shape(given)
        arguments = dtype, shape, shared_name or None, name, reduction_type
        self._backend = _open_backend(ours, in_graph, arguments, target)
        ConditionalAccumulatorBase.__init__(self, dtype, shape, self._backend.reference)
        op = getattr(self._backend.reference, "op", None)
        if op is not None:
            name = op.name
        elif isinstance(self._backend, OperationsBackend):  # in a graph, but not of it
            name = tf.compat.v1.get_default_graph().unique_name(name)
        self._name = name.rsplit("/", 1)[-1]

    @property
    def accumulator_ref(self) -> Any:
        """In a graph the reference of TensorFlow's accumulator, elsewhere the accumulator of this library."""
        return self._accumulator_ref

    @property
    def name(self) -> str:
        """The last component of the name."""
        return self._name

    @property
    def dtype(self) -> Any:
        """The dtype of the gradients, a `tf.DType`."""
        return self._dtype

    def num_accumulated(self, name: str | None = None) -> Any:
        """Return the number of gradients in the round, an int32 tensor."""
        return self._backend.num_accumulated(f"{self._name}_NumAccumulated" if name is None else name)

    def set_global_step(self, new_global_step: Any, name: str | None = None) -> Any:
        """Set the step of the round; lowering it is allowed.

        Returns:
            The operation in a graph, else None.
        """
        return self._backend.set_global_step(new_global_step, name)


class SparseConditionalAccumulator(ConditionalAccumulatorBase):
    """`gradquorum.SparseConditionalAccumulator` with the face of TensorFlow's, in eager mode, functions and graphs.

    Where it is made decides where it lives: in eager mode the round is this process's, usable eagerly and in every
    `tf.function`; while a graph of TensorFlow 1 is the default one, each session has a round of its own.

    Args:
        dtype: as `gradquorum.SparseConditionalAccumulator` takes it.
        shape: of the table, `[rows, *row]`; None without constraint.
        shared_name: accumulators of one target, or of one session, with the same shared name share a round.
        name: its last component is `.name`; in a graph made unique as TensorFlow does.
        reduction_type: ``"MEAN"`` or ``"SUM"``, or ``"MEAN_BY_COUNT"``.
        target: the one argument that TensorFlow has not: address of a `gradquorum.Server` where the round lives.
            None is the default target of `gradquorum.connect`.

    Raises:
        ValueError: an argument cannot be; in eager mode `tf.errors.InvalidArgumentError`. A shape that is none is a
            ValueError or TypeError in all modes.

    Example:
        >>> import gradquorum.tensorflow as gqtf
        >>> acc = gqtf.SparseConditionalAccumulator("float32", shape=[5, 1])
        >>> acc.apply_grad([3, 1, 3], [[1.0], [2.0], [4.0]])
        >>> acc.take_indexed_slices_grad(1).values.numpy()
        array([[2.],
               [5.]], dtype=float32)

    Source:
        `tf.compat.v1.SparseConditionalAccumulator`.
    """

    def __init__(
        self,
        dtype: Any,
        shape: Any = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: Any = "MEAN",
        *,
        target: Any = None,
    ) -> None:
        arguments = dtype, shape, shared_name, name, reduction_type
        self._open(gq.SparseConditionalAccumulator, GatedBackend, arguments, target)

    def apply_grad(
        self, grad_indices: Any, grad_values: Any, grad_shape: Any = None, local_step: Any = 0, name: str | None = None
    ) -> Any:
        """Offer a gradient; it is dropped if `local_step` is below the round's step.

        Args:
            grad_indices: ids `[n]`, in any order, repeated or not.
            grad_values: `[n, *row]`; rows of one id are summed.
            grad_shape: the shape of the table, or None.
            local_step: step of the parameters that the gradient was computed on. In eager mode None is the current one.
            name: of the operation.

        Returns:
            The operation in a graph, else None.

        Raises:
            tf.errors.InvalidArgumentError: the gradient cannot be right, with TensorFlow's words. Nothing has changed.
            TypeError: a dtype does not fit, where that is seen while a graph or function is built.
        """
        return self._backend.apply((grad_indices, grad_values, grad_shape), local_step, name)

    def apply_indexed_slices_grad(self, grad: Any, local_step: Any = 0, name: str | None = None) -> Any:
        """Do what `apply_grad` does with `tf.IndexedSlices`."""
        return self.apply_grad(grad.indices, grad.values, grad.dense_shape, local_step, name)

    def take_grad(self, num_required: Any, name: str | None = None) -> SparseAccumulatorTakeGradient:
        """Wait for `num_required` gradients and return their mean (or sum), ids ascending and unique.

        Returns:
            `(indices, values, shape)`: int64 `[r]`, `[r, *row]`, int64. The round is empty, its step one further.

        Raises:
            tf.errors.InvalidArgumentError: `num_required` is below 1.
            TypeError: it is no integer, where that is seen while a graph or function is built.
            tf.errors.CancelledError: the session was closed meanwhile.
            tf.errors.DeadlineExceededError: `timeout_in_ms` was exceeded.
                After both nothing has changed if the take still waited; a round that was being merged is what the next
                take gets.

        Threads:
            Blocks; takes are served in the order in which they began to wait.
        """
        return SparseAccumulatorTakeGradient(*self._backend.take(num_required, name))

    def take_indexed_slices_grad(self, num_required: Any, name: str | None = None) -> Any:
        """Do what `take_grad` does and return `tf.IndexedSlices`."""
        indices, values, shape = self.take_grad(num_required, name)
        return tf.IndexedSlices(values=values, indices=indices, dense_shape=shape)


class ConditionalAccumulator(ConditionalAccumulatorBase):
    """`gradquorum.ConditionalAccumulator` with the face of TensorFlow's; in graphs without a target, TensorFlow's own.

    Arguments and errors are those of `SparseConditionalAccumulator`; `shape` is that of the whole gradient.

    Source:
        `tf.compat.v1.ConditionalAccumulator`.
    """

    def __init__(
        self,
        dtype: Any,
        shape: Any = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
        reduction_type: Any = "MEAN",
        *,
        target: Any = None,
    ) -> None:
        arguments = dtype, shape, shared_name, name, reduction_type
        self._open(gq.ConditionalAccumulator, NativeDenseBackend, arguments, target)

    def apply_grad(self, grad: Any, local_step: Any = 0, name: str | None = None) -> Any:
        """Offer a gradient; it is dropped if `local_step` is below the round's step.

        Returns:
            The operation in a graph, else None.

        Raises:
            ValueError: its static shape cannot be right. Nothing has changed.
            tf.errors.InvalidArgumentError: its shape is not right. Nothing has changed.
        """
        if self._shape.rank:
            tf.convert_to_tensor(grad, self._dtype).shape.assert_is_compatible_with(self._shape)
        return self._backend.apply((grad,), local_step, name)

    def take_grad(self, num_required: Any, name: str | None = None) -> Any:
        """Wait for `num_required` gradients and return their mean (or sum), a tensor.

        Errors are those of the sparse `take_grad`.
        """
        (mean,) = self._backend.take(num_required, name)
        if self._shape.rank:
            mean.set_shape(self._shape)
        return mean


def _as_shape(shape: Any) -> tf.TensorShape:
    """Convert a shape as TensorFlow does for its operations, and refuse it in the same words."""
    try:
        return tf.TensorShape(shape)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"Error converting shape to a TensorShape: {error}.") from error


def _open_backend(ours: type[Any], in_graph: type[Any], arguments: tuple[Any, ...], target: Any) -> AbstractBackend:
    """Return what runs the operations where the accumulator is made."""
    shared_name = arguments[2]
    if tf.inside_function() and shared_name is None:
        raise ValueError(
            "an accumulator that is made inside a tf.function would be another one each time the function is traced; "
            "make it outside, or give it a shared_name"
        )
    with tf.init_scope():
        is_graph = not tf.executing_eagerly()
    if is_graph and target in (None, "local") and default_target() is None:
        backend: AbstractBackend = in_graph(*arguments)
        return backend
    with contextlib.nullcontext() if is_graph else tensorflow_errors():
        accumulator = ours(*arguments, target=target)
    options = {"sparse": ours is gq.SparseConditionalAccumulator, "dtype": tf.as_dtype(accumulator.dtype)}
    if is_graph:
        return OperationsBackend(accumulator, SessionWait(), **options)
    return ImmediateBackend(accumulator, **options)
