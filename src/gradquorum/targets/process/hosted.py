"""The rounds of a server, by name: who has a handle on each, and who keeps which worker alive."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from gradquorum.errors import ClosedError, InvalidArgumentError
from gradquorum.membership import Worker
from gradquorum.specs import RoundSpec, SparseSpec
from gradquorum.targets.host import RoundHost
from gradquorum.targets.local import LocalTarget
from gradquorum.waiters import Handle

__all__ = ["HostedRound", "HostedTarget", "Rounds"]


class HostedRound:
    """A round of the server.

    Guarded by the lock of `Rounds`: ``num_handles``, ``closed`` and ``leases``.
    """

    def __init__(self, shared_name: str, spec: RoundSpec) -> None:
        self.shared_name = shared_name
        self.spec = spec
        self.host = RoundHost(spec)
        self.round = self.host.round
        self.members = tuple(spec.members.values())
        self.names = tuple(spec.members)
        self.is_plain = len(spec.members) == 1 and isinstance(self.members[0], SparseSpec)
        """Whether `RoundHost.apply_plain` may do."""
        self.weight_dtypes = tuple(dtype for dtype in spec.weight_dtypes() if dtype is not None)
        keeper = self.round.open()
        assert keeper is not None
        self.keeper = keeper
        """The server's own handle: the round outlives clients that die."""
        self.num_handles = 0
        """Open ones of clients; that of a dead client counts no more."""
        self.closed = False
        self.leases: dict[Worker, set[Any]] = {}
        """The sessions over which each worker has joined: it leaves when the last of them ends."""

    @property
    def held_bytes(self) -> int:
        """What it has accumulated and not delivered."""
        return self.round.budget.log_bytes + self.round.budget.detached_bytes


class Rounds:
    """All rounds of a server. Guarded by ``_lock``: all that is assigned outside `__init__`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._rounds: dict[str, HostedRound] = {}
        self._closed = False
        self.dropped: SimpleQueue[tuple[HostedRound, Handle]] = SimpleQueue()
        """Handles that nobody can use any more. To put one here is one C call."""

    def open(self, shared_name: str, spec: RoundSpec | None, *, create: bool = True) -> tuple[HostedRound, Handle]:
        """Return a new handle on the round of that name, and make the round if it is not there and may be made.

        Raises:
            InvalidArgumentError: it was made from another spec, or there is none and no spec was given.
            ClosedError: the server has been closed, or the round is not there and may not be made.
        """
        with self._lock:
            self._close_dropped()
            if self._closed:
                raise ClosedError("the server has been closed")
            hosted = self._rounds.get(shared_name)
            if hosted is None:
                if spec is None:
                    raise InvalidArgumentError(
                        f"shared_name {shared_name!r}: expected one that is in use, and this server has no such round"
                    )
                if not create:
                    raise ClosedError(
                        f"the round {shared_name!r} has been closed, or was never at this server; make a new "
                        "accumulator or group of that name to go on"
                    )
                hosted = self._rounds[shared_name] = HostedRound(shared_name, spec)
            elif spec is not None and hosted.spec.describe() != spec.describe():
                raise InvalidArgumentError(
                    f"shared_name {shared_name!r}: expected the spec it was made with, "
                    f"{hosted.spec.describe()}, got {spec.describe()}"
                )
            handle = hosted.round.open()
            assert handle is not None
            hosted.num_handles += 1
            return hosted, handle

    def close(self, hosted: HostedRound, handle: Handle, *, for_all: bool = False) -> int:
        """Close a handle, and with the last one the round; return how many gradients that discarded."""
        with self._lock:
            self._close_dropped()
            return self._close(hosted, handle, for_all=for_all)

    def _close(self, hosted: HostedRound, handle: Handle, *, for_all: bool = False) -> int:
        if handle.closed:
            return 0
        count = hosted.round.close(handle, for_all=for_all)
        hosted.num_handles -= 1
        if for_all or hosted.num_handles == 0:
            count += hosted.round.close(hosted.keeper)
            hosted.closed = True
            if self._rounds.get(hosted.shared_name) is hosted:
                del self._rounds[hosted.shared_name]
        return count

    def _close_dropped(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._close(*self.dropped.get_nowait())

    def lose(self, hosted: HostedRound, handle: Handle) -> None:
        """Close the handle of a client that died. The round stays, for those who come after it."""
        with self._lock:
            if not handle.closed:
                hosted.num_handles -= 1
                hosted.round.close(handle)

    def lease(self, hosted: HostedRound, worker: Worker, session: object) -> None:
        """Keep a worker alive as long as a session."""
        with self._lock:
            hosted.leases.setdefault(worker, set()).add(session)

    def end_lease(self, hosted: HostedRound, worker: Worker, session: object) -> None:
        """End the lease of a session; with the last one the worker leaves."""
        with self._lock:
            sessions = hosted.leases.get(worker, set())
            sessions.discard(session)
            if not sessions:
                hosted.leases.pop(worker, None)
                hosted.round.leave(worker)

    def all(self) -> list[HostedRound]:
        """Return the rounds."""
        with self._lock:
            return list(self._rounds.values())

    def close_all(self) -> int:
        """Close every round, for good, and return how many gradients that discarded."""
        with self._lock:
            self._closed = True
            hosted = list(self._rounds.values())
            self._rounds.clear()
            count = 0
            for one in hosted:
                one.closed = True
                count += one.round.close(one.keeper, for_all=True)
        return count


class HostedTarget(LocalTarget):
    """A handle that the server's own process has on a round of its server."""

    def __init__(self, rounds: Rounds, shared_name: str, spec: RoundSpec | None, address: str) -> None:
        hosted, handle = rounds.open(shared_name, spec)
        super().__init__(hosted.host, handle)
        self.address = address
        self.shared_name = shared_name
        self.spec = hosted.spec
        self._close: Callable[[bool], int] = lambda for_all: rounds.close(hosted, handle, for_all=for_all)
        weakref.finalize(self, rounds.dropped.put, (hosted, handle)).atexit = False

    def close(self, for_all: bool) -> int:
        return self._close(for_all)
