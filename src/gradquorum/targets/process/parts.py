"""How the arrays of gradients and results lie in memory: one after the other, each aligned, in an order both know.

A gradient has for each sparse member its ids and its values, for each dense one its values. A result has besides,
for each sparse member, its counts. Nothing but the sizes travels; each side computes the rest. The gradient of one
sparse member lies as `AbstractSparseReducer.pack` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.engine.splitting import ALIGNMENT
from gradquorum.specs import DenseSpec, SparseSpec
from gradquorum.targets.process.messages import Part, from_text, to_text
from gradquorum.validation import CheckedGradient, CheckedSparse

__all__ = [
    "LEND_FROM_BYTES",
    "arrays_of",
    "gradient_parts",
    "is_lent",
    "late_error_of",
    "result_parts",
    "write",
]

LEND_FROM_BYTES = 1 << 17
"""Smaller gradients are copied: a block costs descriptors and pages, and is free again at once."""
_INT64 = np.dtype(np.int64)

Spec = SparseSpec | DenseSpec


def arrays_of(
    memory: NDArray[np.uint8], specs: Sequence[Spec], parts: Sequence[Part], *, counts: bool = False
) -> list[NDArray[Any]]:
    """Return the arrays that lie in some memory, as views of it.

    Raises:
        ValueError: they do not fit into it, or the parts are not those of such members.
    """
    arrays: list[NDArray[Any]] = []
    end, room = 0, len(memory)
    for spec, part in zip(specs, parts, strict=True):
        rows, shape = part.num_rows, part.shape
        if isinstance(spec, SparseSpec) is (rows is None):
            raise ValueError("a part is not of the kind of its member")
        if shape is None or part.late_error is not None:
            continue
        forms: tuple[tuple[tuple[int, ...], Any], ...]
        if rows is None:
            forms = ((shape, spec.dtype),)
        elif counts:
            forms = (((rows,), _INT64), ((rows, *shape), spec.dtype), ((rows,), _INT64))
        else:
            forms = (((rows,), _INT64), ((rows, *shape), spec.dtype))
        for form, dtype in forms:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + math.prod(form) * dtype.itemsize  # Python's integers do not overflow
            if end > room:
                raise ValueError("the arrays do not fit into their memory")
            arrays.append(np.ndarray(form, dtype, memory, start))
    return arrays


def _num_bytes(arrays: Iterable[NDArray[Any]]) -> int:
    """Return the bytes that arrays take."""
    end = 0
    for array in arrays:
        end = -(-end // ALIGNMENT) * ALIGNMENT + array.nbytes
    return end


def write(memory: Any, arrays: Iterable[NDArray[Any]]) -> None:
    """Write arrays to memory that has room for them."""
    end = 0
    for array in arrays:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + array.nbytes
        np.ndarray(array.shape, array.dtype, memory, start)[...] = array


# Gradients


def gradient_parts(
    gradients: CheckedGradient,
) -> tuple[tuple[Part, ...], list[NDArray[Any]], int]:
    """Return the parts of a gradient, its arrays in the order in which they lie in memory, and the bytes they take."""
    parts: list[Part] = []
    arrays: list[NDArray[Any]] = []
    for gradient in gradients:
        row_shape, late = gradient.row_shape, gradient.late_error
        there = row_shape is not None and late is None
        words = None if late is None else to_text(late)
        if isinstance(gradient, CheckedSparse):
            parts.append(Part(len(gradient.indices), row_shape, words))
            if there:
                arrays += gradient[:2]
        else:
            parts.append(Part(None, row_shape, words))
            if there and gradient.value is not None:
                arrays.append(gradient.value)
    return tuple(parts), arrays, _num_bytes(arrays)


def is_lent(specs: Sequence[Spec], parts: Sequence[Part]) -> bool:
    """Return whether the server, if it can, lends a gradient of such parts to its round instead of copying it."""
    num_bytes = 0
    for spec, part in zip(specs, parts, strict=True):
        if part.shape is not None and part.late_error is None:
            row_bytes = math.prod(part.shape) * spec.dtype.itemsize  # Python's integers do not overflow
            num_bytes += row_bytes if part.num_rows is None else part.num_rows * (_INT64.itemsize + row_bytes)
    return num_bytes >= LEND_FROM_BYTES


def late_error_of(part: Part) -> str | None:
    """Return what a client found wrong with a part, unless the round's row shape is violated too."""
    return None if part.late_error is None else from_text(part.late_error)


# Results


def result_parts(specs: Sequence[Spec], members: Sequence[Any]) -> tuple[tuple[Part, ...], list[NDArray[Any]], int]:
    """Return the parts of a result, its arrays in the order in which they lie in memory, and the bytes they take."""
    parts: list[Part] = []
    arrays: list[NDArray[Any]] = []
    for spec, member in zip(specs, members, strict=True):
        if isinstance(spec, SparseSpec):
            indices, values, counts = member
            parts.append(Part(len(indices), values.shape[1:]))
            arrays += (indices, values, counts)
        else:
            parts.append(Part(None, member.shape))
            arrays.append(member)
    return tuple(parts), arrays, _num_bytes(arrays)
