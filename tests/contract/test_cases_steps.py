"""CASES, steps, receipts and waiting (S1-S18), each named after its number."""

import logging
import threading

import numpy as np
import pytest

import gradquorum as gq
from gradquorum import ApplyStatus
from tests.support import (
    TIMEOUT,
    accept,
    apply,
    assert_rows,
    column,
    failing_merges,
    only_local,
    times,
    unchanged,
    wait_for_waiters,
)


def test_s1_plain_loop_says_why_instead_of_hanging(make):
    acc = make.sparse("float32", (5, 1))
    assert acc.apply_grad([0], column(1))
    acc.take_grad(1, timeout=0)
    with pytest.warns(gq.StaleGradientWarning):
        assert acc.apply_grad([0], column(1)).status is ApplyStatus.STALE
    with pytest.raises(gq.DeadlineExceededError) as caught:
        acc.take_grad(1, timeout=0.01)
    assert (caught.value.have, caught.value.need, caught.value.num_stale) == (0, 1, 1)
    for words in ("have 0", "need 1", "1 dropped as stale"):
        assert words in str(caught.value)


def test_s1_with_local_step_none_it_just_works(make):
    acc = make.sparse("float32", (5, 1))
    for _ in range(3):
        assert acc.apply_grad([0], column(1), local_step=None)
        acc.take_grad(1, timeout=0)


def test_s2_stale_gradient_has_a_receipt_and_is_counted(make):
    acc = make.sparse("float32", (5, 1))
    acc.set_global_step(3)
    receipt = apply(acc, [0], [1.0], local_step=2)
    assert (receipt.status, receipt.lag) == (ApplyStatus.STALE, 1)
    with pytest.raises(gq.DeadlineExceededError) as caught:
        acc.take_grad(1, timeout=0)
    assert caught.value.num_stale == 1


def test_s3_stale_gradient_of_a_bad_id_is_an_error_all_the_same(make):
    acc = make.sparse("float32", (5, 1))
    acc.set_global_step(3)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="index is 77 exceeded 5"):
        apply(acc, [77], [1.0], local_step=2)


def test_s4_step_lowered_is_a_warning_in_the_log(make, caplog):
    acc = make.sparse("float32", (5, 1))
    acc.set_global_step(5)
    with caplog.at_level(logging.WARNING, "gradquorum"):
        acc.set_global_step(1)
    assert acc.global_step == 1
    assert len(caplog.records) == 1


def test_s5_take_is_of_everything_and_exact_of_the_first(make):
    plain, blocks = make.sparse("float32", (5, 1)), make.sparse("float32", (5, 1), compact=False)
    for value in (1, 2, 3, 10):
        accept(plain, [0], [value])
        accept(blocks, [0], [value])
    with unchanged(plain), pytest.raises(gq.InvalidArgumentError):
        plain.take_grad(2, exact=True)
    assert_rows(plain.take_grad(2, timeout=0), [0], [4.0])
    assert plain.num_accumulated() == 0
    assert_rows(blocks.take_grad(2, timeout=0, exact=True), [0], [1.5])
    assert blocks.num_accumulated() == 2


def test_s6_num_required_does_not_wrap(make):
    acc = make.sparse("float32", (5, 1))
    accept(acc, [0], [1.0])
    for number in (0, -1):
        with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=f"must be positive, but was {number}"):
            acc.take_grad(number)
    for number in (2**31, 2**32 + 1):
        with unchanged(acc), pytest.raises(gq.DeadlineExceededError) as caught:
            acc.take_grad(number, timeout=0)
        assert caught.value.need == number


def test_s7_waiting_takes_are_first_in_first_out(make, run_thread):
    acc = make.sparse("float32", (5, 1))
    first = run_thread(acc.take_grad, 3)
    wait_for_waiters(acc, 1)
    second = run_thread(acc.take_grad, 1)
    wait_for_waiters(acc, 2)
    accept(acc, [0], [1.0])
    assert first.running
    assert second.running
    for value in (2, 3, 4):
        accept(acc, [0], [value])
    assert_rows(first.result(), [0], [2.0])
    assert_rows(second.result(), [0], [4.0])


def test_s8_take_that_the_live_workers_cannot_satisfy_ends_at_once(make):
    acc = make.sparse("float32", (5, 1), expected_workers=64, max_per_worker=1)
    workers = [acc.worker(number) for number in range(64)]
    future = acc.submit_take(60)
    for worker in workers[:4]:
        worker.leave()
    assert not future.done()
    for worker in workers[4:27]:
        worker.leave()
    error = future.exception(TIMEOUT)
    assert isinstance(error, gq.UnavailableError)
    assert error.needed == 60
    with pytest.raises(gq.UnavailableError) as caught:
        acc.take_grad(60)
    assert (caught.value.live, caught.value.needed) == (37, 60)
    assert sorted(caught.value.left) == list(range(27))
    for words in ("37", "60", "26"):
        assert words in str(caught.value)


def test_s9_timed_out_take_leaves_everything_as_it_was(make):
    acc = make.sparse("float32", (5, 1))
    with unchanged(acc), pytest.raises(gq.DeadlineExceededError):
        acc.take_grad(1, timeout=0.05)
    accept(acc, [0], [1.0])
    assert_rows(acc.take_grad(1, timeout=0), [0], [1.0])


def test_s10_close_while_a_take_waits_cancels_it(make, run_thread):
    acc = make.sparse("float32", (5, 1))
    take = run_thread(acc.take_grad, 1)
    wait_for_waiters(acc, 1)
    acc.close()
    with pytest.raises(gq.CancelledError, match="TakeGrad operation was cancelled"):
        take.result()


def test_s11_bad_apply_between_two_good_ones_is_as_if_it_had_not_been(make):
    acc = make.sparse("float32", (6, 1))
    accept(acc, [0], [1.0])
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        apply(acc, [0, 9], [5.0, 5.0])
    accept(acc, [0], [3.0])
    taken = acc.take_grad(2, timeout=0)
    assert_rows(taken, [0], [2.0])
    assert taken.num_gradients == 2


def test_s12_fast_worker_does_not_close_the_step_alone(make):
    acc = make.sparse("float32", (5, 1), max_per_worker=1)
    future = acc.submit_take(2)
    accept(acc, [0], [1.0], worker="fast")
    assert apply(acc, [0], [2.0], worker="fast").status is ApplyStatus.REFUSED
    assert not future.done()
    accept(acc, [0], [3.0], worker="slow")
    assert_rows(future.result(TIMEOUT), [0], [2.0])


def test_s13_gradient_sent_again_counts_once(make):
    acc = make.sparse("float32", (5, 1))
    accept(acc, [0], [1.0], worker=3, sequence=18)
    accept(acc, [0], [1.0], worker=3, sequence=17)
    assert apply(acc, [0], [1.0], worker=3, sequence=17).status is ApplyStatus.DUPLICATE
    assert acc.num_accumulated() == 2
    assert acc.last_sequence(3) == 18


def test_s14_result_written_to_changes_nothing_else(make):
    acc = make.sparse("float32", (5, 1))
    values = column(4.0)
    apply(acc, [0], values)
    taken = acc.take_grad(1, timeout=0)
    taken.values[:] = taken.indices[:] = taken.counts[:] = 3
    taken.shape[:] = 0
    assert values[0, 0] == 4.0
    assert list(acc.shape) == [5, 1]
    accept(acc, [0], [4.0])
    again = acc.take_grad(1, timeout=0)
    assert_rows(again, [0], [4.0])
    np.testing.assert_array_equal(again.shape, [5, 1])


def test_s15_late_gradient_of_a_backup_worker_is_stale(make, run_thread):
    """Once, for all to read; tests/race/test_who_decides_race.py does it a thousand times."""
    acc = make.sparse("float32", (5, 1))
    acc.set_global_step(1)
    take = run_thread(acc.take_grad, 2)
    wait_for_waiters(acc, 1)
    statuses = [apply(acc, [0], [value], local_step=1).status for value in (1.0, 3.0, 100.0)]
    assert statuses == [ApplyStatus.ACCEPTED, ApplyStatus.ACCEPTED, ApplyStatus.STALE]
    assert_rows(take.result(), [0], [2.0])


@only_local("in a server only a lack of memory cuts a merge off")
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, SystemExit])
def test_s16_take_cut_off_during_its_merge_loses_nothing(make, engine, error):
    acc = make.sparse("float32", (5, 1))
    accept(acc, [0], [1.0])
    with failing_merges(engine, error), pytest.raises(error):
        acc.take_grad(1, timeout=0)
    accept(acc, [0], [9.0])
    step = acc.global_step
    assert_rows(acc.take_grad(1, timeout=0), [0], [1.0])
    assert acc.global_step == step
    assert_rows(acc.take_grad(1, timeout=0), [0], [9.0])


def test_s17_two_tables_of_a_group_hold_the_same_gradients(make, run_thread, target):
    spec = gq.SparseSpec("float64", (16, 1), "SUM")
    group = make.group({"one": spec, "other": spec})
    stop = threading.Event()

    def work(number):
        worker = group.worker(number)
        while not stop.is_set():
            gradient = ([number], np.full((1, 1), 2.0**number))
            worker.begin()
            worker.apply({"one": gradient, "other": gradient})

    workers = [run_thread(work, number) for number in range(16)]
    try:
        for taken in group.rounds(12, timeout=TIMEOUT):
            np.testing.assert_array_equal(taken["one"].indices, taken["other"].indices)
            np.testing.assert_array_equal(taken["one"].values, taken["other"].values)
            np.testing.assert_array_equal(taken["one"].counts, taken["other"].counts)
            assert taken.num_gradients >= 12
            if taken.step == times(60, target):
                break
    finally:
        stop.set()
    for worker in workers:
        worker.result()


def test_s18_gradients_of_old_parameters_never_pass_as_fresh(make, run_thread, target):
    acc = make.sparse("float64", (1, 1), compact=False)
    parameters = {"version": 0}
    stop = threading.Event()

    def work():
        worker = acc.worker(threading.get_ident())
        while not stop.is_set():
            worker.begin()
            worker.apply_grad([0], [[float(parameters["version"])]])  # read after the step: at least as new

    workers = [run_thread(work) for _ in range(3)]
    old = 0
    try:
        for taken in acc.rounds(3, timeout=TIMEOUT):
            old += float(taken.values[0, 0]) < taken.step
            parameters["version"] = taken.step + 1
            if taken.step == times(200, target):
                break
    finally:
        stop.set()
    for worker in workers:
        worker.result()
    assert old == 0
