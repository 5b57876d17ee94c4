"""Late gradients under each policy: what counts, how much, in which round, and what the receipt says."""

import math

import numpy as np
import pytest

import gradquorum as gq
from gradquorum import ApplyStatus, Defer, Weighted, Window
from gradquorum.staleness import from_words, to_words
from tests.support import (
    TIMEOUT,
    accept,
    apply,
    assert_rows,
    assert_same_bits,
    available_engines,
    column,
    failing_merges,
    only_local,
    unchanged,
)

POLICIES = ["strict", Window(2), Weighted("inverse"), Weighted("exponential", decay=0.25, max_lag=3), Defer()]

only_where_functions_are = only_local("no code travels: a function of the user's stays in its process")


def at_step(acc, step):
    acc.set_global_step(step)
    return acc


def late(acc, indices, values, lag, **options):
    return apply(acc, indices, values, local_step=acc.global_step - lag, **options)


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


@pytest.mark.parametrize("policy", ["loose", None, 3, Window, "window", object()], ids=repr)
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


# Weighted: the formulas of docs/staleness.md


@pytest.mark.parametrize(
    ("reduction", "weights", "expected"),
    [
        # row 0: 6 in time, 2 with lag 1 (w = 1/2); row 1: 8 with lag 1 only; row 2: 4 in time only
        ("MEAN", (1, 1), [(6 + 1) / 1.5, 8.0, 4.0]),
        ("MEAN_BY_COUNT", (1, 1), [(6 + 1) / 1.5, 4 / 1.5, 4 / 1.5]),
        ("SUM", (1, 1), [7.0, 4.0, 4.0]),
        ("MEAN_BY_WEIGHT", (3, 4), [(18 + 4) / 5, 16 / 5, 12 / 5]),
    ],
)
def test_weighted_divides_by_the_sum_of_the_weights(make, reduction, weights, expected):
    acc = at_step(make.sparse("float64", reduction_type=reduction, staleness=Weighted("inverse")), 1)
    options = [{"weight": w} for w in weights] if reduction == "MEAN_BY_WEIGHT" else [{}, {}]
    accept(acc, [0, 2], [6.0, 4.0], **options[0])
    assert late(acc, [0, 1], [2.0, 8.0], 1, **options[1])
    gradient = acc.take_grad(2)
    np.testing.assert_array_equal(gradient.indices, [0, 1, 2])
    np.testing.assert_allclose(gradient.values.ravel(), expected, rtol=1e-15)
    np.testing.assert_array_equal(gradient.counts, [2, 1, 1])
    assert gradient.num_gradients == 2


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("MEAN", [(6 + 1) / 1.5]), ("MEAN_BY_COUNT", [(6 + 1) / 1.5]), ("SUM", [7.0]), ("MEAN_BY_WEIGHT", [7 / 1.5])],
)
def test_weighted_dense_divides_by_the_sum_of_the_weights(make, reduction, expected):
    acc = at_step(make.dense("float64", reduction_type=reduction, staleness=Weighted("inverse")), 1)
    acc.apply_grad([6.0], local_step=1)
    acc.apply_grad([2.0], local_step=0)
    np.testing.assert_allclose(acc.take_grad(2), expected, rtol=1e-15)


def test_weighted_group_weights_every_member_and_divides_by_those_that_carried_it(make):
    members = {
        "rows": gq.SparseSpec("float64"),
        "bias": gq.DenseSpec("float64"),
        "w": gq.DenseSpec("float64", (), "MEAN_BY_WEIGHT"),
    }
    group = make.group(members, staleness=Weighted("inverse"))
    group.set_global_step(1)
    group.apply({"rows": ([0], [[6.0]]), "w": [6.0]}, local_step=1, weight=3)
    group.apply({"rows": ([0], [[2.0]]), "bias": [8.0], "w": [2.0]}, local_step=0, weight=4)
    gradients = group.take(2)
    np.testing.assert_allclose(gradients["rows"].values.ravel(), [7 / 1.5])  # the weight of the caller is not for it
    np.testing.assert_allclose(gradients["bias"], [8.0])
    np.testing.assert_allclose(gradients["w"], [(18 + 4) / 5])


@pytest.mark.parametrize(
    ("policy", "weights"),
    [
        (Weighted("inverse"), [1, 1 / 2, 1 / 3]),
        (Weighted("exponential"), [1, 0.5, 0.25]),
        (Weighted("exponential", decay=0.25), [1, 0.25, 0.0625]),
    ],
    ids=repr,
)
def test_weights_are_those_of_the_formula(make, policy, weights):
    acc = at_step(make.sparse("float64", reduction_type="SUM", staleness=policy), 2)
    for lag in range(3):
        assert late(acc, [lag], [1.0], lag)
    np.testing.assert_allclose(acc.take_grad(3).values.ravel(), weights, rtol=1e-15)


@only_where_functions_are
def test_weights_are_those_of_the_function(make):
    policy = Weighted(lambda lag: 1 / (1 + lag) ** 2)
    test_weights_are_those_of_the_formula(make, policy, [1, 0.25, 1 / 9])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("reduction", ["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"])
def test_weighted_gives_the_bits_of_strict_as_long_as_nobody_is_late(make, dtype, reduction):
    rng = np.random.default_rng(5)
    accs = [make.sparse(dtype, reduction_type=reduction, staleness=policy) for policy in ("strict", Weighted())]
    for _ in range(7):
        ids = rng.integers(0, 20, 12)
        values = rng.standard_normal((12, 3)).astype(accs[0].dtype)
        for acc in accs:
            acc.apply_grad(ids, values)
    strict, weighted = (acc.take_grad(7) for acc in accs)
    np.testing.assert_array_equal(strict.indices, weighted.indices)
    assert_same_bits(weighted.values, strict.values)
    np.testing.assert_array_equal(strict.counts, weighted.counts)


@pytest.mark.skipif("native" not in available_engines(), reason="needs both engines")
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("reduction", ["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"])
def test_weighted_rounds_have_the_same_bits_on_both_engines_also_compacted(dtype, reduction, compact):
    results = []
    for engine in ("reference", "native"):
        rng = np.random.default_rng(7)
        acc = gq.SparseConditionalAccumulator(
            dtype, reduction_type=reduction, staleness=Weighted("inverse"), engine=engine, compact=compact
        )
        acc.set_global_step(10)
        for _ in range(40):  # 1 MiB is where compaction begins
            ids = rng.integers(0, 600, 500)
            values = rng.standard_normal((500, 16)).astype(acc.dtype)
            assert acc.apply_grad(ids, values, local_step=int(rng.integers(6, 11)))
        results.append(acc.take_grad(40))
        acc.close()
    np.testing.assert_array_equal(results[0].indices, results[1].indices)
    np.testing.assert_array_equal(results[0].counts, results[1].counts)
    assert_same_bits(results[1].values, results[0].values)


def test_weighted_drops_beyond_its_max_lag(make):
    acc = at_step(make.sparse(staleness=Weighted(max_lag=1)), 3)
    assert [late(acc, [0], [1.0], lag).status.name for lag in range(3)] == ["ACCEPTED", "ACCEPTED", "STALE"]


def test_weighted_drops_what_weighs_nothing_in_the_accumulate_dtype(make):
    acc = at_step(make.sparse("float32", staleness=Weighted("exponential")), 1000)
    assert late(acc, [0], [1.0], 100)
    assert late(acc, [0], [1.0], 200).status is ApplyStatus.STALE  # 2 ** -200 is 0 in float32
    wide = at_step(make.sparse("float64", staleness=Weighted("exponential")), 1000)
    assert late(wide, [0], [1.0], 200)


def test_weighted_drops_nothing_but_the_lag_says_how_late_it_was(make):
    acc = at_step(make.sparse(staleness=Weighted()), 7)
    receipt = late(acc, [0], [1.0], 7)
    assert (receipt.status, receipt.lag, bool(receipt)) == (ApplyStatus.ACCEPTED, 7, True)


@only_where_functions_are
@pytest.mark.parametrize("weight", [0, -1, 1.5, math.nan, math.inf, "1", None, True], ids=repr)
def test_function_that_returns_no_weight_is_an_error_and_nothing_has_changed(make, weight):
    acc = at_step(make.sparse(staleness=Weighted(lambda lag: weight)), 1)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="weight above 0"):
        late(acc, [0], [1.0], 1)
    accept(acc, [0], [1.0])  # in time: the function is not asked


@only_where_functions_are
def test_error_of_the_function_reaches_the_caller_and_nothing_has_changed(make):
    acc = at_step(make.sparse(staleness=Weighted(lambda lag: 1 / 0)), 1)
    with unchanged(acc), pytest.raises(ZeroDivisionError):
        late(acc, [0], [1.0], 1)


@only_where_functions_are
def test_function_is_not_asked_beyond_its_max_lag(make):
    acc = at_step(make.sparse(staleness=Weighted([1, 0.5].__getitem__, max_lag=1)), 4)
    assert [late(acc, [0], [1.0], lag).status.name for lag in (1, 2, 3)] == ["ACCEPTED", "STALE", "STALE"]


@only_where_functions_are
def test_retry_is_a_duplicate_whatever_the_function_says_of_its_lag(make):
    acc = at_step(make.sparse(staleness=Weighted({1: 0.5}.__getitem__)), 1)
    assert late(acc, [0], [1.0], 1, worker="a", sequence=0)
    acc.set_global_step(50)
    again = apply(acc, [0], [1.0], local_step=0, worker="a", sequence=0)
    assert (again.status, again.first_status) == (ApplyStatus.DUPLICATE, ApplyStatus.ACCEPTED)
    with unchanged(acc), pytest.raises(KeyError):
        apply(acc, [0], [1.0], local_step=0, worker="a", sequence=1)


@pytest.mark.parametrize(
    ("policy", "status"),
    [("strict", "STALE"), (Window(2**63 - 1), "STALE"), (Weighted(), "ACCEPTED"), (Defer(), "DEFERRED")],
    ids=repr,
)
def test_any_two_steps_of_int64_make_a_lag(make, policy, status):
    acc = at_step(make.sparse("float64", staleness=policy), 2**63 - 1)
    receipt = apply(acc, [0], [1.0], local_step=-(2**63), worker="a", sequence=0)
    assert (receipt.status.name, receipt.lag) == (status, 2**64 - 1)
    restored = make.sparse("float64", staleness=policy)
    restored.load_state_dict(acc.state_dict())
    assert restored.num_accumulated() == acc.num_accumulated() == (status == "ACCEPTED")


@only_where_functions_are
def test_function_may_use_the_accumulator_as_it_runs_outside_the_lock(make, run_thread):
    def weight(lag):
        return run_thread(acc.num_accumulated).result() and 0.5  # another thread gets the lock

    acc = at_step(make.sparse("float64", reduction_type="SUM", staleness=Weighted(weight)), 1)
    accept(acc, [0], [1.0])
    late(acc, [0], [1.0], 1)
    assert_rows(acc.take_grad(2), [0], [1.5])


@only_where_functions_are
def test_gradient_is_weighed_for_the_step_at_which_it_is_judged(make):
    """The step advances between the weighing and the judgement: it is weighed again."""
    lags = []

    def weight(lag):
        lags.append(lag)
        if len(lags) == 1:
            acc.set_global_step(acc.global_step + 1)
        return 1 / (1 + lag)

    acc = at_step(make.sparse("float64", reduction_type="SUM", staleness=Weighted(weight)), 1)
    receipt = apply(acc, [0], [6.0], local_step=0)
    assert (lags, receipt.lag, receipt.step) == ([1, 2], 2, 2)
    assert_rows(acc.take_grad(1), [0], [2.0])


@only_where_functions_are
def test_gradient_that_turns_out_to_be_in_time_counts_in_full(make):
    def weight(lag):
        acc.set_global_step(0)
        return 0.5

    acc = at_step(make.sparse("float64", reduction_type="SUM", staleness=Weighted(weight)), 1)
    assert apply(acc, [0], [6.0], local_step=0).lag == 0
    assert_rows(acc.take_grad(1), [0], [6.0])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_cannot_be_weighted(make, dtype):
    with pytest.raises(gq.InvalidArgumentError, match="integers cannot be weighted"):
        make.sparse(dtype, reduction_type="SUM", staleness=Weighted())
    with pytest.raises(gq.InvalidArgumentError, match=r"n: .*integers cannot be weighted"):
        make.group({"n": gq.DenseSpec(dtype, (), "SUM")}, staleness=Weighted())


def test_empty_late_gradient_counts_by_its_weight(make):
    acc = at_step(make.sparse("float64", reduction_type="MEAN_BY_COUNT", staleness=Weighted()), 1)
    accept(acc, [0], [6.0])
    apply(acc, [], np.zeros((0,)), local_step=0)
    assert_rows(acc.take_grad(2), [0], [4.0])  # 6 / (1 + 1/2)


@pytest.mark.parametrize("reduction", ["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_round_of_nothing_but_empty_late_gradients_has_no_rows(make, reduction, dtype):
    acc = at_step(make.sparse(dtype, (5, 3), reduction_type=reduction, staleness=Weighted()), 1)
    apply(acc, [], np.zeros((0,), dtype), local_step=0)
    assert acc.take_grad(1).values.shape == (0, 3)


@only_local("what goes to a server is copied")
def test_lent_values_stay_lent_until_the_merge_under_each_policy(make):
    for policy in (Window(1), Weighted(), Defer()):
        acc = at_step(make.sparse(staleness=policy), 1)
        receipt = late(acc, [0], column(1.0), 1, copy=False)
        assert receipt.lent
        assert not receipt.released
        if policy == Defer():
            accept(acc, [0], [1.0])
            acc.take_grad(1)
            assert not receipt.released
        acc.take_grad(1)
        assert receipt.released


# Defer


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


def test_warning_of_a_dropped_gradient_is_given_only_when_it_is_dropped(make):
    for policy in (Window(1), Weighted(), Defer()):
        acc = at_step(make.sparse(staleness=policy), 1)
        acc.apply_grad([0], column(1.0), local_step=0)  # warnings are errors in these tests
    with pytest.warns(gq.StaleGradientWarning):
        at_step(make.sparse(staleness=Window(1)), 2).apply_grad([0], column(1.0), local_step=0)
