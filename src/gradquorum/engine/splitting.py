"""Which part of the ids an id belongs to, and a gradient as its parts travel."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALIGNMENT", "PackedRows", "parts_of", "split", "values_at"]

_MIX = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio (Knuth, The Art of Computer Programming 3, 6.4): spreads ids that follow each
other, or that share a factor."""
_HIGH = np.uint64(32)
ALIGNMENT = 64
"""Bytes: arrays that lie behind each other begin at multiples of it, as in `packed.hpp`."""
_INT64 = np.dtype(np.int64)


class PackedRows(NamedTuple):
    """Some rows of a gradient."""

    num_rows: int
    memory: Any
    """Exports bytes: the ids, int64, then the values at the next multiple of 64."""


def values_at(num_rows: int) -> int:
    """Return at which byte the values of so many packed rows begin."""
    return -(-num_rows * _INT64.itemsize // ALIGNMENT) * ALIGNMENT


def parts_of(indices: NDArray[np.int64], num_parts: int, bounds: tuple[int, ...] | None = None) -> NDArray[np.intp]:
    """Return for each id the part that it belongs to.

    Args:
        indices: ids, `[n]`.
        num_parts: how many there are.
        bounds: the first id of each part but the first, ascending; None to spread ids by their hash.
    """
    if bounds is not None:
        return np.searchsorted(np.array(bounds, np.int64), indices, side="right")
    hashed = (indices.view(np.uint64) * _MIX) >> _HIGH
    return (hashed % np.uint64(num_parts)).astype(np.intp)


def split(
    indices: NDArray[np.int64], values: NDArray[Any], num_parts: int, bounds: tuple[int, ...] | None
) -> list[PackedRows]:
    """Do what `AbstractEngine.split` does, in NumPy."""
    owners = parts_of(indices, num_parts, bounds)
    parts = []
    for part in range(num_parts):
        at = np.flatnonzero(owners == part)
        begin = values_at(len(at))
        row_bytes = values.nbytes // max(len(values), 1)
        memory = np.zeros(begin + len(at) * row_bytes, np.uint8)
        memory[: len(at) * indices.itemsize] = indices[at].view(np.uint8)
        memory[begin:] = values[at].reshape(-1).view(np.uint8)
        parts.append(PackedRows(len(at), memory))
    return parts
