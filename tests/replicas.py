"""Helpers of the tests of `SyncReplicas`."""

import numpy as np


def ignore(gradient):
    """An update that changes nothing."""


def make_acc(make, num_workers, max_per_worker=1, **options):
    return make.sparse(
        "float32", (10, 1), expected_workers=num_workers, max_per_worker=max_per_worker, order="worker", **options
    )


def one(index, value=1.0):
    """A gradient of one row."""
    return [index], np.float32([[value]])


def apply_and_leave(sync, index):
    with sync.worker(index) as worker:
        worker.begin()
        assert worker.apply(one(index))
