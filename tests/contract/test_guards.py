"""SEMANTICS 7: NaN and infinities, budgets."""

import numpy as np
import pytest

import gradquorum as gq
from gradquorum import ApplyStatus
from tests.support import TIMEOUT, accept, apply, failing_merges, num_blocked, unchanged, wait_until

BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("bad", BAD)
def test_nonfinite_kept_by_default(make, bad):
    acc = make.sparse("float32", (5, 1))
    accept(acc, [0], [bad])
    np.testing.assert_array_equal(acc.take_grad(1, timeout=0).values, [[bad]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("bad", BAD)
def test_nonfinite_skipped_is_not_counted(make, bad, dtype):
    acc = make.sparse(dtype, (5, 1), on_nonfinite="skip")
    with unchanged(acc):
        receipt = apply(acc, [0, 1], [1.0, bad])
    assert receipt.status is ApplyStatus.SKIPPED
    assert not receipt
    assert receipt.num_accumulated == 0
    accept(acc, [0], [2.0])
    np.testing.assert_array_equal(acc.take_grad(1, timeout=0).values, [[2]])


@pytest.mark.parametrize("bad", BAD)
def test_nonfinite_raises_and_changes_nothing(make, bad):
    acc = make.sparse("float32", (5, 1), on_nonfinite="raise")
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="finite"):
        apply(acc, [0, 1], [1.0, bad], worker="w", sequence=0)
    accept(acc, [0], [1.0], worker="w", sequence=0)


@pytest.mark.parametrize("copy", [True, False])
def test_nonfinite_is_judged_in_lent_and_in_empty_gradients(make, copy):
    acc = make.sparse("float32", (5, 1), on_nonfinite="skip")
    assert apply(acc, [0, 1], [1.0, np.nan], copy=copy).status is ApplyStatus.SKIPPED
    assert apply(acc, [], np.zeros((0, 1), np.float32), copy=copy).status is ApplyStatus.ACCEPTED


def test_nonfinite_is_judged_after_repeats_are_merged_in_the_wide_type(make):
    half = make.sparse("float16", (5, 1), on_nonfinite="skip")
    accept(half, [0, 0], [60000, 60000])  # finite in float32
    single = make.sparse("float32", (5, 1), on_nonfinite="skip")
    assert apply(single, [0, 0], [3e38, 3e38]).status is ApplyStatus.SKIPPED
    accept(single, [0, 1], [3e38, 3e38])
    wide = make.sparse("float32", (5, 1), on_nonfinite="skip", accumulate_dtype="float64")
    accept(wide, [0, 0], [3e38, 3e38])


def test_nonfinite_of_a_stale_gradient_is_stale(make):
    acc = make.sparse("float32", (5, 1), on_nonfinite="skip")
    assert apply(acc, [0], [np.nan], local_step=-1).status is ApplyStatus.STALE


def test_nonfinite_of_integers_is_never(make):
    acc = make.sparse("int32", (5, 1), on_nonfinite="skip", reduction_type="SUM")
    accept(acc, [0], [2**31 - 1])


@pytest.mark.parametrize("bad", BAD)
def test_nonfinite_in_dense_gradients(make, bad):
    skip, refuse = (make.dense("float32", (2,), on_nonfinite=action) for action in ("skip", "raise"))
    with unchanged(skip):
        assert skip.apply_grad([1.0, bad]).status is ApplyStatus.SKIPPED
    with unchanged(refuse), pytest.raises(gq.InvalidArgumentError, match="finite"):
        refuse.apply_grad([1.0, bad])


KIB = 1024
ROWS = np.ones((10, 256), np.float32)
"""10 KiB."""


def _fill(acc):
    """Apply rows of ids of their own until there is no room; return how many gradients fitted."""
    for number in range(100):
        try:
            accept(acc, np.arange(10) + 10 * number, ROWS)
        except gq.ResourceExhaustedError:
            return number
    raise AssertionError("the budget was never exhausted")


def test_max_bytes_raises_and_changes_nothing(make):
    acc = make.sparse("float32", (10_000, 256), max_bytes=64 * KIB)
    number = _fill(acc)
    assert 4 <= number <= 6
    with unchanged(acc), pytest.raises(gq.ResourceExhaustedError) as caught:
        apply(acc, np.arange(10) + 5000, ROWS, worker="w", sequence=0)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.max_bytes == 64 * KIB
    assert caught.value.needed_bytes + caught.value.held_bytes > 64 * KIB
    assert acc.last_sequence("w") == -1
    taken = acc.take_grad(number, timeout=0)
    assert taken.indices.shape == (10 * number,)
    accept(acc, np.arange(10) + 5000, ROWS, worker="w", sequence=0)


def test_max_bytes_is_freed_by_discard(make):
    acc = make.sparse("float32", (10_000, 256), max_bytes=64 * KIB)
    number = _fill(acc)
    acc.discard()
    assert _fill(acc) == number


def test_max_bytes_holds_undelivered_rounds_too(make, engine):
    acc = make.sparse("float32", (10_000, 256), max_bytes=64 * KIB)
    _fill(acc)
    with failing_merges(engine), pytest.raises(MemoryError):
        acc.take_grad(1, timeout=0)
    assert acc.num_undelivered == 1
    with pytest.raises(gq.ResourceExhaustedError):
        apply(acc, np.arange(10), ROWS)


@pytest.fixture
def full(make):
    """A blocking accumulator with room for nothing more."""
    acc = make.sparse("float32", (10_000, 256), max_bytes=64 * KIB, on_full="block")
    for number in range(5):
        accept(acc, np.arange(10) + 10 * number, ROWS, timeout=0)
    return acc


def test_blocked_apply_waits_until_a_take_makes_room(full, run_thread):
    call = run_thread(apply, full, np.arange(20) + 100, ROWS.repeat(2, 0))
    wait_until(lambda: num_blocked(full) == 1, "a blocked apply")
    assert full.num_accumulated() == 5
    assert full.take_grad(5, timeout=0).num_gradients == 5
    receipt = call.result()
    assert receipt.status is ApplyStatus.ACCEPTED
    assert receipt.step == 1


def test_blocked_apply_is_judged_for_staleness_when_let_in(full, run_thread):
    full.set_global_step(4)
    call = run_thread(apply, full, np.arange(20) + 100, ROWS.repeat(2, 0), local_step=4)
    wait_until(lambda: num_blocked(full) == 1, "a blocked apply")
    full.take_grad(5, timeout=0)
    receipt = call.result()
    assert (receipt.status, receipt.step, receipt.lag) == (ApplyStatus.STALE, 5, 1)
    assert full.num_accumulated() == 0


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_blocked_apply_at_its_deadline_raises_and_changes_nothing(full, timeout):
    with unchanged(full), pytest.raises(gq.DeadlineExceededError):
        apply(full, np.arange(20) + 100, ROWS.repeat(2, 0), timeout=timeout, worker="w", sequence=0)
    assert full.last_sequence("w") == -1


def test_blocked_apply_that_no_take_could_help_raises_at_once(full):
    rows = ROWS.repeat(8, 0)
    with unchanged(full), pytest.raises(gq.ResourceExhaustedError):
        apply(full, np.arange(80) + 100, rows)
    full.take_grad(1, timeout=0)
    with pytest.raises(gq.ResourceExhaustedError):  # also with nothing else there
        apply(full, np.arange(80) + 100, rows)


def test_blocked_apply_that_the_waiting_take_needs_raises_at_once(full):
    future = full.submit_take(6)
    with pytest.raises(gq.ResourceExhaustedError):
        apply(full, np.arange(20) + 100, ROWS.repeat(2, 0))
    assert future.cancel()


def test_blocked_apply_ends_when_closed(full, run_thread):
    call = run_thread(apply, full, np.arange(20) + 100, ROWS.repeat(2, 0))
    wait_until(lambda: num_blocked(full) == 1, "a blocked apply")
    full.close()
    with pytest.raises((gq.CancelledError, gq.ClosedError)):
        call.result()


def test_blocked_stale_gradient_does_not_wait(full):
    full.set_global_step(4)
    assert apply(full, np.arange(20) + 100, ROWS.repeat(2, 0), local_step=3).status is ApplyStatus.STALE


def test_many_blocked_applies_are_all_let_in_in_the_end(full, run_thread):
    calls = [run_thread(apply, full, np.arange(10) + 10 * n, ROWS) for n in range(10, 22)]
    taken = 0
    while taken < 17:
        taken += full.take_grad(1, timeout=TIMEOUT).num_gradients
    assert all(call.result() for call in calls)
