"""States that contradict themselves or their spec: each is refused, and the round is as it was."""

import json

import numpy as np
import pytest

import gradquorum as gq
from tests.support import accept, apply, failing_merges, unchanged


def with_header(state, change):
    """Return a state whose header has been changed."""
    header = json.loads(state["header"].tobytes())
    change(header)
    return {**state, "header": np.frombuffer(json.dumps(header).encode(), np.uint8)}


def merged(state, number, of=1):
    """Return a state whose first `of` blocks claim to be so many gradients each."""

    def change(header):
        for contribution in header["log"][:of]:
            contribution["num_gradients"] = number

    counts = {f"log.{i}.0.counts": np.array([number]) for i in range(of)}
    return with_header({**state, **counts}, change)


def refused(make, state, match, **options):
    acc = make.sparse(**options)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=match):
        acc.load_state_dict(state)


@pytest.mark.parametrize("options", [{"compact": False}, {"order": "worker"}], ids=str)
def test_prefix_is_refused_where_nothing_is_ever_merged(make, options):
    acc = make.sparse(**options)
    accept(acc, [0], [1.0], worker=1)
    refused(make, merged(acc.state_dict(), 5), "log.0: expected one gradient", **options)


def test_prefix_of_one_worker_is_refused(make):
    acc = make.sparse()
    accept(acc, [0], [1.0], worker=1)
    refused(make, merged(acc.state_dict(), 5), "log.0: expected no worker")


def test_sequence_without_a_worker_is_refused(make):
    acc = make.sparse()
    accept(acc, [0], [1.0])
    state = with_header(acc.state_dict(), lambda header: header["log"][0].update(sequence=1))
    refused(make, state, "expected a worker beside sequence 1")


@pytest.mark.parametrize("accepted", [[], [[1, 2]], [[1, 1]], [[1, 1], [3, 1]], [[1, 1], [2, 1], [3, 0]]], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_per_worker": 1}], ids=str)
def test_counts_by_worker_that_contradict_the_log_are_refused(make, options, accepted):
    acc = make.sparse(**options)
    accept(acc, [0], [1.0], worker=1)
    accept(acc, [0], [1.0], worker=2)
    state = acc.state_dict()
    refused(make, with_header(state, lambda header: header.update(accepted=accepted)), "state: expected", **options)
    make.sparse(**options).load_state_dict(state)


@pytest.mark.parametrize("accepted", [[[1, 1]], [[1, 3]], [[1, 4]], [[1, 2], [3, 2], [2, 0]]], ids=str)
def test_counts_by_worker_of_a_prefix_are_all_of_it_and_none_above_max_per_worker(make, accepted):
    acc = make.sparse(max_per_worker=2)
    accept(acc, [0], [1.0], worker=1)
    accept(acc, [0], [1.0], worker=2)

    def forget(header):
        header["log"][0].update(worker=None)
        header.update(accepted=[[1, 1], [2, 2], [3, 1]])

    state = with_header(merged(acc.state_dict(), 3), forget)
    make.sparse(max_per_worker=2).load_state_dict(state)
    refused(make, with_header(state, lambda header: header.update(accepted=accepted)), "expected 4", max_per_worker=2)


def test_more_deferred_gradients_of_a_worker_than_may_count_are_refused(make):
    options = {"max_per_worker": 1, "staleness": gq.Defer()}
    acc = make.sparse(**options)
    acc.set_global_step(1)
    for worker in (1, 2):
        apply(acc, [0], [1.0], local_step=0, worker=worker)
    state = with_header(acc.state_dict(), lambda header: header["deferred"][1].update(worker=1))
    refused(make, state, "max_per_worker=1 deferred", **options)


@pytest.mark.parametrize("workers", [[], [1, 1], [2], [1, 2]], ids=str)
def test_workers_that_are_not_those_of_an_undelivered_round_are_refused(make, engine, workers):
    acc = make.sparse()
    accept(acc, [0], [1.0], worker=1)
    with failing_merges(engine), pytest.raises(MemoryError):
        acc.take_grad(1)
    state = acc.state_dict()
    refused(make, with_header(state, lambda h: h["undelivered"][0].update(workers=workers)), "of an undelivered round")
    make.sparse().load_state_dict(state)


@pytest.mark.parametrize("what", ["accepted", "marks", "members"])
def test_worker_of_whom_it_says_something_twice_is_refused(make, what):
    acc = make.sparse()
    accept(acc, [0], [1.0], worker=1, sequence=0)
    state = with_header(acc.state_dict(), lambda header: header[what].append(header[what][0]))
    refused(make, state, f"{what}: expected each worker once")


@pytest.mark.parametrize("staleness", ["strict", gq.Window(3), gq.Weighted(max_lag=2), gq.Weighted()], ids=repr)
def test_lag_that_the_policy_does_not_weigh_is_refused(make, staleness):
    acc = make.sparse(staleness=staleness)
    accept(acc, [0], [1.0])
    lag = 2**64 if staleness == gq.Weighted() else 3
    state = with_header(acc.state_dict(), lambda header: header["log"][0].update(lag=lag))
    refused(make, state, "expected a lag that", staleness=staleness)


@pytest.mark.parametrize("flag", [np.zeros(1, np.uint8), np.ones(2, np.uint8), np.array(["yes"]), np.ones(1)], ids=repr)
def test_flag_of_a_late_gradient_is_one_or_not_there(make, flag):
    acc = make.sparse(staleness=gq.Weighted(), reduction_type="SUM")
    acc.set_global_step(1)
    apply(acc, [0], [1.0], local_step=0)
    state = acc.state_dict()
    assert state["log.0.0.is_late"].tolist() == [1]
    refused(make, {**state, "log.0.0.is_late": flag}, "is_late", staleness=gq.Weighted(), reduction_type="SUM")
