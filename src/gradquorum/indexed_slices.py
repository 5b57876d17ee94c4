"""Sparse gradients as values: what is offered, and what a take returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradquorum import norms

__all__ = ["IndexedSlices", "SparseGradient"]


class IndexedSlices(NamedTuple):
    """Rows of a large table, with TensorFlow's field names and order.

    Anything with attributes `values`, `indices` and `dense_shape`, `tf.IndexedSlices` among them, is accepted
    wherever this is.

    Attributes:
        values: `[n, *row]`.
        indices: `[n]`, the row of the table that each of the values belongs to.
        dense_shape: `[1 + rank of a row]`, the shape of the table, or None.

    Example:
        >>> import gradquorum as gq
        >>> with gq.SparseConditionalAccumulator("float32", (5, 1)) as acc:
        ...     _ = acc.apply_indexed_slices_grad(gq.IndexedSlices([[1.0], [3.0]], [1, 1]))
        ...     slices = acc.take_indexed_slices_grad(1)
        >>> slices.indices, slices.values, slices.dense_shape
        (array([1]), array([[4.]], dtype=float32), array([5, 1]))
    """

    values: Any
    indices: Any
    dense_shape: Any = None


class SparseGradient:
    """The reduced gradient of a round. Unpacks as `(indices, values, shape)`; its owner may write to it.

    Attributes:
        indices: int64 `[r]`, ascending, unique.
        values: `[r, *row]` in the accumulator's dtype.
        num_gradients: gradients in the round.
        step: the round's step before the take advanced it: that of the receipts of its gradients.
        counts: int64 `[r]`, gradients that touched the row.
        workers: the named workers whose gradients are in it, numbers first, sorted.

    Example:
        >>> import gradquorum as gq
        >>> with gq.SparseConditionalAccumulator("float32", (5, 1)) as acc:
        ...     _ = acc.apply_grad([3, 1], [[2.0], [4.0]], worker="a")
        ...     gradient = acc.take_grad(1)
        >>> indices, values, shape = gradient
        >>> indices, values.ravel(), shape, gradient.workers
        (array([1, 3]), array([4., 2.], dtype=float32), array([5, 1]), ('a',))
    """

    __slots__ = ("_shape", "counts", "indices", "num_gradients", "step", "values", "workers")

    def __init__(
        self,
        indices: NDArray[np.int64],
        values: NDArray[Any],
        shape: NDArray[np.int64] | tuple[int, tuple[int, ...]],
        num_gradients: int,
        step: int,
        counts: NDArray[np.int64],
        workers: tuple[int | str, ...] = (),
    ) -> None:
        self.indices = indices
        self.values = values
        self._shape = shape
        self.num_gradients = num_gradients
        self.step = step
        self.counts = counts
        self.workers = workers

    @property
    def shape(self) -> NDArray[np.int64]:
        """int64 `[1 + rank of a row]`: the rows of the table or -1, then the dims of a row."""
        shape = self._shape
        if isinstance(shape, tuple):  # rows, and the shape of the values; few ask, so the array is made for the first
            rows, (_, *row_shape) = shape
            array = np.array((rows, *row_shape), np.int64)
            # Nothing is called between these two lines, so no other thread comes between: all get the same array.
            if self._shape is shape:
                self._shape = array
        return self._shape  # type: ignore[return-value]

    @shape.setter
    def shape(self, shape: NDArray[np.int64]) -> None:
        self._shape = shape

    def __iter__(self) -> Iterator[Any]:
        return iter((self.indices, self.values, self.shape))

    def __len__(self) -> int:
        return 3

    def __getitem__(self, item: int | slice) -> Any:
        return (self.indices, self.values, self.shape)[item]

    def __reduce__(self) -> tuple[object, ...]:
        state = (self.indices, self.values, self.shape, self.num_gradients, self.step, self.counts, self.workers)
        return SparseGradient, state

    def as_indexed_slices(self) -> IndexedSlices:
        """Return the same arrays as `IndexedSlices`."""
        return IndexedSlices(self.values, self.indices, self.shape)

    def norm(self) -> float:
        """Return the Euclidean norm of all values, a complex one counting as two numbers.

        It is computed in float64 and neither overflows nor underflows on the way: infinite only if a value is, or
        if the norm itself passes float64. NaN if a value is NaN. Rows that are not there are rows of zeros.

        Example:
            >>> import gradquorum as gq
            >>> with gq.SparseConditionalAccumulator("float32", (5, 1)) as acc:
            ...     _ = acc.apply_grad([3, 1], [[3e30], [4e30]])
            ...     gradient = acc.take_grad(1)
            >>> round(gradient.norm() / 1e30, 5), gradient.clip_by_norm(10.0).values.ravel()
            (5.0, array([8., 6.], dtype=float32))

        Source:
            `tf.norm` of the dense gradient, which is computed in the gradient's dtype and overflows there.
        """
        return float(norms.norm_of(self.values))

    def row_norms(self) -> NDArray[np.float64]:
        """Return the norm of each row of `values`, float64 `[r]`, computed as `norm` is."""
        return norms.row_norms(self.values)

    def is_finite(self) -> bool:
        """Tell whether no value is a NaN or an infinity."""
        return norms.is_finite(self.values)

    def clip_by_norm(self, max_norm: float) -> SparseGradient:
        """Return a gradient that is scaled down so that its norm is at most `max_norm`, if it is larger.

        All values are multiplied by `max_norm / norm()` in float64 and rounded once. If a value is not finite, all
        values of the result are NaN, so that it cannot pass unseen: ask `is_finite()` first.

        Args:
            max_norm: 0 or more; infinity never clips.

        Returns:
            A new gradient, with arrays of its own; this one is as it was.

        Raises:
            InvalidArgumentError: `max_norm` is negative or NaN.
            InvalidDTypeError: `max_norm` is no number, or the values are integers.

        Source:
            `tf.clip_by_norm`, and `tf.clip_by_global_norm` for what is not finite.
        """
        bound = norms.check_max_norm(max_norm, self.values.dtype)
        return self._with_values(norms.scale(self.values, norms.norm_of(self.values).factor(bound)))

    def clip_rows_by_norm(self, max_norm: float) -> SparseGradient:
        """Return a gradient in which each row is scaled down so that its own norm is at most `max_norm`.

        Rows within the bound keep their bits. A row with a value that is not finite becomes NaN as a whole. Argument,
        result and errors are those of `clip_by_norm`.

        Example:
            >>> import gradquorum as gq
            >>> with gq.SparseConditionalAccumulator("float32", (5, 2)) as acc:
            ...     _ = acc.apply_grad([1, 3], [[0.3, 0.4], [30.0, 40.0]])
            ...     acc.take_grad(1).clip_rows_by_norm(1.0).values
            array([[0.3, 0.4],
                   [0.6, 0.8]], dtype=float32)
        """
        bound = norms.check_max_norm(max_norm, self.values.dtype)
        return self._with_values(norms.clip_rows(self.values, bound))

    def _with_values(self, values: NDArray[Any]) -> SparseGradient:
        """Return a gradient of the same rows, sharing no array with this one."""
        return SparseGradient(
            self.indices.copy(),
            values,
            self.shape.copy(),
            num_gradients=self.num_gradients,
            step=self.step,
            counts=self.counts.copy(),
            workers=self.workers,
        )

    def __repr__(self) -> str:
        return (
            f"SparseGradient({len(self.indices)} rows of shape {self.values.shape[1:]}, {self.values.dtype}; "
            f"num_gradients={self.num_gradients}, step={self.step})"
        )
