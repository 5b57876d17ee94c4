"""What the coordinator knows of one process: its handles, its takes, and the workers that are live over it."""

from __future__ import annotations

import asyncio
from typing import Any

from gradquorum.marks import Marks
from gradquorum.membership import Worker
from gradquorum.waiters import Deadline, Handle, Ticket

__all__ = ["Session", "Take"]


class Take:
    """One take of a session, until it has been delivered for good."""

    def __init__(self, ticket: Ticket, decided: asyncio.Event, deadline: Deadline, incarnation: int) -> None:
        self.ticket = ticket
        self.decided = decided
        self.deadline = deadline
        self.incarnation = incarnation
        self.withdrawn = False
        self.before: dict[Worker, Marks] | None = None
        """Once it has been delivered: the marks that are to come back if it is given back after all."""


class Session:
    """One process. It lives as long as a call of the process to `stay` is pending. Only the event loop touches it."""

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.handles: dict[int, Handle] = {}
        self.takes: dict[int, Take] = {}
        self.workers: set[Worker] = set()
        self.ended = asyncio.Event()
        self.watch: asyncio.Future[Any] | None = None

    def forget_take(self, number: int) -> None:
        """Let go of a round that has arrived: it cannot be given back any more."""
        take = self.takes.pop(number)
        take.ticket.batch = None

    def forget_delivered(self) -> None:
        """Let go of all rounds that have arrived."""
        for number in [number for number, take in self.takes.items() if take.before is not None]:
            self.forget_take(number)
