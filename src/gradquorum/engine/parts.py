"""The content of blocks as arrays, the same for all engines: what a checkpoint is made of.

Rows are real: a complex row is one of twice the width. They are of the dtype, or of the accumulate dtype where
anything was added up. As an array on its own, bfloat16 is its bits in uint16, so that every array is plain NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradquorum.dtypes import is_bfloat16, real_dtype
from gradquorum.engine.interface import ReducerSpec
from gradquorum.errors import InvalidArgumentError

__all__ = ["DenseParts", "SparseParts"]

Arrays = Mapping[str, NDArray[Any]]

_LATE = "late."
_WEIGHTS = ReducerSpec(np.dtype(np.float64), np.dtype(np.float64), "SUM")


class SparseParts(NamedTuple):
    """A sparse block: one gradient, or the merged prefix of a log."""

    indices: NDArray[np.int64]
    """`[n]`, ascending, unique."""
    rows: NDArray[Any]
    """`[n, width]`, real."""
    counts: NDArray[np.int64] | None
    """`[n]`, gradients that touched the row; None for one gradient."""
    weight: float
    """Of the gradient; of all gradients together in a merged prefix, whose rows are weighted already."""
    late: SparseParts | None = None
    """Sums of the weights of late gradients, `[m, 1]` in float64, where a policy weighs them."""
    is_late: bool = False
    """Whether a late gradient is in it, where a policy weighs them."""

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return it as arrays by name."""
        arrays = {"indices": self.indices, "rows": _plain(self.rows), "weight": np.array([self.weight])}
        if self.counts is not None:
            arrays["counts"] = self.counts
        if self.is_late:
            arrays["is_late"] = np.ones(1, np.uint8)
        if self.late is not None:
            arrays.update({_LATE + name: array for name, array in self.late.to_arrays().items()})
        return arrays

    @classmethod
    def from_arrays(
        cls, arrays: Arrays, spec: ReducerSpec, num_elements: int | None, num_gradients: int
    ) -> SparseParts:
        """Check arrays by name and return what they make.

        Args:
            arrays: by name; nothing about them has been checked.
            spec: of the member.
            num_elements: of a row, in the dtype; None for a gradient without rows, of any row shape.
            num_gradients: in the block.

        Raises:
            InvalidArgumentError: they cannot be of a block of this member.
        """
        _check_names(arrays, ("indices", "rows", "counts", "weight", "is_late"), prefix=_LATE)
        indices = _array(arrays, "indices", np.int64, ndim=1)
        n = len(indices)
        if n and (indices[0] < 0 or not (indices[1:] > indices[:-1]).all()):
            raise InvalidArgumentError("indices: expected ascending ids from 0 on")
        if num_elements is None and n:
            raise InvalidArgumentError("indices: expected none, as the row shape is not known")
        rows = _values(arrays, "rows", spec, (n, _width(spec, num_elements)))
        counts = None
        if "counts" in arrays:
            counts = _array(arrays, "counts", np.int64, ndim=1)
            if counts.shape != (n,) or (n and not 1 <= counts.min() <= counts.max() <= num_gradients):
                raise InvalidArgumentError(f"counts: expected {n} numbers from 1 to {num_gradients}")
        elif num_gradients != 1:
            raise InvalidArgumentError(f"counts: expected some for a block of {num_gradients} gradients, got none")
        late = {name.removeprefix(_LATE): array for name, array in arrays.items() if name.startswith(_LATE)}
        parts = None
        if late:
            parts = cls.from_arrays(late, _WEIGHTS, 1, 1 if "counts" not in late else num_gradients)
            at = np.minimum(np.searchsorted(indices, parts.indices), max(n - 1, 0))
            late_counts = np.int64(1) if parts.counts is None else parts.counts
            most = np.ones(n, np.int64) if counts is None else counts
            if (
                not np.array_equal(indices[at], parts.indices)
                or not (late_counts <= most[at]).all()
                or not ((parts.rows[:, 0] > 0) & (parts.rows[:, 0] <= late_counts)).all()
            ):
                raise InvalidArgumentError("late: expected weights above 0 of rows that are there")
        is_late = "is_late" in arrays
        if is_late and _array(arrays, "is_late", np.uint8, ndim=1, size=1)[0] != 1:
            raise InvalidArgumentError("is_late: expected 1, or no such array")
        return cls(indices, rows, counts, _weight(arrays), parts, is_late)


class DenseParts(NamedTuple):
    """A dense block: one gradient, or the running sum of several."""

    total: NDArray[Any] | None
    """`[n]`, real; None if no gradient in it carried this member."""
    num_carriers: int
    """Gradients that carried this member."""
    weight: float
    """As for sparse blocks."""
    weighted: bool
    """Whether it is a sum, weighted already."""
    num_late: int = 0
    """Late ones among the carriers, where a policy weighs them."""
    late_weight: float = 0.0
    """The sum of their weights."""

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return it as arrays by name."""
        arrays: dict[str, NDArray[Any]] = {
            "num_carriers": np.array([self.num_carriers], np.int64),
            "weight": np.array([self.weight]),
            "weighted": np.array([self.weighted], np.uint8),
        }
        if self.total is not None:
            arrays["total"] = _plain(self.total)
        if self.num_late:
            arrays["num_late"] = np.array([self.num_late], np.int64)
            arrays["late_weight"] = np.array([self.late_weight])
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Arrays, spec: ReducerSpec, num_elements: int | None, num_gradients: int) -> DenseParts:
        """Check arrays by name and return what they make, as for sparse blocks."""
        names = ("total", "num_carriers", "weight", "weighted", "num_late", "late_weight")
        _check_names(arrays, names)
        carriers = int(_array(arrays, "num_carriers", np.int64, ndim=1, size=1)[0])
        weighted = bool(_array(arrays, "weighted", np.uint8, ndim=1, size=1)[0])
        if not 0 <= carriers <= num_gradients or (carriers > 0) != ("total" in arrays):
            raise InvalidArgumentError(
                f"num_carriers: got {carriers} of {num_gradients}, with total: {'total' in arrays}"
            )
        if num_gradients != 1 and not weighted:
            raise InvalidArgumentError(f"weighted: expected a sum for a block of {num_gradients} gradients")
        total = None
        if carriers:
            if num_elements is None:
                raise InvalidArgumentError("total: expected none, as its shape is not known")
            total = _values(arrays, "total", spec, (_width(spec, num_elements),))
        num_late, late_weight = 0, 0.0
        if "num_late" in arrays:
            num_late = int(_array(arrays, "num_late", np.int64, ndim=1, size=1)[0])
            late_weight = float(_array(arrays, "late_weight", np.float64, ndim=1, size=1)[0])
            if not 0 < num_late <= carriers or not 0 < late_weight <= num_late:
                raise InvalidArgumentError(f"num_late: got {num_late} of {carriers} with weight {late_weight}")
        return cls(total, carriers, _weight(arrays), weighted, num_late, late_weight)


def _width(spec: ReducerSpec, num_elements: int | None) -> int | None:
    return None if num_elements is None else num_elements * (2 if spec.dtype.kind == "c" else 1)


def _check_names(arrays: Arrays, names: tuple[str, ...], prefix: str | None = None) -> None:
    for name in arrays:
        if name not in names and not (prefix and name.startswith(prefix)):
            raise InvalidArgumentError(f"expected arrays named {', '.join(names)}, got {name!r}")


def _plain(values: NDArray[Any]) -> NDArray[Any]:
    return values.view(np.uint16) if is_bfloat16(values.dtype) else values


def _array(arrays: Arrays, name: str, dtype: Any, *, ndim: int, size: int | None = None) -> NDArray[Any]:
    """Return an array of that form, contiguous and in native byte order."""
    array = arrays.get(name)
    if not isinstance(array, np.ndarray):
        raise InvalidArgumentError(f"{name}: expected an array, got {type(array).__name__}")
    if array.dtype != dtype or array.ndim != ndim or (size is not None and array.size != size):
        raise InvalidArgumentError(
            f"{name}: expected {np.dtype(dtype).name} of {ndim} dims, got {array.dtype.name} {array.shape}"
        )
    return np.require(array, np.dtype(dtype), ["C", "A"])


def _values(arrays: Arrays, name: str, spec: ReducerSpec, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """Return rows of the dtype or of the accumulate dtype; None in the shape stands for any size."""
    array = arrays.get(name)
    storage, accumulate = real_dtype(spec.dtype), real_dtype(spec.accumulate_dtype)
    stored = np.dtype(np.uint16) if is_bfloat16(storage) else storage
    if (
        not isinstance(array, np.ndarray)
        or array.dtype not in (stored, accumulate)
        or array.ndim != len(shape)
        or any(want not in (None, size) for want, size in zip(shape, array.shape, strict=True))
    ):
        got = f"{array.dtype.name} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidArgumentError(f"{name}: expected {stored.name} or {accumulate.name} {shape}, got {got}")
    dtype = stored if array.dtype == stored else accumulate
    values: NDArray[Any] = np.require(array, dtype, ["C", "A"])
    return values.view(storage) if dtype == stored else values


def _weight(arrays: Arrays) -> float:
    weight = float(_array(arrays, "weight", np.float64, ndim=1, size=1)[0])
    if not weight > 0:
        raise InvalidArgumentError(f"weight: expected a number above 0, got {weight}")
    return weight
