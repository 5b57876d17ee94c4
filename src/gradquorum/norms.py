"""Norms of arrays, and scaling to a norm: in float64, without overflow on the way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.dtypes import convert, is_bfloat16
from gradquorum.errors import InvalidArgumentError, InvalidDTypeError

__all__ = ["Norm", "check_max_norm", "clip_rows", "is_finite", "norm_of", "row_norms", "scale"]

_PIECE = 1 << 16
"""Numbers looked at at once: the copies in float64 stay in the cache."""
_SAFE = (1e-280, 1e280)
"""A sum of squares between these has neither overflowed nor lost digits to underflow."""


class Norm:
    """A norm as `scale * root`: the two factors are finite where the product may not be.

    NaN if a value is NaN, else infinite if a value is.
    """

    __slots__ = ("root", "scale")

    def __init__(self, scale: float, root: float) -> None:
        self.scale = scale
        self.root = root

    def __float__(self) -> float:
        return self.scale * self.root if self.scale else 0.0

    @classmethod
    def of(cls, parts: Iterable[Norm]) -> Norm:
        """Return the norm of all that the parts are norms of, taken together."""
        parts = list(parts)
        if not all(math.isfinite(part.scale) for part in parts):
            return cls(_largest(part.scale for part in parts), 1.0)
        largest = max((part.scale for part in parts), default=0.0)
        if largest == 0:
            return cls(0.0, 1.0)
        return cls(largest, math.sqrt(math.fsum((part.scale / largest * part.root) ** 2 for part in parts)))

    def factor(self, max_norm: float) -> float | None:
        """Return what to multiply by so that the norm is at most `max_norm`; None for nothing to do.

        NaN if the norm is that of values which are not all finite: no factor could be right.
        """
        if not math.isfinite(self.scale):
            return math.nan
        if self.scale == 0 or self.root <= max_norm / self.scale:
            return None
        return max_norm / self.scale / self.root


@np.errstate(all="ignore")
def norm_of(values: NDArray[Any]) -> Norm:
    """Return the Euclidean norm of all the numbers of an array, a complex one being two."""
    total = sum(float(np.square(piece).sum()) for piece in _pieces(values))
    if _SAFE[0] <= total <= _SAFE[1]:
        return Norm(1.0, math.sqrt(total))
    largest = _largest(float(np.abs(piece).max()) for piece in _pieces(values))
    if largest == 0 or not math.isfinite(largest):
        return Norm(largest, 1.0)
    return Norm(largest, math.sqrt(sum(float(np.square(piece / largest).sum()) for piece in _pieces(values))))


@np.errstate(all="ignore")
def row_norms(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the norm of each `values[i]`, float64 `[len(values)]`; infinite where it passes float64."""
    norms = np.zeros(len(values))
    for rows, numbers in _rows(values):
        scales, roots = _factors_of_norms(numbers)
        norms[rows] = scales * roots
    return norms


@np.errstate(all="ignore")
def clip_rows(values: NDArray[Any], max_norm: float) -> NDArray[Any]:
    """Return a copy in which no row has a norm above `max_norm`; rows with a NaN or an infinity are all NaN."""
    clipped = values.copy()
    flat = _real(clipped).reshape(len(values), -1) if values.size else clipped
    for rows, numbers in _rows(values):
        scales, roots = _factors_of_norms(numbers)
        allowed = max_norm / scales
        above = ~(roots <= allowed)
        above &= scales != 0
        factors = np.where(np.isfinite(scales), allowed / roots, np.nan)[above]
        flat[rows][above] = convert(numbers[above] * factors[:, None], flat.dtype)
    return clipped


@np.errstate(all="ignore")
def scale(values: NDArray[Any], factor: float | None) -> NDArray[Any]:
    """Return a copy times `factor`, each number rounded once; None for a plain copy."""
    scaled = values.copy()
    if factor is not None:
        flat = _real(scaled).reshape(-1)
        for start, piece in zip(range(0, flat.size, _PIECE), _pieces(values), strict=True):
            flat[start : start + _PIECE] = convert(piece * factor, flat.dtype)
    return scaled


def is_finite(values: NDArray[Any]) -> bool:
    """Tell whether no number is a NaN or an infinity."""
    return values.dtype.kind == "i" or all(bool(np.isfinite(piece).all()) for piece in _pieces(values))


def check_max_norm(max_norm: Any, *dtypes: np.dtype[Any]) -> float:
    """Return the bound of a clipping as a float; refuse it for gradients of integers."""
    if isinstance(max_norm, (bool, np.bool_)) or not isinstance(max_norm, (int, float, np.integer, np.floating)):
        raise InvalidDTypeError(f"max_norm: expected a number, got {max_norm!r}")
    if not max_norm >= 0:
        raise InvalidArgumentError(f"max_norm: expected 0 or more, got {max_norm}")
    for dtype in dtypes:
        if dtype.kind == "i":
            raise InvalidDTypeError(f"clipping: expected a gradient of floating or complex dtype, got {dtype.name}")
    try:
        return float(max_norm)
    except OverflowError:  # an int beyond all norms
        return math.inf


def _largest(numbers: Iterable[float]) -> float:
    """Return the largest number, 0 of none; NaN if one is (`max` would depend on their order)."""
    largest = 0.0
    for number in numbers:
        if math.isnan(number):
            return number
        largest = max(largest, number)
    return largest


def _real(values: NDArray[Any]) -> NDArray[Any]:
    """Return complex numbers as pairs along the last axis, all others as they are."""
    if values.dtype.kind != "c":
        return values
    real = np.float32 if values.dtype.itemsize == 8 else np.float64
    return np.ascontiguousarray(values)[..., None].view(real)


def _wide(values: NDArray[Any]) -> NDArray[np.float64]:
    if is_bfloat16(values.dtype):  # by way of float32, which holds it exactly
        values = values.astype(np.float32)
    return values.astype(np.float64)


def _pieces(values: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
    """Yield all numbers in order, in float64."""
    flat = _real(values).reshape(-1)
    for start in range(0, flat.size, _PIECE):
        yield _wide(flat[start : start + _PIECE])


def _rows(values: NDArray[Any]) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Yield ranges of rows with their numbers `[rows, numbers of a row]` in float64."""
    if not values.size:
        return
    flat = _real(values).reshape(len(values), -1)
    step = max(_PIECE // flat.shape[1], 1)
    for start in range(0, len(flat), step):
        rows = slice(start, min(start + step, len(flat)))
        yield rows, _wide(flat[rows])


def _factors_of_norms(numbers: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the norm of each row as a scale and a root, as `Norm` has them."""
    totals = np.einsum("ij,ij->i", numbers, numbers)
    scales, roots = np.ones(len(totals)), np.sqrt(totals)
    odd = ~((totals >= _SAFE[0]) & (totals <= _SAFE[1]))
    if odd.any():
        scales[odd] = largest = np.abs(numbers[odd]).max(axis=1)
        usable = np.isfinite(largest) & (largest > 0)
        scaled = numbers[odd] / np.where(usable, largest, 1.0)[:, None]
        roots[odd] = np.where(usable, np.sqrt(np.square(scaled).sum(axis=1)), 1.0)
    return scales, roots
