"""torch sparse tensors added one after the other, coalesced in the end; the counts by `unique`."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.cases import Gradient
from benchmarks.rivals import Job


def prepare(gradients: list[Gradient]) -> Job:
    num_rows = 1 + max(int(ids.max()) for ids, _ in gradients)
    tensors = [(torch.from_numpy(ids), torch.from_numpy(values)) for ids, values in gradients]
    unique = all(bool(np.all(ids[1:] > ids[:-1])) for ids, _ in gradients)

    def sparse(ids, values):
        wide = values.float() if values.dtype == torch.float16 else values  # float16 has no sparse add
        return torch.sparse_coo_tensor(
            ids[None], wide, (num_rows, values.shape[1]), is_coalesced=unique or None, check_invariants=False
        )

    def job():
        total, each = None, []
        for ids, values in tensors:
            gradient = sparse(ids, values)
            if not unique:
                gradient = gradient.coalesce()
                ids = gradient.indices()[0]
            each.append(ids)
            total = gradient if total is None else total + gradient
        total = total.coalesce()
        counts = torch.unique(torch.cat(each), return_counts=True)[1]
        return total.indices()[0], (total.values() / counts[:, None]).to(tensors[0][1].dtype)

    return job
