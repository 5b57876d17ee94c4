"""Typed usage, checked by mypy --strict: what a reader of the documentation would write."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import gradquorum as gq

acc = gq.SparseConditionalAccumulator("float32", (5, None), name="emb", reduction_type="SUM", compact=False)
receipt = acc.apply_grad([0, 1], np.ones((2, 2), np.float32), [5, 2], local_step=0, worker="a", sequence=1, copy=False)
assert_type(receipt, gq.ApplyReceipt)
assert_type(receipt.status, gq.ApplyStatus)
assert_type(receipt.step, int)
assert_type(receipt.lag, int)
assert_type(receipt.lent, bool)
assert_type(receipt.released, bool)
assert_type(receipt.first_status, gq.ApplyStatus | None)
acc.apply_grad(np.array([0, 1]), [[1.0, 2.0], [3.0, 4.0]], None, None, timeout=1.5)
acc.apply_indexed_slices_grad(gq.IndexedSlices(np.ones((1, 2), np.float32), np.array([0])))
acc.apply_indexed_slices_grad([gq.IndexedSlices(np.ones((1, 2), np.float32), np.array([0]), (5, 2))], local_step=None)

taken = acc.take_grad(2, timeout=0.5, exact=True)
assert_type(taken, gq.SparseGradient)
indices, values, shape = taken
assert_type(taken.num_gradients, int)
assert_type(taken.step, int)
assert_type(taken.indices, NDArray[np.int64])
assert_type(taken.counts, NDArray[np.int64])
assert_type(taken.values, NDArray[Any])
assert_type(taken.workers, tuple[int | str, ...])
assert_type(acc.take_indexed_slices_grad(1), gq.IndexedSlices)
assert_type(acc.submit_take(3), concurrent.futures.Future[gq.SparseGradient])
assert_type(acc.num_accumulated(), int)
assert_type(acc.global_step, int)
assert_type(acc.published_step, int)
assert_type(acc.publish(), int)
assert_type(acc.wait_published(3, timeout=1.0), int)
assert_type(acc.discard(), int)
assert_type(acc.close(for_all=True), int)
assert_type(acc.last_sequence("a"), int)
assert_type(acc.name, str)
assert_type(acc.engine, str)
assert_type(acc.closed, bool)
acc.set_global_step(4)
for grad in acc.rounds(3, timeout=10.0):
    assert_type(grad, gq.SparseGradient)


async def taker() -> gq.SparseGradient:
    """Take in a coroutine."""
    return await acc.take_grad_async(2, timeout=1.0)


with gq.ConditionalAccumulator(np.float64, (2, 3), order="worker", engine="reference") as dense:
    assert_type(dense, gq.ConditionalAccumulator)
    assert_type(dense.apply_grad(np.ones((2, 3))), gq.ApplyReceipt)
    assert_type(dense.take_grad(1), NDArray[Any])
    assert_type(dense.submit_take(1), concurrent.futures.Future[NDArray[Any]])
    with dense.worker(3) as member:
        step: int = member.begin()
        member.apply_grad([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], weight=1.0)

with acc.worker("w") as worker:
    worker.begin()
    worker.apply_grad([0], [[1.0, 2.0]])
    worker.apply_indexed_slices_grad(gq.IndexedSlices([[1.0]], [0]))

with gq.AccumulatorGroup(
    {"emb": gq.SparseSpec("float32", (5, 2), "SUM"), "bias": gq.DenseSpec("float32", (2,))}, expected_workers=2
) as group:
    group.apply({"emb": gq.IndexedSlices([[1.0, 2.0]], [0]), "bias": [1.0, 2.0]}, local_step=None, worker=1)
    group.apply({"emb": ([0], np.ones((1, 2), np.float32))})
    result = group.take(2, timeout=1.0)
    assert_type(result.num_gradients, int)
    assert_type(result.step, int)
    names: Iterator[str] = iter(result)


def anything(accumulator: gq.ConditionalAccumulatorBase[Any]) -> int:
    """Take either class."""
    return accumulator.global_step


anything(acc)
anything(dense)
error: ValueError = gq.InvalidArgumentError("")
timeout_error: TimeoutError = gq.DeadlineExceededError("", have=0, need=1, step=0, num_stale=0)
