"""The rounds of a server, by name: who has a handle on each, and who keeps which worker alive."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from queue import Empty, SimpleQueue
from typing import Any

from gradquorum.background import background
from gradquorum.errors import ClosedError, GradQuorumError, InvalidArgumentError
from gradquorum.membership import Worker
from gradquorum.specs import RoundSpec, SparseSpec
from gradquorum.targets.host import RoundHost
from gradquorum.targets.local import LocalTarget
from gradquorum.targets.process.checkpoints import Checkpoints, RoundFile
from gradquorum.targets.process.reentry import log_discarded
from gradquorum.waiters import Handle, RLock

__all__ = ["HostedRound", "HostedTarget", "Rounds"]

_logger = logging.getLogger("gradquorum")


class HostedRound:
    """A round of the server.

    Guarded by the lock of `Rounds`: ``num_handles``, ``closed`` and ``leases``.
    """

    def __init__(self, shared_name: str, spec: RoundSpec, file: RoundFile | None = None) -> None:
        self.shared_name = shared_name
        self.spec = spec
        self.file = file
        """Where it is kept beyond its handles and the server, if it is."""
        cores = len(os.sched_getaffinity(0))
        self.host = RoundHost(spec, compaction_threads=max(cores // 2, 1))  # the others are the workers'
        self.round = self.host.round
        self.members = tuple(spec.members.values())
        self.names = tuple(spec.members)
        options = spec.options
        is_sparse = len(spec.members) == 1 and isinstance(self.members[0], SparseSpec)
        self.is_plain = is_sparse and options.on_full != "block"
        """Whether `RoundHost.apply_plain` may do: nothing waits."""
        self.needs_worker = options.order == "worker" or bool(options.max_per_worker)
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

        if file is not None and file.exists:
            file.restore(self.host, keeper)

    def save(self) -> bool:
        """Save the round if it has changed; False if it is not kept.

        Raises:
            GradQuorumError: it could not be saved.
        """
        if self.file is None:
            return False
        try:
            self.file.save(self.host, self.keeper)
        except OSError as error:
            raise GradQuorumError(f"the round {self.shared_name!r} could not be saved: {error}") from error
        return True

    def try_to_save(self) -> bool:
        """Save the round; False, and a line in the log, if that fails."""
        try:
            return self.save()
        except ClosedError:  # meanwhile: nothing is left of it
            return False
        except GradQuorumError as error:
            _logger.error("%s", error)
            return False

    @property
    def held_bytes(self) -> int:
        """What it has accumulated and not delivered."""
        budget = self.round.budget
        return budget.log_bytes + budget.deferred_bytes + budget.detached_bytes


class Rounds:
    """All rounds of a server. Guarded by ``_lock``: all that is assigned outside `__init__`."""

    def __init__(self, checkpoints: Checkpoints | None = None) -> None:
        self._checkpoints = checkpoints
        self._lock: RLock = threading.RLock()
        self._rounds: dict[str, HostedRound] = {}
        self._closed = False
        self.dropped: SimpleQueue[tuple[HostedRound, Handle]] = SimpleQueue()
        """Handles that nobody can use any more. To put one here is one C call."""

    def open(self, shared_name: str, spec: RoundSpec | None, *, create: bool = True) -> tuple[HostedRound, Handle]:
        """Return a new handle on the round of that name, and make the round if it is not there and may be made.

        Raises:
            InvalidArgumentError: it was made from another spec, or there is none and no spec was given.
            GradQuorumError: it has a checkpoint that cannot be read.
            ClosedError: the server has been closed, or the round is not there and may not be made.
        """
        with self._lock:
            self._close_dropped()
            if self._closed:
                raise ClosedError("the server has been closed")
            hosted = self._rounds.get(shared_name)
            if hosted is None:
                hosted = self._rounds[shared_name] = self._new(shared_name, spec, create)
            elif spec is not None and hosted.spec.describe() != spec.describe():
                raise InvalidArgumentError(
                    f"shared_name {shared_name!r}: expected the spec it was made with, {hosted.spec.describe()}, got "
                    f"{spec.describe()}; to begin anew, attach(shared_name, target).close(for_all=True)"
                )
            handle = hosted.round.open()
            assert handle is not None
            hosted.num_handles += 1
            return hosted, handle

    def _new(self, shared_name: str, spec: RoundSpec | None, create: bool) -> HostedRound:
        """Return a round that is not here yet, from its file if `restore_all` could not read that."""
        file = None if self._checkpoints is None else self._checkpoints.file_of(shared_name)
        is_kept = file is not None and file.exists
        if spec is None:
            if file is None or not is_kept:
                raise InvalidArgumentError(
                    f"shared_name {shared_name!r}: expected one that is in use, and this server has no such round"
                )
            spec = file.spec()
        if not create and not is_kept:
            raise ClosedError(
                f"the round {shared_name!r} has been closed, or was never at this server; make a new "
                "accumulator or group of that name to go on"
            )
        return HostedRound(shared_name, spec, file)

    def restore_all(self) -> None:
        """Make the rounds that are kept. A file that cannot be used is logged, and tried again when somebody comes."""
        if self._checkpoints is None:
            return
        with self._lock:
            for shared_name, file in self._checkpoints.kept():
                try:
                    self._rounds[shared_name] = HostedRound(shared_name, file.spec(), file)
                except GradQuorumError as error:
                    _logger.error("the round %r is not restored: %s", shared_name, error)

    def close(self, hosted: HostedRound, handle: Handle, *, for_all: bool = False) -> int:
        """Close a handle, and with the last one the round; return how many gradients that discarded."""
        with self._lock:
            self._close_dropped()
            return self._close(hosted, handle, for_all=for_all)

    def _close(self, hosted: HostedRound, handle: Handle, *, for_all: bool = False) -> int:
        if handle.closed:
            return 0
        if for_all and hosted.file is not None:
            hosted.file.remove()
        count = hosted.round.close(handle, for_all=for_all)
        hosted.num_handles -= 1
        if for_all or (hosted.num_handles == 0 and hosted.file is None):
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

    @property
    def is_entered(self) -> bool:
        """Whether this thread is in a call on the rounds, which a signal handler or finalizer has interrupted."""
        return self._lock._is_owned() or self.is_round_entered

    @property
    def is_round_entered(self) -> bool:
        """Whether this thread is in a call on one of the rounds."""
        return any(hosted.round.is_entered for hosted in list(self._rounds.values()))

    def close_all(self) -> None:
        """Close all handles, for good. What the rounds hold stays until `discard_all`."""
        with self._lock:
            self._closed = True
            for hosted in self._rounds.values():
                hosted.closed = True
                hosted.round.close_others(hosted.keeper)

    @property
    def num_in_flight(self) -> int:
        """The rounds that takes are about to deliver."""
        return sum(hosted.round.num_in_flight for hosted in self.all())

    def discard_all(self) -> tuple[int, GradQuorumError | None]:
        """Save the rounds that are kept, and close all.

        Returns:
            How many gradients of others that discarded, and why a round could not be saved, if that was so.
        """
        with self._lock:
            rounds = list(self._rounds.values())
            self._rounds.clear()
        count, error = 0, None
        for hosted in rounds:
            try:
                is_saved = hosted.save()
            except ClosedError:  # meanwhile: nothing is left of it
                is_saved = False
            except GradQuorumError as reason:
                _logger.error("%s", reason)
                is_saved, error = False, error or reason
            discarded = hosted.round.close(hosted.keeper, for_all=True)
            count += 0 if is_saved else discarded
        return count, error


class HostedTarget(LocalTarget):
    """A handle that the server's own process has on a round of its server."""

    def __init__(self, rounds: Rounds, shared_name: str, spec: RoundSpec | None, address: str) -> None:
        hosted, handle = rounds.open(shared_name, spec)
        super().__init__(hosted.host, handle)
        self.address = address
        self.shared_name = shared_name
        self.spec = hosted.spec
        self._rounds, self._hosted = rounds, hosted
        weakref.finalize(self, rounds.dropped.put, (hosted, handle)).atexit = False

    def close(self, for_all: bool) -> int:
        close = functools.partial(self._rounds.close, self._hosted, self._handle, for_all=for_all)
        if self._rounds.is_round_entered:  # another thread may wait for that round, and hold the lock of them all
            background.jobs.put(lambda: log_discarded(close()))
            return 0
        return close()
