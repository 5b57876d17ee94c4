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

__all__ = ["Ground"]

_MAX_DELIVERED = 64
"""So many takes are remembered as delivered, in case the coordinator dies before their takers hear of it."""


class Ground:
    """The marks of what has been delivered or discarded, and the steps that go with them.

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

    def settle(self, contributions: Iterable[Contribution], take: tuple[bytes, int] | None) -> dict[Worker, Marks]:
        """Count gradients as delivered by a take, or with None as discarded; return their workers' marks before."""
        before: dict[Worker, Marks] = {}
        for worker, sequence in _offered(contributions):
            marks = self.marks.get(worker, NO_MARKS)
            before.setdefault(worker, marks)
            if marks.highest - sequence <= WINDOW:
                self.marks[worker] = marks.judged(sequence, ApplyStatus.ACCEPTED)
        if take is not None:
            self._delivered.append(take)
        return before

    def unsettle(self, before: dict[Worker, Marks], take: tuple[bytes, int]) -> None:
        """Count a take as not delivered after all."""
        self.marks.update(before)
        if take in self._delivered:
            self._delivered.remove(take)

    def remember(self, take: tuple[bytes, int]) -> None:
        """Note that a take has been delivered."""
        self._delivered.append(take)

    @property
    def delivered(self) -> tuple[tuple[bytes, int], ...]:
        """The last takes that were."""
        return tuple(self._delivered)

    def was_delivered(self, take: tuple[bytes, int]) -> bool:
        """Whether a take has been delivered, as far as that is remembered."""
        return take in self._delivered

    def look(self, host: RoundHost, keeper: Handle) -> None:
        """Note the steps and the members of a round; its step goes back to that of the oldest round not delivered."""
        snapshot = host.round.snapshot(keeper)
        self._step = min((batch.step for batch in snapshot.undelivered), default=snapshot.step)
        self._published, self._members = snapshot.published_step, snapshot.members

    def record(self) -> Recorded:
        """Return what the shards are to keep: all of it, as what is sent may arrive in another order."""
        self._version += 1
        marks, delivered = dict(self.marks), tuple(self._delivered)
        return Recorded(
            self.incarnation, self._version, self._step, self._published, marks, dict(self._members), delivered
        )

    def snapshot(self, num_members: int) -> Snapshot:
        """Return a round without gradients, to begin with."""
        nothing: Any = (None,) * num_members
        return Snapshot(
            self._step, self._published, 0, [], 0, nothing, {}, (), [], dict(self.marks), dict(self._members)
        )

    def load(self, snapshot: Snapshot) -> None:
        """Let all that a snapshot has judged count as delivered, but for the gradients that it holds."""
        self.marks = dict(snapshot.marks)


def _offered(contributions: Iterable[Contribution]) -> Iterable[tuple[Worker, int]]:
    """Yield worker and sequence of the gradients that have one."""
    for contribution in contributions:
        if contribution.worker is not None and contribution.sequence is not None:
            yield contribution.worker, contribution.sequence
        elif contribution.worker is None:
            yield from contribution.blocks[0].offered
