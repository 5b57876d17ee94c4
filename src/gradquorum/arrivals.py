"""When gradients arrive, and what another quorum would have cost.

A gradient belongs to the round of its `local_step` (the current one if that is None or ahead), also when it comes too
late for it, and its arrival time is what has passed since that round began: since the round before was detached. So the
time that the taker needs to merge, update and publish is in it.

For one recorded round let ``T(1) <= T(2) <= ... <= T(m)`` be the arrival times of its m gradients. A quorum of N
would have waited ``T(N)`` and dropped ``m - N`` gradients. That is what would have been if the workers had behaved the
same: a slow worker whose gradient is dropped begins its next one late, which another quorum changes.
"""

from __future__ import annotations

import math
import numbers
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from gradquorum.errors import InvalidArgumentError

__all__ = ["ArrivalReport", "Arrivals", "QuorumFigures", "arrival_report"]

MOST_ARRIVALS = 1024
"""Of one round; those that come after it are not recorded."""


class Arrivals:
    """The arrival times of the last rounds.

    Guarded by the lock of the round that it belongs to.
    """

    def __init__(self, num_rounds: int) -> None:
        self._num_rounds = num_rounds
        self._rounds: dict[int, tuple[float, array[float]]] = {}
        """By step, oldest first: when it began, and the arrival times."""
        self._open: int | None = None

    def begin(self, step: int, *, was_taken: bool = True) -> None:
        """Begin the round of a step; the open one is forgotten unless it was taken."""
        if not was_taken and self._open is not None:
            self._rounds.pop(self._open, None)
        self._rounds.pop(step, None)
        self._rounds[step] = time.monotonic(), array("d")
        self._open = step
        if len(self._rounds) > self._num_rounds + 1:
            self._rounds.pop(next(iter(self._rounds)), None)

    def record(self, step: int) -> None:
        """Record that a gradient of that step is here."""
        entry = self._rounds.get(step)
        if entry is not None and len(entry[1]) < MOST_ARRIVALS:
            entry[1].append(time.monotonic() - entry[0])

    def times(self) -> list[list[float]]:
        """Return the arrival times of the rounds that were taken, oldest first."""
        return [list(times) for step, (_, times) in self._rounds.items() if step != self._open and times]


class QuorumFigures(NamedTuple):
    """What one quorum would have been like."""

    num_required: int
    num_rounds: int
    """Rounds in which so many gradients arrived at all; the figures are over these."""
    mean_wait: float
    """Seconds until the quorum was reached."""
    longest_wait: float
    """Seconds."""
    mean_dropped: float
    """Gradients of the round that came afterwards."""

    @property
    def gradients_per_second(self) -> float:
        """What would have been used: `num_required` / `mean_wait`."""
        return self.num_required / max(self.mean_wait, 1e-9)


class ArrivalReport(NamedTuple):
    """For every quorum what waiting and dropping would have been.

    Example:
        >>> from gradquorum.arrivals import arrival_report
        >>> report = arrival_report([[1.0, 1.1, 1.2, 9.0], [1.0, 1.2, 1.2, 7.0]])
        >>> print(report)
        2 rounds
        num_required  rounds  mean wait s  longest wait s  mean dropped  gradients/s
                   1       2       1.0000          1.0000          3.00         1.00
                   2       2       1.1500          1.2000          2.00         1.74
                   3       2       1.2000          1.2000          1.00         2.50
                   4       2       8.0000          9.0000          0.00         0.50
        >>> report.suggest_num_required()
        3
    """

    num_rounds: int
    """Rounds recorded."""
    quorums: tuple[QuorumFigures, ...]
    """For 1, 2, ... up to the most gradients that one round had."""

    def suggest_num_required(self, *, gain: float = 1.0) -> int:
        """Return the quorum with the most progress per second: the N that maximises ``N ** gain / mean_wait(N)``.

        Only an N that at least half of the rounds reached is considered: of others nobody knows how long waiting would
        have taken. Of equal ones the larger.

        Args:
            gain: what a round gains from more gradients, above 0 and at most 1. 1: each gradient is worth the same, in
                whichever round it is used. 0.5: the error of their mean, which falls with the square root of N, is what
                counts; that favours smaller quorums.

        Raises:
            InvalidArgumentError: nothing has been recorded, or `gain` cannot be.
        """
        if isinstance(gain, bool) or not isinstance(gain, numbers.Real) or not 0 < gain <= 1:
            raise InvalidArgumentError(f"gain: expected a number above 0 and at most 1, got {gain!r}")
        power = float(gain)
        known = [figures for figures in self.quorums if 2 * figures.num_rounds >= self.num_rounds]
        if not known:
            raise InvalidArgumentError(
                "suggest_num_required: expected recorded arrivals of at least one round, got none; call "
                "observe_arrivals() and let some rounds go by"
            )
        best = max(known, key=lambda f: (f.num_required**power / max(f.mean_wait, 1e-9), f.num_required))
        return best.num_required

    def __str__(self) -> str:
        lines = [
            f"{self.num_rounds} rounds",
            "num_required  rounds  mean wait s  longest wait s  mean dropped  gradients/s",
        ]
        lines += [
            f"{f.num_required:12}  {f.num_rounds:6}  {f.mean_wait:11.4f}  {f.longest_wait:14.4f}  "
            f"{f.mean_dropped:12.2f}  {f.gradients_per_second:11.2f}"
            for f in self.quorums
        ]
        return "\n".join(lines)


def arrival_report(times: Sequence[Sequence[float]]) -> ArrivalReport:
    """Return the report on rounds of which these are the arrival times, in seconds, each in order."""
    quorums = []
    for need in range(1, max(map(len, times), default=0) + 1):
        reached = [arrived for arrived in times if len(arrived) >= need]
        waits = [arrived[need - 1] for arrived in reached]
        dropped = sum(len(arrived) - need for arrived in reached)
        quorums.append(
            QuorumFigures(need, len(reached), math.fsum(waits) / len(waits), max(waits), dropped / len(reached))
        )
    return ArrivalReport(len(times), tuple(quorums))
