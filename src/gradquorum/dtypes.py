"""Which dtypes there are, and in which one each is added up."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.errors import InvalidArgumentError, InvalidDTypeError

__all__ = ["accumulate_dtype_of", "as_dtype", "convert", "is_bfloat16", "real_dtype", "round_weight"]

# For each dtype, the dtypes in which it may be added up; the first is the default.
_ACCUMULATE: dict[str, tuple[str, ...]] = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
    "complex64": ("complex64", "complex128"),
    "complex128": ("complex128",),
    "int32": ("int64",),
    "int64": ("int64",),
}


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype, in native byte order, of whatever NumPy or a framework calls a dtype.

    Raises:
        InvalidDTypeError: it is none, or not one of the supported ones.
    """
    found = _resolve(dtype)
    if found is None or found.name not in _ACCUMULATE:
        name = dtype if found is None else found.name
        raise InvalidDTypeError(f"dtype: expected one of {', '.join(_ACCUMULATE)}, got {name!r}")
    return found if found.isnative else found.newbyteorder("=")


def _resolve(dtype: Any) -> np.dtype[Any] | None:
    if dtype is None:  # np.dtype(None) is float64
        return None
    if isinstance(dtype, getattr(sys.modules.get("torch"), "dtype", ())):
        dtype = str(dtype).removeprefix("torch.")
    dtype = getattr(dtype, "as_numpy_dtype", dtype)  # tf.DType
    if isinstance(dtype, str) and dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    try:
        found: np.dtype[Any] = np.dtype(dtype)
        return found
    except (TypeError, ValueError):
        return None


def accumulate_dtype_of(dtype: np.dtype[Any], asked: Any) -> np.dtype[Any]:
    """Return the dtype in which gradients of `dtype` are added up: the default, or the one asked for.

    Raises:
        InvalidArgumentError: gradients of `dtype` are not added up in the dtype asked for.
    """
    allowed = _ACCUMULATE[dtype.name]
    if asked is None:
        return np.dtype(allowed[0])
    found = _resolve(asked)
    if found is None or found.name not in allowed:
        got = asked if found is None else found.name
        raise InvalidArgumentError(
            f"accumulate_dtype: expected {' or '.join(allowed)} for gradients of {dtype.name}, got {got!r}"
        )
    return np.dtype(found.name)


def real_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the parts of a complex dtype, and every other dtype as it is."""
    return np.dtype(f"float{dtype.itemsize * 4}") if dtype.kind == "c" else dtype


def round_weight(weight: float, dtype: np.dtype[Any]) -> float:
    """Return the weight as a number that the dtype holds exactly, infinite or 0 if it is beyond."""
    with np.errstate(over="ignore", under="ignore"):
        return float(dtype.type(weight))


def convert(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a contiguous copy in the dtype, each number rounded once, to nearest even. What overflows is infinite."""
    with np.errstate(all="ignore"):
        if is_bfloat16(dtype) and array.dtype.kind in "fiu" and array.dtype.itemsize > 4:
            array = _round_to_odd_float32(array.astype(np.float64, copy=False))
        return np.array(array, dtype, order="C")


def _round_to_odd_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Round so that rounding the result again, to bfloat16, gives what rounding once would.

    ml_dtypes goes from float64 to bfloat16 by way of float32, which rounds twice. Source: Boldo and Melquiond, "When
    double rounding is odd", 2005.
    """
    near: NDArray[np.float32] = array.astype(np.float32)
    inexact = np.isfinite(near) & (near != array)
    even = (near.view(np.uint32) & 1) == 0
    toward = np.where(near < array, np.float32(np.inf), np.float32(-np.inf))
    return np.where(inexact & even, np.nextafter(near, toward), near)


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Tell whether this is `ml_dtypes.bfloat16`, without loading that package."""
    return dtype.kind == "V" and dtype.name == "bfloat16"  # the kind first: NumPy makes up names in Python
