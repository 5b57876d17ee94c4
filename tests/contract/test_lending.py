"""SEMANTICS 2: lending, and what the caller may do with its arrays."""

import numpy as np
import pytest

import gradquorum as gq
from tests.support import GatedMerges, accept, apply, assert_rows, column, failing_merges, only_local


@pytest.fixture
def acc(make):
    return make.sparse("float32", (5, 1))


@pytest.mark.parametrize("indices", [[0], [0, 3], [3, 0], [3, 3]])
def test_copy_by_default_lets_the_caller_reuse_its_arrays_at_once(acc, indices):
    ids, values = np.array(indices), np.full((len(indices), 1), 2, np.float32)
    receipt = acc.apply_grad(ids, values)
    assert not receipt.lent
    assert receipt.released
    ids[:], values[:] = 1, -9
    taken = acc.take_grad(1, timeout=0)
    assert_rows(taken, sorted(set(indices)), [2.0 * indices.count(i) for i in sorted(set(indices))])


@only_local("what goes to a server is copied")
def test_lend_of_ascending_ids_reads_the_caller_s_values_and_says_so(acc):
    values = column(2, 4)
    receipt = apply(acc, [0, 3], values, copy=False)
    assert receipt.lent
    assert not receipt.released
    values[0] = 7  # which a caller must not do: it shows that nothing was copied
    assert_rows(acc.take_grad(1, timeout=0), [0, 3], [7, 4])


@only_local("what goes to a server is copied")
def test_lend_copies_the_ids_always(acc):
    ids = np.array([0, 3])
    assert acc.apply_grad(ids, column(2, 4), copy=False).lent
    ids[:] = 1
    assert_rows(acc.take_grad(1, timeout=0), [0, 3], [2, 4])


@pytest.mark.parametrize("indices", [[3, 0], [3, 3], [0, 0, 1]])
def test_lend_of_other_ids_keeps_the_ordered_copy_and_says_so(acc, indices):
    values = np.ones((len(indices), 1), np.float32)
    receipt = apply(acc, indices, values, copy=False)
    assert not receipt.lent
    assert receipt.released
    values[:] = -9
    assert (acc.take_grad(1, timeout=0).values > 0).all()


@pytest.mark.parametrize("values", [[[2.0], [4.0]], column(2, 4, dtype=">f4"), column(2, 0, 4)[::2]])
def test_lend_of_values_that_must_be_converted_is_right(acc, values):
    receipt = apply(acc, [0, 3], np.asarray(values, getattr(values, "dtype", np.float32)), copy=False)
    assert receipt
    assert_rows(acc.take_grad(1, timeout=0), [0, 3], [2, 4])


@only_local("what goes to a server is copied")
def test_lent_array_is_released_after_the_merge_not_when_the_step_advances(acc, engine):
    with GatedMerges(engine) as merges:
        future = acc.submit_take(1)
        receipt = accept(acc, [0], [1.0], copy=False)
        assert merges.begun.wait(10)
        assert acc.global_step == 1
        assert receipt.lent
        assert not receipt.released
        merges.gate.set()
        future.result(10)
    assert receipt.released


def test_lent_array_is_released_by_an_ordinary_take(acc):
    receipt = accept(acc, [0], [1.0], copy=False)
    acc.take_grad(1, timeout=0)
    assert receipt.released


@only_local("what goes to a server is copied")
def test_lent_array_is_kept_through_a_failed_merge(acc, engine):
    receipt = accept(acc, [0], [1.0], copy=False)
    with failing_merges(engine), pytest.raises(MemoryError):
        acc.take_grad(1, timeout=0)
    assert not receipt.released
    acc.take_grad(1, timeout=0)
    assert receipt.released


def test_lent_array_is_released_by_discard_and_close(make):
    acc = make.sparse("float32", (5, 1))
    receipt = accept(acc, [0], [1.0], copy=False)
    acc.discard()
    assert receipt.released
    receipt = accept(acc, [0], [1.0], copy=False)
    acc.close()
    assert receipt.released


@pytest.mark.parametrize("compact", [True, False])
def test_lent_array_of_a_dropped_gradient_is_free_at_once(make, compact):
    acc = make.sparse("float32", (5, 1), compact=compact)
    acc.set_global_step(3)
    receipt = apply(acc, [0], [1.0], local_step=2, copy=False)
    assert receipt.status is gq.ApplyStatus.STALE
    assert receipt.released


@pytest.mark.parametrize("copy", [True, False])
def test_result_never_aliases_the_caller_s_arrays(make, copy):
    for acc in (make.sparse("float32", (5, 1)), make.sparse("float32", (5, 1), compact=False)):
        values = column(2, 4)
        apply(acc, [0, 3], values, copy=copy)
        taken = acc.take_grad(1, timeout=0)
        assert not np.shares_memory(taken.values, values)
        taken.values[:] = -1
        np.testing.assert_array_equal(values, column(2, 4))


@pytest.mark.parametrize("copy", [True, False])
def test_dense_result_never_aliases_the_caller_s_array(make, copy):
    acc = make.dense("float32", (2,))
    value = np.array([2, 4], np.float32)
    acc.apply_grad(value, copy=copy)
    taken = acc.take_grad(1, timeout=0)
    assert not np.shares_memory(taken, value)


def test_dense_copy_by_default_lets_the_caller_reuse_its_array(make):
    acc = make.dense("float32", (2,))
    value = np.array([2, 4], np.float32)
    assert acc.apply_grad(value).released
    value[:] = -9
    np.testing.assert_array_equal(acc.take_grad(1, timeout=0), [2, 4])
