"""The takes that operations of TensorFlow have begun on an accumulator of this library."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.errors import CancelledError
from gradquorum.tensorflow.lifelines import lifeline

__all__ = ["AbstractListener", "Offers"]


_BACK_SECONDS = 1.0
"""How long the end of a run may wait until its round is back."""


class _Unfetched(CancelledError):
    """Nobody has fetched a round, which goes back."""


class AbstractListener(ABC):
    """What is told of the takes of an `Offers`, in any thread."""

    @abstractmethod
    def ended(self, number: int) -> None:
        """A round has come for a take, or an error: there is something to fetch. Called once at most."""

    @abstractmethod
    def gone(self, number: int) -> None:
        """A take has been fetched or cut off."""


class _Take:
    """One take of which an operation is to fetch the round.

    Guarded by ``_lock``: ``_is_announced``.
    """

    future: concurrent.futures.Future[Any]

    def __init__(self, announce: Callable[[], None]) -> None:
        self.has_ended = False
        """The round has come, or an error. Set before it is announced."""
        self._announce = announce
        self._lock = threading.Lock()
        self._is_announced = False
        self._settled = threading.Event()
        self._is_fetched = False

    def end(self, *_: object) -> None:
        """Announce, once, that a round or an error is there."""
        with self._lock:
            is_announced, self._is_announced = self._is_announced, True
        if not is_announced:
            self.has_ended = True
            self._announce()

    def offer(self, _: object) -> None:
        """Wait until the round is fetched: in the thread of the take, which then delivers it.

        Raises:
            _Unfetched: nobody will fetch it.
        """
        self.end()
        self._settled.wait()
        if not self._is_fetched:
            raise _Unfetched("take_grad: the run of the operation ended before it had the round, which went back")

    def fetch(self) -> Any:
        """Return the round, or raise what ended the take."""
        self._is_fetched = True
        self._settled.set()
        return self.future.result()

    def drop(self) -> None:
        """End the take: it leaves its line, or its round goes back, which whoever takes next is to find."""
        with self._lock:
            self._is_announced = True
        self._settled.set()
        if not self.future.cancel():
            concurrent.futures.wait([self.future], _BACK_SECONDS)


class Offers:
    """The takes of one accumulator, by number. Each is in the accumulator's line as soon as it has begun.

    A take is several operations, the first begins it and the last fetches its round, and their run may end before the
    last. So a lifeline goes from the first to the last: if it is cut, the take leaves its line, and a round that has
    come for it goes back to the accumulator. It can neither be lost nor keep others waiting.

    Guarded by ``_lock``: ``_takes``.
    """

    def __init__(self, accumulator: Any, listener: AbstractListener) -> None:
        self._acc = accumulator
        self._listener = listener
        self._lock = threading.Lock()
        self._takes: dict[int, _Take] = {}

    def begin(self, number: int, num_required: Any) -> NDArray[np.int64]:
        """Begin the take of a new number, and return its lifeline."""
        take = _Take(functools.partial(self._listener.ended, number))
        line = lifeline(functools.partial(self._cut, number))
        take.future = self._acc._submit_offer(num_required, None, take.offer)
        with self._lock:
            self._takes[number] = take
        take.future.add_done_callback(take.end)
        return line

    def has_ended(self, number: int) -> bool:
        """Whether there is something to fetch."""
        return self._takes[number].has_ended

    def fetch(self, number: int) -> Any:
        """Return the round of a take that has ended, which is delivered by that.

        Raises:
            GradQuorumError: what ended the take.
        """
        with self._lock:
            take = self._takes.pop(number)
        self._listener.gone(number)
        return take.fetch()

    def _cut(self, number: int) -> None:
        with self._lock:
            take = self._takes.pop(number, None)
        if take is not None:
            take.drop()
            self._listener.gone(number)
