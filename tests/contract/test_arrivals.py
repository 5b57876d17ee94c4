"""Arrival times: what is recorded, what another quorum would have cost, and which one is suggested."""

from fractions import Fraction

import numpy as np
import pytest

import gradquorum as gq
from gradquorum import Defer, arrivals
from gradquorum.arrivals import MOST_ARRIVALS, arrival_report
from tests.support import accept, accept_many, apply


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that stands still until it is told to move."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(arrivals, "time", made)
    return made


def at(acc, clock, now, value=1.0, **options):
    clock.now = now
    return apply(acc, [0], [value], **options)


def test_nothing_is_recorded_unless_somebody_asks(make):
    acc = make.sparse()
    accept(acc, [0], [1.0])
    acc.take_grad(1)
    assert acc.arrivals() == (0, ())
    with pytest.raises(gq.InvalidArgumentError, match="call observe_arrivals"):
        acc.suggest_num_required()


def test_times_are_those_since_the_round_before_was_detached(make, clock):
    acc = make.sparse()
    acc.observe_arrivals()
    at(acc, clock, 101.0)
    at(acc, clock, 103.0)
    clock.now = 104.0
    acc.take_grad(2)
    at(acc, clock, 106.0)
    at(acc, clock, 110.0)
    acc.take_grad(2)
    first, second = acc.arrivals().quorums
    assert (first.num_required, first.num_rounds, first.mean_wait, first.longest_wait) == (1, 2, 1.5, 2.0)
    assert (second.num_required, second.mean_wait, second.longest_wait) == (2, 4.5, 6.0)
    assert (first.mean_dropped, second.mean_dropped) == (1.0, 0.0)


@pytest.mark.parametrize("staleness", ["strict", Defer()], ids=repr)
def test_late_gradient_is_an_arrival_of_the_round_it_was_computed_for(make, clock, staleness):
    acc = make.sparse(staleness=staleness)
    acc.set_global_step(5)
    acc.observe_arrivals()
    at(acc, clock, 101.0, local_step=5)
    acc.take_grad(1)
    at(acc, clock, 109.0, local_step=5)  # too late
    only, other = acc.arrivals().quorums
    assert (only.mean_wait, other.mean_wait) == (1.0, 9.0)


def test_open_round_is_not_reported_before_it_is_taken(make, clock):
    acc = make.sparse()
    acc.observe_arrivals()
    at(acc, clock, 101.0)
    assert acc.arrivals().num_rounds == 0
    acc.take_grad(1)
    assert acc.arrivals().num_rounds == 1


def test_what_is_not_kept_by_any_round_is_no_arrival(make, clock):
    acc = make.sparse(max_per_worker=1, on_nonfinite="skip")
    acc.observe_arrivals()
    at(acc, clock, 101.0, worker="a", sequence=0)
    at(acc, clock, 102.0, worker="a", sequence=0)  # duplicate
    at(acc, clock, 103.0, worker="a")  # refused
    at(acc, clock, 104.0, float("nan"), worker="b")  # skipped
    acc.take_grad(1)
    assert len(acc.arrivals().quorums) == 1


def test_recording_begins_with_the_next_round_if_the_open_one_is_not_empty(make, clock):
    acc = make.sparse()
    at(acc, clock, 101.0)
    acc.observe_arrivals()
    at(acc, clock, 102.0)
    acc.take_grad(2)
    assert acc.arrivals().num_rounds == 0
    at(acc, clock, 103.0)
    acc.take_grad(1)
    assert acc.arrivals().num_rounds == 1


def test_only_the_last_rounds_are_kept(make, clock):
    acc = make.sparse()
    acc.observe_arrivals(3)
    for i in range(10):
        at(acc, clock, clock.now + i)
        acc.take_grad(1)
    report = acc.arrivals()
    assert (report.num_rounds, report.quorums[0].mean_wait, report.quorums[0].longest_wait) == (3, 8.0, 9.0)


def test_memory_of_a_round_with_many_gradients_is_bounded(make):
    acc = make.sparse()
    acc.observe_arrivals()
    accept_many(acc, MOST_ARRIVALS + 5, [0], [1.0])
    acc.take_grad(1)
    assert len(acc.arrivals().quorums) == MOST_ARRIVALS


def test_recording_can_be_ended_and_begun_anew(make, clock):
    acc = make.sparse()
    for num_rounds in (256, None, 256):
        acc.observe_arrivals(num_rounds)
        at(acc, clock, clock.now + 1)
        acc.take_grad(1)
        assert acc.arrivals().num_rounds == (0 if num_rounds is None else 1)


def test_setting_the_step_forgets_the_open_round(make, clock):
    acc = make.sparse()
    acc.observe_arrivals()
    at(acc, clock, 150.0)
    acc.set_global_step(7)
    at(acc, clock, 151.0)
    acc.take_grad(1)
    assert [f.mean_wait for f in acc.arrivals().quorums] == [1.0]


@pytest.mark.parametrize("num_rounds", [0, -1, 1.5, "many", True], ids=repr)
def test_bad_number_of_rounds_is_refused(make, num_rounds):
    with pytest.raises(gq.InvalidArgumentError, match="num_rounds"):
        make.sparse().observe_arrivals(num_rounds)


def test_group_suggests_too(make, clock):
    group = make.group({"a": gq.SparseSpec("float32"), "b": gq.DenseSpec("float32")})
    group.observe_arrivals()
    for now in (101.0, 101.5, 190.0):
        clock.now = now
        group.apply({"b": [1.0]})
    group.take(3)
    assert group.suggest_num_required() == 2  # 1/1, 2/1.5, 3/90 gradients a second


@pytest.mark.parametrize(
    ("times", "gain", "expected"),
    [
        ([[1.0, 1.1, 1.2, 9.0]], 1.0, 3),  # one straggler: a backup worker pays
        ([[1.0, 1.0, 1.0, 1.0]], 1.0, 4),  # nobody is slow: wait for all
        ([[1.0, 2.0, 3.0, 4.0]], 1.0, 4),  # all alike: the larger
        ([[1.0, 2.0, 3.0, 4.0]], 0.5, 1),  # the same, if only the error of the mean counts
        ([[1.0, 1.1], [1.0, 1.1], [1.0, 1.1, 1.1]], 1.0, 2),  # three came in a third of the rounds only
        ([[1.0, 1.1], [1.0, 1.1, 1.1]], 1.0, 3),
    ],
)
def test_suggestion_maximises_progress_per_second(times, gain, expected):
    assert arrival_report(times).suggest_num_required(gain=gain) == expected


def test_suggestion_is_the_argument_of_the_maximum_of_the_documented_formula():
    times = [[0.5, 0.9, 1.0, 2.0, 8.0], [0.4, 0.8, 1.4, 1.5, 2.5], [0.1, 0.2, 0.3, 4.0, 4.1]]
    for gain in (0.3, 0.7, 1.0):
        by_hand = {n: n**gain / (sum(one[n - 1] for one in times) / 3) for n in range(1, 6)}
        assert arrival_report(times).suggest_num_required(gain=gain) == max(by_hand, key=by_hand.get)


@pytest.mark.parametrize("gain", [np.float32(0.5), Fraction(1, 2), 0.5], ids=repr)
def test_gain_is_any_real_number(gain):
    report = arrival_report([[1.0, 1.1, 9.0]])
    assert report.suggest_num_required(gain=gain) == 2


@pytest.mark.parametrize("gain", [0, -1, 1.1, "1", None, True], ids=repr)
def test_bad_gain_is_refused(gain):
    with pytest.raises(gq.InvalidArgumentError, match="gain"):
        arrival_report([[1.0]]).suggest_num_required(gain=gain)


def test_closed_handle_reports_nothing(make):
    acc = make.sparse()
    acc.close()
    for call in (acc.observe_arrivals, acc.arrivals, acc.suggest_num_required):
        with pytest.raises(gq.ClosedError):
            call()


def test_report_prints_as_a_table():
    lines = str(arrival_report([[1.0, 2.0]])).splitlines()
    assert lines[0] == "1 rounds"
    assert len(lines) == 4
