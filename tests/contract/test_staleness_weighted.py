"""Late gradients that are weighted by their lag: the formulas of docs/staleness.md."""

import math

import numpy as np
import pytest

import gradquorum as gq
from gradquorum import ApplyStatus, Defer, Weighted, Window
from tests.late import at_step, late, only_where_functions_are
from tests.support import accept, apply, assert_rows, assert_same_bits, available_engines, column, only_local, unchanged


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
