"""What the coordinator answers about its round, by the names under which handles ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradquorum.arrivals import arrival_report
from gradquorum.membership import Worker
from gradquorum.targets.ray.ground import offered_in
from gradquorum.targets.ray.incarnations import Incarnations
from gradquorum.targets.ray.leases import Leases
from gradquorum.targets.ray.records import Standing
from gradquorum.targets.ray.sessions import Session
from gradquorum.waiters import Deadline, Handle

__all__ = ["Answers"]


class Answers:
    """All is the round's own. Nothing here changes after `__init__`."""

    def __init__(self, life: Incarnations, leases: Leases) -> None:
        self._life = life
        self._leases = leases

    async def figures(self, session: Session, handle: Handle) -> Any:
        return self._life.host.round.figures()

    async def num_accumulated(self, session: Session, handle: Handle) -> int:
        return self._life.host.round.num_accumulated(handle)

    async def global_step(self, session: Session, handle: Handle) -> int:
        return self._life.host.round.step

    async def published_step(self, session: Session, handle: Handle) -> int:
        return self._life.host.round.publication.step

    async def num_workers(self, session: Session, handle: Handle) -> int:
        return self._life.host.round.num_workers

    async def num_undelivered(self, session: Session, handle: Handle) -> int:
        return self._life.host.round.num_undelivered

    async def num_deferred(self, session: Session, handle: Handle) -> int:
        return self._life.host.round.num_deferred

    async def num_waiting(self, session: Session, handle: Handle) -> int:
        return self._life.host.round.num_waiting

    async def num_blocked(self, session: Session, handle: Handle) -> int:
        return self._life.host.round.budget.num_waiting

    async def num_sessions(self, session: Session, handle: Handle) -> int:
        return self._life.num_sessions

    async def closed(self, session: Session, handle: Handle) -> bool:
        return handle.closed

    async def set_global_step(self, session: Session, handle: Handle, step: int) -> int:
        before = self._life.host.round.set_step(handle, step)
        await self._life.record()
        return before

    async def publish(self, session: Session, handle: Handle, step: int | None, only_raise: bool) -> int:
        published = self._life.host.round.publish(handle, step, only_raise=only_raise)
        await self._life.record()
        return published

    async def wait_published(self, session: Session, handle: Handle, step: int, timeout: float | None) -> Any:
        publication = self._life.host.round.publication
        if timeout == 0 or publication.step >= step:
            return publication.wait(handle, step, Deadline(0.0))
        return await self._life.in_thread(publication.wait, handle, step, Deadline(timeout))

    async def join_worker(self, session: Session, handle: Handle, worker: Worker) -> None:
        self._life.host.round.join(handle, worker)
        self._leases.join(session, worker)

    async def leave_worker(self, session: Session, handle: Handle, worker: Worker) -> None:
        self._leases.end(session, worker)

    async def watch_worker(self, session: Session, handle: Handle, worker: Worker, call: list[Any]) -> None:
        self._life.host.round.join(handle, worker)
        self._leases.watch(worker, call[0])

    async def last_sequence(self, session: Session, handle: Handle, worker: Worker) -> Standing:
        round_ = self._life.host.round
        sequence, snapshot = round_.last_sequence(handle, worker), round_.snapshot(handle)
        undelivered = self._life.ground.unknown_of(worker)
        rounds = [(batch.serial, batch.contributions) for batch in snapshot.undelivered]
        for serial, contributions in (*rounds, (round_.serial, snapshot.log), (round_.serial + 1, snapshot.deferred)):
            undelivered.update({found: serial for who, found in offered_in(contributions) if who == worker})
        return Standing(sequence, undelivered, self._life.incarnation)

    async def num_accepted(self, session: Session, handle: Handle, worker: Worker) -> int:
        return self._life.host.round.num_accepted(handle, worker)

    async def observe(self, session: Session, handle: Handle, num_rounds: int | None) -> None:
        self._life.host.round.observe(handle, num_rounds)

    async def arrivals(self, session: Session, handle: Handle) -> Any:
        return arrival_report(self._life.host.round.arrival_times(handle))

    async def discard(self, session: Session, handle: Handle) -> int:
        snapshot, serial = self._life.host.round.snapshot(handle), self._life.host.round.serial
        count = self._life.host.round.discard(handle)
        self._life.ground.settle([*snapshot.log, *snapshot.deferred], serial, None, is_final=True)
        await self._life.record()
        return count

    async def state(self, session: Session, handle: Handle) -> Any:
        return await self._life.in_thread(self._life.host.state, handle)

    async def load_state(self, session: Session, handle: Handle, state: Mapping[str, Any]) -> Any:
        incarnation = self._life.incarnation
        loaded = await self._life.in_thread(self._life.host.load_state, handle, state)
        if incarnation == self._life.incarnation:
            self._life.ground.load(self._life.host.round.snapshot(handle))
            await self._life.record()
        return loaded if incarnation == self._life.incarnation else self._life.void()
