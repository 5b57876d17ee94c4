"""What the coordinator knows of one process: its handles, its takes, and the workers that are live over it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from gradquorum.membership import Worker
from gradquorum.waiters import Deadline, Handle, Ticket

__all__ = ["Session", "Take"]

_MAX_GIVEN_UP = 1024


class Take:
    """One take of a session, until it has been delivered for good."""

    def __init__(self, ticket: Ticket, decided: asyncio.Event, deadline: Deadline, incarnation: int) -> None:
        self.ticket = ticket
        self.decided = decided
        self.deadline = deadline
        self.incarnation = incarnation
        self.withdrawn = False
        self.delivered = False
        """Whether its taker has said that it has the result. Until it takes again it may still give it back."""


class Session:
    """One process. It lives as long as a call of the process to `stay` is pending. Only the event loop touches it."""

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.handles: dict[int, Handle] = {}
        self.takes: dict[int, Take] = {}
        self.given_up: deque[int] = deque(maxlen=_MAX_GIVEN_UP)
        """Numbers of takes that were given back and are not here: Ray may let that overtake the take itself."""
        self.workers: set[Worker] = set()
        self.ended = asyncio.Event()
        self.watch: asyncio.Future[Any] | None = None

    def forget_take(self, number: int) -> None:
        """Let go of a round that has arrived: it cannot be given back any more."""
        self.takes.pop(number).ticket.batch = None

    def forget_delivered(self) -> list[int]:
        """Let go of all rounds that have arrived, and return the numbers of their takes."""
        numbers = [number for number, take in self.takes.items() if take.delivered]
        for number in numbers:
            self.forget_take(number)
        return numbers
