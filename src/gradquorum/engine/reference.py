"""The reference engine: slow, obvious NumPy.

It is the oracle of the tests, the fallback where there is no native engine, and the place to read what
the arithmetic is.
"""

from __future__ import annotations

import math
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
from gradquorum.engine.splitting import split

__all__ = ["ReferenceEngine"]

# NaN, infinities and overflow are carried, not reported: what comes in goes out.
_quiet = np.errstate(all="ignore")


class _SparseBlock(NamedTuple):
    """One gradient, or the merged prefix of a log."""

    indices: NDArray[np.int64]
    """`[n]`, ascending, unique."""
    rows: NDArray[Any]
    """`[n, width]`, real: of the dtype, or of the accumulate dtype where anything was added."""
    counts: NDArray[np.int64] | None
    """`[n]`, gradients that touched the row; None for one gradient."""
    weight: float
    """Of the gradient; of all gradients together in a merged prefix, whose rows are weighted already."""
    lent: bool
    finite: bool

    @property
    def num_bytes(self) -> int:
        return self.indices.nbytes + self.rows.nbytes + (0 if self.counts is None else self.counts.nbytes)


class _DenseBlock(NamedTuple):
    """One gradient, or the running sum of several."""

    total: NDArray[Any] | None
    """Real, any shape flattened to `[n]`; None if no gradient so far carried this member."""
    num_carriers: int
    """Gradients that carried this member."""
    weight: float
    weighted: bool
    lent: bool
    finite: bool

    @property
    def num_bytes(self) -> int:
        return 0 if self.total is None else self.total.nbytes


class _Arithmetic:
    """What sparse and dense members share: conversion in, the denominator, conversion out."""

    def __init__(self, spec: ReducerSpec) -> None:
        self._dtype = real_dtype(spec.dtype)
        self._accumulate = real_dtype(spec.accumulate_dtype)
        self._result_dtype = spec.dtype
        self._reduction = spec.reduction_type
        self._kept_bytes = max(self._dtype.itemsize, self._accumulate.itemsize // 2)

    def _weighted(self, rows: NDArray[Any], weight: float) -> NDArray[Any]:
        if self._reduction != "MEAN_BY_WEIGHT":
            return rows
        return cast("NDArray[Any]", rows * self._accumulate.type(weight))

    def _reduced(
        self, sums: NDArray[Any], counts: NDArray[np.int64] | int, num_gradients: int, weight: float
    ) -> NDArray[Any]:
        """Divide `[r, width]` sums by their denominators and convert them, once, to the dtype."""
        if self._reduction == "MEAN":
            sums = sums / np.asarray(counts).reshape(-1, 1).astype(self._accumulate)
        elif self._reduction == "MEAN_BY_COUNT":
            sums = sums / self._accumulate.type(num_gradients)
        elif self._reduction == "MEAN_BY_WEIGHT":
            sums = sums / self._accumulate.type(weight)
        return convert(sums, self._dtype).view(self._result_dtype)


class _SparseReducer(_Arithmetic, AbstractSparseReducer):
    @_quiet
    def block(
        self,
        indices: NDArray[np.int64],
        values: NDArray[Any],
        *,
        weight: float = 1.0,
        lend: bool = False,
        check_finite: bool = False,
    ) -> Block:
        width = math.prod(values.shape[1:]) * (values.itemsize // self._dtype.itemsize)
        lend = lend and values.flags.c_contiguous and _ascends(indices)
        if not values.flags.c_contiguous:
            values = np.ascontiguousarray(values)
        rows = values.view(self._dtype).reshape(len(indices), width)
        if not lend:
            indices, rows = _coalesce(indices, rows, self._accumulate)
        finite = not check_finite or bool(np.isfinite(rows.astype(self._accumulate, copy=False)).all())
        return _SparseBlock(indices, rows, None, weight, lend, finite)

    @_quiet
    def merge(
        self, blocks: Sequence[Block], row_shape: tuple[int, ...], num_gradients: int
    ) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
        indices, sums, counts, weight = self._sum(cast("Sequence[_SparseBlock]", blocks))
        values = self._reduced(sums, counts, num_gradients, weight)
        return indices, values.reshape(len(indices), *row_shape), counts

    @_quiet
    def compact(self, blocks: Sequence[Block]) -> Block:
        indices, sums, counts, weight = self._sum(cast("Sequence[_SparseBlock]", blocks))
        return _SparseBlock(indices, sums, counts, weight, lent=False, finite=True)

    def distinct_bytes(self, blocks: Sequence[Block]) -> int:
        sparse = cast("Sequence[_SparseBlock]", blocks)
        distinct = len(np.unique(np.concatenate([block.indices for block in sparse])))
        return distinct * (8 + _width(sparse) * self._kept_bytes)

    def export_block(self, block: Block) -> SparseParts:
        sparse = cast("_SparseBlock", block)
        counts = None if sparse.counts is None else sparse.counts.copy()
        return SparseParts(sparse.indices.copy(), sparse.rows.copy(), counts, sparse.weight)

    def import_block(self, parts: SparseParts, num_gradients: int) -> Block:
        counts = None if parts.counts is None else parts.counts.copy()
        return _SparseBlock(parts.indices.copy(), parts.rows.copy(), counts, parts.weight, lent=False, finite=True)

    def _sum(self, blocks: Sequence[_SparseBlock]) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64], float]:
        """Add up the rows of each id in the order of the log, starting from the first."""
        indices = np.unique(np.concatenate([block.indices for block in blocks]))
        width = _width(blocks)
        sums = np.empty((len(indices), width), self._accumulate)
        counts = np.zeros(len(indices), np.int64)
        for block in blocks:
            if not len(block.indices):
                continue  # an empty gradient of any row shape
            rows = block.rows.astype(self._accumulate, copy=False)
            if block.counts is None:
                rows = self._weighted(rows, block.weight)
            at = np.searchsorted(indices, block.indices)
            first = counts[at] == 0
            sums[at[first]] = rows[first]
            sums[at[~first]] += rows[~first]
            counts[at] += 1 if block.counts is None else block.counts
        return indices, sums, counts, _total_weight(blocks)


class _DenseReducer(_Arithmetic, AbstractDenseReducer):
    @_quiet
    def block(
        self, value: NDArray[Any] | None, *, weight: float = 1.0, lend: bool = False, check_finite: bool = False
    ) -> Block:
        if value is None:
            return _DenseBlock(None, 0, weight, weighted=False, lent=False, finite=True)
        lend = lend and value.flags.c_contiguous
        total = np.ascontiguousarray(value).reshape(-1).view(self._dtype)
        if not lend:
            total = total.copy()
        finite = not check_finite or bool(np.isfinite(total.astype(self._accumulate, copy=False)).all())
        return _DenseBlock(total, 1, weight, weighted=False, lent=lend, finite=finite)

    @_quiet
    def merge(self, blocks: Sequence[Block], shape: tuple[int, ...], num_gradients: int) -> NDArray[Any]:
        summed = self._sum(cast("Sequence[_DenseBlock]", blocks))
        if summed.total is None:
            return np.zeros(shape, self._result_dtype)
        values = self._reduced(summed.total.reshape(1, -1), summed.num_carriers, num_gradients, summed.weight)
        return values.reshape(shape)

    @_quiet
    def compact(self, blocks: Sequence[Block]) -> Block:
        return self._sum(cast("Sequence[_DenseBlock]", blocks))

    def distinct_bytes(self, blocks: Sequence[Block]) -> int:
        sizes = (block.total.size for block in cast("Sequence[_DenseBlock]", blocks) if block.total is not None)
        return max(sizes, default=0) * self._kept_bytes

    def export_block(self, block: Block) -> DenseParts:
        dense = cast("_DenseBlock", block)
        total = None if dense.total is None else dense.total.copy()
        return DenseParts(total, dense.num_carriers, dense.weight, dense.weighted)

    def import_block(self, parts: DenseParts, num_gradients: int) -> Block:
        total = None if parts.total is None else parts.total.copy()
        return _DenseBlock(total, parts.num_carriers, parts.weight, parts.weighted, lent=False, finite=True)

    def _sum(self, blocks: Sequence[_DenseBlock]) -> _DenseBlock:
        total: NDArray[Any] | None = None
        for block in blocks:
            if block.total is None:
                continue
            value = block.total.astype(self._accumulate, copy=False)
            if not block.weighted:
                value = self._weighted(value, block.weight)
            if total is None:
                total = value.copy()
            else:
                total += value
        count = sum(block.num_carriers for block in blocks)
        return _DenseBlock(total, count, _total_weight(blocks), weighted=True, lent=False, finite=True)


class ReferenceEngine(AbstractEngine):
    """Makes reducers of plain NumPy."""

    name = "reference"
    split = staticmethod(split)

    def sparse_reducer(self, spec: ReducerSpec) -> AbstractSparseReducer:
        return _SparseReducer(spec)

    def dense_reducer(self, spec: ReducerSpec) -> AbstractDenseReducer:
        return _DenseReducer(spec)


def _width(blocks: Sequence[_SparseBlock]) -> int:
    """Return the width of the rows, which an empty gradient need not know."""
    return next((block.rows.shape[1] for block in blocks if len(block.indices)), 0)


def _total_weight(blocks: Sequence[_SparseBlock] | Sequence[_DenseBlock]) -> float:
    """Add the weights one after the other: `sum` compensates from Python 3.12 on, with other bits."""
    total = 0.0
    for block in blocks:
        total += block.weight
    return total


def _ascends(indices: NDArray[np.int64]) -> bool:
    return bool((indices[1:] > indices[:-1]).all())


def _coalesce(
    indices: NDArray[np.int64], rows: NDArray[Any], accumulate: np.dtype[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Sort by id; if there are repeats, sum them in the accumulate dtype, in order, starting from the first row."""
    if _ascends(indices):
        return indices, rows.copy()
    unique, first, inverse = np.unique(indices, return_index=True, return_inverse=True)
    if len(unique) == len(indices):
        return unique, rows[first]
    rows = rows.astype(accumulate)
    sums = rows[first]
    repeats = np.ones(len(indices), np.bool_)
    repeats[first] = False
    np.add.at(sums, inverse[repeats], rows[repeats])  # adds one after the other, in order
    return unique, sums
