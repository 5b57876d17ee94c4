"""Any sequence of calls, beside a plain model, compared after each rule."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import gradquorum as gq
from tests.property.plain_model import Batch, BelowWindow, Gradient, Model, Ticket
from tests.support import TIMEOUT, assert_rows, available_engines, failing_merges

pytestmark = pytest.mark.timeout(600)  # finding the smallest failing sequence takes its time

NUM_ROWS = 6
_names = itertools.count()

values = st.integers(-1000, 1000)
rows = st.lists(st.tuples(st.integers(0, NUM_ROWS - 1), values), max_size=5).map(tuple)
needs = st.integers(1, 5)
policies = st.sampled_from(["strict", "strict", gq.Window(1), gq.Window(3), gq.Defer(), gq.Defer()])
workers = st.sampled_from([None, 1, 2, "1", "a"])


class Accumulator:
    """How the machine speaks to two handles of one sparse accumulator."""

    def __init__(self, **options):
        self._options = {"shared_name": f"machine-{next(_names)}", **options}

    def open(self):
        return gq.SparseConditionalAccumulator("float64", (NUM_ROWS, 1), **self._options)

    def offer(self, handle, gradient, **options):
        ids = [i for i, _ in gradient.rows]
        return handle.apply_grad(
            ids, np.array([[value] for _, value in gradient.rows] or np.zeros((0, 1)), float), **options
        )

    def offer_bad(self, handle, kind):
        ids, values = {
            "beyond": ([0, NUM_ROWS], np.ones((2, 1))), "negative": ([-1], np.ones((1, 1))),
            "dtype": ([0], np.ones((1, 1), np.float32)), "rows": ([0], np.ones((2, 1))),
            "ids": ([0.5], np.ones((1, 1))), "columns": ([0], np.ones((1, 2))),
        }[kind]  # fmt: skip
        handle.apply_grad(ids, values, local_step=None)

    def take(self, handle, need, **options):
        return handle.take_grad(need, **options)

    def submit(self, handle, need, **options):
        return handle.submit_take(need, **options)

    def check(self, result, batch):
        self._check_rows(result, batch)
        assert (result.num_gradients, result.step) == (len(batch.gradients), batch.step)
        assert result.workers == batch.workers()

    def _check_rows(self, result, batch):
        total, counts = batch.sums()
        ids = sorted(total)
        assert_rows(result, ids, [total[i] / counts[i] for i in ids])
        np.testing.assert_array_equal(result.counts, [counts[i] for i in ids])


class Group(Accumulator):
    """The same, to a group of a sparse and a dense member: the dense one has the sum of each gradient's values."""

    def open(self):
        members = {"rows": gq.SparseSpec("float64", (NUM_ROWS, 1)), "total": gq.DenseSpec("float64", (1,), "SUM")}
        return gq.AccumulatorGroup(members, **self._options)

    def offer(self, handle, gradient, **options):
        ids = [i for i, _ in gradient.rows]
        sparse = (ids, np.array([[value] for _, value in gradient.rows] or np.zeros((0, 1)), float))
        return handle.apply({"rows": sparse, "total": [float(sum(value for _, value in gradient.rows))]}, **options)

    def offer_bad(self, handle, kind):
        good = {"rows": ([0], np.ones((1, 1))), "total": [1.0]}
        bad = {"beyond": {"rows": ([NUM_ROWS], np.ones((1, 1)))}, "negative": {"rows": ([-1], np.ones((1, 1)))},
               "dtype": {"rows": ([0], np.ones((1, 1), np.float32))}, "rows": {"total": [1.0, 2.0]},
               "ids": {"rows": ([0.5], np.ones((1, 1)))}, "columns": {"other": [1.0]}}  # fmt: skip
        handle.apply({**good, **bad[kind]}, local_step=None)

    def take(self, handle, need, **options):
        return handle.take(need, **options)

    def check(self, result, batch):
        self._check_rows(result["rows"], batch)
        np.testing.assert_array_equal(result["total"], [batch.total()])
        assert (result.num_gradients, result.step) == (len(batch.gradients), batch.step)
        assert result.workers == batch.workers()


class Machine(RuleBasedStateMachine):
    """One round, two handles, at most a few waiting takes."""

    kind: type
    engine: str

    @initialize(compact=st.booleans(), max_per_worker=st.sampled_from([None, None, 2]), staleness=policies)
    def make(self, compact, max_per_worker, staleness):
        self.compact = compact
        self.options = {"compact": compact, "max_per_worker": max_per_worker, "staleness": staleness}
        self.subject = self.kind(engine=self.engine, **self.options)
        self.model = Model(max_per_worker, staleness)
        self.handles = [self.subject.open(), self.subject.open()]
        self.accepted = self.delivered = self.discarded = 0

    def teardown(self):
        if hasattr(self, "handles"):
            assert self.handles[0].close() == 0
            self.model.queue = [ticket for ticket in self.model.queue if ticket.handle != 0]
            self.serve()
            left = self.handles[1].close()
            assert self.accepted == self.delivered + self.discarded + left

    def serve(self):
        """Compare the waiting takes that the model serves now."""
        for ticket, batch in self.model.serve():
            self.subject.check(ticket.future.result(TIMEOUT), batch)
            self.delivered += len(batch.gradients)

    @rule(
        at=st.integers(0, 1), rows=rows, worker=workers, lag=st.sampled_from([None, None, 0, 0, -1, -3, 1]),
        back=st.sampled_from([None, -1, 0, 1, 5, 63, 64, 65, 100]), copy=st.booleans(),
    )  # fmt: skip
    def apply(self, at, rows, worker, lag, back, copy):
        if self.model.max_per_worker is not None and worker is None:
            worker = 1
        gradient = Gradient(rows, worker)
        sequence = None
        if worker is not None and back is not None:
            sequence = max(self.model.highest(worker) - back, 0)
        local_step = None if lag is None else self.model.step + lag
        try:
            status, behind, first = self.model.apply(gradient, local_step, sequence)
        except BelowWindow:
            with pytest.raises(gq.InvalidArgumentError):
                self.subject.offer(
                    self.handles[at], gradient, local_step=local_step, worker=worker, sequence=sequence, copy=copy
                )
            return
        step, count = self.model.step, len(self.model.open)
        receipt = self.subject.offer(
            self.handles[at], gradient, local_step=local_step, worker=worker, sequence=sequence, copy=copy
        )
        assert (receipt.status, receipt.lag, receipt.first_status) == (status, behind, first)
        assert (receipt.step, receipt.num_accumulated) == (step, count)
        self.accepted += status in (gq.ApplyStatus.ACCEPTED, gq.ApplyStatus.DEFERRED)
        self.serve()

    @rule(at=st.integers(0, 1), worker=workers.filter(bool), ahead=st.integers(1, 200), rows=rows)
    def apply_with_a_jump_of_the_sequence(self, at, worker, ahead, rows):
        self.apply(at, rows, worker, None, -ahead, True)

    @rule(at=st.integers(0, 1), kind=st.sampled_from(["beyond", "negative", "dtype", "rows", "ids", "columns"]))
    def apply_bad(self, at, kind):
        if self.model.max_per_worker is None:
            with pytest.raises(gq.InvalidArgumentError):
                self.subject.offer_bad(self.handles[at], kind)

    def queued(self, ticket):
        """Let the model queue a take that does not wait; return its batch or None."""
        self.model.queue.append(ticket)
        served = self.model.serve()
        if not served:
            self.model.queue.remove(ticket)
            return None
        ((_, batch),) = served
        return batch

    @rule(at=st.integers(0, 1), need=needs, exact=st.booleans())
    def take(self, at, need, exact):
        if exact and self.compact:
            with pytest.raises(gq.InvalidArgumentError):
                self.subject.take(self.handles[at], need, exact=True)
            return
        have, num_stale = len(self.model.open), self.model.num_stale
        batch = self.queued(Ticket(need, exact))
        if batch is None:
            with pytest.raises(gq.DeadlineExceededError) as caught:
                self.subject.take(self.handles[at], need, timeout=0, exact=exact)
            error = caught.value
            assert (error.have, error.need, error.step, error.num_stale) == (have, need, self.model.step, num_stale)
        else:
            self.subject.check(self.subject.take(self.handles[at], need, timeout=0, exact=exact), batch)
            self.delivered += len(batch.gradients)

    @precondition(lambda self: not self.model.queue)
    @rule(at=st.integers(0, 1), need=needs, error=st.sampled_from([MemoryError, KeyboardInterrupt]))
    def take_cut_off_in_its_merge(self, at, need, error):
        batch = self.queued(Ticket(need, False))
        if batch is not None:
            with failing_merges(self.engine, error), pytest.raises(error):
                self.subject.take(self.handles[at], need, timeout=0)
            self.model.undelivered.insert(0, batch)

    @precondition(lambda self: len(self.model.queue) < 3)
    @rule(at=st.integers(0, 1), need=needs, exact=st.booleans())
    def take_waiting(self, at, need, exact):
        exact = exact and not self.compact
        future = self.subject.submit(self.handles[at], need, exact=exact)
        self.model.queue.append(Ticket(need, exact, at, future))
        self.serve()

    @precondition(lambda self: self.model.queue)
    @rule(data=st.data())
    def cancel_waiting(self, data):
        ticket = data.draw(st.sampled_from(self.model.queue).map(self.model.queue.index), label="which")
        ticket = self.model.queue.pop(ticket)
        assert ticket.future.cancel()
        self.serve()

    @rule(at=st.integers(0, 1), by=st.integers(-2, 3))
    def set_step(self, at, by):
        self.model.step += by
        self.handles[at].set_global_step(self.model.step)

    @rule(at=st.integers(0, 1), step=st.sampled_from([None, 0, 7, 10**12]))
    def publish(self, at, step):
        self.model.published = self.model.step if step is None else step
        assert self.handles[at].publish(step) == self.model.published

    @rule(at=st.integers(0, 1))
    def discard(self, at):
        count = self.handles[at].discard()
        assert count == len(self.model.open) + len(self.model.deferred)
        self.discarded += count
        self.model.open, self.model.deferred = [], []

    @precondition(lambda self: not self.model.queue)
    @rule(other=st.sampled_from(available_engines()))
    def restore_elsewhere(self, other):
        """Go on with another round, on whichever engine, into which the state of this one was loaded."""
        restored = self.kind(engine=other, **self.options)
        handles = [restored.open(), restored.open()]
        handles[0].load_state_dict(self.handles[0].state_dict())
        left = sum(handle.close() for handle in self.handles)
        undelivered = sum(len(batch.gradients) for batch in self.model.undelivered)
        assert left == len(self.model.open) + len(self.model.deferred) + undelivered
        self.subject, self.handles, self.engine = restored, handles, other

    @rule(at=st.integers(0, 1))
    def close_and_attach_again(self, at):
        ended = [ticket for ticket in self.model.queue if ticket.handle == at]
        self.model.queue = [ticket for ticket in self.model.queue if ticket.handle != at]
        assert self.handles[at].close() == 0
        for ticket in ended:
            assert isinstance(ticket.future.exception(TIMEOUT), gq.CancelledError)
        with pytest.raises(gq.ClosedError):
            self.handles[at].num_accumulated()
        self.handles[at] = self.subject.open()
        self.serve()

    @invariant()
    def same_as_the_model(self):
        if not hasattr(self, "model"):
            return
        for handle in self.handles:
            assert handle.num_accumulated() == len(self.model.open)
            assert handle.num_deferred == len(self.model.deferred)
            assert handle.global_step == self.model.step
            assert handle.published_step == self.model.published
            assert handle.num_undelivered == len(self.model.undelivered)
            assert handle.num_workers == len(self.model.joined)
        for worker in (1, 2, "1", "a"):
            assert self.handles[0].last_sequence(worker) == self.model.highest(worker)
        assert not any(ticket.future.done() for ticket in self.model.queue)


def _case(machine_kind, machine_engine):
    class Bound(Machine):
        kind, engine = machine_kind, machine_engine

    Bound.__qualname__ = Bound.__name__ = f"{machine_kind.__name__}On{machine_engine.title()}"
    return pytest.mark.filterwarnings("ignore::gradquorum.StaleGradientWarning")(Bound.TestCase)


for _kind, _engine in itertools.product([Accumulator, Group], available_engines()):
    globals()[f"Test{_kind.__name__}On{_engine.title()}"] = _case(_kind, _engine)


def test_model_batch_of_repeats_counts_a_gradient_once():
    batch = Batch((Gradient(((1, 2), (1, 3))), Gradient(((1, 5),), "w")), 0)
    assert batch.sums() == ({1: 10}, {1: 2})
    assert batch.workers() == ("w",)
