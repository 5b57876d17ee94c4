"""Sparse gradients in all the forms in which people have them: slices, tuples, parts, sparse tensors of frameworks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from gradquorum.arrays import as_dims
from gradquorum.errors import InvalidArgumentError, no_memory
from gradquorum.frameworks import split_sparse
from gradquorum.indexed_slices import SparseGradient
from gradquorum.specs import SparseSpec
from gradquorum.validation import CheckedSparse, Dims, check_dims, check_row_shape, check_sparse

__all__ = ["check_slices"]


def check_slices(spec: SparseSpec, where: str, gradient: Any, local_step: Any) -> tuple[CheckedSparse, int | None]:
    """Check one sparse gradient, given whole or as a list of parts, and return it with its step.

    Raises:
        InvalidArgumentError: it is in none of the forms, or a check of SEMANTICS section 2 fails.
    """
    if not isinstance(gradient, list):
        return check_sparse(spec, where, *_split(where, gradient), local_step)
    if not gradient:
        raise InvalidArgumentError(f"{where}expected at least one part, got an empty list")
    if len(gradient) == 1:
        return check_slices(spec, where, gradient[0], local_step)
    parts, step = [], None
    known: Dims = ()
    for i, one in enumerate(gradient):
        here = f"{where}part {i}: "
        indices, values, shape = _split(here, one)
        part, step = check_sparse(spec, here, indices, values, shape, local_step)
        parts.append(part)
        if shape is not None:
            dims = as_dims("grad_shape", shape, unknown=(None, -1))
            check_dims(here, known, dims)
            known = tuple(a if b is None else b for a, b in itertools.zip_longest(known, dims))
    return _joined(spec, where, parts), step


def _split(where: str, gradient: Any) -> tuple[Any, Any, Any]:
    """Return ids, values and shape."""
    if isinstance(gradient, SparseGradient):
        return gradient.indices, gradient.values, gradient.shape
    if hasattr(gradient, "dense_shape") and hasattr(gradient, "indices") and hasattr(gradient, "values"):
        return gradient.indices, gradient.values, gradient.dense_shape
    if isinstance(gradient, tuple) and len(gradient) in (2, 3):
        indices, values, shape = (*gradient, None)[:3]
        return indices, values, shape
    split = split_sparse(f"{where}grad", gradient)
    if split is None:
        raise InvalidArgumentError(
            f"{where}grad: expected IndexedSlices, a tuple (indices, values[, shape]), a sparse tensor or a list of "
            f"such parts, got {type(gradient).__name__}"
        )
    return split


def _joined(spec: SparseSpec, where: str, parts: list[CheckedSparse]) -> CheckedSparse:
    """Return several parts as one gradient, whose repeats are summed as any others."""
    known = [part for part in parts if part.row_shape is not None]
    late = next((part.late_error for part in known if part.late_error is not None), None)
    if len(known) < 2:
        return known[0] if known else parts[0]
    row_shape = known[0].row_shape
    assert row_shape is not None
    for i, part in enumerate(parts):
        if late is None and part.row_shape is not None:
            check_row_shape(f"{where}part {i}: ", spec, row_shape, part.row_shape)
    if late is not None:
        return known[0]._replace(late_error=late)
    try:
        indices = np.concatenate([part.indices for part in known])
        values = np.concatenate([part.values for part in known])
    except MemoryError as error:
        raise no_memory(error) from error
    return CheckedSparse(indices, values, row_shape, borrowed=False)
