"""Which workers are live, and over whom: a process, or a call that is pending."""

from __future__ import annotations

import asyncio
from typing import Any

from gradquorum.membership import Worker
from gradquorum.targets.ray.incarnations import Incarnations
from gradquorum.targets.ray.sessions import Session

__all__ = ["Leases"]


class Leases:
    """Lets workers leave with what kept them. Only the coordinator's event loop calls this."""

    def __init__(self, life: Incarnations) -> None:
        self._life = life
        self._sessions: dict[Worker, set[bytes]] = {}
        """The sessions over which each worker has joined: it leaves when the last of them ends."""
        self._watches: set[asyncio.Future[None]] = set()

    def join(self, session: Session, worker: Worker) -> None:
        """Keep a worker alive as long as a session."""
        session.workers.add(worker)
        self._sessions.setdefault(worker, set()).add(session.token)

    def lose(self, session: Session) -> None:
        """End the leases of a session that is gone; with its last one a worker leaves."""
        for worker in session.workers:
            sessions = self._sessions.get(worker, set())
            sessions.discard(session.token)
            if not sessions:
                self._sessions.pop(worker, None)
                self._life.host.round.leave(worker)

    def end(self, session: Session, worker: Worker) -> None:
        """Let a worker leave, whatever other sessions it had joined over."""
        session.workers.discard(worker)
        self._sessions.pop(worker, None)
        self._life.host.round.leave(worker)

    def watch(self, worker: Worker, call: Any) -> None:
        """Let a worker leave when a call ends, with its error, if it has one."""
        watch = asyncio.ensure_future(self._leave_with(worker, call))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _leave_with(self, worker: Worker, call: Any) -> None:
        why = None
        try:
            await call
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            why = f"raised {type(cause).__name__}: {cause}"
        await self._life.ready()
        self._sessions.pop(worker, None)
        self._life.host.round.leave(worker, why)
