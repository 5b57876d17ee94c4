"""`SyncReplicas`: what it takes, and what it refuses."""

import inspect
import pickle

import numpy as np
import pytest

import gradquorum as gq
from tests.replicas import apply_and_leave, ignore, make_acc
from tests.support import TIMEOUT, wait_for_waiters


def test_dense_accumulator_gives_the_update_arrays_and_steps(make, run_thread):
    acc = make.dense("float32", (2,), expected_workers=2, max_per_worker=1)
    taken = []

    def work(sync, index):
        with sync.worker(index) as worker:
            for step in worker:
                worker.apply(np.float32([index, step]))

    with gq.SyncReplicas(acc, 2, num_workers=2, update=lambda *both: taken.append(both)) as sync:
        sync._update._wants_step = True
        calls = [run_thread(work, sync, index) for index in range(2)]
        sync.run(3, timeout=TIMEOUT)
    for call in calls:
        call.result()
    assert [step for _, step in taken] == [0, 1, 2]
    np.testing.assert_array_equal([gradient for gradient, _ in taken], [[0.5, 0], [0.5, 1], [0.5, 2]])


def test_pickled_one_has_workers_and_no_run_and_a_local_one_says_what_to_do(make):
    acc = make_acc(make, 2, shared_name=make.shared_name())
    with gq.SyncReplicas(acc, 1, num_workers=2, update=ignore) as sync:
        if make.target == "local":
            with pytest.raises(TypeError, match="target="):
                pickle.dumps(sync)
            return
        with pickle.loads(pickle.dumps(sync)) as elsewhere:
            apply_and_leave(elsewhere, 1)
            with pytest.raises(gq.InvalidArgumentError, match="the chief's process"):
                elsewhere.run(1)
        assert elsewhere.closed
        assert sync.run(1, timeout=TIMEOUT) == 1


def test_process_of_workers_only_cannot_run_and_closes_only_its_own_handle(make):
    name = make.shared_name()
    acc = make_acc(make, 1, shared_name=name)
    other = make_acc(make, 1, shared_name=name)
    with gq.SyncReplicas(other, 1, num_workers=1, update=None) as sync:
        apply_and_leave(sync, 0)
        with pytest.raises(gq.InvalidArgumentError, match="update= was given"):
            sync.run(1)
        assert sync.params is None
    assert other.closed
    assert not acc.closed
    assert acc.num_accumulated() == 1


def test_signatures_are_the_specified_ones():
    def names(function):
        parameters = inspect.signature(function).parameters.values()
        return ", ".join(
            ("*" if one.kind is one.KEYWORD_ONLY else "")
            + one.name
            + ("" if one.default is one.empty else f"={one.default!r}")
            for one in parameters
        )

    assert names(gq.SyncReplicas) == ("group, num_required, *num_workers, *update, *max_per_worker=1, *params=None")
    assert names(gq.SyncReplicas.run) == "self, rounds, *timeout=None"
    assert names(gq.SyncReplicas.worker) == "self, worker"
    assert names(gq.SyncReplicas.close) == "self"


@pytest.mark.parametrize(
    ("num_required", "options", "words"),
    [
        (0, {}, "num_required: expected 1 to num_workers x max_per_worker = 3, got 0"),
        (4, {}, "= 3, got 4"),
        (1.5, {}, "num_required: expected an integer"),
        (True, {}, "num_required: expected an integer"),
        (None, {}, "num_required: expected an integer"),
        ("", {}, "got ''"),
        ("all-", {}, "'all' or 'all-b' with a number b, got 'all-'"),
        ("all-x", {}, "got 'all-x'"),
        ("all-" + "9" * 5000, {}, "with a number b, got 'all-999"),
        ("all--1", {}, "got 'all--1'"),
        ("All", {}, "got 'All'"),
        ("all-3", {}, "expected to spare fewer than num_workers=3"),
        (1, {"num_workers": 0}, "num_workers: expected 1 or more, got 0"),
        (1, {"max_per_worker": 0}, "max_per_worker: expected 1 or more, got 0"),
        (1, {"num_workers": 4}, "made with expected_workers=4, max_per_worker=1, got expected_workers=3"),
        (1, {"max_per_worker": 2}, "made with expected_workers=3, max_per_worker=2, got"),
        ("all", {"max_per_worker": 2}, "expected a number with max_per_worker=2"),
        (1, {"update": 3}, "update: expected a function of the gradient, a torch optimizer or an optax"),
        (1, {"update": lambda: None}, "update: expected a function of the gradient"),
        (1, {"update": lambda a, b, c: None}, "with 3 required arguments"),
        (1, {"params": {}}, "params: expected None with a function"),
        (1, {"group": "emb"}, "group: expected an AccumulatorGroup or an accumulator, got 'emb'"),
    ],
)
def test_arguments_that_cannot_be_are_refused_and_nothing_has_changed(make, num_required, options, words):
    acc = make_acc(make, 3)
    arguments = {"group": acc, "num_workers": 3, "update": ignore, **options}
    with pytest.raises(gq.InvalidArgumentError) as caught:
        gq.SyncReplicas(arguments.pop("group"), num_required, **arguments)
    assert words in str(caught.value)
    assert (acc.closed, acc.num_workers) == (False, 0)


def test_group_that_does_not_know_its_workers_is_refused_and_told_how(make):
    with pytest.raises(gq.InvalidArgumentError, match="make the group with these options"):
        gq.SyncReplicas(make.sparse("float32"), 2, num_workers=3, update=ignore)


def test_run_and_worker_refuse_what_cannot_be(make, run_thread):
    acc = make_acc(make, 2)
    with gq.SyncReplicas(acc, 2, num_workers=2, update=ignore) as sync:
        for number in (-1, 2, "0", None, 0.0):
            with pytest.raises(gq.InvalidArgumentError, match="worker: expected"):
                sync.worker(number)
        with pytest.raises(gq.InvalidArgumentError, match="rounds: expected 0 or more, or None; got -1"):
            sync.run(-1)
        with pytest.raises(gq.InvalidArgumentError, match="timeout"):
            sync.run(1, timeout=-1)
        run = run_thread(sync.run, 1)
        wait_for_waiters(acc, 1)
        with pytest.raises(gq.InvalidArgumentError, match="run: expected one at a time"):
            sync.run(1)
        sync.close()
        assert run.result() == 0


def test_update_is_given_the_step_if_it_asks_for_one(make):
    calls = []

    def with_a_default_of_another_kind(gradient, rate=0.1):
        calls.append(rate)

    def with_a_step(gradient, step=None):
        calls.append(step)

    acc = make_acc(make, 1)
    functions = [
        lambda gradient: calls.append("gradient"),
        lambda gradient, step: calls.append(step),
        lambda gradient, anything: calls.append(anything),
        with_a_default_of_another_kind,
        with_a_step,
        lambda *both: calls.append(len(both)),
    ]
    for function in functions:
        sync = gq.SyncReplicas(acc, 1, num_workers=1, update=function)
        apply_and_leave(sync, 0)
        sync.run(1, timeout=TIMEOUT)
    assert calls == ["gradient", 1, 2, 0.1, 4, 1]


def test_repr_says_what_it_is(make):
    acc = make_acc(make, 3)
    sync = gq.SyncReplicas(acc, "all-1", num_workers=3, update=ignore)
    assert repr(sync).startswith("<SyncReplicas 'all-1' of 3 on <")
    assert repr(sync.worker(2)) == "<ReplicaWorker 2: step 0>"
    assert sync.group is acc
