"""Which shard holds which rows, and how their results become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.targets.ray.records import Rows

__all__ = ["dense_shard", "join", "own", "shards_of", "split"]

_INT64 = np.dtype(np.int64)

_MIX = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio (Knuth, The Art of Computer Programming 3, 6.4): spreads ids that follow each
other, or that share a factor."""
_HIGH = np.uint64(32)


def shards_of(indices: NDArray[np.int64], num_shards: int, bounds: tuple[int, ...] | None = None) -> NDArray[np.intp]:
    """Return for each id the shard that holds it.

    Args:
        indices: ids, `[n]`.
        num_shards: how many there are.
        bounds: the first id of each shard but the first, ascending; None to spread ids by their hash.
    """
    if bounds is not None:
        return np.searchsorted(np.array(bounds, np.int64), indices, side="right")
    hashed = (indices.view(np.uint64) * _MIX) >> _HIGH
    return (hashed % np.uint64(num_shards)).astype(np.intp)


def dense_shard(member: int, num_shards: int) -> int:
    """Return the shard that holds a dense member."""
    return member % num_shards


def split(
    indices: NDArray[np.int64], values: NDArray[Any], num_shards: int, bounds: tuple[int, ...] | None = None
) -> list[Rows | None]:
    """Return for each shard its rows of a gradient, in the order in which they are; None where there are none."""
    if num_shards == 1:
        return [Rows(indices, values) if len(indices) else None]
    owners = shards_of(indices, num_shards, bounds)
    parts: list[Rows | None] = []
    for shard in range(num_shards):
        at = np.flatnonzero(owners == shard)
        parts.append(Rows(indices.take(at), values.take(at, axis=0)) if len(at) else None)
    return parts


def own(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a copy of an array of Ray's, which is read only and whose dtype, having travelled, is not NumPy's own."""
    copied = np.empty(array.shape, dtype)
    copied[...] = array
    return copied


def join(
    results: Sequence[tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]], dtype: np.dtype[Any]
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
    """Return the results of all shards as one, ascending, in arrays of its own. No id is in two of them."""
    if len(results) == 1:
        indices, values, counts = results[0]
        return own(indices, _INT64), own(values, dtype), own(counts, _INT64)
    together = np.concatenate([indices for indices, _, _ in results])
    order = np.argsort(together, kind="stable")  # merges runs that are ascending already
    place = np.empty(len(order), np.intp)
    place[order] = np.arange(len(order))
    values = np.empty((len(order), *results[0][1].shape[1:]), dtype)
    counts = np.empty(len(order), np.int64)
    begin = 0
    for ids, rows, touched in results:
        at = place[begin : begin + len(ids)]
        values[at], counts[at] = rows, touched
        begin += len(ids)
    return own(together[order], _INT64), values, counts
