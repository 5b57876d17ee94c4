"""What this process has offered and would have to offer again: the accepted gradients that are not yet delivered."""

from __future__ import annotations

import threading
from typing import NamedTuple

from gradquorum.errors import UnavailableError
from gradquorum.marks import WINDOW, Marks
from gradquorum.membership import Worker, sort_workers
from gradquorum.receipts import ApplyStatus
from gradquorum.targets.interface import Terms
from gradquorum.targets.ray.records import Judged, Resumed

__all__ = ["Losses"]

_KEPT = (ApplyStatus.ACCEPTED, ApplyStatus.DEFERRED)


class _Accepted(NamedTuple):
    thread: int
    sequences: set[int]


class Losses:
    """The receipts that a void round makes worthless, until they have been reported, each exactly once.

    Guarded by ``_lock``: all that is assigned outside `__init__`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accepted: dict[Worker, _Accepted] = {}
        """By worker what is not known to be delivered, and the thread that offered the last of it."""
        self._unnamed: dict[int, int] = {}
        """How many gradients without a sequence were accepted, by the serial of their round."""
        self._lost: dict[Worker, _Accepted] = {}
        self._num_lost = 0

    @property
    def workers(self) -> list[Worker]:
        """Those of whom something may be lost."""
        with self._lock:
            return list(self._accepted)

    def note(self, terms: Terms, judged: Judged, thread: int) -> None:
        """Note what became of a gradient that was offered by a thread."""
        receipt = judged.receipt
        kept = receipt.status in _KEPT or receipt.first_status in _KEPT
        with self._lock:
            for serial in [serial for serial in self._unnamed if serial < judged.settled]:
                del self._unnamed[serial]
            if terms.worker is not None and terms.sequence is not None:
                accepted = self._accepted.get(terms.worker, _Accepted(0, set())).sequences
                if kept:
                    accepted.add(terms.sequence)
                self._accepted[terms.worker] = _Accepted(thread, _undelivered(accepted, judged.marks))
            elif receipt.status in _KEPT:
                self._unnamed[judged.serial] = self._unnamed.get(judged.serial, 0) + 1

    def void(self, resumed: Resumed) -> None:
        """Find out what is lost, as a round was void."""
        with self._lock:
            if resumed.is_durable:
                return
            for worker, accepted in self._accepted.items():
                lost = _undelivered(accepted.sequences, resumed.marks.get(worker))
                lost |= self._lost.get(worker, _Accepted(0, set())).sequences
                if lost:
                    self._lost[worker] = _Accepted(accepted.thread, lost)
            self._accepted.clear()
            self._num_lost += sum(self._unnamed.values())
            self._unnamed.clear()

    def report(self, reason: str, worker: Worker | None, *, outcome_known: bool = True) -> None:
        """Raise if something is lost of a worker, or with None of those that this thread has offered for.

        Raises:
            UnavailableError: names what is lost. It will not be named again.
        """
        with self._lock:
            if not self._lost and not self._num_lost:
                return
            mine = threading.get_ident()
            workers = [w for w, lost in self._lost.items() if (lost.thread == mine if worker is None else w == worker)]
            resend = tuple(
                (worker, sequence)
                for worker in sort_workers(workers)
                for sequence in sorted(self._lost.pop(worker).sequences)
            )
            num_lost, self._num_lost = self._num_lost, 0
        if not resend and not num_lost:
            return
        words = [f"{worker!r}: {[s for w, s in resend if w == worker]}" for worker in dict(resend)]
        if num_lost:
            words.append(f"{num_lost} without a sequence")
        raise UnavailableError(
            f"the open round was void, as {reason}; these accepted gradients are lost and may be sent again, then they "
            f"count: {'; '.join(words)}",
            outcome_known=outcome_known,
            resend=resend,
            num_lost=num_lost,
        )


def _undelivered(sequences: set[int], marks: Marks | None) -> set[int]:
    """Return the sequences that are not among the marks of what has been delivered."""
    if marks is None:
        return set(sequences)
    highest, window = marks
    return {s for s in sequences if s > highest or (highest - s <= WINDOW and not window[highest - s])}
