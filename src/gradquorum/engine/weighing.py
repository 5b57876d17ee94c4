"""Reducers that weight late gradients: made of the plain reducers of any engine, so the bits are the engine's.

The rows of a gradient are multiplied by its weight as under ``"MEAN_BY_WEIGHT"``. What the sums are divided by, under

* ``"SUM"``: nothing;
* ``"MEAN"``: for each row the sum of the weights of the gradients that touched it: the number of those in time plus
  the sum of the others' weights in log order, in float64, converted to the accumulate dtype;
* ``"MEAN_BY_COUNT"``: the sum of the weights of all gradients, which is what ``"MEAN_BY_WEIGHT"`` does;
* ``"MEAN_BY_WEIGHT"``: as ever, where each weight is the product of the gradient's own and that of its lag.

A round without late gradients is merged by the plain reducer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradquorum.dtypes import convert, real_dtype
from gradquorum.engine.interface import (
    AbstractDenseReducer,
    AbstractEngine,
    AbstractSparseReducer,
    Block,
    ReducerSpec,
)
from gradquorum.engine.parts import DenseParts, SparseParts
from gradquorum.errors import InvalidArgumentError

__all__ = ["weighing_dense_reducer", "weighing_sparse_reducer"]


def weighing_sparse_reducer(engine: AbstractEngine, spec: ReducerSpec) -> AbstractSparseReducer:
    """Return the sparse reducer of a spec whose gradients are weighted by their lag."""
    if spec.reduction_type in ("MEAN", "SUM"):
        return _SparseReducer(engine, spec)
    return engine.sparse_reducer(spec._replace(reduction_type="MEAN_BY_WEIGHT"))


def weighing_dense_reducer(engine: AbstractEngine, spec: ReducerSpec) -> AbstractDenseReducer:
    """Return the dense reducer of a spec whose gradients are weighted by their lag."""
    if spec.reduction_type in ("MEAN", "SUM"):
        return _DenseReducer(engine, spec)
    return engine.dense_reducer(spec._replace(reduction_type="MEAN_BY_WEIGHT"))


class _SparseBlock(NamedTuple):
    rows: Block
    """The gradient, or a merged prefix whose rows are weighted."""
    is_late: bool
    """Whether a late gradient is in it."""
    weights: Block | None
    """Under "MEAN" the weights of the late gradients, by id."""

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes + (0 if self.weights is None else self.weights.num_bytes)

    @property
    def lent(self) -> bool:
        return self.rows.lent

    @property
    def finite(self) -> bool:
        return self.rows.finite


class _DenseBlock(NamedTuple):
    total: Block
    num_late: int
    """Late gradients that carried this member."""
    late_weight: float
    """The sum of their weights."""

    @property
    def num_bytes(self) -> int:
        return self.total.num_bytes

    @property
    def lent(self) -> bool:
        return self.total.lent

    @property
    def finite(self) -> bool:
        return self.total.finite


class _SparseReducer(AbstractSparseReducer):
    def __init__(self, engine: AbstractEngine, spec: ReducerSpec) -> None:
        self._spec = spec
        self._plain = engine.sparse_reducer(spec)
        self._weighted = engine.sparse_reducer(spec._replace(reduction_type="MEAN_BY_WEIGHT"))
        wide = np.dtype(np.float64)
        self._weights = engine.sparse_reducer(ReducerSpec(wide, wide, "SUM", spec.num_threads))
        self._means = spec.reduction_type == "MEAN"

    def block(
        self,
        indices: NDArray[np.int64],
        values: NDArray[Any],
        *,
        weight: float = 1.0,
        lend: bool = False,
        check_finite: bool = False,
    ) -> Block:
        weights = None
        is_late = weight != 1.0
        if is_late and self._means:
            ids = np.unique(indices)
            weights = self._weights.block(ids, np.full((len(ids), 1), weight))
        rows = self._weighted.block(indices, values, weight=weight, lend=lend, check_finite=check_finite)
        return _SparseBlock(rows, is_late, weights)

    def merge(
        self, blocks: Sequence[Block], row_shape: tuple[int, ...], num_gradients: int
    ) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
        logged = cast("Sequence[_SparseBlock]", blocks)
        if not any(block.is_late for block in logged):
            return self._plain.merge([block.rows for block in logged], row_shape, num_gradients)
        merged = self._weighted.export_block(self._weighted.compact([block.rows for block in logged]))
        indices, counts = merged.indices, merged.counts
        assert counts is not None
        denominators = self._denominators(logged, indices, counts) if self._means else None
        values = _divided(merged.rows, denominators, self._spec)
        return indices, values.reshape(len(indices), *row_shape), counts

    def compact(self, blocks: Sequence[Block]) -> Block:
        logged = cast("Sequence[_SparseBlock]", blocks)
        weights = [block.weights for block in logged if block.weights is not None]
        return _SparseBlock(
            self._weighted.compact([block.rows for block in logged]),
            any(block.is_late for block in logged),
            self._weights.compact(weights) if weights else None,
        )

    def distinct_bytes(self, blocks: Sequence[Block]) -> int:
        logged = cast("Sequence[_SparseBlock]", blocks)
        weights = [block.weights for block in logged if block.weights is not None]
        distinct = self._weighted.distinct_bytes([block.rows for block in logged])
        return distinct + (self._weights.distinct_bytes(weights) if weights else 0)

    def export_block(self, block: Block) -> SparseParts:
        logged = cast("_SparseBlock", block)
        weights = None if logged.weights is None else self._weights.export_block(logged.weights)
        return self._weighted.export_block(logged.rows)._replace(late=weights, is_late=logged.is_late)

    def import_block(self, parts: SparseParts, num_gradients: int) -> Block:
        weights = None
        if (parts.late is not None) != (parts.is_late and self._means):
            raise InvalidArgumentError("late: expected the weights of late gradients exactly where there are some")
        if parts.late is not None:
            weights = self._weights.import_block(parts.late, num_gradients)
        return _SparseBlock(self._weighted.import_block(parts, num_gradients), parts.is_late, weights)

    def _denominators(
        self, blocks: Sequence[_SparseBlock], indices: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        weights = [block.weights for block in blocks if block.weights is not None]
        ids, sums, late = self._weights.merge(weights, (1,), len(blocks))
        denominators = counts.astype(np.float64)
        at = np.searchsorted(indices, ids)
        denominators[at] = (counts[at] - late) + sums[:, 0]
        return denominators


class _DenseReducer(AbstractDenseReducer):
    def __init__(self, engine: AbstractEngine, spec: ReducerSpec) -> None:
        self._spec = spec
        self._plain = engine.dense_reducer(spec)
        self._weighted = engine.dense_reducer(spec._replace(reduction_type="MEAN_BY_WEIGHT"))

    def block(
        self, value: NDArray[Any] | None, *, weight: float = 1.0, lend: bool = False, check_finite: bool = False
    ) -> Block:
        total = self._weighted.block(value, weight=weight, lend=lend, check_finite=check_finite)
        is_late = value is not None and weight != 1.0
        return _DenseBlock(total, int(is_late), weight if is_late else 0.0)

    def merge(self, blocks: Sequence[Block], shape: tuple[int, ...], num_gradients: int) -> NDArray[Any]:
        logged = cast("Sequence[_DenseBlock]", blocks)
        if not any(block.num_late for block in logged):
            return self._plain.merge([block.total for block in logged], shape, num_gradients)
        summed = self.export_block(self.compact(blocks))
        assert summed.total is not None
        denominators = None
        if self._spec.reduction_type == "MEAN":
            denominators = np.array([(summed.num_carriers - summed.num_late) + summed.late_weight])
        return _divided(summed.total.reshape(1, -1), denominators, self._spec).reshape(shape)

    def compact(self, blocks: Sequence[Block]) -> Block:
        logged = cast("Sequence[_DenseBlock]", blocks)
        late_weight = 0.0
        for block in logged:  # one after the other: `sum` compensates from Python 3.12 on, with other bits
            late_weight += block.late_weight
        total = self._weighted.compact([block.total for block in logged])
        return _DenseBlock(total, sum(block.num_late for block in logged), late_weight)

    def distinct_bytes(self, blocks: Sequence[Block]) -> int:
        return self._weighted.distinct_bytes([block.total for block in cast("Sequence[_DenseBlock]", blocks)])

    def export_block(self, block: Block) -> DenseParts:
        logged = cast("_DenseBlock", block)
        parts = self._weighted.export_block(logged.total)
        return parts._replace(num_late=logged.num_late, late_weight=logged.late_weight)

    def import_block(self, parts: DenseParts, num_gradients: int) -> Block:
        return _DenseBlock(self._weighted.import_block(parts, num_gradients), parts.num_late, parts.late_weight)


@np.errstate(all="ignore")
def _divided(sums: NDArray[Any], denominators: NDArray[np.float64] | None, spec: ReducerSpec) -> NDArray[Any]:
    """Divide `[n, width]` sums in the accumulate dtype row by row, and convert them, once, to the dtype."""
    if denominators is not None:
        sums = sums / denominators.astype(sums.dtype).reshape(-1, 1)
    return convert(sums, real_dtype(spec.dtype)).view(spec.dtype)
