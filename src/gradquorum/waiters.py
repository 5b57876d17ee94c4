"""What a thread waits on: a waiter of its own, which the deciding call fills and wakes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gradquorum.errors import CancelledError, GradQuorumError
from gradquorum.records import Batch

__all__ = [
    "Deadline",
    "Handle",
    "RLock",
    "Ticket",
    "Waiter",
    "cancel_closed",
    "leave_line",
    "may_wait",
    "wait_in_line",
    "wake_all",
]

RLock = Any
"""`threading.RLock` is a function to the type checker. One lock for a round and all that belongs to it."""

_LOOK_UP_SECONDS = 0.5


class Handle:
    """The identity of one open accumulator object on its round."""

    __slots__ = ("__weakref__", "closed")

    def __init__(self) -> None:
        self.closed = False
        """Guarded by the round's lock."""


class Deadline:
    """A moment on the monotonic clock, or never."""

    __slots__ = ("at", "timeout")

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.at = float("inf") if timeout is None else time.monotonic() + timeout

    @property
    def passed(self) -> bool:
        """Whether it lies behind us."""
        return time.monotonic() >= self.at

    def left(self, at_most: float = threading.TIMEOUT_MAX) -> float:
        """Return the seconds left, not below 0 and not above `at_most`."""
        return min(max(self.at - time.monotonic(), 0.0), at_most)


class Waiter:
    """One thread that waits. It is filled and woken exactly once, under the round's lock, or leaves its line."""

    __slots__ = ("_gate", "error", "handle", "wake")

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.error: BaseException | None = None
        """Guarded by the round's lock until woken."""
        self.wake: Callable[[], Any] | None = None
        """A C function: nothing of the user's runs under the lock and no signal comes between. None if nobody waits."""
        self.prepare_to_wait()

    def prepare_to_wait(self) -> None:
        """Make what `wait` waits for and what wakes it. The caller holds the lock."""
        gate = threading.Lock()
        gate.acquire()
        wake = gate.release
        # Commit.
        self._gate = gate
        self.wake = wake

    def wait(self, seconds: float) -> bool:
        """Wait until woken; False if the seconds pass first. Ctrl-C in the main thread interrupts it."""
        if threading.get_ident() != threading.main_thread().ident:
            return self._gate.acquire(timeout=seconds)
        # A signal that arrives when CPython is just about to wait for the lock does not interrupt it.
        until = time.monotonic() + seconds
        while not self._gate.acquire(timeout=min(seconds, _LOOK_UP_SECONDS)):
            seconds = until - time.monotonic()
            if seconds <= 0:
                return False
        return True

    def raise_error(self) -> None:
        """Raise what ended the wait, if anything did, and forget it: it would refer to us in a circle."""
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


class Ticket(Waiter):
    """One take. Most are served at once, so one without a `wake` of its own prepares to wait only if it has to."""

    __slots__ = ("batch", "exact", "num_required")

    def __init__(self, handle: Handle, num_required: int, exact: bool, wake: Callable[[], Any] | None = None) -> None:
        self.handle = handle
        self.error = None
        self.wake = wake
        self.num_required = num_required
        self.exact = exact
        self.batch: Batch | None = None
        """What it will deliver. Guarded by the round's lock until woken."""

    @property
    def decided(self) -> bool:
        """Whether it has been filled or ended."""
        return self.batch is not None or self.error is not None


def wake_all(line: deque[Waiter]) -> None:
    """Wake everybody in a line, which is left empty. The caller holds the lock."""
    while line:
        waiter = line[0]
        del line[0]
        if waiter.wake is not None:
            waiter.wake()


def leave_line(line: deque[Any], waiter: Waiter, error: Exception | None = None) -> bool:
    """Take a waiter out of its line and, with an error, end its wait; False if it is not there.

    The caller holds the lock.
    """
    while True:
        try:
            i = list(line).index(waiter)
        except ValueError:
            return False
        with contextlib.suppress(IndexError):  # what ran meanwhile may have shortened the line
            if line[i] is waiter:
                # Commit.
                del line[i]
                if error is not None:
                    waiter.error = error
                    if waiter.wake is not None:
                        waiter.wake()
                return True


def cancel_closed(line: deque[Any], message: str) -> None:
    """End the waits of closed handles. The caller holds the lock."""
    for waiter in list(line):
        if waiter.handle.closed:
            leave_line(line, waiter, CancelledError(message))


def may_wait(lock: RLock) -> None:
    """Refuse to wait while this thread holds the lock: nobody could end the wait.

    Raises:
        GradQuorumError: this is a signal handler or finalizer that interrupted a call on the same round.
    """
    if lock._is_owned():  # what threading.Condition asks, too
        raise GradQuorumError(
            "this call would wait for ever: it was made by a signal handler or finalizer that interrupted another "
            "call on the same accumulator; wait in another thread, or use timeout=0"
        )


def wait_in_line(waiter: Waiter, line: deque[Waiter], lock: RLock, deadline: Deadline) -> None:
    """Wait until woken or until the deadline, then leave the line.

    Raises:
        CancelledError: the handle was closed meanwhile.
    """
    try:
        may_wait(lock)
        waiter.wait(deadline.left())
    finally:
        with lock:
            leave_line(line, waiter)
    waiter.raise_error()
