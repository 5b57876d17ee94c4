"""The takes of a round, as the coordinator sees them: until their takers have said that they have the result."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from typing import Any

from gradquorum.targets.ray.incarnations import Incarnations
from gradquorum.targets.ray.records import Detached, Void
from gradquorum.targets.ray.sessions import Session, Take
from gradquorum.waiters import Deadline, Handle, Ticket

__all__ = ["TakeQueue"]

_logger = logging.getLogger("gradquorum")


class TakeQueue:
    """Takes by session and number. Only the coordinator's event loop calls this."""

    def __init__(self, life: Incarnations, sessions: Mapping[bytes, Session]) -> None:
        self._life = life
        self._sessions = sessions

    def enqueue(
        self,
        session: Session,
        handle: Handle,
        take: int,
        num_required: int,
        timeout: float | None,
        exact: bool,
    ) -> None:
        """Put a take in the queue, unless it has been given up already."""
        self._finish(session)
        if take in session.given_up:
            return
        loop, decided = asyncio.get_running_loop(), asyncio.Event()
        ticket = Ticket(handle, num_required, exact, wake=functools.partial(loop.call_soon_threadsafe, decided.set))
        self._life.host.round.enqueue(ticket)
        session.takes[take] = Take(ticket, decided, Deadline(timeout), self._life.incarnation)

    async def wait(self, token: bytes, number: int) -> Any:
        """Wait for a take that is in the queue; None if it is withdrawn."""
        session = self._sessions.get(token)
        take = None if session is None else session.takes.get(number)
        if session is None or take is None:
            return Void(self._life.reason, began=True)
        host, ticket = self._life.host, take.ticket
        while not ticket.decided and not take.withdrawn:
            try:
                left = None if take.deadline.timeout is None else take.deadline.left()
                await asyncio.wait_for(take.decided.wait(), left)
            except TimeoutError:
                host.round.expire(ticket)
        if take.incarnation != self._life.incarnation:
            return Void(self._life.reason, began=True)
        if take.withdrawn:
            session.takes.pop(number, None)
            return None
        try:
            ticket.raise_error()
            assert ticket.batch is not None
            merged = host.merge(ticket.batch)
        except BaseException:
            session.takes.pop(number, None)
            host.round.abandoned.append(ticket)
            host.round.settle()
            raise
        return Detached(tuple(merged.members), merged.num_gradients, merged.step, merged.workers)

    async def withdraw(self, token: bytes, number: int) -> bool:
        """Take a take out of the queue; False if it has been decided already."""
        session = self._sessions.get(token)
        take = None if session is None else session.takes.get(number)
        if take is None or take.incarnation != self._life.incarnation:
            return False
        take.withdrawn = take.withdrawn or self._life.host.round.withdraw(take.ticket)
        if take.withdrawn:
            take.decided.set()
        return take.withdrawn

    async def deliver(self, token: bytes, number: int, final: bool) -> Void | None:
        """Record that a round has arrived. Unless that is final, it can be given back until the next take."""
        if self._life.ground.was_delivered((token, number)):
            await self._life.record()  # the call before this one may not have come so far
            return None
        session = self._sessions.get(token)
        take = None if session is None else session.takes.get(number)
        if session is None or take is None or take.incarnation != self._life.incarnation or take.ticket.batch is None:
            return self._life.void()
        batch = take.ticket.batch
        self._life.host.round.deliver(take.ticket)
        self._life.ground.settle(batch.contributions, batch.serial, (token, number), is_final=final)
        take.delivered = True
        if final:
            session.forget_take(number)
        del batch
        await self._life.record()
        return None

    def _finish(self, session: Session) -> None:
        """Let go of all rounds of a session that have arrived."""
        for number in session.forget_delivered():
            self._life.ground.finish((session.token, number))

    def end_session(self, session: Session) -> None:
        """Keep the rounds of a process that has died for the next takes, but for those that had arrived."""
        self._finish(session)
        for take in session.takes.values():
            if take.incarnation == self._life.incarnation:
                self._life.host.round.abandoned.append(take.ticket)

    async def give_back(self, token: bytes, number: int) -> None:
        """Keep a round for the next take: it did not arrive, or was lost by who had received it."""
        session = self._sessions.get(token)
        take = None if session is None else session.takes.pop(number, None)
        if session is not None and take is None:
            session.given_up.append(number)
        if take is None or take.incarnation != self._life.incarnation:
            return
        if take.delivered and not self._life.ground.unsettle((token, number)):
            return
        self._life.host.round.abandoned.append(take.ticket)
        orphaned = self._life.host.round.settle()
        if orphaned:
            _logger.warning("%d gradients were discarded: a take was cut off after the accumulator closed", orphaned)
        take.withdrawn = True
        take.decided.set()
        if take.delivered:
            await self._life.record()
