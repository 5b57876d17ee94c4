"""Who takes part in a round, and how much the workers that are left can still add to it."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["Membership", "Worker", "sort_workers", "worker_key"]

Worker = int | str


class Membership:
    """The workers that joined, and those among them that are still there.

    Guarded by the lock of the round that it belongs to.
    """

    def __init__(self, expected_workers: int | None, max_per_worker: int | None) -> None:
        self._live: dict[Worker, bool] = {}
        """Every worker that ever joined, and whether it is there now."""
        self._why: dict[Worker, str] = {}
        """What made a worker leave, if somebody said so."""
        self._expected = expected_workers
        self._max_per_worker = max_per_worker
        self.most = None if expected_workers is None or max_per_worker is None else expected_workers * max_per_worker
        """How many gradients one round can ever hold; None if there is no bound. Never changes."""

    def join(self, worker: Worker) -> None:
        self._live[worker] = True
        if self._why:
            self._why.pop(worker, None)

    def leave(self, worker: Worker, why: str | None = None) -> None:
        if worker in self._live:
            self._live[worker] = False
            if why is not None:
                self._why[worker] = why

    @property
    def left_in_words(self) -> str:
        """Those that have left, and why, where that is known."""
        words = [f"{worker!r} {self._why[worker]}" if worker in self._why else repr(worker) for worker in self.left]
        return ", ".join(words) or "nobody"

    @property
    def num_live(self) -> int:
        return sum(self._live.values())

    @property
    def all(self) -> dict[Worker, bool]:
        """Every worker that ever joined, and whether it is live; a copy."""
        return dict(self._live)

    def replace(self, members: dict[Worker, bool]) -> None:
        """Put what `all` returned in the place of what is here."""
        self._live = dict(members)

    @property
    def left(self) -> tuple[Worker, ...]:
        """Return the workers that have left, in `sort_workers` order."""
        return sort_workers([worker for worker, live in self._live.items() if not live])

    def capacity(self, accepted: dict[Worker, int]) -> int | None:
        """Return how many gradients the live workers can add to a round.

        Args:
            accepted: what the round holds already, by worker.

        Returns:
            None as long as there is no bound: a worker that is expected has not joined yet, or may apply
            any number of times.
        """
        if self._max_per_worker is None or self._expected is None or len(self._live) < self._expected:
            return None
        most = self._max_per_worker
        return sum(most - accepted.get(worker, 0) for worker, live in self._live.items() if live)


def sort_workers(workers: Collection[Worker]) -> tuple[Worker, ...]:
    """Sort workers: numbers first, then names."""
    return tuple(sorted(workers, key=worker_key)) if workers else ()


def worker_key(worker: Worker) -> tuple[bool, int, str]:
    """Return the sort key of a worker: numbers first, then names."""
    return (True, 0, worker) if isinstance(worker, str) else (False, worker, "")
