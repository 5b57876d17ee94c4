"""Late gradients that wait for the next round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradquorum.membership import Worker
from gradquorum.records import Contribution, Forms, conflict, either

__all__ = ["Deferred", "Placement"]


class Placement(NamedTuple):
    """What a round that begins takes over."""

    log: list[Contribution]
    forms: Forms
    accepted: dict[Worker, int]
    num_gradients: int
    """In the log."""
    num_bytes: int
    """Of the log."""
    waiting: Deferred
    """Those that this round has no place for."""
    waiting_bytes: int


class Deferred:
    """The late gradients that a round keeps for the next one. Guarded by the round's lock, as all that is in a round.

    Attributes:
        contributions: in order of arrival.
        forms: the row shapes, on which they agree.
        by_worker: how many each named worker has here.
    """

    __slots__ = ("by_worker", "contributions", "forms")

    def __init__(self, contributions: Sequence[Contribution], no_forms: Forms) -> None:
        self.contributions = list(contributions)
        self.forms = no_forms
        self.by_worker: dict[Worker, int] = {}
        for contribution in self.contributions:
            self.forms = either(self.forms, contribution.forms)
            if contribution.worker is not None:
                self.by_worker[contribution.worker] = self.by_worker.get(contribution.worker, 0) + 1

    def placed(
        self, log: list[Contribution], forms: Forms, accepted: dict[Worker, int], max_per_worker: int | None
    ) -> Placement:
        """Return the next round: what an exact take left of the last one, then those that wait.

        One that its worker has no place for, or whose row shape is another, waits for a later round.
        """
        log, accepted = list(log), dict(accepted)
        waiting: list[Contribution] = []
        no_forms: Forms = (None,) * len(forms)
        for contribution in self.contributions:
            worker = contribution.worker
            count = 0 if worker is None else accepted.get(worker, 0)
            full = max_per_worker is not None and count >= max_per_worker
            if full or conflict(forms, contribution.forms) is not None:
                waiting.append(contribution)
                continue
            log.append(contribution)
            forms = either(forms, contribution.forms)
            if worker is not None:
                accepted[worker] = count + 1
        num_bytes, waiting_bytes = (sum(contribution.num_bytes for contribution in them) for them in (log, waiting))
        return Placement(log, forms, accepted, len(log), num_bytes, Deferred(waiting, no_forms), waiting_bytes)
