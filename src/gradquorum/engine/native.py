"""The native engine: the C++ core behind the engine interface. Same bits as the reference engine."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from gradquorum import _native  # type: ignore[attr-defined, unused-ignore]  # compiled; may have no stub
from gradquorum.dtypes import is_bfloat16, real_dtype
from gradquorum.engine.interface import (
    AbstractDenseReducer,
    AbstractEngine,
    AbstractSparseReducer,
    Block,
    PlainBlock,
    ReducerSpec,
)
from gradquorum.engine.parts import DenseParts, SparseParts
from gradquorum.engine.splitting import PackedRows

__all__ = ["NativeEngine"]

atexit.register(_native.end_calls)

_INT64 = np.dtype(np.int64)


def _num_threads(asked: int | None) -> int:
    """Return how many threads a merge may use: those asked for, or one for each core of this process."""
    if asked is not None:
        return asked
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Door:
    """What sparse and dense members share: how arrays cross. bfloat16 crosses as its bits."""

    __slots__ = ("_as_bits", "_dtype", "_native", "_reals")

    def __init__(self, spec: ReducerSpec, native_type: Any) -> None:
        self._dtype = spec.dtype
        self._reals = real_dtype(spec.dtype), real_dtype(spec.accumulate_dtype)
        self._as_bits = is_bfloat16(spec.dtype)
        self._native = native_type(
            spec.dtype.name, spec.accumulate_dtype.name, spec.reduction_type, _num_threads(spec.num_threads)
        )

    def _in(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values as the core reads them: contiguous, aligned, bits for bfloat16."""
        flags = values.flags
        if not flags.c_contiguous or not flags.aligned:
            values = np.array(values, order="C")
        return values.view(np.uint16) if self._as_bits else values

    def _in_reals(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values of the dtype or of the accumulate dtype, as the core reads them."""
        return values.view(np.uint16) if is_bfloat16(values.dtype) else values


class _SparseReducer(_Door, AbstractSparseReducer):
    __slots__ = ("_merge",)

    def __init__(self, spec: ReducerSpec) -> None:
        super().__init__(spec, _native.SparseReducer)
        self._merge = self._native.merge

    def block(
        self,
        indices: NDArray[np.int64],
        values: NDArray[Any],
        *,
        weight: float = 1.0,
        lend: bool = False,
        check_finite: bool = False,
    ) -> Block:
        crossing = self._in(values)
        lend = lend and values.flags.c_contiguous and values.flags.aligned
        block: Block = self._native.block(indices, crossing, weight, lend, check_finite)
        return block

    def _plain_block_of_bits(self, indices: Any, values: Any, *terms: Any) -> PlainBlock | None:
        if type(values) is not ndarray or values.dtype != self._dtype:
            return None
        block: PlainBlock | None = self._native.plain_block(indices, values.view(np.uint16), *terms)
        return block

    # The core's own functions, without a method around them: here every call counts.

    @property
    def plain_block(self) -> Callable[..., PlainBlock | None]:
        plain_block: Callable[..., PlainBlock | None] = self._native.plain_block
        return self._plain_block_of_bits if self._as_bits else plain_block

    @property
    def packed_block(self) -> Callable[..., PlainBlock | None]:
        packed_block: Callable[..., PlainBlock | None] = self._native.packed_block
        return packed_block

    @property
    def pack(self) -> Callable[[PlainBlock, Any], None]:
        pack: Callable[[PlainBlock, Any], None] = self._native.pack
        return pack

    def merge(
        self, blocks: Sequence[Block], row_shape: tuple[int, ...], num_gradients: int
    ) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
        merged: tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]
        merged = self._merge(blocks, row_shape, num_gradients)
        if self._as_bits:
            indices, values, counts = merged
            return indices, values.view(self._dtype), counts
        return merged

    def consume(
        self, blocks: Sequence[Block], row_shape: tuple[int, ...], num_gradients: int, kept: list[Any]
    ) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
        if not kept:
            self._native.consume(blocks, row_shape, num_gradients, kept)
        indices, values, counts = kept[0]
        num_rows = len(indices) // _INT64.itemsize
        return (
            np.ndarray((num_rows,), _INT64, indices),
            np.ndarray((num_rows, *row_shape), self._dtype, values),
            np.ndarray((num_rows,), _INT64, counts),
        )

    def compact(self, blocks: Sequence[Block]) -> Block:
        block: Block = self._native.compact(blocks)
        return block

    def distinct_bytes(self, blocks: Sequence[Block]) -> int:
        num_bytes: int = self._native.distinct_bytes(blocks)
        return num_bytes

    def export_block(self, block: Block) -> SparseParts:
        num_rows, width, summed, weight, indices, rows, counts = self._native.export_block(block)
        return SparseParts(
            ndarray((num_rows,), _INT64, indices),
            ndarray((num_rows, width), self._reals[summed], rows),
            None if counts is None else ndarray((num_rows,), _INT64, counts),
            weight,
        )

    def import_block(self, parts: SparseParts, num_gradients: int) -> Block:
        summed = parts.rows.dtype != self._reals[0]
        rows = self._in_reals(parts.rows)
        block: Block = self._native.import_block(parts.indices, rows, summed, parts.counts, parts.weight, num_gradients)
        return block


class _DenseReducer(_Door, AbstractDenseReducer):
    __slots__ = ()

    def __init__(self, spec: ReducerSpec) -> None:
        super().__init__(spec, _native.DenseReducer)

    def block(
        self, value: NDArray[Any] | None, *, weight: float = 1.0, lend: bool = False, check_finite: bool = False
    ) -> Block:
        crossing = None
        if value is not None:
            crossing = self._in(value)
            lend = lend and value.flags.c_contiguous and value.flags.aligned
        block: Block = self._native.block(crossing, weight, lend, check_finite)
        return block

    def merge(self, blocks: Sequence[Block], shape: tuple[int, ...], num_gradients: int) -> NDArray[Any]:
        return ndarray(shape, self._dtype, self._native.merge(blocks, shape, num_gradients))

    def compact(self, blocks: Sequence[Block]) -> Block:
        block: Block = self._native.compact(blocks)
        return block

    def distinct_bytes(self, blocks: Sequence[Block]) -> int:
        num_bytes: int = self._native.distinct_bytes(blocks)
        return num_bytes

    def export_block(self, block: Block) -> DenseParts:
        size, summed, weight, compacted, num_carriers, total = self._native.export_block(block)
        array = None if num_carriers == 0 else ndarray((size,), self._reals[summed], total)
        return DenseParts(array, num_carriers, weight, compacted)

    def import_block(self, parts: DenseParts, num_gradients: int) -> Block:
        total, summed = None, False
        if parts.total is not None:
            total, summed = self._in_reals(parts.total), parts.total.dtype != self._reals[0]
        block: Block = self._native.import_block(total, summed, parts.weight, parts.weighted, parts.num_carriers)
        return block


class NativeEngine(AbstractEngine):
    """Makes reducers that run in C++, without the GIL, on as many threads as the spec says."""

    name = "native"
    tensor_memory = (_native.TensorMemory,)
    coo_memory = staticmethod(_native.coo_memory)  # without a method around it: here every call counts
    coo_tensors = staticmethod(_native.coo_tensors)

    def sparse_reducer(self, spec: ReducerSpec) -> AbstractSparseReducer:
        return _SparseReducer(spec)

    def dense_reducer(self, spec: ReducerSpec) -> AbstractDenseReducer:
        return _DenseReducer(spec)

    def split(
        self, indices: NDArray[np.int64], values: NDArray[Any], num_parts: int, bounds: tuple[int, ...] | None
    ) -> list[PackedRows]:
        crossing = values.view(np.uint16) if is_bfloat16(values.dtype) else values
        firsts = None if bounds is None else np.array(bounds, _INT64)
        return [PackedRows(*part) for part in _native.split(indices, crossing, num_parts, firsts)]

    def trim_memory(self, from_bytes: int = 0) -> int:
        return _native.trim_memory(from_bytes)
