"""How the outcome of a take that nobody blocks on gets to a future or a coroutine."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from gradquorum.targets.waits import try_to_resolve

__all__ = ["FutureTake", "Handover"]

T = TypeVar("T")


class FutureTake(concurrent.futures.Future[T]):
    """A future whose `cancel` works until the round is detached."""

    def __init__(self, withdraw: Callable[[], bool]) -> None:
        super().__init__()
        self._withdraw = withdraw

    def cancel(self) -> bool:
        if self.done() or not self._withdraw():
            return self.cancelled()
        super().cancel()
        return not self.set_running_or_notify_cancel()


class Handover(Generic[T]):
    """From the thread of a take to a coroutine. The round is delivered by the coroutine, once it has it."""

    def __init__(self, loop: Any, arrived: Any, give_back: Callable[[], None]) -> None:
        self._loop = loop
        self._arrived = arrived
        self._give_back = give_back

    def offer(self, result: T) -> None:
        """Hand the result over. In the take's thread."""
        self._resolve(result, None)

    def fail(self, error: BaseException) -> None:
        """Hand an error over. In the take's thread."""
        self._resolve(None, error)

    def _resolve(self, result: Any, error: BaseException | None) -> None:
        if not try_to_resolve(self._loop, self._arrived, result, error):
            self._give_back()

    def reclaim(self) -> bool:
        """Give the round back if the coroutine's loop has been closed; True once that is done."""
        if not self._loop.is_closed():
            return False
        self._give_back()
        return True
