"""Late gradients: the policies by name, windows, and what holds for each policy."""

import math

import numpy as np
import pytest

import gradquorum as gq
from gradquorum import ApplyStatus, Defer, Weighted, Window
from gradquorum.staleness import from_words, to_words
from tests.late import POLICIES, at_step, late, only_where_functions_are
from tests.support import accept, assert_rows, column, unchanged

# Names


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_policies_are_accepted_by_all_accumulators(make, policy):
    for acc in (make.sparse(staleness=policy), make.dense(staleness=policy)):
        assert acc.num_deferred == 0
    make.group({"a": gq.SparseSpec("float32"), "b": gq.DenseSpec("float32")}, staleness=policy)


@only_where_functions_are
def test_function_of_the_user_is_a_policy(make):
    assert make.sparse(staleness=Weighted(math.exp)).num_deferred == 0


def test_function_of_the_user_is_refused_where_it_would_have_to_travel(make, target):
    if target == "local":
        return
    with pytest.raises(gq.InvalidArgumentError, match=r"another process.*use 'inverse' or 'exponential'"):
        make.sparse(staleness=Weighted(math.exp))


@pytest.mark.parametrize("policy", ["loose", None, 3, Window, "window", ...], ids=repr)
def test_what_is_no_policy_is_refused(make, policy):
    with pytest.raises(gq.InvalidArgumentError, match="staleness: expected"):
        make.sparse(staleness=policy)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Window(-1), lambda: Window(1.5), lambda: Window(True), lambda: Weighted("linear"), lambda: Weighted(2),
        lambda: Weighted("exponential", decay=0), lambda: Weighted("exponential", decay=1), lambda: Weighted(decay="x"),
        lambda: Weighted(max_lag=-1),
    ],
)  # fmt: skip
def test_policies_refuse_what_they_cannot_be(bad):
    with pytest.raises(gq.InvalidArgumentError, match="expected"):
        bad()


def test_policies_are_equal_if_they_say_the_same_and_do_not_change():
    assert Window(2) == Window(2) != Window(3)
    assert Weighted() == Weighted("inverse") != Weighted("exponential")
    assert Weighted("exponential") != Weighted("exponential", decay=0.25)
    assert Weighted(math.exp) == Weighted(math.exp) != Weighted(math.log)
    assert Weighted(np.str_("inverse")) == Weighted("inverse")
    assert Defer() == Defer() != Window(0)
    assert len({Window(2), Window(2), Defer(), Defer()}) == 2
    with pytest.raises(AttributeError, match="does not change"):
        Window(2).max_lag = 3


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_policies_travel_as_plain_words(policy):
    words = to_words(policy)
    assert all(word is None or isinstance(word, str | int | float) for word in words)
    assert from_words(words) == policy
    assert repr(from_words(words)) == repr(policy)


def test_function_of_the_user_does_not_travel():
    with pytest.raises(gq.InvalidArgumentError, match="another process"):
        to_words(Weighted(math.exp))


@pytest.mark.parametrize("words", [[], ["Loose"], ["Window"], ["Window", "x"], [["Window"]]], ids=repr)
def test_words_of_no_policy_are_refused(words):
    with pytest.raises(gq.InvalidArgumentError):
        from_words(words)


def test_shared_name_with_another_policy_is_refused(make):
    name = make.shared_name()
    first = make.sparse(shared_name=name, staleness=Window(2))
    assert make.sparse(shared_name=name, staleness=Window(2)).num_deferred == first.num_deferred
    with pytest.raises(gq.InvalidArgumentError, match=r"Window\(2\).*Window\(3\)"):
        make.sparse(shared_name=name, staleness=Window(3))


# Window


def test_window_accepts_up_to_its_lag_and_drops_beyond(make):
    acc = at_step(make.sparse(staleness=Window(2)), 5)
    receipts = [late(acc, [0], [float(lag)], lag) for lag in range(5)]
    assert [r.status.name for r in receipts] == ["ACCEPTED"] * 3 + ["STALE"] * 2
    assert [r.lag for r in receipts] == [0, 1, 2, 3, 4]
    assert [r.num_accumulated for r in receipts] == [1, 2, 3, 3, 3]
    assert_rows(acc.take_grad(3), [0], [1.0])


def test_window_of_0_is_strict(make):
    acc = at_step(make.sparse(staleness=Window(0)), 2)
    assert late(acc, [0], [1.0], 1).status is ApplyStatus.STALE


@pytest.mark.parametrize(
    ("reduction", "expected"), [("MEAN", 3.0), ("SUM", 6.0), ("MEAN_BY_COUNT", 3.0), ("MEAN_BY_WEIGHT", 3.0)]
)
def test_window_counts_a_late_gradient_in_full(make, reduction, expected):
    acc = at_step(make.sparse(reduction_type=reduction, staleness=Window(1)), 1)
    accept(acc, [0], [4.0])
    late(acc, [0], [2.0], 1)
    assert_rows(acc.take_grad(2), [0], [expected])


def test_window_gradient_counts_towards_max_per_worker_of_the_open_round(make):
    acc = at_step(make.sparse(staleness=Window(1), max_per_worker=1), 1)
    assert late(acc, [0], [1.0], 1, worker="a")
    assert late(acc, [0], [1.0], 0, worker="a").status is ApplyStatus.REFUSED


def test_window_gradient_has_to_match_the_row_shape_of_the_round(make):
    acc = at_step(make.sparse(staleness=Window(1)), 1)
    accept(acc, [0], [1.0])
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="Shape mismatch"):
        late(acc, [0], np.ones((1, 2), np.float32), 1)
    assert late(acc, [0], np.ones((1, 2), np.float32), 2).status is ApplyStatus.STALE  # it is dropped, whatever it is


def test_window_gradient_that_is_not_finite_is_skipped_like_any_other(make):
    acc = at_step(make.sparse(staleness=Window(1), on_nonfinite="skip"), 1)
    assert late(acc, [0], [np.nan], 1).status is ApplyStatus.SKIPPED


def test_warning_of_a_dropped_gradient_is_given_only_when_it_is_dropped(make):
    for policy in (Window(1), Weighted(), Defer()):
        acc = at_step(make.sparse(staleness=policy), 1)
        acc.apply_grad([0], column(1.0), local_step=0)  # warnings are errors in these tests
    with pytest.warns(gq.StaleGradientWarning):
        at_step(make.sparse(staleness=Window(1)), 2).apply_grad([0], column(1.0), local_step=0)
