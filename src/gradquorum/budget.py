"""How much memory a round may hold, and who waits for some."""

from __future__ import annotations

from collections import deque

from gradquorum.errors import DeadlineExceededError, ResourceExhaustedError
from gradquorum.waiters import Deadline, Handle, RLock, Waiter, cancel_closed, wait_in_line, wake_all

__all__ = ["Budget"]


class Budget:
    """The memory of a round, under the round's lock.

    Guarded by ``_lock``: ``log_bytes`` (may be read without), ``deferred_bytes``, ``detached_bytes`` and ``_line``.
    The round commits to the numbers itself, together with what they count.
    """

    def __init__(self, lock: RLock, max_bytes: int | None, *, block: bool) -> None:
        self._lock = lock
        self._max_bytes = max_bytes
        self._block = block
        self.log_bytes = 0
        """Of the open round."""
        self.deferred_bytes = 0
        """Of the gradients that wait for the next round."""
        self.detached_bytes = 0
        """Of the rounds that are detached and not delivered."""
        self._line: deque[Waiter] = deque()

    def has_room(self, num_bytes: int) -> bool:
        """Tell whether so much more may be held. The caller holds the lock."""
        return self._max_bytes is None or self._held_bytes + num_bytes <= self._max_bytes

    @property
    def _held_bytes(self) -> int:
        return self.log_bytes + self.deferred_bytes + self.detached_bytes

    @property
    def num_waiting(self) -> int:
        """The applies that wait for room."""
        return len(self._line)

    def look_again(self) -> None:
        """Wake who waits for room: some was freed, or none can be any more. The caller holds the lock."""
        if self._line:
            wake_all(self._line)

    def cancel_closed(self) -> None:
        """End the waits of closed handles. The caller holds the lock."""
        cancel_closed(self._line, "apply was cancelled while it waited for room")

    def line_up(self, handle: Handle, num_bytes: int, deadline: Deadline, stuck: str | None) -> Waiter:
        """Return a waiter in the line for room. The caller holds the lock.

        Args:
            handle: whose apply this is.
            num_bytes: what it needs.
            deadline: when to give up.
            stuck: why no take of the open round can come, or None if one can.

        Raises:
            ResourceExhaustedError: the accumulator does not block, or no take can free enough memory.
            DeadlineExceededError: it is too late to wait.
        """
        held = self._held_bytes
        figures = f"{held} of max_bytes={self._max_bytes} bytes are held and the gradient needs {num_bytes}"
        why = None
        if not self._block:
            why = "take the round first, or use on_full='block'"
        elif self._max_bytes is not None and num_bytes > self._max_bytes:
            why = "no take can make room for it"
        elif stuck is not None and not self.detached_bytes:
            why = f"no take can free memory: {stuck}"
        if why is not None:
            raise ResourceExhaustedError(
                f"no room for the gradient: {figures}; {why}",
                needed_bytes=num_bytes,
                held_bytes=held,
                max_bytes=self._max_bytes,
            )
        if deadline.passed:
            raise DeadlineExceededError(
                f"apply: no room within {deadline.timeout} s: {figures}", have=held, need=num_bytes
            )
        return self.wait_for_compaction(handle)

    def wait_for_compaction(self, handle: Handle) -> Waiter:
        """Return a waiter in the line, without asking whether it can ever be served. The caller holds the lock."""
        waiter = Waiter(handle)
        self._line.append(waiter)
        return waiter

    def wait(self, waiter: Waiter, deadline: Deadline) -> None:
        """Wait until it is worth another look.

        Raises:
            CancelledError: the handle was closed meanwhile.
        """
        wait_in_line(waiter, self._line, self._lock, deadline)
