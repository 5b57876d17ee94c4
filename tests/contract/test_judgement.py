"""SEMANTICS 2: judgement, receipts and safe retries."""

import threading
import warnings

import numpy as np
import pytest

import gradquorum as gq
from gradquorum import ApplyStatus
from tests.support import accept, apply, assert_rows, unchanged


@pytest.fixture
def acc(make):
    return make.sparse("float32", (5, 1))


def test_receipt_of_an_accepted_gradient_says_what_happened(acc):
    acc.set_global_step(4)
    apply(acc, [0], [1.0])
    receipt = apply(acc, [0], [1.0], local_step=4)
    assert receipt.status is ApplyStatus.ACCEPTED
    assert (receipt.step, receipt.lag, receipt.num_accumulated) == (4, 0, 2)
    assert receipt.first_status is None
    assert not receipt.lent
    assert receipt.released
    assert bool(receipt) is True


def test_receipt_counts_itself_before_the_take_that_it_completes(acc):
    future = acc.submit_take(1)
    assert apply(acc, [0], [1.0]).num_accumulated == 1
    assert future.result(10).num_gradients == 1
    assert acc.num_accumulated() == 0


def test_receipt_repr_names_the_status(acc):
    assert "ACCEPTED" in repr(accept(acc, [0], [1.0]))


def test_status_has_the_names_of_the_specification():
    names = {status.name for status in ApplyStatus}
    assert names == {"ACCEPTED", "STALE", "DUPLICATE", "SKIPPED", "REFUSED", "DEFERRED"}


@pytest.mark.parametrize("dense", [False, True])
def test_apply_of_an_older_step_is_stale_dropped_and_raises_nothing(make, dense):
    acc = make.dense("float32", (1,)) if dense else make.sparse("float32", (5, 1))
    acc.set_global_step(7)
    grad = ([1.0],) if dense else ([0], [[1.0]])
    with unchanged(acc):
        receipt = acc.apply_grad(*grad, local_step=4)
    assert receipt.status is ApplyStatus.STALE
    assert (receipt.step, receipt.lag, receipt.num_accumulated) == (7, 3, 0)
    assert bool(receipt) is False


@pytest.mark.parametrize("local_step", [7, 8, 2**63 - 1, None])
def test_apply_of_an_equal_or_future_step_is_accepted(acc, local_step):
    acc.set_global_step(7)
    receipt = apply(acc, [0], [1.0], local_step=local_step)
    assert receipt.status is ApplyStatus.ACCEPTED
    assert receipt.step == 7


def test_apply_with_local_step_none_means_the_current_step(acc):
    for _ in range(3):
        apply(acc, [0], [1.0], local_step=None)
        acc.take_grad(1, timeout=0)
    assert acc.global_step == 3


@pytest.mark.parametrize("given", [{}, {"local_step": 0}])
def test_drop_with_local_step_0_warns_once_per_accumulator(make, given):
    for _ in range(2):
        acc = make.sparse("float32", (5, 1))
        acc.set_global_step(1)
        with pytest.warns(gq.StaleGradientWarning, match="local_step") as caught:
            assert acc.apply_grad([0], [[1.0]], **given).status is ApplyStatus.STALE
            acc.apply_grad([0], [[1.0]], **given)
        assert len(caught) == 1
        assert caught[0].filename == __file__


def test_drop_with_another_local_step_does_not_warn(acc):
    acc.set_global_step(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert apply(acc, [0], [1.0], local_step=4).status is gq.ApplyStatus.STALE
        assert apply(acc, [0], [1.0], local_step=-1).status is gq.ApplyStatus.STALE


def test_drop_with_the_warning_made_an_error_leaves_everything_usable(acc):
    acc.set_global_step(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with unchanged(acc), pytest.raises(gq.StaleGradientWarning):
            acc.apply_grad([0], [[1.0]])
    accept(acc, [0], [2.0])
    assert_rows(acc.take_grad(1, timeout=0), [0], [2.0])


def test_duplicate_of_an_accepted_gradient_is_a_no_op(acc):
    accept(acc, [0], [1.0], worker="w", sequence=0)
    with unchanged(acc):
        receipt = apply(acc, [0], [9.0], worker="w", sequence=0)
    assert receipt.status is ApplyStatus.DUPLICATE
    assert receipt.first_status is ApplyStatus.ACCEPTED
    assert not receipt
    assert_rows(acc.take_grad(1, timeout=0), [0], [1.0])


def test_duplicate_is_known_after_the_take(acc):
    accept(acc, [0], [1.0], worker="w", sequence=0)
    acc.take_grad(1, timeout=0)
    assert apply(acc, [0], [1.0], worker="w", sequence=0).status is ApplyStatus.DUPLICATE
    assert apply(acc, [0], [1.0], worker="w", sequence=0, local_step=-1).status is ApplyStatus.DUPLICATE
    assert acc.num_accumulated() == 0


def test_duplicate_of_a_stale_gradient_stays_out_even_if_fresh_now(acc):
    acc.set_global_step(3)
    assert apply(acc, [0], [1.0], local_step=2, worker=1, sequence=5).status is ApplyStatus.STALE
    receipt = apply(acc, [0], [1.0], local_step=3, worker=1, sequence=5)
    assert receipt.status is ApplyStatus.DUPLICATE
    assert receipt.first_status is ApplyStatus.STALE
    assert acc.num_accumulated() == 0


def test_duplicate_of_a_refused_or_skipped_gradient_says_so(make):
    acc = make.sparse("float32", (5, 1), on_nonfinite="skip", max_per_worker=1, expected_workers=1)
    apply(acc, [0], [np.nan], worker=1, sequence=0)
    accept(acc, [0], [1.0], worker=1, sequence=1)
    assert apply(acc, [0], [1.0], worker=1, sequence=2).status is ApplyStatus.REFUSED
    assert apply(acc, [0], [1.0], worker=1, sequence=0).first_status is ApplyStatus.SKIPPED
    assert apply(acc, [0], [1.0], worker=1, sequence=2).first_status is ApplyStatus.REFUSED


def test_worker_int_and_str_are_different_things(acc):
    accept(acc, [0], [1.0], worker=1, sequence=0)
    accept(acc, [0], [1.0], worker="1", sequence=0)
    assert acc.last_sequence(1) == 0
    assert acc.num_accumulated() == 2


def test_last_sequence_tells_the_highest_judged(acc):
    assert acc.last_sequence("w") == -1
    for sequence, expected in ((3, 3), (9, 9), (5, 9)):
        accept(acc, [0], [1.0], worker="w", sequence=sequence)
        assert acc.last_sequence("w") == expected
    assert acc.last_sequence("other") == -1


def test_window_accepts_64_below_the_highest_each_once(acc):
    accept(acc, [0], [1.0], worker="w", sequence=100)
    for sequence in range(36, 100):
        accept(acc, [0], [1.0], worker="w", sequence=sequence)
    for sequence in range(36, 101):
        assert apply(acc, [0], [1.0], worker="w", sequence=sequence).status is ApplyStatus.DUPLICATE
    assert acc.num_accumulated() == 65


@pytest.mark.parametrize("sequence", [35, 0])
def test_window_below_it_is_an_error_never_a_silent_duplicate(acc, sequence):
    accept(acc, [0], [1.0], worker="w", sequence=100)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="sequence"):
        apply(acc, [0], [1.0], worker="w", sequence=sequence)


def test_window_moving_on_forgets_what_fell_out(acc):
    for sequence in range(200):
        accept(acc, [0], [1.0], worker="w", sequence=sequence)
    assert apply(acc, [0], [1.0], worker="w", sequence=136).first_status is ApplyStatus.ACCEPTED
    with pytest.raises(gq.InvalidArgumentError):
        apply(acc, [0], [1.0], worker="w", sequence=134)


def test_window_of_a_large_jump_keeps_only_what_is_inside(acc):
    accept(acc, [0], [1.0], worker="w", sequence=10)
    accept(acc, [0], [1.0], worker="w", sequence=40)
    accept(acc, [0], [1.0], worker="w", sequence=100)
    assert apply(acc, [0], [1.0], worker="w", sequence=40).status is ApplyStatus.DUPLICATE
    accept(acc, [0], [1.0], worker="w", sequence=41)
    accept(acc, [0], [1.0], worker="w", sequence=10**18)
    assert acc.last_sequence("w") == 10**18


def test_first_status_is_told_for_the_last_64(acc):
    for sequence in range(100):
        local_step = -1 if sequence % 2 else 0
        apply(acc, [0], [1.0], worker="w", sequence=sequence, local_step=local_step)
    for sequence in range(36, 100):
        expected = ApplyStatus.STALE if sequence % 2 else ApplyStatus.ACCEPTED
        assert apply(acc, [0], [1.0], worker="w", sequence=sequence).first_status is expected


@pytest.mark.parametrize("first", ["17", "18"])
def test_two_threads_of_a_worker_crossing_both_count_once(acc, run_thread, first):
    gate = threading.Event()

    def after_the_other(sequence):
        assert gate.wait(10)
        return apply(acc, [0], [1.0], worker=3, sequence=sequence)

    late = run_thread(after_the_other, 18 if first == "17" else 17)
    accept(acc, [0], [1.0], worker=3, sequence=int(first))
    gate.set()
    assert late.result().status is ApplyStatus.ACCEPTED
    assert acc.num_accumulated() == 2
    assert acc.last_sequence(3) == 18


@pytest.mark.parametrize(
    "marks",
    [{"sequence": 0}, {"worker": 1.5}, {"worker": None, "sequence": 3}, {"worker": b"w"}, {"worker": ("w",)},
     {"worker": "w", "sequence": -1}, {"worker": "w", "sequence": 1.0}, {"worker": "w", "sequence": "1"},
     {"worker": True}],
    ids=str,
)  # fmt: skip
def test_marks_that_are_wrong_are_an_error(acc, marks):
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        apply(acc, [0], [1.0], **marks)


def test_worker_without_sequence_may_apply_any_number_of_times(acc):
    for _ in range(3):
        accept(acc, [0], [1.0], worker="w")
    assert acc.num_accumulated() == 3
    assert acc.last_sequence("w") == -1


def test_parts_of_one_apply_are_summed_and_count_once(acc):
    parts = [
        gq.IndexedSlices(np.ones((2, 1), np.float32), [1, 2]),
        gq.IndexedSlices(np.ones((2, 1), np.float32), [3, 2]),
    ]
    assert acc.apply_indexed_slices_grad(parts)
    taken = acc.take_grad(1, timeout=0)
    assert_rows(taken, [1, 2, 3], [1, 2, 1])
    assert taken.num_gradients == 1
    np.testing.assert_array_equal(taken.counts, [1, 1, 1])


def test_parts_of_which_one_is_bad_change_nothing(acc):
    parts = [gq.IndexedSlices(np.ones((1, 1), np.float32), [1]), gq.IndexedSlices(np.ones((1, 1), np.float32), [9])]
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="exceeded"):
        acc.apply_indexed_slices_grad(parts)


def test_empty_gradient_counts_as_one(acc):
    accept(acc, [], np.zeros((0,), np.float32))
    accept(acc, [1], [4.0])
    taken = acc.take_grad(2, timeout=0)
    assert taken.num_gradients == 2
    assert_rows(taken, [1], [4.0])
