"""What of the Ray target needs no Ray: splitting, joining, losses, and the model of its cost."""

import asyncio

import numpy as np
import pytest

import gradquorum as gq
from benchmarks.simulate_ray import Costs, Load, bounds, check, fit, on_one_machine, simulate
from gradquorum.engine import get_engine
from gradquorum.engine.splitting import parts_of
from gradquorum.marks import NO_MARKS
from gradquorum.receipts import ApplyReceipt, ApplyStatus
from gradquorum.records import Contribution
from gradquorum.targets.interface import Terms
from gradquorum.targets.ray.ground import Ground
from gradquorum.targets.ray.incarnations import Incarnations
from gradquorum.targets.ray.losses import Losses
from gradquorum.targets.ray.records import Judged, Part, Resumed, Standing
from gradquorum.targets.ray.splitting import join
from gradquorum.targets.ray.wire import pack_rows, unpack_rows


@pytest.mark.parametrize("bounds", [None, (100, 5000)])
def test_join_of_a_split_gives_the_same_rows_in_arrays_of_its_own(bounds):
    rng = np.random.default_rng(0)
    ids = np.unique(rng.integers(0, 2**62, 1000) % 10**4)
    values = rng.normal(size=(len(ids), 3))
    owners = parts_of(ids, 3, bounds)
    counts = ids % 7
    results = [(ids[owners == part], values[owners == part], counts[owners == part]) for part in range(3)]
    joined = join(results, values.dtype)
    for got, expected in zip(joined, (ids, values, counts), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.flags.writeable and not any(np.shares_memory(got, array) for part in results for array in part)


@pytest.mark.parametrize("stride", [1, 2, 64, 1024, 10**9])
def test_hash_spreads_ids_of_any_stride_evenly(stride):
    found = np.bincount(parts_of(np.arange(8000, dtype=np.int64) * stride, 4), minlength=4)
    assert found.min() > 1000, found


def test_bounds_give_each_shard_its_range():
    ids = np.array([0, 9, 10, 49, 50, 2**62])
    np.testing.assert_array_equal(parts_of(ids, 3, (10, 50)), [0, 0, 1, 1, 2, 2])


ROWS = {
    "packed": Part(3, (2,), (get_engine().split(np.arange(3), np.ones((3, 2)), 1, None)[0].memory,)),
    "apart": Part(3, (2,), (np.arange(3), np.ones((3, 2)))),
    "no columns": Part(3, (0,), (get_engine().split(np.arange(3), np.ones((3, 0)), 1, None)[0].memory,)),
}


def test_rows_arrive_as_they_were_packed():
    dense = Part(None, (2, 2), (np.full((2, 2), 7.0),))
    items = [((b"me", i), {0: part, 1: dense}) for i, part in enumerate(ROWS.values())]
    items.append(((b"me", 9), {1: Part(None, (0, 4), ())}))
    data, buffers = pack_rows(items)
    got = unpack_rows(b"me", data, [buffer.raw() for buffer in buffers], [np.dtype(float)] * 2)
    assert list(got) == [key for key, _ in items]
    for (key, _), part in zip(items, ROWS.values(), strict=False):
        np.testing.assert_array_equal(got[key][0].indices, np.arange(3))
        np.testing.assert_array_equal(got[key][0].values, np.ones((3, *part.shape)))
        assert got[key][1].indices is None
        np.testing.assert_array_equal(got[key][1].values, np.full((2, 2), 7.0))
    assert got[b"me", 9][1].values.shape == (0, 4)


def judged(status=ApplyStatus.ACCEPTED, marks=None, serial=0, settled=0):
    return Judged(ApplyReceipt(status, 0, 0, 1), serial, settled, marks)


def resumed(settled=None, **marks):
    return Resumed(2, "it died", marks, settled, is_durable=False)


def note(losses, worker, sequence, answer, incarnation=1, thread=7):
    losses.note(Terms(0, worker, sequence), answer, thread, incarnation)


def lost(losses, worker):
    """Return what is reported of a worker, nothing if nothing is."""
    try:
        losses.report("it died", worker)
    except gq.UnavailableError as error:
        return [sequence for _, sequence in error.resend]
    return []


def marks_of(*sequences):
    marks = NO_MARKS
    for sequence in sequences:
        marks = marks.judged(sequence, ApplyStatus.ACCEPTED)
    return marks


def test_losses_are_what_was_accepted_and_not_delivered_each_named_once():
    losses = Losses()
    for sequence in range(3):
        note(losses, "a", sequence, judged(marks=marks_of(0)))
    note(losses, "a", 3, judged(ApplyStatus.STALE, marks_of(0)))
    note(losses, "b", 5, judged())
    losses.report("nothing", "a")
    losses.void(1, resumed(a=marks_of(0, 2)))
    assert losses.owes("a") and not losses.owes("c")
    assert lost(losses, "a") == [1]
    assert lost(losses, "a") == []
    losses.report("it died", None)  # this is no thread that has offered anything
    assert lost(losses, "b") == [5]


def test_losses_without_a_sequence_are_counted_until_their_round_was_delivered():
    losses = Losses()
    for serial, settled in ((0, 0), (0, 0), (1, 1), (2, 1)):
        losses.note(Terms(0), judged(serial=serial, settled=settled), 7, 1)
    losses.void(1, resumed(settled=2))
    with pytest.raises(gq.UnavailableError) as caught:
        losses.report("it died", None)
    assert (caught.value.num_lost, caught.value.resend) == (1, ())


def test_receipt_that_comes_after_the_end_of_its_incarnation_is_lost_unless_delivered():
    losses = Losses()
    losses.void(1, resumed(settled=3, a=marks_of(0)))
    for sequence in (0, 1):
        note(losses, "a", sequence, judged())
    losses.note(Terms(0), judged(serial=2), 7, 1)
    losses.note(Terms(0), judged(serial=3), 7, 1)
    note(losses, "a", 2, judged(), incarnation=2)
    with pytest.raises(gq.UnavailableError) as caught:
        losses.report("it died", "a")
    assert (caught.value.num_lost, caught.value.resend) == (1, (("a", 1),))
    losses.void(2, resumed())
    assert lost(losses, "a") == [2]


def test_what_lies_below_the_window_of_the_marks_is_lost_unless_its_round_was_delivered():
    losses = Losses()
    note(losses, "a", 1, judged(serial=3))
    note(losses, "a", 2, judged(serial=4))
    note(losses, "a", 3, judged(ApplyStatus.DEFERRED, serial=3))
    losses.void(1, resumed(settled=4, a=marks_of(500)))
    assert lost(losses, "a") == [2, 3]


def test_who_takes_over_hears_of_what_was_accepted_before():
    losses = Losses()
    losses.take_over("a", Standing(4, {3: 0, 4: 0}, 1), 7)
    note(losses, "a", 5, judged(marks=marks_of(3)))
    losses.void(1, resumed(a=marks_of(3)))
    assert lost(losses, "a") == [4, 5]
    losses.take_over("a", Standing(9, {8: 0, 9: 0}, 1), 7)  # an answer that the end has overtaken
    assert lost(losses, "a") == [8, 9]


def test_gradient_that_a_finalizer_offers_while_another_is_noted_is_not_forgotten():
    losses = Losses()

    class Interrupted:
        """What a shard says of a gradient: while it is looked at, a finalizer offers another one."""

        receipt, serial, settled = judged().receipt, 0, 0

        @property
        def marks(self):
            note(losses, "a", 6, judged())
            return NO_MARKS

    note(losses, "a", 5, Interrupted())
    losses.void(1, resumed())
    assert lost(losses, "a") == [5, 6]


def test_nothing_is_lost_of_a_round_that_is_kept():
    losses = Losses()
    note(losses, 1, 0, judged())
    losses.void(1, resumed()._replace(is_durable=True))
    note(losses, 1, 1, judged())
    assert lost(losses, 1) == []


def accepted(worker, *sequences):
    return [Contribution((), (), 0, worker, sequence) for sequence in sequences]


def sequences_in(marks):
    return {} if marks is None else {i for i in range(marks.highest + 1) if marks.status_of(i) is not None}


def test_ground_tells_of_a_delivery_once_it_is_recorded_and_final():
    ground = Ground(None)
    ground.settle(accepted("a", 0, 1), 0, (b"taker", 1), is_final=False)
    ground.settle(accepted("a", 2), 1, None, is_final=True)
    assert (sequences_in(ground.known("a")), ground.known_serial(2)) == (set(), 0)
    assert ground.unknown_of("a") == {0: 0, 1: 0, 2: 1}
    recorded, deliveries = ground.record()
    assert sequences_in(recorded.marks["a"]) == {0, 1, 2}
    ground.finish((b"taker", 1))
    assert ground.known_serial(2) == 0
    ground.recorded(deliveries)
    assert (sequences_in(ground.known("a")), ground.known_serial(2), ground.unknown_of("a")) == ({0, 1, 2}, 2, {})
    assert not ground.unsettle((b"taker", 1))


def test_ground_takes_back_one_delivery_and_keeps_those_after_it():
    ground = Ground(None)
    for take, sequence in enumerate((0, 200, 201)):
        ground.settle(accepted("a", sequence), take, (b"taker", take), is_final=take != 1)
    ground.settle(accepted("b", 0), 3, None, is_final=True)
    assert ground.unsettle((b"taker", 1))
    assert not ground.was_delivered((b"taker", 1)) and ground.was_delivered((b"taker", 2))
    assert ground.marks["a"] == marks_of(0, 201)
    ground.recorded(ground.record()[1])
    assert (ground.known("a"), ground.known("b")) == (marks_of(0, 201), marks_of(0))


def test_ground_lets_nobody_take_back_what_is_long_past():
    ground = Ground(None)
    for take in range(200):
        ground.settle(accepted("a", take), take, (b"taker", take), is_final=False)
        ground.recorded(ground.record()[1])
    assert len(ground.unknown_of("a")) == 64
    assert not ground.unsettle((b"taker", 100))
    assert ground.unsettle((b"taker", 199))


def test_round_whose_shards_do_not_come_back_is_an_error_and_no_wait_without_end():
    async def wait():
        life = Incarnations(None, (), None, None, {}, None)
        await life.ready(0.0)
        life._beginning = asyncio.get_running_loop().create_future()
        await life.ready(0.01)

    def no_shards(self):
        self._has_begun = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Incarnations, "_first", lambda self: asyncio.sleep(0, no_shards(self)))
        with pytest.raises(gq.UnavailableError, match="does not come back"):
            asyncio.run(wait())


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("workers", [1, 8, 500])
@pytest.mark.parametrize("num_bytes", [1 << 10, 1 << 20])
def test_simulation_keeps_the_bounds_and_comes_near_the_least_when_that_is_not_the_workers(shards, workers, num_bytes):
    load, costs = Load(workers, shards, num_bytes, 0.01), Costs()
    limits = bounds(load, costs)
    got = simulate(load, costs)
    assert got <= 1.01 * min(limits.values())
    if min(limits, key=lambda what: limits[what]) != "workers" and workers == 500:
        assert got >= 0.9 * min(limits.values())


def test_costs_are_found_again_in_rates_that_follow_from_them():
    costs, cores = Costs(70e-6, 70e-6, 90e-6, 800e-6, copy=1.5e9, merge=1.5e9), 2.0
    measured = {}
    for name, num_bytes, in_call in (("32 kB", 34_816, 20.0), ("1 MB", 1_081_344, 6.0)):
        rates = {}
        for key, shards, each in (("waiting", 1, 1.0), ("pipelined", 1, in_call), ("two shards", 2, in_call)):
            rates[f"gradquorum, {key}"] = [
                on_one_machine(Load(2, shards, num_bytes, 0.0, 2 * num_bytes), costs, cores, each)
            ]
        sizes = {"bytes": num_bytes, "distinct_bytes": 2 * num_bytes}
        measured[name] = {"gradients_per_s": rates, "gradients_per_call": in_call, **sizes}
    commits = on_one_machine(Load(2, 1, 0, 0.0), costs, cores, 30.0)
    measured["nothing"] = {"commits_per_s": [commits], "gradients_per_call": 30.0}
    for name, value in vars(fit(measured, cores)).items():
        if name not in ("link", "latency"):  # those of one machine are none
            assert value == pytest.approx(getattr(costs, name))
    assert [row[-1] for row in check(measured, cores)] == ["1.00"] * 3
