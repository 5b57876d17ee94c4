"""What is known of the gates of `tickets.py`: the gradients before and behind them, and the takes."""

from __future__ import annotations

import bisect
import itertools
from typing import Any

from numpy.typing import NDArray

from gradquorum.engine.interface import Block

__all__ = ["Gate", "Held", "Round"]

_serials = itertools.count()


class Held:
    """One gradient whose fate is not known yet."""

    __slots__ = ("begun", "block", "gone_after", "has_arrived", "is_quiet", "row_shape", "seems_counted")

    def __init__(self, block: Block, row_shape: tuple[int, ...] | None, gate: Gate) -> None:
        self.block = block
        self.row_shape = row_shape
        self.begun = gate.begun
        """What its gate's `begun` was when it was last heard of."""
        self.is_quiet = not gate.waiting
        """No take was waiting when it was offered."""
        self.has_arrived = self.seems_counted = False
        self.gone_after: int | None = None
        """It is in no gate any more, and in no take either once all have ended that had begun before this one."""


class Round:
    """What one take of a gate has decided."""

    def __init__(self, held: list[Held]) -> None:
        self.serial = next(_serials)
        """Rounds are numbered in the order in which they come from their gates."""
        self.held = held
        self.merged: list[NDArray[Any]] | None = None


class Gate:
    """What is known of the gate of one session."""

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}
        self.begun = 0
        """Above the numbers of all takes that have begun, and at most that of the next one."""
        self.waiting: set[int] = set()
        """The takes of which the gate may have decided, or not: their tickets are not here yet."""
        self.rounds: dict[int, Round | None] = {}
        """The round of each take that has begun and whose run has not ended."""
        self.undelivered: list[Round] = []
        """Rounds whose take was cut off, oldest first: each is what a next take will get."""

    def keep(self, round_: Round) -> None:
        """Keep a round for the next take."""
        bisect.insort(self.undelivered, round_, key=lambda each: each.serial)

    def end_wait(self, number: int, *, is_served: bool) -> None:
        """Note that a take waits no longer, and drop what can be in no take any more.

        A gradient that passed the gate before a take began which the gate has served since, but without it, was stale,
        or it is in a take that began before that one ended.
        """
        self.waiting.discard(number)
        if is_served:
            for held in self.held.values():
                if held.has_arrived and held.begun <= number and held.gone_after is None:
                    held.gone_after = self.begun
        oldest = min(self.waiting, default=self.begun)
        gone = [key for key, held in self.held.items() if held.gone_after is not None and held.gone_after <= oldest]
        for key in gone:
            del self.held[key]
