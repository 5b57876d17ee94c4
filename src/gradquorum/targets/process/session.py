"""What the server knows of one client process: its handles, and the workers that are live over it."""

from __future__ import annotations

import contextlib
import itertools
import threading

from gradquorum.errors import ClosedError
from gradquorum.membership import Worker
from gradquorum.targets.process.channel import BrokenChannel, Channel
from gradquorum.targets.process.hosted import HostedRound, Rounds
from gradquorum.targets.process.messages import Bye, encode
from gradquorum.waiters import Handle

__all__ = ["Session"]


class Session:
    """One client process. It lives as long as the connection that began it, which the process uses for nothing else.

    Guarded by ``_lock``: all that is assigned outside `__init__`.
    """

    def __init__(self, rounds: Rounds, token: bytes, channel: Channel) -> None:
        self.token = token
        self.orderly = False
        """Whether the process has said goodbye."""
        self._rounds = rounds
        self._channel = channel
        self._lock = threading.Lock()
        self._handles: dict[int, tuple[HostedRound, Handle]] = {}
        self._numbers = itertools.count()
        self._leases: set[tuple[HostedRound, Worker]] = set()
        self._ended = False

    def add(self, hosted: HostedRound, handle: Handle) -> int:
        """Return the number of a new handle."""
        with self._lock:
            if not self._ended:
                number = next(self._numbers)
                self._handles[number] = hosted, handle
                return number
        self._rounds.lose(hosted, handle)
        raise ClosedError("the client has gone")

    def get(self, number: int) -> tuple[HostedRound, Handle]:
        """Return a handle and its round; a closed one is there until it is released."""
        found = self._handles.get(number)
        if found is None:
            raise ClosedError("this handle has been closed")
        return found

    def release(self, number: int) -> None:
        """Close a handle that nobody can use any more."""
        with self._lock:
            found = self._handles.pop(number, None)
        if found is not None:
            self._rounds.close(*found)

    def has_joined(self, hosted: HostedRound, worker: Worker) -> bool:
        """Return whether a worker is live as long as this session."""
        return (hosted, worker) in self._leases

    def join(self, hosted: HostedRound, worker: Worker) -> None:
        """Let a worker be live as long as this session; called before it joins the round."""
        lease = hosted, worker
        if lease in self._leases:
            return
        with self._lock:
            if self._ended:
                raise ClosedError("the client has gone")
            self._leases.add(lease)
            self._rounds.lease(hosted, worker, self)

    def leave(self, hosted: HostedRound, worker: Worker) -> None:
        """Let a worker leave, whatever other sessions it had joined over."""
        with self._lock:
            self._leases.discard((hosted, worker))
        self._rounds.end_lease(hosted, worker, self)
        hosted.round.leave(worker)

    def end(self) -> None:
        """Close the handles and let the workers leave. Rounds stay, unless the process has said goodbye."""
        with self._lock:
            self._ended = True
            handles, leases = list(self._handles.values()), list(self._leases)
            self._handles.clear()
            self._leases.clear()
        for hosted, worker in leases:
            self._rounds.end_lease(hosted, worker, self)
        for hosted, handle in handles:
            if self.orderly:
                self._rounds.close(hosted, handle)
            else:
                self._rounds.lose(hosted, handle)

    def say_bye(self) -> None:
        """Tell the process that the server was closed, and did not die."""
        with contextlib.suppress(BrokenChannel):
            self._channel.send(encode(Bye()))
