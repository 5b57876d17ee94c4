"""The takes that operations of TensorFlow have begun on an accumulator of this library."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.errors import CancelledError
from gradquorum.tensorflow.lifelines import lifeline

__all__ = ["AbstractListener", "Offers"]


_logger = logging.getLogger("gradquorum")
_LOOK_SECONDS = 0.001
"""How often a take looks whether a round that was read is on the way: its mark is in memory and wakes nobody."""
_SETTLE_SECONDS = 1.0
"""How long the end of a run may wait until its round is back, or is known to be delivered."""


class _Unfetched(CancelledError):
    """Nobody has got a round, which goes back."""


class AbstractListener(ABC):
    """What is told of the takes of an `Offers`, in any thread."""

    @abstractmethod
    def ended(self, number: int) -> None:
        """A round has come for a take, or an error: there is something to read. Called once at most."""

    @abstractmethod
    def delivered(self, number: int) -> None:
        """The accumulator knows that a round was delivered. Called in a thread of the library's, once at most."""

    @abstractmethod
    def gone(self, number: int) -> None:
        """The lifeline of a take has been cut."""


class _Take:
    """One take of which an operation is to read the round.

    Guarded by ``_lock``: ``_is_announced``.
    """

    future: concurrent.futures.Future[Any]

    def __init__(self, announce: Callable[[], None], is_marked: Callable[[], bool]) -> None:
        self.has_ended = False
        """The round has come, or an error. Set before it is announced."""
        self._announce = announce
        self.is_marked = is_marked
        self._lock = threading.Lock()
        self._is_announced = False
        self._read = threading.Event()
        self._settled = threading.Event()
        self._offered: Any = None

    def end(self) -> None:
        """Announce, once, that a round or, in the future, an error is there."""
        with self._lock:
            is_announced, self._is_announced = self._is_announced, True
        if not is_announced:
            self.has_ended = True
            self._announce()

    def offer(self, result: Any) -> None:
        """Wait until the round is delivered: in the thread of the take.

        Raises:
            _Unfetched: it will not be.
        """
        self._offered = result
        self.end()
        self._read.wait()
        while not self.is_marked() and not self._settled.wait(_LOOK_SECONDS):
            pass
        if not self.is_marked():
            raise _Unfetched("take_grad: the run of the operation ended before it had the round, which went back")

    def read(self) -> Any:
        """Return the round, which is delivered once its lifeline is marked, or raise what ended the take."""
        if self._offered is None:
            return self.future.result()
        self._read.set()
        return self._offered

    def settle(self) -> None:
        """End the take: it leaves its line, or its round is delivered or goes back for whoever takes next."""
        with self._lock:
            self._is_announced = True
        self._settled.set()
        self._read.set()
        if self.is_marked() or not self.future.cancel():
            concurrent.futures.wait([self.future], _SETTLE_SECONDS)
        if self.is_marked() and not (self.future.done() and self.future.exception() is None):
            _logger.warning("take_grad: a round was delivered, but where it lives does not know; it may be taken again")


class Offers:
    """The takes of one accumulator, by number. Each is in the accumulator's line as soon as it has begun.

    A take is several operations, the first begins it and one reads its round, and their run may end before the last.
    So a lifeline goes from the first to the last: if it is cut unmarked, the take leaves its line, and a round that has
    come for it goes back to the accumulator. It can neither be lost nor keep others waiting.

    Lifelines are cut in any thread at any moment, so there is no lock: each change of ``_takes`` is one call of the
    dict's own.
    """

    def __init__(self, accumulator: Any, listener: AbstractListener) -> None:
        self._acc = accumulator
        self._listener = listener
        self._takes: dict[int, _Take] = {}

    def begin(self, number: int, num_required: Any) -> NDArray[np.int64]:
        """Begin the take of a new number, and return its lifeline."""
        line, is_marked = lifeline(functools.partial(self._cut, number))
        take = _Take(functools.partial(self._listener.ended, number), is_marked)
        take.future = self._acc._submit_offer(num_required, None, take.offer)
        self._takes[number] = take
        take.future.add_done_callback(lambda _: self._done(number, take))
        return line

    def has_ended(self, number: int) -> bool:
        """Whether there is something to read."""
        return self._takes[number].has_ended

    def read(self, number: int) -> Any:
        """Return the round of a take that has ended. It is delivered when the lifeline is marked, if ever.

        Raises:
            GradQuorumError: what ended the take.
        """
        return self._takes[number].read()

    def _done(self, number: int, take: _Take) -> None:
        take.end()
        if take.is_marked():
            self._listener.delivered(number)

    def _cut(self, number: int, _is_marked: bool) -> None:
        take = self._takes.pop(number, None)
        if take is not None:
            take.settle()
            self._listener.gone(number)
