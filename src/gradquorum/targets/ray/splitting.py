"""Which shard holds a dense member, and how the results of all shards become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["dense_shard", "join", "own"]

_INT64 = np.dtype(np.int64)


def dense_shard(member: int, num_shards: int) -> int:
    """Return the shard that holds a dense member."""
    return member % num_shards


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
