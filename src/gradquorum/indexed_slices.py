"""Sparse gradients as values: what is offered, and what a take returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
        shape: int64 `[1 + rank of a row]`: the rows of the table or -1, then the dims of a row.
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

    __slots__ = ("counts", "indices", "num_gradients", "shape", "step", "values", "workers")

    def __init__(
        self,
        indices: NDArray[np.int64],
        values: NDArray[Any],
        shape: NDArray[np.int64],
        num_gradients: int,
        step: int,
        counts: NDArray[np.int64],
        workers: tuple[int | str, ...] = (),
    ) -> None:
        self.indices = indices
        self.values = values
        self.shape = shape
        self.num_gradients = num_gradients
        self.step = step
        self.counts = counts
        self.workers = workers

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

    def __repr__(self) -> str:
        return (
            f"SparseGradient({len(self.indices)} rows of shape {self.values.shape[1:]}, {self.values.dtype}; "
            f"num_gradients={self.num_gradients}, step={self.step})"
        )
