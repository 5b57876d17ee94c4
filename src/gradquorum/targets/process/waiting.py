"""Takes that nobody blocks on: each waits in a thread of its own, and hands its result to a future or a coroutine."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from gradquorum.targets.process import messages as m
from gradquorum.targets.process.channel import BrokenChannel
from gradquorum.targets.process.client import Client
from gradquorum.targets.process.connection import Connection
from gradquorum.targets.waits import try_to_resolve

__all__ = ["FutureTake", "Handover", "WaitingTake"]

T = TypeVar("T")

_WITHDRAW_SECONDS = 30.0
_LOOK_UP_SECONDS = 1.0
_RECLAIM_SECONDS = 1.0


class Gate:
    """An event. A KeyboardInterrupt at any moment of a wait does it no harm, as it would a `threading.Event`."""

    def __init__(self) -> None:
        self.is_open = False
        self._queue: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Open it, for good."""
        self.is_open = True
        self._queue.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait until it is open; False if the seconds pass first."""
        if not self.is_open:
            with contextlib.suppress(Empty):
                self._queue.get(timeout=seconds)
                self._queue.put(None)  # for whoever waits besides
        return self.is_open


class WaitingTake(Generic[T]):
    """A take that waits in a thread. Its outcome comes in that thread.

    Guarded by ``_lock``: ``_answered``.
    """

    def __init__(
        self,
        client: Client,
        connection: Connection,
        wait: Callable[..., Any],
        on_reply: Callable[[Connection, Any], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Prepare a take.

        Args:
            client: whose connection it uses.
            connection: over which the take was queued. It is ours from here on.
            wait: returns the reply that comes over it, and calls `on_detached` meanwhile.
            on_reply: takes over the connection and the reply.
            on_error: is told why there is none.
        """
        self._client = client
        self._work: Any = (wait, on_reply, on_error)
        self._lock = threading.Lock()
        self._answered = False
        self._withdrawn = False
        self._ended = Gate()
        self.done = Gate()
        """Open once nothing is left to do."""
        self._connection = connection

    def start(self) -> None:
        """Start the thread."""
        try:
            threading.Thread(target=self._run, name="gradquorum-take", daemon=True).start()
        except BaseException:
            self._client.give_up(self._connection)
            raise

    def _run(self) -> None:
        connection = self._connection
        (wait, on_reply, on_error), self._work = self._work, None
        try:
            reply = wait(connection, on_detached=self._on_detached)
        except BaseException as error:
            self._on_detached()
            connection.channel.close()
            self.done.set()
            on_error(error)
            return
        self._withdrawn = type(reply) is m.Withdrawn
        self._on_detached()
        try:
            if self._withdrawn:
                self._client.check_in(connection)
            else:
                on_reply(connection, reply)
        except BaseException as error:
            self._client.give_up(connection)
            on_error(error)
        finally:
            self.done.set()

    def _on_detached(self) -> None:
        """Let who cancels know what became of it."""
        with self._lock:
            self._answered = True
        self._ended.set()

    def withdraw(self, seconds: float = _WITHDRAW_SECONDS) -> bool:
        """End the wait; False if the take has been answered, or is being."""
        with self._lock:
            if not self._answered:
                try:
                    self._connection.channel.send(m.encode(m.Cancel()))
                except BrokenChannel:
                    return False
        self._ended.wait(seconds)
        return self._withdrawn


class Handover(Generic[T]):
    """How a result gets from the thread of a take to a coroutine. It is delivered when the coroutine has it.

    The thread waits until the coroutine has accepted or refused it, or can do neither because its loop is closed.
    """

    def __init__(self, client: Client, loop: Any, arrived: Any) -> None:
        self._client = client
        self._loop = loop
        self._arrived = arrived
        self._decided = Gate()
        self._accepted = False
        self.job: WaitingTake[T] | None = None

    def offer(self, connection: Connection, result: T) -> None:
        """Hand the result over, then give the connection back. In the take's thread.

        Raises:
            BrokenChannel: the coroutine did not accept it. The connection is the caller's still.
        """
        self._resolve((connection, result), None)
        del result
        while not self._decided.wait(_LOOK_UP_SECONDS):
            if self._loop.is_closed():
                break
        if not self._accepted:
            raise BrokenChannel("nobody waits for the round any more")
        self._client.check_in(connection)

    def fail(self, error: BaseException) -> None:
        """Hand an error over. In the take's thread."""
        self._resolve(None, error)

    def _resolve(self, result: Any, error: BaseException | None) -> None:
        if not try_to_resolve(self._loop, self._arrived, result, error):
            self._decided.set()

    def reclaim(self) -> bool:
        """Give the result back if the coroutine's loop has been closed; True once that is done."""
        if not self._loop.is_closed() or self.job is None:
            return False
        if not self.job.withdraw(_RECLAIM_SECONDS):
            self.refuse()
        return self.job.done.wait(_RECLAIM_SECONDS)

    def accept(self) -> None:
        """Keep the result. In the coroutine."""
        self._accepted = True
        self._decided.set()

    def refuse(self) -> None:
        """Give the result back, whether it has arrived or not. In the coroutine."""
        self._accepted = False
        self._decided.set()


class FutureTake(concurrent.futures.Future[T]):
    """A future whose `cancel` works until the round is detached."""

    withdraw: Callable[[], bool]

    def cancel(self) -> bool:
        if self.done() or not self.withdraw():
            return self.cancelled()
        super().cancel()
        return not self.set_running_or_notify_cancel()
