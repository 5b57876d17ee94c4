"""Whatever a caller calls an array, as NumPy sees it: lists, NumPy, and the arrays of frameworks."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.dtypes import convert, is_bfloat16
from gradquorum.errors import InvalidArgumentError, InvalidDTypeError, no_memory
from gradquorum.frameworks import check_concrete, from_torch, is_torch

__all__ = ["MAX_INT64", "as_contiguous", "as_dims", "as_index_vector", "as_integer", "as_values"]

MAX_INT64 = 2**63 - 1
_NO_ARRAYS = (int, float, complex, list, tuple)
"""What is converted, not refused, when its dtype differs."""
_KIND_RANK = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}


def as_values(
    what: str, values: Any, dtype: np.dtype[Any], *, convert_arrays: bool = False
) -> tuple[NDArray[Any], bool]:
    """Return values as an array of `dtype` in native byte order, and whether it is the caller's memory.

    Lists and scalars are converted unless that loses their kind (real to integer, complex to real). An array
    of another dtype is refused, or with `convert_arrays` converted under the same condition.

    Raises:
        InvalidDTypeError: the dtype does not fit.
        InvalidArgumentError: this is no array at all, or a number does not fit the dtype.
    """
    array, is_array, borrowed = _as_array(what, values)
    if array.dtype is dtype or array.dtype == dtype:
        return array, borrowed
    if array.dtype.newbyteorder("=") == dtype:
        return _cast(array, dtype), False
    if is_array and not convert_arrays:
        raise InvalidDTypeError(
            f"{what}: expected an array of {dtype.name}, got {array.dtype.name}; "
            f"write {_cast_of(values, dtype)} to convert it"
        )
    if array.size == 0 and not is_array:  # NumPy calls an empty list float64
        return array.astype(dtype), False
    return _converted(what, array, dtype), False


def _converted(what: str, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    have, want = _kind_rank(array.dtype), _kind_rank(dtype)
    if have is None or want is None or have > want:
        raise InvalidDTypeError(
            f"{what}: expected numbers that {dtype.name} can hold, got {array.dtype.name}, "
            "and converting would lose what kind of number they are"
        )
    if want == 1 and array.size:
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise InvalidArgumentError(f"{what}: expected integers that {dtype.name} can hold, got one beyond")
    return _cast(array, dtype)


def _cast(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a private, contiguous copy."""
    try:
        return convert(array, dtype)
    except MemoryError as error:
        raise no_memory(error) from error


def as_contiguous(array: NDArray[Any], borrowed: bool) -> tuple[NDArray[Any], bool]:
    """Return the array if it is contiguous and aligned, else a private copy; and whether it is the caller's memory."""
    flags = array.flags
    if flags.c_contiguous and flags.aligned:
        return array, borrowed
    return _cast(array, array.dtype), False


def _kind_rank(dtype: np.dtype[Any]) -> int | None:
    if dtype.kind != "V":
        return _KIND_RANK.get(dtype.kind)
    # What ml_dtypes adds: float8_e5m2, bfloat16, int4 and the like.
    if dtype.name.startswith(("bfloat", "float")):
        return 2
    return 1 if _is_narrow_integer(dtype) else None


def _is_narrow_integer(dtype: np.dtype[Any]) -> bool:
    """Tell whether this is one of the integers of less than a byte, which ml_dtypes has and NumPy does not."""
    return dtype.kind == "V" and dtype.name.startswith(("int", "uint"))


def _cast_of(values: Any, dtype: np.dtype[Any]) -> str:
    if is_torch(values):
        return f".to(torch.{dtype.name})"
    return f".astype({'ml_dtypes.bfloat16' if is_bfloat16(dtype) else f'np.{dtype.name}'})"


def _as_array(what: str, values: Any) -> tuple[NDArray[Any], bool, bool]:
    """Return a NumPy array, whether this was an array (and not a list or a scalar), and whether it is its memory."""
    if type(values) is np.ndarray:
        return values[...], True, True  # a view: another thread may change the shape of the caller's
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())  # NumPy loads it when it is first named
    if isinstance(values, masked):
        raise InvalidArgumentError(f"{what}: expected an array without a mask, got a masked one; fill it first")
    if isinstance(values, _NO_ARRAYS) and not isinstance(values, np.generic):
        try:
            return np.asarray(values), False, False
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            got = "a ragged list" if "inhomogeneous" in str(error) else "a sequence that is none"
            raise InvalidArgumentError(f"{what}: expected an array, got {got}: {error}") from error
    if isinstance(values, (str, bytes, bytearray)):
        raise InvalidDTypeError(f"{what}: expected an array, a list or a scalar, got {type(values).__name__}")
    if is_torch(values):
        array, borrowed = from_torch(what, values)
        return array, True, borrowed
    try:
        if hasattr(values, "__array_interface__") or hasattr(values, "__array__"):
            return np.asarray(values), True, True
        if hasattr(values, "__dlpack__"):
            return np.from_dlpack(values), True, True
        memory = _memory_of(values)
        if memory is not None:
            return np.asarray(memory), True, True
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        check_concrete(what, values)
        raise InvalidArgumentError(
            f"{what}: expected an array, a list or a scalar, got {type(values).__name__}: {error}"
        ) from error
    check_concrete(what, values)
    raise InvalidArgumentError(f"{what}: expected an array, a list or a scalar, got {type(values).__name__}")


def _memory_of(values: Any) -> memoryview | None:
    """Return an object's buffer, None if it has none."""
    try:
        return memoryview(values)
    except TypeError:
        return None


def as_index_vector(indices: Any) -> NDArray[np.int64]:
    """Return ids as a private int64 array of whatever rank they have.

    Raises:
        InvalidDTypeError: they are no integers.
        InvalidArgumentError: one does not fit int64.
    """
    array, is_array, _ = _as_array("indices", indices)
    if not is_array and isinstance(indices, (list, tuple)) and any(isinstance(i, (bool, np.bool_)) for i in indices):
        raise InvalidDTypeError("indices: expected integers, got a bool among them")
    if array.size == 0 and not is_array:
        return np.zeros(array.shape, np.int64)
    if array.dtype.kind == "f" and not is_array:  # NumPy's answer to a mixture of uint64 and others
        array = _integers(indices, array)
    if array.dtype.kind not in "iu" and not _is_narrow_integer(array.dtype):
        raise InvalidDTypeError(f"indices: expected integers, got {array.dtype.name}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:
        array = _cast(array, np.dtype(np.uint64))  # the caller's may change between check and use
        if array.size and int(array.max()) > MAX_INT64:
            raise InvalidArgumentError(f"indices: expected ids up to {MAX_INT64}, got {int(array.max())}")
        return array.view(np.int64)
    try:
        return np.array(array, np.int64, order="C")
    except MemoryError as error:
        raise no_memory(error) from error


def _integers(sequence: Any, fallback: NDArray[Any]) -> NDArray[Any]:
    try:
        return np.array([operator.index(number) for number in sequence], np.int64)
    except (TypeError, OverflowError):
        return fallback


def as_integer(what: str, number: Any, remedy: str = "write one integer") -> int:
    """Return a scalar integer that fits int64; the remedy is for what is no scalar.

    Raises:
        InvalidDTypeError: it is no integer.
        InvalidArgumentError: it is no scalar, or does not fit.
    """
    if type(number) is not int:
        if getattr(number, "ndim", 0) or isinstance(number, (list, tuple)):
            raise InvalidArgumentError(f"{what} must be scalar, got {number!r}; {remedy}")
        is_bool = isinstance(number, (bool, np.bool_)) or str(getattr(number, "dtype", "")).endswith("bool")
        try:
            if is_bool:
                raise TypeError
            number = operator.index(number)
        except (TypeError, ValueError):
            raise InvalidDTypeError(f"{what}: expected an integer, got {number!r}") from None
    if not -MAX_INT64 - 1 <= number <= MAX_INT64:
        raise InvalidArgumentError(f"{what}: expected an int64, got {number}")
    return int(number)


def as_dims(what: str, dims: Any, *, unknown: tuple[Any, ...]) -> tuple[int | None, ...]:
    """Return a shape as a tuple of sizes, None for those that are one of `unknown`.

    Raises:
        InvalidArgumentError: it is no vector of sizes.
    """
    if hasattr(dims, "as_list"):  # tf.TensorShape
        dims = () if dims.rank is None else dims.as_list()
    is_vector = getattr(dims, "ndim", 1) == 1 and hasattr(dims, "__getitem__") and hasattr(dims, "__len__")
    if not is_vector or isinstance(dims, (str, bytes, Mapping)):
        raise InvalidArgumentError(f"{what}: expected a vector of sizes, got {dims!r}")
    entries = list(dims)
    sizes: list[int | None] = []
    for i, entry in enumerate(entries):
        size = None if entry is None else as_integer(f"{what}[{i}]", getattr(entry, "value", entry))
        if size is None or size in unknown:
            if None not in unknown:
                raise InvalidArgumentError(f"{what}[{i}]: expected a size, got {entry!r}")
            sizes.append(None)
        elif size < 0:
            others = f", or one of {', '.join(map(str, unknown))}" if unknown else ""
            raise InvalidArgumentError(f"{what}[{i}]: expected a size of 0 or more{others}; got {size}")
        else:
            sizes.append(size)
    return tuple(sizes)
