"""What a round holds, and the takes that wait for it: the part of the state machine that decides who is served.

Interruptions. In the main thread a signal handler can run, and raise (Ctrl-C), after any call of a C function
and at the entry of any Python function, also inside a ``with self._lock``; a finalizer can run there in any thread.
So each transition first prepares everything and then commits in statements that call nothing; a ticket is filled
and woken in one breath, the call to ``wake()`` being the last thing.

* If an exception surfaces, what may be left undone is *serving* a queue whose head has become servable, or taking
  back an abandoned ticket: `_settle`, with which every call begins, does both.
* If the handler or finalizer calls the same round, the lock lets it in, as it is the same thread. Each commit
  changes ``_version``, and whoever prepared a commit meanwhile prepares it again.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Collection

from gradquorum.arrivals import Arrivals
from gradquorum.budget import Budget
from gradquorum.deferred import Deferred
from gradquorum.errors import ClosedError, DeadlineExceededError, InvalidArgumentError, UnavailableError
from gradquorum.marks import Marks
from gradquorum.membership import Membership, Worker
from gradquorum.publication import Publication
from gradquorum.records import Batch, Contribution, Forms, Prefix, either
from gradquorum.staleness import STRICT, AbstractStaleness
from gradquorum.waiters import Handle, RLock, Ticket, leave_line, may_wait

__all__ = ["MAX_STEP", "Takes"]

MAX_STEP = 2**63 - 1


class Takes:
    """The state of a round and its takes. `Round` is the only class made from it, and adds all other calls.

    Guarded by ``_lock``: every attribute that is assigned outside ``__init__``. The public ones may be read
    without it, and ``abandoned`` may be appended to without it.

    It has slots because it has many attributes: CPython finds those, and methods, at once in a dict of up to 29 only.
    """

    __slots__ = (
        "__weakref__",
        "_accepted",
        "_closed",
        "_compact_from_bytes",
        "_compaction",
        "_count",
        "_deferred",
        "_forms",
        "_handles",
        "_in_flight",
        "_is_bounded",
        "_lock",
        "_log",
        "_marks",
        "_max_per_worker",
        "_membership",
        "_no_forms",
        "_num_orphaned",
        "_num_stale",
        "_queue",
        "_serial",
        "_staleness",
        "_undelivered",
        "_version",
        "_weighs",
        "abandoned",
        "arrivals",
        "budget",
        "compact_above_bytes",
        "publication",
        "step",
    )

    def __init__(
        self,
        num_members: int,
        *,
        expected_workers: int | None = None,
        max_per_worker: int | None = None,
        max_bytes: int | None = None,
        block_when_full: bool = False,
        compact_from_bytes: int = 0,
        staleness: AbstractStaleness = STRICT,
    ) -> None:
        self._lock: RLock = threading.RLock()
        self._version = 0
        """Counts the commits."""
        self._no_forms: Forms = (None,) * num_members
        self._max_per_worker = max_per_worker
        self._is_bounded = max_bytes is not None
        """Whether anybody may ever wait for room."""
        self._compact_from_bytes = compact_from_bytes
        self._staleness = staleness
        self._weighs = staleness.weighs

        self.step = 0
        self.publication = Publication(self._lock)
        self.budget = Budget(self._lock, max_bytes, block=block_when_full)
        self._membership = Membership(expected_workers, max_per_worker)
        self._marks: dict[Worker, Marks] = {}
        self.arrivals: Arrivals | None = None
        """The times at which gradients come, if somebody asked for them."""

        # The open round
        self._log: list[Contribution] = []
        self._count = 0
        self._forms: Forms = self._no_forms
        self._accepted: dict[Worker, int] = {}
        """Gradients of each named worker."""
        self._num_stale = 0
        self._deferred = Deferred((), self._no_forms)
        """Late gradients that wait for the next round."""
        self._serial = 0
        """Counts the rounds that were detached or discarded."""
        self.compact_above_bytes = compact_from_bytes
        """Size of the log from which a compaction is worth a look."""
        self._compaction: weakref.ref[Prefix] | None = None

        # Takes
        self._queue: deque[Ticket] = deque()
        """The waiting ones, oldest first. Between calls the head cannot be served."""
        self._undelivered: list[Batch] = []
        """Rounds that were detached and whose take was cut off, oldest first."""
        self._in_flight: dict[Ticket, Batch] = {}
        """Rounds that a take is about to deliver."""
        self.abandoned: deque[Ticket] = deque()
        """Tickets whose takers were cut off. An append to it is all that a taker must manage."""

        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._closed = False
        self._num_orphaned = 0
        """Gradients of rounds that came back after the close."""

    def _check_open(self, handle: Handle) -> None:
        if handle.closed:
            raise ClosedError("this handle has been closed; make a new accumulator or group to go on")

    @property
    def num_in_flight(self) -> int:
        """The rounds that a take is about to deliver."""
        return len(self._in_flight)

    @property
    def num_undelivered(self) -> int:
        """The rounds that wait for a next take to deliver them."""
        with self._lock:
            self._settle()
            return len(self._undelivered)

    @property
    def num_waiting(self) -> int:
        """The takes in the queue."""
        return len(self._queue)

    @property
    def serial(self) -> int:
        """Counts the rounds that were detached or discarded: that of the open one."""
        return self._serial

    @property
    def oldest_serial(self) -> int:
        """That of the oldest round whose gradients have been neither delivered nor discarded."""
        with self._lock:
            batches = [*self._undelivered, *self._in_flight.values()]
            return min([batch.serial for batch in batches], default=self._serial)

    def enqueue(self, ticket: Ticket) -> None:
        """Put a take in the queue; it may be served at once.

        Raises:
            InvalidArgumentError: it could never be served.
            ClosedError: the handle has been closed.
        """
        with self._lock:
            if self.abandoned or self._queue:
                self._settle()
            if ticket.handle.closed:
                self._check_open(ticket.handle)
            most = self._membership.most
            if most is not None and ticket.num_required > most:
                raise InvalidArgumentError(
                    f"num_required: expected at most expected_workers x max_per_worker = {most}, "
                    f"got {ticket.num_required}"
                )
            self._queue.append(ticket)  # a commit in itself
            self._serve()
            if self._queue:
                if ticket.wake is None and not ticket.decided:
                    ticket.prepare_to_wait()
                self.budget.look_again()  # perhaps no take can free memory any more

    def expire(self, ticket: Ticket) -> None:
        """End a take whose time is over, unless it has been decided."""
        with self._lock:
            self._settle()
            have, need = self._count, ticket.num_required
            error = DeadlineExceededError(
                f"take_grad: have {have}, need {need} at step {self.step}; {self._num_stale} dropped as stale "
                f"since the round began{self._deferred_in_words()}",
                have=have,
                need=need,
                step=self.step,
                num_stale=self._num_stale,
            )
            self._remove(ticket, error)
            self._serve()

    def _deferred_in_words(self) -> str:
        waiting = len(self._deferred.contributions)
        return f", {waiting} deferred to the next one" if waiting else ""

    def withdraw(self, ticket: Ticket) -> bool:
        """Take a ticket out of the queue; False if it has been decided already."""
        with self._lock:
            self._settle()
            withdrawn = self._remove(ticket)
            self._serve()
            return withdrawn

    def deliver(self, ticket: Ticket) -> None:
        """Record that the result of a ticket is in its taker's hands. Its last chance is `abandoned`."""
        batch = ticket.batch
        assert batch is not None
        with self._lock:
            # Commit.
            self._version += 1
            self.budget.detached_bytes -= batch.num_bytes
            del self._in_flight[ticket]
            if self._is_bounded:
                self.budget.look_again()

    @property
    def is_entered(self) -> bool:
        """Whether this thread is in a call on this round, which a signal handler or finalizer has interrupted."""
        return bool(self._lock._is_owned())

    def may_wait(self) -> None:
        """Refuse to wait in a signal handler that interrupted a call on this round."""
        may_wait(self._lock)

    def settle(self) -> int:
        """Take back what cut-off takers left, serve who waits; return gradients lost to a closed round."""
        with self._lock:
            self._settle()
            orphaned = self._num_orphaned
            self._num_orphaned = 0
        return orphaned

    def _settle(self) -> None:
        """Do what an exception may have left undone: abandoned tickets, then a servable queue."""
        while self.abandoned:
            ticket = self.abandoned[0]
            if ticket.batch is not None:
                self._take_back(ticket, ticket.batch)
            elif not self._remove(ticket) and self.abandoned and self.abandoned[0] is ticket:
                del self.abandoned[0]
        if self._queue:
            self._serve()

    def _take_back(self, ticket: Ticket, batch: Batch) -> None:
        """Keep the round of an abandoned ticket for the next take, in front of newer ones."""
        version = self._version
        older = sum(other.serial < batch.serial for other in self._undelivered)
        regained = 0 if ticket in self._in_flight else batch.num_bytes  # it had been delivered
        if version != self._version or ticket.batch is None:
            return
        # Commit.
        self._version += 1
        del self.abandoned[0]
        ticket.batch = None
        if ticket in self._in_flight:
            del self._in_flight[ticket]
        if self._closed:
            self._num_orphaned += batch.num_gradients
        else:
            self._undelivered[older:older] = (batch,)
            self.budget.detached_bytes += regained

    def _remove(self, ticket: Ticket, error: Exception | None = None) -> bool:
        """Take a ticket out of the queue and, with an error, end its wait; False if it is not there."""
        self._version += 1
        return leave_line(self._queue, ticket, error)

    def _serve(self) -> None:
        """Serve the oldest takes as long as that is possible, and end those that never can be."""
        while self._queue:
            version, ticket = self._version, self._queue[0]
            if self._undelivered:
                batch = self._undelivered[0]
                # Commit.
                self._version += 1
                del self._undelivered[0], self._queue[0]
                self._in_flight[ticket] = batch
                ticket.batch = batch
                if ticket.wake is not None:
                    ticket.wake()
            elif self._count >= ticket.num_required:
                self._detach_for(ticket, version)
            elif not self._end_hopeless():
                return

    def _detach_for(self, ticket: Ticket, version: int) -> None:
        """Detach the round, or an exact part of it, for the head of the queue, and advance the step.

        Args:
            ticket: the head of the queue, which can be served,
            version: if this is still the version.
        """
        if self.step == MAX_STEP:
            error = InvalidArgumentError(f"global_step is {MAX_STEP}: a take would pass int64; set_global_step first")
            self._remove(ticket, error)
            return
        taken = self._log
        rest: list[Contribution] = []
        accepted: dict[Worker, int] = {}
        count, forms = 0, self._no_forms
        num_bytes = self.budget.log_bytes
        workers: Collection[Worker] = self._accepted
        if ticket.exact:
            taken, rest = self._log[: ticket.num_required], self._log[ticket.num_required :]
            num_bytes = sum(contribution.num_bytes for contribution in taken)
            workers = {contribution.worker for contribution in taken if contribution.worker is not None}
            count = len(rest)
            for contribution in rest:
                forms = either(forms, contribution.forms)
                if contribution.worker is not None:
                    accepted[contribution.worker] = accepted.get(contribution.worker, 0) + 1
        batch = Batch(taken, self._forms, self._count - count, num_bytes, self.step, self._serial, workers)
        placed = None
        if self._deferred.contributions:
            placed = self._deferred.placed(rest, forms, accepted, self._max_per_worker)
        if version != self._version:
            return  # `_serve` looks again
        # Commit.
        self._version += 1
        self._log, self._count, self._forms, self._accepted = rest, count, forms, accepted
        self.budget.log_bytes -= num_bytes
        self.budget.detached_bytes += num_bytes
        if placed is not None:
            self._log, self._forms, self._accepted = placed.log, placed.forms, placed.accepted
            self._count, self._deferred = placed.num_gradients, placed.waiting
            self.budget.log_bytes, self.budget.deferred_bytes = placed.num_bytes, placed.waiting_bytes
        self._num_stale = 0
        self._serial += 1
        self.compact_above_bytes = self._compact_from_bytes
        self.step += 1
        del self._queue[0]
        self._in_flight[ticket] = batch
        ticket.batch = batch
        if ticket.wake is not None:
            ticket.wake()
        if self.arrivals is not None:
            self.arrivals.begin(self.step)

    def _end_hopeless(self) -> bool:
        """End the takes that the live workers cannot satisfy; True if there were any."""
        ended = False
        num_deferred = len(self._deferred.contributions)
        fresh = self._membership.capacity(self._deferred.by_worker)
        now = self._membership.capacity(self._accepted)
        if fresh is None or now is None:
            return False
        for ticket in list(self._queue):
            is_head = bool(self._queue) and self._queue[0] is ticket
            # One further back will be the head of this round if those before it end, else of a later one.
            possible = self._count + now if is_head else max(self._count + now, fresh + num_deferred)
            if ticket.num_required <= possible:
                continue
            live, left = self._membership.num_live, self._membership.left
            error = UnavailableError(
                f"take_grad: {live} workers live, {ticket.num_required} gradients needed, {possible} can come at "
                f"most ({self._count} are here); left: {self._membership.left_in_words}",
                live=live,
                needed=ticket.num_required,
                left=left,
            )
            ended = self._remove(ticket, error) or ended
        return ended
