"""Which sequence numbers of a worker have been judged: the memory behind safe retries."""

from __future__ import annotations

from typing import NamedTuple

from gradquorum.errors import InvalidArgumentError
from gradquorum.receipts import ApplyStatus

__all__ = ["NO_MARKS", "WINDOW", "Marks", "check_marks"]

WINDOW = 64
"""How far below a worker's highest sequence a number may still arrive."""

_STATUSES = tuple(ApplyStatus)


class Marks(NamedTuple):
    """The highest sequence judged and what became of it and of the `WINDOW` below it. Immutable."""

    highest: int
    window: bytes
    """Byte `i` is about sequence `highest - i`: 0 if not judged, else 1 + the index of its status."""

    def status_of(self, sequence: int) -> ApplyStatus | None:
        """Return what became of a sequence, None if it has not been judged.

        Raises:
            InvalidArgumentError: it lies below the window, so nobody can tell.
        """
        behind = self.highest - sequence
        if behind < 0:
            return None
        if behind > WINDOW:
            raise InvalidArgumentError(
                f"sequence: expected at least {self.highest - WINDOW} ({WINDOW} below this worker's highest, "
                f"{self.highest}), got {sequence}; go on from last_sequence(worker) + 1"
            )
        code = self.window[behind]
        return _STATUSES[code - 1] if code else None

    def judged(self, sequence: int, status: ApplyStatus) -> Marks:
        """Return the marks with one more sequence judged."""
        code = bytes((1 + _STATUSES.index(status),))
        behind = self.highest - sequence
        if behind >= 0:
            return Marks(self.highest, self.window[:behind] + code + self.window[behind + 1 :])
        skipped = bytes(min(-behind - 1, WINDOW))
        return Marks(sequence, (code + skipped + self.window)[: WINDOW + 1])


NO_MARKS = Marks(-1, bytes(WINDOW + 1))
"""Of a worker that has never used a sequence."""


def check_marks(marks: Marks) -> Marks:
    """Return marks that come from outside.

    Raises:
        InvalidArgumentError: no worker can have such marks.
    """
    window = marks.window
    if len(window) != WINDOW + 1 or not window[0] or max(window) > len(_STATUSES) or any(window[marks.highest + 1 :]):
        raise InvalidArgumentError(f"state: marks: expected a window of {WINDOW + 1} judgements, got {window!r}")
    return marks
