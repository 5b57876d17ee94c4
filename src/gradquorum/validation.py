"""The checks of an apply, in TensorFlow's order and words. Everything behind them assumes good input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradquorum.arrays import as_contiguous, as_dims, as_index_vector, as_integer, as_values
from gradquorum.errors import InvalidArgumentError
from gradquorum.specs import MAX_BYTES, DenseSpec, SparseSpec

__all__ = [
    "CheckedDense",
    "CheckedGradient",
    "CheckedSparse",
    "Dims",
    "check_dense",
    "check_dims",
    "check_row_shape",
    "check_sparse",
    "check_step",
    "empty_sparse",
    "plain_sparse",
]

Dims = Sequence[int | None]
_INT64 = np.dtype(np.int64)
_SURELY_FITS = 2**55
"""Elements whose bytes, also in the widest dtype, are below 2**63."""

_ONE_NUMBER_A_ROW = "; values have a row for each id: for rows of one number write values[:, None]"


class CheckedSparse(NamedTuple):
    """A sparse gradient whose form is right."""

    indices: NDArray[np.int64]
    """`[n]`, private to the library."""
    values: NDArray[Any]
    """`[n, *row]` of the member's dtype."""
    row_shape: tuple[int, ...] | None
    """None for an empty gradient of any row shape."""
    borrowed: bool
    """Whether `values` is the caller's memory."""
    late_error: str | None = None
    """What is wrong with it, unless the row shape of the round, which counts first, is violated too."""


class CheckedDense(NamedTuple):
    """A dense gradient whose form is right; None as value for a gradient without this member."""

    value: NDArray[Any] | None
    borrowed: bool = False
    late_error: str | None = None

    @property
    def row_shape(self) -> tuple[int, ...] | None:
        """The shape that all gradients of a round share, called as for sparse members."""
        return None if self.value is None else self.value.shape


CheckedGradient = Sequence[CheckedSparse | CheckedDense]
"""One part for each member of its round."""


def check_step(local_step: Any, remedy: str = "write the step of the whole gradient") -> int | None:
    """Return `local_step` as an int, None for the current step (check 2)."""
    return None if local_step is None else as_integer("local_step", local_step, remedy)


def empty_sparse(spec: SparseSpec) -> CheckedSparse:
    """Return the gradient of a table that a gradient does not touch."""
    return CheckedSparse(np.empty(0, np.int64), np.empty(0, spec.dtype), None, borrowed=False)


def check_sparse(
    spec: SparseSpec, where: str, indices: Any, values: Any, shape: Any = None, local_step: Any = 0
) -> tuple[CheckedSparse, int | None]:
    """Check one sparse gradient and return it with its step (the checks' numbers are those of the table).

    Args:
        spec: what the member takes.
        where: prefix of a message: "" or the member's name.
        indices: the ids, `[n]`.
        values: `[n, *row]`.
        shape: of the whole table, or None.
        local_step: as the caller gave it.

    Raises:
        InvalidArgumentError: the first check that fails, but for `late_error`.
    """
    array, borrowed = as_values(f"{where}grad_values", values, spec.dtype)  # 1
    step = check_step(local_step)  # 2
    ids = as_index_vector(indices)
    if ids.ndim != 1:  # 3
        raise InvalidArgumentError(f"{where}Input indices should be vector but received shape: {_brackets(ids.shape)}")
    if array.ndim == 0:  # 4
        raise InvalidArgumentError(f"{where}Values cannot be 0-dimensional.")
    if array.shape[0] != len(ids):  # 5
        raise InvalidArgumentError(
            f"{where}Expected {len(ids)} non-empty input values, got {array.shape[0]}; give a row for each id"
        )
    if array.shape == (0,):
        return CheckedSparse(ids, array, None, borrowed=False), step
    dims = None
    if shape is not None:
        dims = as_dims("grad_shape", shape, unknown=(None, -1))
        _check_grad_shape(where, spec.shape, dims)  # 6, 7
    _check_range(where, ids, _known_rows(spec.shape, dims))  # 8, 9
    row_shape = array.shape[1:]
    if not len(ids) or array.size > _SURELY_FITS:
        _check_size(where, spec, array.shape)
    late = None
    if spec.shape and spec.shape[1:] != row_shape:
        late = _declared_error(where, spec.shape, array.shape)  # 10
    if late is None and dims:
        late = _trailing_error(where, dims, row_shape)  # 11
    if late is None:
        array, borrowed = as_contiguous(array, borrowed)
    return CheckedSparse(ids, array, row_shape, borrowed, late), step


def plain_sparse(spec: SparseSpec, indices: Any, values: Any) -> CheckedSparse | None:
    """Return what `check_sparse` returns for the plainest of gradients; None for all others, right or wrong."""
    if type(indices) is not np.ndarray or type(values) is not np.ndarray:
        return None
    shape, declared = values.shape, spec.shape
    if indices.dtype != _INT64 or values.dtype != spec.dtype or indices.shape != shape[:1]:
        return None
    if declared and declared[1:] != shape[1:]:
        return None
    if not 0 < values.size <= _SURELY_FITS or not values.flags.c_contiguous:
        return None
    if not indices.flags.c_contiguous or not indices.flags.aligned:
        return None
    if not _in_range(indices, _known_rows(declared, None)):
        return None
    return CheckedSparse(indices, values, shape[1:], borrowed=True)


def _check_size(where: str, spec: SparseSpec, shape: tuple[int, ...]) -> None:
    if math.prod(shape[1:]) * max(shape[0], 1) * max(spec.dtype.itemsize, 8) > MAX_BYTES:
        raise InvalidArgumentError(f"{where}values: expected less than 2**63 bytes, got shape {list(shape)}")


def _check_grad_shape(where: str, declared: Dims, dims: Dims) -> None:
    if len(dims) < len(declared):
        raise InvalidArgumentError(
            f"{where}Shape mismatch: expected shape rank at least {len(declared)}, got {len(dims)}"
        )
    check_dims(where, declared, dims)


def check_dims(where: str, declared: Dims, dims: Dims) -> None:
    """Check that each dim which both shapes know is the same (7)."""
    for i, (want, got) in enumerate(zip(declared, dims, strict=False)):
        if want is not None and got is not None and want != got:
            raise InvalidArgumentError(f"{where}Shape mismatch: expected shape dim {i} to be {want}, got {got}")


def _known_rows(declared: Dims, dims: Dims | None) -> int | None:
    if declared and declared[0] is not None:
        return declared[0]
    return dims[0] if dims else None


def _in_range(ids: NDArray[np.int64], rows: int | None) -> bool:
    # Read without its sign, a negative id is above all others: one pass finds out whether anything is wrong.
    return not len(ids) or bool(np.maximum.reduce(ids.view(np.uint64)) < (2**63 if rows is None else rows))


def _check_range(where: str, ids: NDArray[np.int64], rows: int | None) -> None:
    if _in_range(ids, rows):
        return
    if rows is not None and int(ids.max()) >= rows:
        i = int(np.argmax(ids >= rows))
        raise InvalidArgumentError(
            f"{where}Shape mismatch: index of slice {i} exceeded limits of shape; index is {ids[i]} exceeded {rows}"
            f"; {_ids_allowed(rows)}"
        )
    if int(ids.min()) < 0:
        i = int(np.argmax(ids < 0))
        raise InvalidArgumentError(f"{where}index of slice {i} is negative: expected 0 or more, got {ids[i]}")


def _ids_allowed(rows: int) -> str:
    return f"ids go from 0 to {rows - 1}" if rows else "a table of 0 rows has no ids"


def _declared_error(where: str, declared: Dims, values_shape: tuple[int, ...]) -> str | None:
    if len(declared) > len(values_shape):
        hint = _ONE_NUMBER_A_ROW if len(values_shape) == 1 else ""
        return f"{where}Shape mismatch: expected values rank at least {len(declared)}, got {len(values_shape)}{hint}"
    return _trailing_error(where, declared, values_shape[1:])


def _trailing_error(where: str, dims: Dims | None, row_shape: tuple[int, ...]) -> str | None:
    """Compare the entries of a shape after the first, as many as both have, with those of the values."""
    for i, (want, got) in enumerate(zip(dims[1:] if dims else (), row_shape, strict=False), start=1):
        if want is not None and want != got:
            return f"{where}Shape mismatch: expected values dim {i} to be {want}, got {got}"
    return None


def check_row_shape(where: str, spec: SparseSpec | DenseSpec, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
    """Check a gradient's row shape against that of the gradients in the round (10)."""
    if expected == got:
        return
    if isinstance(spec, DenseSpec):
        raise InvalidArgumentError(_dense_error(where, expected, got))
    if len(expected) != len(got):
        raise InvalidArgumentError(
            f"{where}Shape mismatch: expected values rank {1 + len(expected)}, got {1 + len(got)}"
            f"{'' if got else _ONE_NUMBER_A_ROW}"
        )
    error = _trailing_error(where, (None, *expected), got)
    if error is not None:
        raise InvalidArgumentError(error)


def check_dense(spec: DenseSpec, where: str, value: Any) -> CheckedDense:
    """Check one dense gradient and convert it to the member's dtype.

    Raises:
        InvalidDTypeError: converting it would lose what kind of number it is.
    """
    array, borrowed = as_values(f"{where}grad", value, spec.dtype, convert_arrays=True)
    declared = spec.shape
    fits = not declared or (
        len(declared) == array.ndim
        and all(want is None or want == got for want, got in zip(declared, array.shape, strict=True))
    )
    late = None if fits else _dense_error(where, declared, array.shape)
    if fits:
        array, borrowed = as_contiguous(array, borrowed)
    return CheckedDense(array, borrowed, late)


def _dense_error(where: str, expected: Dims, got: Dims) -> str:
    return f"{where}Shape mismatch: expected {_brackets(expected)}, got {_brackets(got)}"


def _brackets(shape: Dims) -> str:
    return f"[{','.join('?' if size is None else str(size) for size in shape)}]"
