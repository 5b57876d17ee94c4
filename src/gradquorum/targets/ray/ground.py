"""What a round goes back to when it is void: what was delivered, and nothing of what was not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from gradquorum.marks import NO_MARKS, WINDOW, Marks
from gradquorum.membership import Worker
from gradquorum.receipts import ApplyStatus
from gradquorum.records import Contribution, Snapshot
from gradquorum.targets.host import RoundHost
from gradquorum.targets.ray.records import Recorded
from gradquorum.waiters import Handle

__all__ = ["Ground", "Take", "offered_in"]

Take = tuple[bytes, int]
"""A session, and the number that it gave to one of its takes."""

_MAX_DELIVERED = 64
"""So many takes are remembered as delivered, in case the coordinator dies before their takers hear of it."""
_MAX_UNSETTLED = 64
"""So many takes that came after it a take can be given back; from then on it cannot."""
_MAX_ENDED = 64
"""Of so many incarnations it is known how far they came."""


class _Delivery:
    """What was counted as delivered or discarded, in one go."""

    __slots__ = ("before", "is_final", "is_recorded", "offered", "serial")

    def __init__(self, serial: int, *, is_final: bool) -> None:
        self.serial = serial
        """Of the round; see `Takes.serial`."""
        self.offered: list[tuple[Worker, int]] = []
        self.before: dict[Worker, Marks] = {}
        """The marks of its workers before that."""
        self.is_final = is_final
        """Whether it can not be taken back any more."""
        self.is_recorded = False
        """Whether it outlives the coordinator."""


class Ground:
    """The marks of what has been delivered or discarded, and the steps that go with them.

    What can still be taken back, or would be forgotten if the coordinator died now, counts when the round is void, but
    nobody is told of it before that: a worker that lets go of a gradient could not send it again. See `known`.

    Only the coordinator's event loop calls this.
    """

    def __init__(self, recorded: Recorded | None) -> None:
        self.incarnation = 0 if recorded is None else recorded.incarnation
        self._version = 0 if recorded is None else recorded.version
        self._step = 0 if recorded is None else recorded.step
        self._published = 0 if recorded is None else recorded.published_step
        self.marks: dict[Worker, Marks] = {} if recorded is None else dict(recorded.marks)
        self._members: dict[Worker, bool] = {} if recorded is None else dict(recorded.members)
        self._delivered = deque(() if recorded is None else recorded.delivered, _MAX_DELIVERED)
        self.settled: dict[int, int] = {} if recorded is None else dict(recorded.settled)
        """By incarnation the serial of its oldest round that was neither delivered nor discarded."""
        self._deliveries: dict[Any, _Delivery] = {}
        """By take, in their order: the oldest that is not known for good, and all that came after it."""

    # Deliveries

    def settle(self, contributions: Iterable[Contribution], serial: int, take: Take | None, *, is_final: bool) -> None:
        """Count the gradients of a round as delivered by a take, or with None as discarded."""
        delivery = _Delivery(serial, is_final=is_final)
        delivery.offered.extend(offered_in(contributions))
        self._deliveries[object() if take is None else take] = delivery
        self._mark(delivery)
        if take is not None:
            self._delivered.append(take)
        self._trim()

    def _mark(self, delivery: _Delivery) -> None:
        delivery.before = {worker: self.marks.get(worker, NO_MARKS) for worker, _ in delivery.offered}
        for worker, sequence in delivery.offered:
            marks = self.marks.get(worker, NO_MARKS)
            if marks.highest - sequence <= WINDOW:
                self.marks[worker] = marks.judged(sequence, ApplyStatus.ACCEPTED)

    def unsettle(self, take: Take) -> bool:
        """Count a take as not delivered after all; False if it is too late for that."""
        taken_back = self._deliveries.get(take)
        if taken_back is None or taken_back.is_final:
            return False
        keys = list(self._deliveries)
        later = [self._deliveries[key] for key in keys[keys.index(take) + 1 :]]
        for delivery in [*reversed(later), taken_back]:
            self.marks.update(delivery.before)
        del self._deliveries[take]
        for delivery in later:
            self._mark(delivery)
        if take in self._delivered:
            self._delivered.remove(take)
        self._trim()
        return True

    def finish(self, take: Take) -> None:
        """Note that a take that was delivered will not be taken back."""
        if take in self._deliveries:
            self._deliveries[take].is_final = True
            self._trim()

    def _trim(self) -> None:
        for i, delivery in enumerate(reversed(self._deliveries.values())):
            delivery.is_final = delivery.is_final or i >= _MAX_UNSETTLED
        for key, delivery in list(self._deliveries.items()):
            if not (delivery.is_final and delivery.is_recorded):
                return
            del self._deliveries[key]

    def remember(self, take: Take) -> None:
        """Note that a take has been delivered."""
        self._delivered.append(take)

    @property
    def delivered(self) -> tuple[Take, ...]:
        """The last takes that were."""
        return tuple(self._delivered)

    def was_delivered(self, take: Take) -> bool:
        """Whether a take has been delivered, as far as that is remembered."""
        return take in self._delivered

    # What is known for good

    def known(self, worker: Worker) -> Marks | None:
        """Return the marks of what of a worker's has been delivered or discarded, whatever happens from here on."""
        for delivery in self._deliveries.values():
            if worker in delivery.before:
                return delivery.before[worker]
        return self.marks.get(worker)

    def known_serial(self, serial: int) -> int:
        """Return the serial of the oldest round not known to be delivered, given that of the oldest in the round."""
        return min([serial, *[delivery.serial for delivery in self._deliveries.values()]])

    def unknown_of(self, worker: Worker) -> dict[int, int]:
        """Return the sequences of a worker that were delivered, but not for good, with the serials of their rounds."""
        return {
            sequence: delivery.serial
            for delivery in self._deliveries.values()
            for offered_by, sequence in delivery.offered
            if offered_by == worker
        }

    # Records

    def look(self, host: RoundHost, keeper: Handle) -> None:
        """Note the steps and the members of a round; its step goes back to that of the oldest round not delivered."""
        snapshot = host.round.snapshot(keeper)
        self._step = min((batch.step for batch in snapshot.undelivered), default=snapshot.step)
        self._published, self._members = snapshot.published_step, snapshot.members
        self.settled.pop(self.incarnation, None)
        self.settled[self.incarnation] = host.round.oldest_serial
        while len(self.settled) > _MAX_ENDED:
            del self.settled[next(iter(self.settled))]

    def record(self) -> tuple[Recorded, list[Any]]:
        """Return what the shards are to keep, and what to tell `recorded` once one of them does.

        It is all of it, as what is sent may arrive in another order.
        """
        self._version += 1
        recorded = Recorded(
            self.incarnation,
            self._version,
            self._step,
            self._published,
            dict(self.marks),
            dict(self._members),
            tuple(self._delivered),
            dict(self.settled),
        )
        return recorded, [delivery for delivery in self._deliveries.values() if not delivery.is_recorded]

    def recorded(self, deliveries: Iterable[Any]) -> None:
        """Note that these outlive the coordinator."""
        for delivery in deliveries:
            delivery.is_recorded = True
        self._trim()

    def begin(self) -> None:
        """Note that an incarnation has begun with what is here: none of it can be taken back."""
        self._deliveries.clear()

    def snapshot(self, num_members: int) -> Snapshot:
        """Return a round without gradients, to begin with."""
        nothing: Any = (None,) * num_members
        return Snapshot(
            self._step, self._published, 0, [], 0, nothing, {}, (), [], dict(self.marks), dict(self._members)
        )

    def load(self, snapshot: Snapshot) -> None:
        """Let all that a snapshot has judged count as delivered: what it holds is still where it was loaded from."""
        self.marks = dict(snapshot.marks)


def offered_in(contributions: Iterable[Contribution]) -> Iterable[tuple[Worker, int]]:
    """Yield worker and sequence of the gradients that have one."""
    for contribution in contributions:
        if contribution.worker is not None and contribution.sequence is not None:
            yield contribution.worker, contribution.sequence
        elif contribution.worker is None:
            yield from contribution.blocks[0].offered
