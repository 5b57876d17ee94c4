"""Late gradients that are kept for the next round."""

import numpy as np
import pytest

import gradquorum as gq
from gradquorum import ApplyStatus, Defer
from tests.late import at_step, late
from tests.support import TIMEOUT, accept, apply, assert_rows, failing_merges, unchanged


def test_deferred_gradient_counts_in_the_next_round(make):
    acc = at_step(make.sparse(staleness=Defer()), 1)
    receipt = late(acc, [0], [1.0], 1)
    assert (receipt.status, receipt.lag, receipt.num_accumulated, bool(receipt)) == (ApplyStatus.DEFERRED, 1, 0, False)
    assert (acc.num_accumulated(), acc.num_deferred) == (0, 1)
    accept(acc, [0], [5.0])
    assert_rows(acc.take_grad(1), [0], [5.0])
    assert (acc.num_accumulated(), acc.num_deferred) == (1, 0)
    assert_rows(acc.take_grad(1), [0], [1.0])


def test_deferred_gradient_completes_the_quorum_of_the_next_take(make, run_thread):
    acc = at_step(make.sparse(staleness=Defer()), 1)
    late(acc, [0], [1.0], 1)
    first, second = acc.submit_take(1), acc.submit_take(1)
    accept(acc, [0], [5.0])
    assert_rows(first.result(TIMEOUT), [0], [5.0])
    result = second.result(TIMEOUT)
    assert_rows(result, [0], [1.0])
    assert result.step == 2


def test_deferred_gradients_go_to_the_front_of_the_next_round_in_order_of_arrival(make):
    acc = at_step(make.sparse("float32", reduction_type="SUM", staleness=Defer()), 1)
    for value in (1e8, 1.0):
        late(acc, [0], [value], 1)
    accept(acc, [0], [0.0])
    acc.take_grad(1)
    accept(acc, [0], [-1e8])
    assert_rows(acc.take_grad(3), [0], [0.0])  # (1e8 + 1) - 1e8, in this order, is 0 in float32


def test_deferred_gradient_is_judged_once(make):
    acc = at_step(make.sparse(staleness=Defer()), 1)
    assert late(acc, [0], [1.0], 1, worker="a", sequence=7).status is ApplyStatus.DEFERRED
    again = late(acc, [0], [1.0], 1, worker="a", sequence=7)
    assert (again.status, again.first_status) == (ApplyStatus.DUPLICATE, ApplyStatus.DEFERRED)
    accept(acc, [0], [5.0], worker="b")
    acc.take_grad(1)
    result = acc.take_grad(1)
    assert (result.num_gradients, result.workers) == (1, ("a",))
    assert acc.last_sequence("a") == 7


@pytest.mark.parametrize("end", ["discard", "close"])
def test_discard_and_close_report_deferred_gradients(make, end):
    acc = at_step(make.sparse(staleness=Defer()), 1)
    late(acc, [0], [1.0], 1)
    accept(acc, [0], [5.0])
    assert getattr(acc, end)() == 2
    if end == "discard":
        assert (acc.num_accumulated(), acc.num_deferred) == (0, 0)


def test_deferred_gradients_count_towards_max_per_worker_of_the_round_they_join(make):
    acc = at_step(make.sparse(staleness=Defer(), max_per_worker=1), 1)
    assert late(acc, [0], [1.0], 1, worker="a").status is ApplyStatus.DEFERRED
    assert late(acc, [0], [1.0], 1, worker="a").status is ApplyStatus.REFUSED
    accept(acc, [0], [5.0], worker="a")  # the open round is another one
    acc.take_grad(1)
    assert apply(acc, [0], [5.0], worker="a").status is ApplyStatus.REFUSED
    assert_rows(acc.take_grad(1), [0], [1.0])


def test_deferred_gradient_waits_longer_when_an_exact_take_leaves_its_worker_no_place(make):
    acc = at_step(make.sparse(staleness=Defer(), max_per_worker=1, compact=False), 1)
    late(acc, [0], [1.0], 1, worker="a")
    accept(acc, [0], [5.0], worker="b")
    accept(acc, [0], [7.0], worker="a")
    assert_rows(acc.take_grad(1, exact=True), [0], [5.0])
    assert (acc.num_accumulated(), acc.num_deferred) == (1, 1)  # 7 was left, so 1 has no place
    assert_rows(acc.take_grad(1), [0], [7.0])
    assert_rows(acc.take_grad(1), [0], [1.0])


def test_take_is_not_hopeless_while_deferred_gradients_can_serve_it(make):
    acc = make.sparse(staleness=Defer(), max_per_worker=1, expected_workers=2)
    leaving, _ = (acc.worker(name) for name in "ab")
    acc.set_global_step(1)
    late(acc, [0], [1.0], 1, worker="a")
    first, second = acc.submit_take(1), acc.submit_take(2)  # the second needs what "a" has left behind
    leaving.leave()
    assert not second.done()
    accept(acc, [0], [2.0], worker="b")
    assert_rows(first.result(TIMEOUT), [0], [2.0])
    accept(acc, [0], [3.0], worker="b")
    assert_rows(second.result(TIMEOUT), [0], [2.0])
    with pytest.raises(gq.UnavailableError):
        acc.take_grad(2)  # now there is nothing left of it


def test_deferred_gradient_that_is_not_finite_is_skipped(make):
    acc = at_step(make.sparse(staleness=Defer(), on_nonfinite="skip"), 1)
    assert late(acc, [0], [np.inf], 1).status is ApplyStatus.SKIPPED
    assert acc.num_deferred == 0


def test_deferred_gradients_are_part_of_the_budget(make):
    acc = at_step(make.sparse("float64", staleness=Defer(), max_bytes=2000), 1)
    row = np.ones((1, 100))
    assert late(acc, [0], row, 1).status is ApplyStatus.DEFERRED
    assert late(acc, [0], row, 1).status is ApplyStatus.DEFERRED
    with unchanged(acc), pytest.raises(gq.ResourceExhaustedError):
        late(acc, [0], row, 1)
    assert acc.num_deferred == 2
    acc.discard()
    assert late(acc, [0], row, 1).status is ApplyStatus.DEFERRED


def test_deferred_gradients_of_different_row_shapes_are_refused(make):
    acc = at_step(make.sparse(staleness=Defer()), 1)
    accept(acc, [0], np.ones((1, 3), np.float32))
    late(acc, [0], np.ones((1, 2), np.float32), 1)  # the next round may be of another shape than this one
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="Shape mismatch: expected values dim 1 to be 2"):
        late(acc, [0], np.ones((1, 4), np.float32), 1)
    assert acc.take_grad(1).values.shape == (1, 3)
    assert acc.take_grad(1).values.shape == (1, 2)


def test_deferred_gradient_whose_round_is_cut_off_is_in_the_next_delivered_one(make, engine):
    acc = at_step(make.sparse(staleness=Defer()), 1)
    late(acc, [0], [1.0], 1)
    accept(acc, [0], [5.0])
    acc.take_grad(1)
    with failing_merges(engine), pytest.raises(MemoryError):
        acc.take_grad(1)
    assert acc.num_undelivered == 1
    assert_rows(acc.take_grad(9), [0], [1.0])


def test_timeout_says_how_many_are_deferred(make):
    acc = at_step(make.sparse(staleness=Defer()), 1)
    late(acc, [0], [1.0], 1)
    with pytest.raises(gq.DeadlineExceededError, match=r"have 0, need 1 at step 1; .* 1 deferred"):
        acc.take_grad(1, timeout=0)
