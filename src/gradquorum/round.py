"""The round: a log of contributions plus a few words of state, under one lock.

What it decides: which gradients count, when a take is served and with what, who may still come. It never
touches a value, calls nobody back and logs nothing while it holds the lock. Whoever completes a quorum
detaches the round for the oldest take *before its own call returns*; the taker only merges.

`gradquorum.takes` has what the round holds and the queue of takes, and says what a call may be interrupted by and how
each is made so that nothing is left half done.
"""

from __future__ import annotations

import weakref

from gradquorum.arrivals import Arrivals
from gradquorum.deferred import Deferred
from gradquorum.errors import InvalidArgumentError
from gradquorum.marks import NO_MARKS
from gradquorum.membership import Worker
from gradquorum.receipts import ApplyReceipt, ApplyStatus
from gradquorum.records import (
    Batch,
    Contribution,
    Figures,
    Forms,
    LagConflict,
    Prefix,
    Snapshot,
    check_forms,
    either,
)
from gradquorum.takes import Takes
from gradquorum.waiters import Deadline, Handle, cancel_closed

__all__ = ["Round"]

_ACCEPTED, _STALE, _DEFERRED = ApplyStatus.ACCEPTED, ApplyStatus.STALE, ApplyStatus.DEFERRED
"""Looking up a member of an enum takes as long as calling a function."""
_ARRIVED = frozenset({_ACCEPTED, _STALE, _DEFERRED})
_KEPT = frozenset({_ACCEPTED, _DEFERRED})
_COMPACTION_SECONDS = 0.1
"""How long an apply waits for a compaction before it looks whether that was given up."""


class Round(Takes):
    """The state machine of one accumulator or group. All methods may be called from any thread."""

    __slots__ = ()

    # Handles

    def open(self) -> Handle | None:
        """Return a new handle, or None if the round has been closed."""
        handle = Handle()
        with self._lock:
            if self._closed:
                return None
            self._handles.add(handle)
        return handle

    def close(self, handle: Handle, *, for_all: bool = False) -> int:
        """Close one handle or all, end their waits, and return how many gradients that discarded."""
        with self._lock:
            self._settle()
            if handle.closed:
                return 0
            for closing in list(self._handles) if for_all else [handle]:
                closing.closed = True
            self._version += 1
            cancel_closed(self._queue, "TakeGrad operation was cancelled")
            self.publication.cancel_closed()
            self.budget.cancel_closed()
            if not all(other.closed for other in self._handles):
                self._serve()
                return 0
            self._closed = True
            count, dropped = self._clear()
            undelivered, self._undelivered = self._undelivered, []
            count += sum(batch.num_gradients for batch in undelivered)
        del dropped, undelivered  # not under the lock: lent arrays may have finalizers of the user's
        return count

    def close_others(self, handle: Handle) -> None:
        """Close all other handles and end their waits."""
        with self._lock:
            for other in list(self._handles):
                if other is not handle:
                    self.close(other)

    # Applies

    def offer(self, handle: Handle, contribution: Contribution, local_step: int | None) -> ApplyReceipt | None:
        """Judge one gradient; None if there is no memory for it and nothing has been judged.

        Raises:
            FormConflict: its row shape differs from the round's.
            LagConflict: it was weighed for another lag.
            InvalidArgumentError: its sequence lies below the window of its worker's marks.
            ClosedError: the handle has been closed.
        """
        worker, sequence = contribution.worker, contribution.sequence
        with self._lock:
            while True:
                if self.abandoned or self._queue:
                    self._settle()
                version = self._version
                if handle.closed:
                    self._check_open(handle)
                step, marks, accepted = self.step, NO_MARKS, 0
                if worker is not None:
                    accepted = self._accepted.get(worker, 0)
                    if sequence is not None:
                        marks = self._marks.get(worker, NO_MARKS)
                        first = marks.status_of(sequence)
                        if first is not None:
                            self._membership.join(worker)
                            return ApplyReceipt(ApplyStatus.DUPLICATE, step, 0, self._count, first)
                forms, lag = self._forms, 0
                if local_step is not None and local_step < step:
                    lag = step - local_step
                if self._weighs and lag != contribution.lag:
                    raise LagConflict(lag)
                if lag and (lag > self._staleness.max_lag or contribution.vanishes):
                    forms = self._deferred.forms
                    late = self._judge_late(contribution)
                    if late is None:
                        return None
                    status = late
                    if status is _DEFERRED:
                        forms = either(forms, contribution.forms)
                        accepted = 0 if worker is None else self._deferred.by_worker.get(worker, 0)
                else:
                    if not self._log:
                        forms = contribution.forms
                    elif forms != contribution.forms:
                        check_forms(forms, contribution.forms)
                        forms = either(forms, contribution.forms)
                    if not contribution.finite:
                        status = ApplyStatus.SKIPPED
                    elif self._max_per_worker is not None and accepted >= self._max_per_worker:
                        status = ApplyStatus.REFUSED
                    elif self._is_bounded and not self.budget.has_room(contribution.num_bytes):
                        return None
                    else:
                        status = _ACCEPTED
                if sequence is not None:
                    marks = marks.judged(sequence, status)
                if worker is not None:
                    self._membership.join(worker)
                added = (contribution,)
                if version == self._version:
                    break
            # Commit.
            self._version += 1
            if worker is not None and sequence is not None:
                self._marks[worker] = marks
            if status is _ACCEPTED:
                self._log += added
                self._count += 1
                self.budget.log_bytes += contribution.num_bytes
                self._forms = forms
                if worker is not None:
                    self._accepted[worker] = accepted + 1
            elif status is _STALE:
                self._num_stale += 1
            elif status is _DEFERRED:
                self._deferred.contributions += added
                self._deferred.forms = forms
                if worker is not None:
                    self._deferred.by_worker[worker] = accepted + 1
                self.budget.deferred_bytes += contribution.num_bytes
            count = self._count
            if self.arrivals is not None and status in _ARRIVED:
                self.arrivals.record(step - lag)
            if self._queue:
                self._serve()
        borrower = weakref.ref(contribution) if contribution.lent and status in _KEPT else None
        return ApplyReceipt(status, step, lag, count, None, borrower)

    def _judge_late(self, contribution: Contribution) -> ApplyStatus | None:
        """Judge a gradient that comes too late for the open round; None if there is no memory to keep it."""
        if not self._staleness.defers:
            return _STALE
        check_forms(self._deferred.forms, contribution.forms)
        if not contribution.finite:
            return ApplyStatus.SKIPPED
        most, worker = self._max_per_worker, contribution.worker
        if most is not None and worker is not None and self._deferred.by_worker.get(worker, 0) >= most:
            return ApplyStatus.REFUSED
        return _DEFERRED if self.budget.has_room(contribution.num_bytes) else None

    def forms_for(self, local_step: int | None) -> Forms:
        """Return the row shapes that a gradient of that step has to match."""
        with self._lock:
            if local_step is None or self.step - local_step <= self._staleness.max_lag:
                return self._forms
            return self._deferred.forms

    def lag_of(self, local_step: int | None) -> int:
        """Return how late a gradient of that step is at this moment."""
        return 0 if local_step is None else max(self.step - local_step, 0)

    def was_judged(self, worker: Worker | None, sequence: int | None) -> bool:
        """Return whether a gradient is a duplicate.

        Raises:
            InvalidArgumentError: its sequence lies below the window of its worker's marks.
        """
        if worker is None or sequence is None:
            return False
        with self._lock:
            return self._marks.get(worker, NO_MARKS).status_of(sequence) is not None

    def wait_for_room(self, handle: Handle, num_bytes: int, deadline: Deadline) -> None:
        """Wait until there may be room for a gradient; the errors are those of `Budget`."""
        with self._lock:
            self._settle()
            self._check_open(handle)
            if self.budget.has_room(num_bytes):
                return
            if self._is_compacting():  # that may make room, and wakes us when it ends
                waiter = self.budget.wait_for_compaction(handle)
                deadline = Deadline(deadline.left(_COMPACTION_SECONDS))
            else:
                waiter = self.budget.line_up(handle, num_bytes, deadline, self._stuck())
        self.budget.wait(waiter, deadline)

    def _stuck(self) -> str | None:
        """Return in words why the oldest take cannot free memory, or None if one can come that does."""
        if not self._queue:
            return None
        return f"the oldest one waits for {self._queue[0].num_required} gradients, {self._count} are here"

    def why_stuck(self) -> str | None:
        """Return in words why no take can free memory as things are, or None if one can."""
        with self._lock:
            self._settle()
            return None if self.budget.detached_bytes else self._stuck()

    # Compaction

    def begin_compaction(self, *, above_bytes: int) -> Prefix | None:
        """Return the log for the caller to merge, if it is larger than that and nobody else is at it."""
        with self._lock:
            while True:
                version = self._version
                if self._is_compacting() or len(self._log) < 2 or self.budget.log_bytes <= above_bytes:
                    return None
                prefix = Prefix(list(self._log), self._serial)
                compaction = weakref.ref(prefix)
                if version == self._version:
                    break
            # Commit.
            self._version += 1
            self._compaction = compaction
            return prefix

    def _is_compacting(self) -> bool:
        return self._compaction is not None and self._compaction() is not None

    def end_compaction(self, prefix: Prefix, merged: Contribution | None, compact_above_bytes: int) -> None:
        """Swap the merged prefix in, unless the round was detached meanwhile; None leaves the log as it is."""
        length = len(prefix.contributions)
        num_bytes = sum(contribution.num_bytes for contribution in prefix.contributions)
        line = max(compact_above_bytes, self._compact_from_bytes)
        with self._lock:
            # Commit. Nobody else compacts before the end of it: what `length` counts is the prefix until then.
            self._version += 1
            if prefix.serial == self._serial:
                self.compact_above_bytes = line
                if merged is not None:
                    self._log[:length] = (merged,)
                    self.budget.log_bytes += merged.num_bytes - num_bytes
            self._compaction = None
            self.budget.look_again()

    # Steps

    def set_step(self, handle: Handle, step: int) -> int:
        """Set the step and return the one before."""
        with self._lock:
            self._settle()
            self._check_open(handle)
            before = self.step
            # Commit.
            self._version += 1
            self.step = step
            if self.arrivals is not None and step != before:
                self.arrivals.begin(step, was_taken=False)
            return before

    def publish(self, handle: Handle, step: int | None, *, only_raise: bool = False) -> int:
        """Publish a step, by default the current one, and return the published one."""
        with self._lock:
            self._check_open(handle)
            step = self.step if step is None else step
            if only_raise and step < self.publication.step:
                return self.publication.step
            self._version += 1
            self.publication.publish(step)
            return step

    # Workers

    def join(self, handle: Handle, worker: Worker) -> None:
        """Count a worker as live."""
        with self._lock:
            self._settle()
            self._check_open(handle)
            self._version += 1
            self._membership.join(worker)

    def leave(self, worker: Worker) -> None:
        """Count a worker as gone; takes that cannot be satisfied without it end."""
        with self._lock:
            self._version += 1
            self._membership.leave(worker)
            self._serve()

    def last_sequence(self, handle: Handle, worker: Worker) -> int:
        """Return the highest sequence of a worker that was judged, -1 if there is none."""
        with self._lock:
            self._check_open(handle)
            return self._marks.get(worker, NO_MARKS).highest

    def num_accepted(self, handle: Handle, worker: Worker) -> int:
        """Return how many gradients of a worker the open round holds."""
        with self._lock:
            self._settle()
            self._check_open(handle)
            return self._accepted.get(worker, 0)

    @property
    def num_workers(self) -> int:
        """The named workers that are live."""
        with self._lock:
            return self._membership.num_live

    # State

    def figures(self) -> Figures:
        """Return what a message about a wait says."""
        with self._lock:
            self._settle()
            return Figures(self._count, self.step, self._num_stale)

    def num_accumulated(self, handle: Handle) -> int:
        """Return the gradients in the open round."""
        with self._lock:
            self._settle()
            self._check_open(handle)
            return self._count

    @property
    def version(self) -> int:
        """Changes whenever what the round holds does."""
        return self._version

    @property
    def num_deferred(self) -> int:
        """The late gradients that wait for the next round."""
        with self._lock:
            self._settle()
            return len(self._deferred.contributions)

    def observe(self, handle: Handle, num_rounds: int | None) -> None:
        """Record the arrival times of so many rounds from now on, anew; None for none."""
        arrivals = None if num_rounds is None else Arrivals(num_rounds)
        with self._lock:
            self._check_open(handle)
            if arrivals is not None and not self._count:
                arrivals.begin(self.step)
            self.arrivals = arrivals

    def arrival_times(self, handle: Handle) -> list[list[float]]:
        """Return the arrival times of the rounds recorded, oldest first."""
        with self._lock:
            self._check_open(handle)
            return [] if self.arrivals is None else self.arrivals.times()

    def snapshot(self, handle: Handle) -> Snapshot:
        """Return all that the round holds at this moment. Contributions are immutable, so it stays as it is."""
        with self._lock:
            self._settle()
            self._check_open(handle)
            while True:
                version = self._version
                snapshot = Snapshot(
                    self.step,
                    self.publication.step,
                    self._num_stale,
                    list(self._log),
                    self._count,
                    self._forms,
                    dict(self._accepted),
                    tuple(self._deferred.contributions),
                    sorted([*self._undelivered, *self._in_flight.values()], key=_serial_of),
                    dict(self._marks),
                    self._membership.all,
                )
                if version == self._version:
                    return snapshot

    def restore(self, handle: Handle, snapshot: Snapshot) -> None:
        """Put a snapshot in the place of all that the round holds, which must be no gradient; serve who waits.

        Raises:
            InvalidArgumentError: the round holds gradients. Nothing has changed.
            ClosedError: the handle has been closed.
        """
        log_bytes = sum(contribution.num_bytes for contribution in snapshot.log)
        detached_bytes = sum(batch.num_bytes for batch in snapshot.undelivered)
        deferred = Deferred(snapshot.deferred, self._no_forms)
        deferred_bytes = sum(contribution.num_bytes for contribution in snapshot.deferred)
        log, accepted, marks = list(snapshot.log), dict(snapshot.accepted), dict(snapshot.marks)
        with self._lock:
            while True:
                self._settle()
                version, serial = self._version, self._serial
                self._check_open(handle)
                held = self._count + len(self._deferred.contributions)
                if held or self._undelivered or self._in_flight:
                    raise InvalidArgumentError(
                        f"load_state_dict: expected a round without gradients, got one with {held} accumulated or "
                        f"deferred and {len(self._undelivered) + len(self._in_flight)} undelivered rounds; take or "
                        "discard them first"
                    )
                undelivered = [batch.with_serial(serial + i) for i, batch in enumerate(snapshot.undelivered)]
                after = serial + len(undelivered) + 1
                if version == self._version:
                    break
            # Commit.
            self._version += 1
            self.step = snapshot.step
            self._num_stale = snapshot.num_stale
            self._log, self._count, self._forms, self._accepted = log, snapshot.num_gradients, snapshot.forms, accepted
            self._deferred, self._undelivered, self._marks, self._serial = deferred, undelivered, marks, after
            self.budget.log_bytes, self.budget.detached_bytes = log_bytes, detached_bytes
            self.budget.deferred_bytes = deferred_bytes
            self.compact_above_bytes = self._compact_from_bytes
            self._membership.replace(snapshot.members)
            self.publication.publish(snapshot.published_step)
            if self.arrivals is not None:
                self.arrivals.begin(self.step, was_taken=False)
            self._serve()

    def discard(self, handle: Handle) -> int:
        """Empty the open round, and what waits for the next, and return how many gradients that were."""
        with self._lock:
            self._settle()
            self._check_open(handle)
            count, dropped = self._clear()
            self._serve()  # what workers that have left had added is gone
        del dropped  # not under the lock: lent arrays may have finalizers of the user's
        return count

    def _clear(self) -> tuple[int, object]:
        """Empty the open round and what waits for the next; return how many gradients that were, and they."""
        count, log, deferred = self._count, self._log, self._deferred
        none_deferred = Deferred((), self._no_forms)
        # Commit.
        self._version += 1
        self._log = []
        self._count = self.budget.log_bytes = self.budget.deferred_bytes = 0
        self._forms = self._no_forms
        self._accepted = {}
        self._deferred = none_deferred
        self._serial += 1
        self.compact_above_bytes = self._compact_from_bytes
        self.budget.look_again()
        return count + len(deferred.contributions), (log, deferred)


def _serial_of(batch: Batch) -> int:
    return batch.serial
