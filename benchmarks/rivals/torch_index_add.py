"""torch: all ids through one `unique`, all rows through one `index_add_`."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.cases import Gradient
from benchmarks.rivals import Job


def prepare(gradients: list[Gradient]) -> Job:
    tensors = [(torch.from_numpy(ids), torch.from_numpy(values)) for ids, values in gradients]
    unique = all(bool(np.all(ids[1:] > ids[:-1])) for ids, _ in gradients)
    lengths = [len(ids) for ids, _ in gradients]

    def job():
        all_ids, all_values = (torch.cat(parts) for parts in zip(*tensors, strict=True))
        ids, inverse, counts = torch.unique(all_ids, return_inverse=True, return_counts=True)
        sums = torch.zeros((len(ids), all_values.shape[1]), dtype=all_values.dtype)
        sums.index_add_(0, inverse, all_values)
        if not unique:
            counts = torch.zeros(len(ids), dtype=torch.int64)
            for places in inverse.split(lengths):
                counts += torch.zeros(len(ids), dtype=torch.int64).index_fill_(0, places, 1)
        return ids, sums.div_(counts[:, None])

    return job
