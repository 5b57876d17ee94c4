"""Late gradients that wait for the next round."""

from __future__ import annotations

from typing import NamedTuple

from gradquorum.membership import Worker
from gradquorum.records import Contribution, Forms, check_forms, conflict, either

__all__ = ["Deferred", "Placement", "gathered", "num_deferred", "with_one_more"]


class Placement(NamedTuple):
    """What a round that begins takes over."""

    log: list[Contribution]
    forms: Forms
    accepted: dict[Worker, int]
    num_gradients: int
    """In the log."""
    num_bytes: int
    """Of the log."""
    waiting: Deferred | None
    """Those that this round has no place for."""
    waiting_bytes: int


class Deferred(NamedTuple):
    """The late gradients that a round keeps for the next one, in order of arrival. Immutable."""

    contributions: tuple[Contribution, ...]
    forms: Forms
    num_bytes: int

    def of(self, worker: Worker | None) -> int:
        """Return how many a worker has here."""
        return sum(contribution.worker == worker for contribution in self.contributions)

    def by_worker(self) -> dict[Worker, int]:
        """Return how many each named worker has here."""
        counts: dict[Worker, int] = {}
        for contribution in self.contributions:
            if contribution.worker is not None:
                counts[contribution.worker] = counts.get(contribution.worker, 0) + 1
        return counts

    def placed(
        self, log: list[Contribution], forms: Forms, accepted: dict[Worker, int], max_per_worker: int | None
    ) -> Placement:
        """Return the next round: what an exact take left of the last one, then those that wait.

        One that its worker has no place for, or whose row shape is another, waits for a later round.
        """
        log, accepted = list(log), dict(accepted)
        waiting: list[Contribution] = []
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
        num_bytes = sum(contribution.num_bytes for contribution in log)
        later = gathered(tuple(waiting)) if waiting else None
        return Placement(log, forms, accepted, len(log), num_bytes, later, 0 if later is None else later.num_bytes)


def with_one_more(deferred: Deferred | None, contribution: Contribution) -> Deferred:
    """Return what waits with one gradient more.

    Raises:
        FormConflict: its row shape differs from that of the others.
    """
    if deferred is None:
        return gathered((contribution,))
    check_forms(deferred.forms, contribution.forms)
    return Deferred(
        (*deferred.contributions, contribution),
        either(deferred.forms, contribution.forms),
        deferred.num_bytes + contribution.num_bytes,
    )


def gathered(contributions: tuple[Contribution, ...]) -> Deferred:
    """Return what waits; there is at least one gradient, and their forms agree."""
    forms = contributions[0].forms
    for contribution in contributions:
        forms = either(forms, contribution.forms)
    return Deferred(contributions, forms, sum(contribution.num_bytes for contribution in contributions))


def num_deferred(deferred: Deferred | None) -> int:
    """Return how many gradients wait."""
    return 0 if deferred is None else len(deferred.contributions)
