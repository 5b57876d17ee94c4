"""Checkpoints: the same bits afterwards on either engine, one moment of the round, and nothing half done."""

import contextlib
import itertools
import os
import threading

import numpy as np
import pytest

import gradquorum as gq
from gradquorum import Defer, Weighted, Window
from tests.support import (
    TIMEOUT,
    GatedMerges,
    accept,
    apply,
    assert_rows,
    assert_same_bits,
    available_engines,
    column,
    drain,
    failing_merges,
    only_local,
    unchanged,
    wait_until,
)

pytest.importorskip("safetensors")

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int32", "int64"]


@pytest.fixture(params=available_engines())
def other(request):
    """The engine on which a state is loaded."""
    return request.param


def same(restored, original):
    for name in ("global_step", "published_step", "num_undelivered", "num_deferred", "num_workers"):
        assert getattr(restored, name) == getattr(original, name), name
    assert restored.num_accumulated() == original.num_accumulated()


def assert_same_results(restored, original):
    results = [drain(acc) for acc in (restored, original)]
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a.indices, b.indices)
        assert_same_bits(a.values, b.values)
        np.testing.assert_array_equal(a.counts, b.counts)
        assert (a.num_gradients, a.step, a.workers) == (b.num_gradients, b.step, b.workers)


def fill(acc, rng, count, num_ids=300, rows=200, width=4):
    for i in range(count):
        values = rng.standard_normal((rows, width)) * 1000
        if acc.dtype.kind == "c":
            values = values + 1j * rng.standard_normal(values.shape)
        options = {"weight": float(rng.random() + 0.1)} if acc.reduction_type == "MEAN_BY_WEIGHT" else {}
        acc.apply_grad(
            rng.integers(0, num_ids, rows),
            values.astype(acc.dtype),
            local_step=None,
            worker=i % 3,
            sequence=i,
            **options,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"])
def test_restored_round_gives_the_same_bits_on_either_engine(make, other, tmp_path, dtype, reduction):
    if dtype.startswith("int") and reduction != "SUM":
        return
    acc = make.sparse(dtype, (300, 4), reduction_type=reduction)
    fill(acc, np.random.default_rng(3), 5)
    acc.save(tmp_path / "round")
    restored = make.sparse(dtype, (300, 4), reduction_type=reduction, engine=other)
    restored.load(tmp_path / "round")
    same(restored, acc)
    for one in (acc, restored):
        fill(one, np.random.default_rng(4), 3)
    assert_same_results(restored, acc)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("reduction", ["MEAN", "MEAN_BY_WEIGHT"])
@pytest.mark.parametrize("staleness", ["strict", Weighted()], ids=repr)
def test_compacted_log_gives_the_same_bits_on_either_engine(make, other, dtype, reduction, staleness):
    options = {"reduction_type": reduction, "staleness": staleness}
    acc = make.sparse(dtype, **options)
    fill(acc, np.random.default_rng(3), 40, num_ids=600, rows=500, width=64)
    assert len(acc.state_dict()) < 100  # it has been compacted
    restored = make.sparse(dtype, engine=other, **options)
    restored.load_state_dict(acc.state_dict())
    for one in (acc, restored):
        fill(one, np.random.default_rng(4), 2, width=64)
    assert_same_results(restored, acc)


@pytest.mark.parametrize("reduction", ["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("staleness", ["strict", Weighted()], ids=repr)
def test_group_with_dense_members_and_absent_ones_is_restored(make, other, dtype, reduction, staleness):
    members = {"a.b": gq.SparseSpec(dtype, (50, 2), reduction), "a": gq.DenseSpec(dtype, (3,), reduction)}
    group = make.group(members, staleness=staleness)
    group.set_global_step(2)
    rng = np.random.default_rng(0)
    for i in range(6):
        gradient = {"a.b": (rng.integers(0, 50, 7), rng.standard_normal((7, 2)).astype(group.members["a"].dtype))}
        if i % 2:
            gradient["a"] = rng.standard_normal(3).astype(group.members["a"].dtype)
        group.apply({} if i == 4 else gradient, 2 if staleness == "strict" else 2 - i % 3)
    restored = make.group(members, engine=other, staleness=staleness)
    restored.load_state_dict(group.state_dict())
    same(restored, group)
    a, b = group.take(6), restored.take(6)
    assert_same_bits(b["a.b"].values, a["a.b"].values)
    assert_same_bits(b["a"], a["a"])


def test_steps_marks_members_and_stale_ones_are_restored(make, other):
    acc = make.sparse()
    acc.set_global_step(4)
    acc.publish(3)
    accept(acc, [0], [1.0], worker="a", sequence=17)
    apply(acc, [0], [1.0], worker="a", sequence=16, local_step=1)
    acc.worker(7).leave()
    acc.worker("b")
    restored = make.sparse(engine=other)
    restored.load_state_dict(acc.state_dict())
    same(restored, acc)
    again = apply(restored, [0], [1.0], worker="a", sequence=16)
    assert (again.status, again.first_status) == (gq.ApplyStatus.DUPLICATE, gq.ApplyStatus.STALE)
    assert apply(restored, [0], [1.0], worker="a", sequence=17).status is gq.ApplyStatus.DUPLICATE
    assert restored.last_sequence("a") == 17
    with pytest.raises(gq.DeadlineExceededError, match="have 1, need 2 at step 4; 1 dropped as stale"):
        restored.take_grad(2, timeout=0)
    assert restored.take_grad(1).workers == ("a",)


def test_max_per_worker_is_kept_across_a_restart(make, other):
    options = {"max_per_worker": 1, "expected_workers": 2}
    acc = make.sparse(**options)
    accept(acc, [0], [1.0], worker=1)
    restored = make.sparse(engine=other, **options)
    restored.load_state_dict(acc.state_dict())
    assert apply(restored, [0], [1.0], worker=1).status is gq.ApplyStatus.REFUSED
    accept(restored, [0], [1.0], worker="1")


def test_deferred_gradients_are_restored(make, other):
    acc = make.sparse(staleness=Defer())
    acc.set_global_step(1)
    apply(acc, [0], [1.0], local_step=0, worker="a", sequence=0)
    accept(acc, [0], [5.0])
    restored = make.sparse(engine=other, staleness=Defer())
    restored.load_state_dict(acc.state_dict())
    same(restored, acc)
    assert_same_results(restored, acc)


def test_undelivered_rounds_are_restored_in_order(make, engine, other):
    acc = make.sparse()
    for value in (1.0, 2.0):
        accept(acc, [0], [value])
        future = acc.submit_take(1) if value == 2.0 else None
        if future is None:
            with failing_merges(engine), pytest.raises(MemoryError):
                acc.take_grad(1)
            assert acc.num_undelivered == 1
            state = acc.state_dict()
        else:
            assert_rows(future.result(TIMEOUT), [0], [1.0])
    restored = make.sparse(engine=other)
    restored.load_state_dict(state)
    assert (restored.num_undelivered, restored.global_step) == (1, 1)
    accept(restored, [0], [2.0])
    first, second = restored.take_grad(5), restored.take_grad(1)
    assert_rows(first, [0], [1.0])
    assert_rows(second, [0], [2.0])
    assert (first.step, second.step) == (0, 1)


def test_round_that_a_take_is_about_to_deliver_is_in_the_state(make, engine, run_thread):
    acc = make.sparse()
    accept(acc, [0], [1.0])
    with GatedMerges(engine) as merges:
        take = run_thread(acc.take_grad, 1)
        assert merges.begun.wait(TIMEOUT)
        state = acc.state_dict()
    assert_rows(take.result(), [0], [1.0])
    restored = make.sparse()
    restored.load_state_dict(state)
    assert restored.num_undelivered == 1
    assert_rows(restored.take_grad(1), [0], [1.0])
    after = make.sparse()
    after.load_state_dict(acc.state_dict())
    assert after.num_undelivered == 0  # by now it has been delivered


def test_takes_of_every_kind_leave_nothing_in_the_state_once_delivered(make):
    import asyncio

    acc = make.sparse()
    takes = [acc.take_grad, lambda n: acc.submit_take(n).result(TIMEOUT), lambda n: asyncio.run(acc.take_grad_async(n))]
    for take in takes:
        accept(acc, [0], [1.0])
        take(1)
    wait_until(lambda: len(acc.state_dict()) == 1, "the state of an empty round")


def test_state_shares_no_memory_with_the_round_or_with_the_callers_arrays(make):
    acc = make.sparse()
    values = column(1.0)
    apply(acc, [0], values)
    state = acc.state_dict()
    for array in state.values():
        assert not np.shares_memory(array, values)
        array[...] = 0
    values[...] = 5
    assert_rows(acc.take_grad(1), [0], [1.0])


@only_local("what goes to a server is copied")
def test_state_keeps_no_lent_array(make):
    acc = make.sparse()
    values = column(1.0)
    receipt = apply(acc, [0], values, copy=False)
    for array in acc.state_dict().values():
        assert not np.shares_memory(array, values)
    assert not receipt.released
    acc.take_grad(1)
    assert receipt.released


def test_state_is_plain_numpy(make):
    for dtype in DTYPES:
        acc = make.sparse(dtype, reduction_type="SUM")
        fill(acc, np.random.default_rng(0), 2)
        for array in acc.state_dict().values():
            assert type(array) is np.ndarray
            assert array.dtype.kind in "uif"
            assert array.dtype.isbuiltin == 1


def test_state_taken_while_others_apply_and_take_holds_whole_moments(make, run_thread, switch_often):
    """Each gradient has the same value in two rows; what was taken and what is in the state add up to a whole."""
    acc = make.sparse("float64", (4, 1), reduction_type="SUM")
    stop = threading.Event()

    def work(worker):
        for sequence in itertools.count():
            accept(acc, [0, 3], [1.0, 1.0], worker=worker, sequence=sequence)
            if stop.is_set():
                return

    def takes():
        while not stop.is_set():
            with contextlib.suppress(gq.DeadlineExceededError):
                acc.take_grad(3, timeout=0)

    others = [run_thread(work, 0), run_thread(work, 1), run_thread(takes)]
    wait_until(lambda: acc.global_step > 3, "the first rounds")
    states = {}

    def enough():
        state = acc.state_dict()
        states[state["header"].tobytes()] = state
        return len(states) == 20

    wait_until(enough, "20 different states")
    stop.set()
    for other in others:
        other.result()
    for state in states.values():
        restored = make.sparse("float64", (4, 1), reduction_type="SUM")
        restored.load_state_dict(state)
        for gradient in drain(restored):
            np.testing.assert_array_equal(gradient.values.ravel(), [gradient.num_gradients] * 2)
        restored.close()


# What it may be loaded into


def test_state_of_another_spec_is_refused_with_both_specs_printed(make):
    state = make.sparse("float32").state_dict()
    for other in (make.sparse("float64"), make.dense("float32"), make.sparse("float32", staleness=Window(1))):
        with unchanged(other), pytest.raises(gq.InvalidArgumentError, match=r"expected one of .* got one of .*float32"):
            other.load_state_dict(state)


def test_round_that_holds_gradients_is_not_overwritten(make, engine):
    state = make.sparse(staleness=Defer()).state_dict()
    accumulated, deferred, undelivered = (make.sparse(staleness=Defer()) for _ in range(3))
    accept(accumulated, [0], [1.0])
    deferred.set_global_step(1)
    apply(deferred, [0], [1.0], local_step=0)
    accept(undelivered, [0], [1.0])
    with failing_merges(engine), pytest.raises(MemoryError):
        undelivered.take_grad(1)
    for acc in (accumulated, deferred, undelivered):
        with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="without gradients"):
            acc.load_state_dict(state)
    accumulated.discard()
    accumulated.load_state_dict(state)


def test_take_that_waits_is_served_from_the_restored_round(make):
    acc = make.sparse()
    accept(acc, [0], [1.0])
    accept(acc, [0], [3.0])
    restored = make.sparse()
    waiting = restored.submit_take(2)
    restored.load_state_dict(acc.state_dict())
    assert_rows(waiting.result(TIMEOUT), [0], [2.0])


def test_who_waits_for_a_published_step_looks_again_after_a_load(make, run_thread):
    acc = make.sparse()
    acc.publish(5)
    restored = make.sparse()
    waiting = run_thread(restored.wait_published, 5)
    restored.load_state_dict(acc.state_dict())
    assert waiting.result() == 5


def test_closed_handle_neither_saves_nor_loads(make, tmp_path):
    acc = make.sparse()
    state = acc.state_dict()
    acc.close()
    for call in (acc.state_dict, lambda: acc.load_state_dict(state), lambda: acc.save(tmp_path / "round")):
        with pytest.raises(gq.ClosedError):
            call()
    assert os.listdir(tmp_path) == []


def test_no_memory_for_a_loaded_state_leaves_the_round_as_it_was(make, engine):
    if engine != "native":
        return
    from gradquorum import _native

    acc = make.sparse("float64")
    fill(acc, np.random.default_rng(0), 3)
    state = acc.state_dict()
    restored = make.sparse("float64")
    _native._fail_allocation_after(2)
    try:
        with unchanged(restored), pytest.raises(gq.ResourceExhaustedError):
            restored.load_state_dict(state)
        _native._fail_allocation_after(2)
        with unchanged(acc), pytest.raises(gq.ResourceExhaustedError):
            acc.state_dict()
    finally:
        _native._fail_allocation_after(-1)
    restored.load_state_dict(state)
    assert_same_results(restored, acc)
