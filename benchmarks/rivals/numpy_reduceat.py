"""NumPy: sort all rows by id, then `add.reduceat`."""

from __future__ import annotations

import numpy as np

from benchmarks.cases import Gradient
from benchmarks.rivals import Job


def grouped(all_ids, owners):
    """Return the order that sorts the ids, where each id starts, and in how many gradients it occurs.

    `owners` is the gradient of each row, or None if no gradient repeats an id.
    """
    order = np.argsort(all_ids, kind="stable")
    ids = all_ids[order]
    starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
    if owners is None:
        return order, ids[starts], starts, np.diff(starts, append=len(ids))
    owner = owners[order]
    new = np.r_[True, (ids[1:] != ids[:-1]) | (owner[1:] != owner[:-1])]
    return order, ids[starts], starts, np.add.reduceat(new, starts, dtype=np.int64)


def owners_of(gradients: list[Gradient]):
    if all(bool(np.all(ids[1:] > ids[:-1])) for ids, _ in gradients):
        return None
    return np.repeat(np.arange(len(gradients)), [len(ids) for ids, _ in gradients])


def prepare(gradients: list[Gradient]) -> Job:
    owners = owners_of(gradients)

    def job():
        all_ids, all_values = (np.concatenate(parts) for parts in zip(*gradients, strict=True))
        order, ids, starts, counts = grouped(all_ids, owners)
        sums = np.add.reduceat(all_values[order], starts, axis=0)
        sums /= counts[:, None].astype(sums.dtype)
        return ids, sums

    return job
