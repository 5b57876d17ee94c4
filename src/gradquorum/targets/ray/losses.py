"""What this process has offered and would have to offer again: the accepted gradients that are not yet delivered."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from gradquorum.errors import UnavailableError
from gradquorum.marks import NO_MARKS, WINDOW, Marks
from gradquorum.membership import Worker, sort_workers
from gradquorum.receipts import ApplyStatus
from gradquorum.targets.interface import Terms
from gradquorum.targets.ray.records import Judged, Resumed, Standing

__all__ = ["Losses"]

_KEPT = (ApplyStatus.ACCEPTED, ApplyStatus.DEFERRED)


class _Accepted:
    __slots__ = ("serials", "thread")

    def __init__(self, thread: int, serials: dict[int, int]) -> None:
        self.thread = thread
        self.serials = serials
        """By sequence that of the round for which it was judged."""


class Losses:
    """The receipts that a void round makes worthless, until they have been reported, each exactly once.

    Guarded by ``_lock``: all that is assigned outside `__init__`. A finalizer may come in under it, in the same thread:
    what is noted then stays, as dicts are changed in place.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._accepted: dict[Worker, _Accepted] = {}
        """By worker what is not known to be delivered, and the thread that offered the last of it."""
        self._unnamed: dict[int, int] = {}
        """How many gradients without a sequence were accepted, by the serial of their round."""
        self._lost: dict[Worker, _Accepted] = {}
        self._num_lost = 0
        self._ended = 0
        """The incarnation that was void last."""
        self._resumed: Resumed | None = None
        """What that came to."""

    @property
    def workers(self) -> list[Worker]:
        """Those of whom something may be lost."""
        with self._lock:
            return list(self._accepted)

    def note(self, terms: Terms, judged: Judged, thread: int, incarnation: int) -> None:
        """Note what became of a gradient that was offered by a thread in an incarnation."""
        receipt, serial = judged.receipt, judged.serial
        kept = receipt.status in _KEPT or receipt.first_status in _KEPT
        if ApplyStatus.DEFERRED in (receipt.status, receipt.first_status):
            serial += 1  # it is for a later round
        with self._lock:
            late = self._late(incarnation)
            if late is None:
                for other in [other for other in list(self._unnamed) if other < judged.settled]:
                    self._unnamed.pop(other, None)
            if terms.worker is not None and terms.sequence is not None:
                serials = {terms.sequence: serial} if kept else {}
                if late is None:
                    self._keep(terms.worker, serials, thread)
                    accepted = self._accepted[terms.worker].serials
                    before = dict(accepted)
                    for sequence in before.keys() - _undelivered(before, judged.marks, judged.settled):
                        accepted.pop(sequence, None)
                else:
                    self._lose(terms.worker, serials, thread, incarnation, late)
            elif receipt.status in _KEPT:
                if late is None:
                    self._unnamed[serial] = self._unnamed.get(serial, 0) + 1
                elif incarnation != self._ended or late.settled is None or serial >= late.settled:
                    self._num_lost += 1

    def take_over(self, worker: Worker, standing: Standing, thread: int) -> None:
        """Note what was accepted of a worker before this process went on as that worker."""
        with self._lock:
            late = self._late(standing.incarnation)
            if late is None:
                self._keep(worker, standing.undelivered, thread)
            else:
                self._lose(worker, standing.undelivered, thread, standing.incarnation, late)

    def _late(self, incarnation: int) -> Resumed | None:
        """Return what the end of an incarnation came to, if an answer of it has overtaken that; else None."""
        if self._resumed is None or self._resumed.is_durable or incarnation > self._ended:
            return None
        return self._resumed

    def _keep(self, worker: Worker, serials: Mapping[int, int], thread: int) -> None:
        kept = self._accepted.setdefault(worker, _Accepted(thread, {}))
        kept.serials.update(serials)
        kept.thread = thread

    def _lose(
        self, worker: Worker, serials: Mapping[int, int], thread: int, incarnation: int, resumed: Resumed
    ) -> None:
        """Count as lost what had not been delivered when an incarnation ended."""
        settled = resumed.settled if incarnation == self._ended else None
        lost = _undelivered(dict(serials), resumed.marks.get(worker), settled)
        if lost:
            named = self._lost.setdefault(worker, _Accepted(thread, {}))
            named.serials.update(lost)
            named.thread = thread

    def void(self, ended: int, resumed: Resumed) -> None:
        """Find out what is lost, as an incarnation has ended."""
        with self._lock:
            self._ended, self._resumed = ended, resumed
            if resumed.is_durable:
                return
            for worker, accepted in list(self._accepted.items()):
                self._lose(worker, accepted.serials, accepted.thread, ended, resumed)
            self._accepted.clear()
            settled = resumed.settled
            self._num_lost += sum(
                n for serial, n in list(self._unnamed.items()) if settled is None or serial >= settled
            )
            self._unnamed.clear()

    def owes(self, worker: Worker | None) -> bool:
        """Whether there is something that has to be reported before more is offered of a worker."""
        with self._lock:
            return worker in self._lost or bool(self._num_lost)

    def report(self, reason: str, worker: Worker | None, *, outcome_known: bool = True) -> None:
        """Raise if something is lost of a worker, or with None of those that this thread has offered for.

        Raises:
            UnavailableError: names what is lost. It will not be named again.
        """
        with self._lock:
            if not self._lost and not self._num_lost:
                return
            mine = threading.get_ident()
            workers = [
                w for w, lost in list(self._lost.items()) if (lost.thread == mine if worker is None else w == worker)
            ]
            resend = tuple(
                (worker, sequence)
                for worker in sort_workers(workers)
                for sequence in sorted(self._lost.pop(worker).serials)
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


def _undelivered(serials: Mapping[int, int], marks: Marks | None, settled: int | None) -> dict[int, int]:
    """Return those sequences that are not known to be delivered.

    Args:
        serials: of their rounds, by sequence.
        marks: of what has been delivered of their worker's.
        settled: the serial of the oldest round that has not been delivered, which tells of those that the marks have
            forgotten; None if that is not known.
    """
    highest, window = NO_MARKS if marks is None else marks
    return {
        sequence: serial
        for sequence, serial in serials.items()
        if sequence > highest
        or (not window[highest - sequence] if highest - sequence <= WINDOW else settled is None or serial >= settled)
    }
