"""Which step's parameters are out, and who waits for the next."""

from __future__ import annotations

from collections import deque

from gradquorum.errors import ClosedError, DeadlineExceededError
from gradquorum.waiters import Deadline, Handle, RLock, Waiter, cancel_closed, wait_in_line, wake_all

__all__ = ["Publication"]


class Publication:
    """The published step of a round, under the round's lock.

    Guarded by ``_lock``: ``step`` (may be read without) and ``_line``.
    """

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        self.step = 0
        self._line: deque[Waiter] = deque()

    def publish(self, step: int) -> None:
        """Publish a step and wake who waits. The caller holds the lock."""
        self.step = step
        wake_all(self._line)

    def cancel_closed(self) -> None:
        """End the waits of closed handles. The caller holds the lock."""
        cancel_closed(self._line, "wait_published was cancelled")

    def wait(self, handle: Handle, step: int, deadline: Deadline) -> int:
        """Wait until a step is published, and return the published one."""
        while True:
            with self._lock:
                if handle.closed:
                    raise ClosedError("this handle has been closed")
                published = self.step
                if published >= step:
                    return published
                if deadline.passed:
                    raise DeadlineExceededError(
                        f"wait_published: have {published}, need {step} after {deadline.timeout} s",
                        have=published,
                        need=step,
                    )
                waiter = Waiter(handle)
                self._line.append(waiter)
            wait_in_line(waiter, self._line, self._lock, deadline)
