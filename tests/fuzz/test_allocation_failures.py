"""SEMANTICS 4, the two points, when each allocation of an apply and of a take fails in turn."""

import contextlib
import gc

import numpy as np
import pytest

import gradquorum as gq
from tests.support import round_of, state, wait_until

_native = pytest.importorskip("gradquorum._native", exc_type=ImportError)

SORTED = np.arange(0, 800, 2)
RAW = np.random.default_rng(5).integers(0, 600, 500)
HASHED = np.random.default_rng(6).integers(0, 2**62, 500)
ENDLESS = 1000
"""More allocations than any of these calls makes."""


class Failing:
    """While entered, the allocation after `after` more ones fails, once."""

    def __init__(self, after):
        self._after = after

    def __enter__(self):
        _native._fail_allocation_after(self._after)

    def __exit__(self, *exception):
        _native._fail_allocation_after(-1)


def live_bytes():
    return _native.memory_stats()["live_bytes"]


@pytest.fixture(autouse=True)
def no_leak():
    gc.collect()
    before = live_bytes()
    yield
    _native._fail_allocation_after(-1)
    gc.collect()
    wait_until(lambda: live_bytes() == before, "the memory of before")  # a thread may still be letting go of a round


def rows_for(indices, width=9, dtype="f4"):
    return np.random.default_rng(len(indices)).normal(size=(len(indices), width)).astype(dtype)


def sparse(**options):
    return gq.SparseConditionalAccumulator("float32", **{"engine": "native", "num_threads": 1, **options})


def same(actual, expected):
    """Compare two results of takes, whatever they are results of."""
    if isinstance(expected, gq.GroupGradient):
        assert list(actual) == list(expected)
        for name in expected:
            same(actual[name], expected[name])
    elif isinstance(expected, gq.SparseGradient):
        for got, want in ((actual.indices, expected.indices), (actual.values, expected.values)):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(actual.counts, expected.counts)
        assert (actual.num_gradients, actual.step) == (expected.num_gradients, expected.step)
    else:
        np.testing.assert_array_equal(actual, expected)


def sparse_apply(indices, width=9, **options):
    values = rows_for(indices, width)
    return lambda acc, **extras: acc.apply_grad(indices, values, local_step=None, **options, **extras)


def dense_apply(acc, **extras):
    return acc.apply_grad(rows_for(SORTED), local_step=None, **extras)


GROUP = {"a": gq.SparseSpec("f4"), "b": gq.DenseSpec("f8"), "c": gq.SparseSpec("f2", None, "MEAN_BY_COUNT")}


def group_apply(acc, **extras):
    gradients = {"a": (RAW, rows_for(RAW)), "b": rows_for(SORTED, 3, "f8"), "c": (SORTED, rows_for(SORTED, 2, "f2"))}
    return acc.apply(gradients, local_step=None, **extras)


def dense(**options):
    return gq.ConditionalAccumulator("float32", engine="native", num_threads=1, **options)


def group(**options):
    return gq.AccumulatorGroup(GROUP, engine="native", num_threads=1, **options)


CASES = {
    "sorted": (sparse, sparse_apply(SORTED)),
    "lent": (sparse, sparse_apply(SORTED, copy=False)),
    "raw": (sparse, sparse_apply(RAW)),
    "raw thin": (sparse, sparse_apply(RAW, 1)),
    "hashed": (sparse, sparse_apply(HASHED)),
    "weighted": (lambda **o: sparse(reduction_type="MEAN_BY_WEIGHT", **o), sparse_apply(RAW, weight=0.7)),
    "checked": (lambda **o: sparse(on_nonfinite="raise", **o), sparse_apply(RAW)),
    "threads": (lambda **o: sparse(**{**o, "num_threads": 3}), sparse_apply(np.arange(40_000), 8)),
    "by worker": (lambda **o: sparse(order="worker", **o), sparse_apply(SORTED)),
    "dense": (dense, dense_apply),
    "group": (group, group_apply),
}
cases = pytest.mark.parametrize(("build", "apply"), CASES.values(), ids=CASES)


def take(acc, **options):
    return (acc.take if isinstance(acc, gq.AccumulatorGroup) else acc.take_grad)(1, timeout=0, **options)


def expected_of(build, apply, count):
    with build() as acc:
        for sequence in range(count):
            apply(acc, worker="w", sequence=sequence)
        return take(acc)


@cases
def test_apply_when_an_allocation_fails_expect_nothing_changed_and_the_retry_counted_once(build, apply):
    expected = expected_of(build, apply, 3)
    failed = 0
    for after in range(ENDLESS):
        with build() as acc:
            apply(acc, worker="w", sequence=0)
            before, mark, held = state(acc), acc.last_sequence("w"), live_bytes()
            receipt = None
            with contextlib.suppress(gq.ResourceExhaustedError), Failing(after):
                receipt = apply(acc, worker="w", sequence=1)
            if receipt is None:
                failed += 1
                assert (state(acc), acc.last_sequence("w"), live_bytes()) == (before, mark, held)
                assert apply(acc, worker="w", sequence=1).status is gq.ApplyStatus.ACCEPTED
            assert acc.num_accumulated() == 2
            assert apply(acc, worker="w", sequence=1).status is gq.ApplyStatus.DUPLICATE
            assert apply(acc, worker="w", sequence=2)
            same(take(acc), expected)
        if receipt is not None:
            break
    assert 0 < failed < ENDLESS - 1


@cases
@pytest.mark.parametrize("how", ["take", "future"])
def test_take_when_an_allocation_fails_expect_the_round_kept_for_the_next(build, apply, how):
    expected = expected_of(build, apply, 3)
    failed = 0
    for after in range(ENDLESS):
        with build(compact=False) as acc:
            for sequence in range(3):
                apply(acc, worker="w", sequence=sequence)
            result = None
            with contextlib.suppress(gq.ResourceExhaustedError), Failing(after):
                result = take(acc) if how == "take" else acc.submit_take(1, timeout=0).result(20)
            if result is None:
                failed += 1
                assert (acc.global_step, acc.num_undelivered, acc.num_accumulated()) == (1, 1, 0)
                assert apply(acc, worker="w", sequence=2).status is gq.ApplyStatus.DUPLICATE
                newer = apply(acc, worker="w", sequence=3)
                assert (newer.status, newer.num_accumulated) == (gq.ApplyStatus.ACCEPTED, 1)
                same(take(acc), expected)  # that round, and only that one, without a further step
                assert (acc.global_step, acc.num_undelivered, acc.num_accumulated()) == (1, 0, 1)
            else:
                same(result, expected)
                assert (acc.global_step, acc.num_undelivered, acc.num_accumulated()) == (1, 0, 0)
        if result is not None:
            break
    assert 0 < failed < ENDLESS - 1


def test_take_when_allocations_fail_again_and_again_expect_the_round_kept_each_time():
    acc = sparse()
    sparse_apply(RAW)(acc)
    expected = expected_of(sparse, sparse_apply(RAW), 1)
    for _ in range(5):
        with Failing(0), pytest.raises(gq.ResourceExhaustedError):
            take(acc)
        assert (acc.global_step, acc.num_undelivered) == (1, 1)
    same(take(acc), expected)
    acc.close()


def expected_bytes(build, apply, count):
    """Return what so many gradients take without compaction."""
    with build(compact=False) as acc:
        for _ in range(count):
            apply(acc)
        return round_of(acc).budget.log_bytes


@pytest.mark.parametrize(
    ("build", "apply"),
    [(sparse, sparse_apply(RAW, 400)), (sparse, sparse_apply(SORTED, 400, copy=False)), (dense, dense_apply)],
    ids=["raw", "lent", "dense"],
)
def test_compaction_when_an_allocation_fails_expect_no_gradient_lost(build, apply):
    # What an apply does besides must not make it fail: compaction is tried again later.
    count = 8
    expected, most = expected_of(build, apply, count), expected_bytes(build, apply, count)
    native = _native.SparseReducer("float32", "float32", "SUM", 1)
    one, seen, unseen = np.arange(1), 0, 0
    for after in range(ENDLESS):
        raised, outlived = False, False
        with build() as acc:
            with Failing(after):
                for sequence in range(count):
                    try:
                        apply(acc, worker="w", sequence=sequence)
                    except gq.ResourceExhaustedError:
                        raised = True
                        apply(acc, worker="w", sequence=sequence)
                try:
                    native.block(one, rows_for(one), 1.0, False, False)
                except MemoryError:  # all this makes fewer allocations
                    outlived = True
            assert acc.num_accumulated() == count
            held = round_of(acc).budget.log_bytes
            same(take(acc), expected)
        if outlived:
            break
        seen, unseen = seen + raised, unseen + (not raised)
    assert seen > 0  # failures of applies
    assert unseen > 0  # failures of compactions
    assert outlived
    assert held < most // 2  # it does compact
