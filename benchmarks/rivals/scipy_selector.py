"""SciPy: a sparse matrix that selects and adds the rows of each id, times all rows."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from benchmarks.cases import Gradient
from benchmarks.rivals import Job
from benchmarks.rivals.numpy_reduceat import grouped, owners_of


def prepare(gradients: list[Gradient]) -> Job:
    owners = owners_of(gradients)
    dtype = gradients[0][1].dtype
    wide = np.promote_types(dtype, np.float32)  # SciPy has no float16

    def job():
        all_ids, all_values = (np.concatenate(parts) for parts in zip(*gradients, strict=True))
        order, ids, starts, counts = grouped(all_ids, owners)
        ones = np.ones(len(order), wide)
        selector = scipy.sparse.csr_array((ones, order, np.append(starts, len(order))), (len(ids), len(order)))
        sums = selector @ all_values.astype(wide, copy=False)
        sums /= counts[:, None].astype(wide)
        return ids, sums.astype(dtype, copy=False)

    return job
