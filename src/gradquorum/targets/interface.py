"""What a target is: the place where a round lives, as one open handle sees it."""

from __future__ import annotations

import concurrent.futures
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from numpy.typing import NDArray

from gradquorum.arrivals import ArrivalReport
from gradquorum.receipts import ApplyReceipt
from gradquorum.validation import CheckedGradient

__all__ = ["PRIVATE", "AbstractTarget", "Merged", "Terms"]

T = TypeVar("T")

PRIVATE = "private-"
"""How the shared names begin that nobody gave."""


class Terms:
    """What goes with a gradient on its way to the round: checked, but for what only the round can know. Immutable."""

    __slots__ = ("lend", "local_step", "sequence", "timeout", "weight", "worker")

    def __init__(
        self,
        local_step: int | None,
        worker: int | str | None = None,
        sequence: int | None = None,
        weight: float = 1.0,
        lend: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.local_step = local_step
        self.worker = worker
        self.sequence = sequence
        self.weight = weight
        self.lend = lend
        self.timeout = timeout


class Merged:
    """A round, merged: for each member what its reducer returns. Immutable.

    Attributes:
        members: sparse: `(indices [r], values [r, *row], counts [r])`; dense: an array.
        num_gradients: in the round.
        step: the round's step before it was detached.
        workers: the named workers whose gradients are in it, sorted.
    """

    __slots__ = ("members", "num_gradients", "step", "workers")

    def __init__(self, members: Sequence[Any], num_gradients: int, step: int, workers: tuple[int | str, ...]) -> None:
        self.members = members
        self.num_gradients = num_gradients
        self.step = step
        self.workers = workers


class AbstractTarget(ABC):
    """One open handle on a round. All methods may be called from any thread.

    Every method raises `ClosedError` once the handle is closed, unless it says otherwise.
    """

    engine_name: str

    @abstractmethod
    def apply(self, gradients: CheckedGradient, terms: Terms) -> ApplyReceipt:
        """Offer a gradient: checked, one part for each member."""

    def apply_plain(self, indices: Any, values: Any, terms: Terms) -> ApplyReceipt | None:
        """Check a sparse gradient and offer it in one go; None, and nothing has happened, if that takes a closer look.

        A shortcut that a target may have: `apply` with a checked gradient does the same.
        """
        return None

    @abstractmethod
    def take(self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]) -> T:
        """Wait for a round and return what `build` makes of it. It is delivered when this returns."""

    @abstractmethod
    async def take_async(
        self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]
    ) -> T:
        """Do the same as `take` without blocking the event loop."""

    @abstractmethod
    def submit_take(
        self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]
    ) -> concurrent.futures.Future[T]:
        """Do the same as `take` without blocking; the round is delivered when the future is done."""

    @abstractmethod
    def num_accumulated(self) -> int: ...

    @property
    @abstractmethod
    def global_step(self) -> int: ...

    @abstractmethod
    def set_global_step(self, step: int) -> int:
        """Set the step and return the one before."""

    @property
    @abstractmethod
    def published_step(self) -> int: ...

    @abstractmethod
    def publish(self, step: int | None, *, only_raise: bool = False) -> int:
        """Publish a step and return the published one; with `only_raise`, a later one stays."""

    @abstractmethod
    def wait_published(self, step: int, timeout: float | None) -> int: ...

    @abstractmethod
    def join(self, worker: int | str) -> None: ...

    @abstractmethod
    def leave(self, worker: int | str) -> None: ...

    @abstractmethod
    def last_sequence(self, worker: int | str) -> int: ...

    @abstractmethod
    def num_accepted(self, worker: int | str) -> int:
        """Return how many gradients of a worker the open round holds."""

    @property
    @abstractmethod
    def num_workers(self) -> int: ...

    @property
    @abstractmethod
    def num_undelivered(self) -> int: ...

    @property
    @abstractmethod
    def num_deferred(self) -> int: ...

    @abstractmethod
    def state(self) -> dict[str, NDArray[Any]]:
        """Return all that the round holds at one moment, as arrays by name that nobody else has."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put what `state` returned in the place of what the round holds, which must be no gradient."""

    @abstractmethod
    def observe(self, num_rounds: int | None) -> None:
        """Record the arrival times of so many rounds from now on, anew; None for none."""

    @abstractmethod
    def arrivals(self) -> ArrivalReport:
        """Return the report on the rounds recorded."""

    @abstractmethod
    def discard(self) -> int: ...

    @abstractmethod
    def close(self, for_all: bool) -> int: ...

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether this handle is closed; never raises."""
