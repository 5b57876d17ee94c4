"""What a `gradquorum.Server` does: it hosts rounds by name for the processes of this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import util

from gradquorum.background import background
from gradquorum.errors import ClosedError, InvalidArgumentError
from gradquorum.specs import RoundSpec
from gradquorum.targets.process import reentry
from gradquorum.targets.process.address import Address
from gradquorum.targets.process.channel import HEARTBEAT_SECONDS, Channel
from gradquorum.targets.process.checkpoints import Checkpoints
from gradquorum.targets.process.hosted import HostedTarget, Rounds
from gradquorum.targets.process.link import Link
from gradquorum.targets.process.memory import SharedMemory
from gradquorum.targets.process.session import Session

__all__ = ["Service"]

_NO_DESCRIPTOR_SECONDS = 0.1
_QUIET_SECONDS = 0.001
_CLOSE_SECONDS = 5.0
"""How long those who are about to receive a round may take to acknowledge it."""

_services: weakref.WeakSet[Service] = weakref.WeakSet()


def _after_fork() -> None:
    for service in list(_services):
        service._forget()
    _services.clear()
    reentry.forget_all()


os.register_at_fork(after_in_child=_after_fork)


class Service:
    """The rounds, the connections and the threads of a server. Arguments are those of `gradquorum.Server`, checked.

    Guarded by ``_lock``: ``_links``, ``_sessions`` and ``closing`` (may be read without). Who closes lets go of
    ``_checkpoints``. Nothing else changes after `__init__`.
    """

    def __init__(
        self,
        address: str | os.PathLike[str] | None,
        authkey: bytes | None,
        max_bytes: int | None,
        checkpoint: str | os.PathLike[str] | None,
        checkpoint_every: float,
    ) -> None:
        self.max_bytes = max_bytes
        self.keeps = checkpoint is not None
        """Whether rounds are saved."""
        self.keeps_each = checkpoint is not None and checkpoint_every == 0
        """Whether each change is saved before the client hears of it."""
        self._save_every = checkpoint_every
        """Seconds."""
        self.memory = SharedMemory()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._sessions: dict[bytes, Session] = {}
        self._threads: set[int] = set()
        """The numbers of those of the server. `add` and `discard` need no lock."""
        self.closing = False
        """Whether it has been closed."""
        self._checkpoints = None if checkpoint is None else Checkpoints(checkpoint)
        try:
            _services.add(self)
            self.rounds = Rounds(self._checkpoints)
            self.rounds.restore_all()
            self._place = Address(address, authkey)
            reentry.remember(self.address, self._is_inside)
        except BaseException:
            self._end_checkpoints()
            raise
        try:
            works = [(self._accept, "accept"), (self._keep_pace, "heartbeat")]
            if self._checkpoints is not None and checkpoint_every:
                works.append((self._save_often, "checkpoint"))
            for work, name in works:
                self.thread(work, name).start()
            background.start()
        except BaseException:
            self.close()
            raise
        self._finalizer = util.Finalize(None, self.close, exitpriority=1)

    @property
    def address(self) -> str:
        """The absolute path of the socket."""
        return self._place.path

    def close(self) -> int:
        """Close it, as `gradquorum.Server.close` does."""
        with self._lock:
            if self.closing:
                return 0
            # Before any conversation ends: who then finds its connection or the socket gone knows that all is well.
            for session in self._sessions.values():
                session.say_bye()
            self.closing = True
        try:
            self._end_conversations()
        finally:  # also after Ctrl-C: what is kept is saved, and the folder is free
            try:
                count, error = self.rounds.discard_all()
            finally:
                self._ended.set()
                reentry.forget(self.address, self._is_inside)
                self._end_checkpoints()
                with contextlib.suppress(AttributeError):
                    self._finalizer.cancel()
        if error is not None:
            raise error
        return count

    def _end_conversations(self) -> None:
        """Let nobody begin anything new, and wait a while for what is on its way."""
        self._place.remove()
        self.rounds.close_all()
        for link in self._snapshot():
            link.finish()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for link in self._snapshot():
            link.thread.join(max(deadline - time.monotonic(), 0.0))
        for link in self._snapshot():
            link.channel.shut_down()
            link.thread.join(1.0)
        while self.rounds.num_in_flight and time.monotonic() < deadline:  # to threads of this process
            time.sleep(_QUIET_SECONDS)

    @property
    def key(self) -> bytes:
        """What clients must know."""
        return self._place.key

    def open(self, spec: RoundSpec | None, shared_name: str) -> HostedTarget:
        """Return a handle of this process."""
        if self._place.is_foreign:
            raise InvalidArgumentError("target: this server belongs to the parent process; use its address")
        return HostedTarget(self.rounds, shared_name, spec, self.address)

    @property
    def held_bytes(self) -> int:
        """Shared memory, and what the rounds hold outside of it. What is being lent may count twice."""
        lent = sum(link.blocks.lent_bytes for link in self._snapshot())
        return self.memory.num_bytes + max(sum(hosted.held_bytes for hosted in self.rounds.all()) - lent, 0)

    def reclaim(self) -> None:
        """Give the system back the memory of gradients that have been merged."""
        for link in self._snapshot():
            link.blocks.reclaim()

    @property
    def is_settling(self) -> bool:
        """Whether a round has arrived and may still be given back."""
        return any(link.taking.acknowledged for link in self._snapshot())

    def wait(self, seconds: float) -> None:
        """Wait, or until the server is closed."""
        self._ended.wait(seconds)

    def session(self, token: bytes | None, link: Link) -> Session | None:
        """Return a new session for None, that of a token, or None if it has ended.

        Raises:
            ClosedError: the server has been closed.
        """
        with self._lock:
            if self.closing:
                raise ClosedError("the server has been closed")
            if token is None:
                session = Session(self.rounds, secrets.token_bytes(16), link.channel)
                self._sessions[session.token] = session
                return session
            return self._sessions.get(token)

    def end_session(self, session: Session) -> None:
        """End a session, and its other connections with it."""
        with self._lock:
            self._sessions.pop(session.token, None)
            # While closing, each still sends its reply; then it ends by itself.
            links = [] if self.closing else [link for link in self._links if link.session is session]
        session.end()
        for link in links:
            link.channel.shut_down()

    def remove_link(self, link: Link) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._links.discard(link)

    # Threads

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        """Return a thread of the server, not started."""
        return threading.Thread(target=self._run, args=(work,), name=f"gradquorum-{name}", daemon=True)

    def _run(self, work: Callable[[], None]) -> None:
        number = threading.get_ident()
        self._threads.add(number)
        try:
            work()
        finally:
            self._threads.discard(number)

    def _is_inside(self) -> bool:
        """Whether this thread is one of the server's or in a call on its rounds, interrupted by whoever asks."""
        return threading.get_ident() in self._threads or self.rounds.is_entered

    def _snapshot(self) -> list[Link]:
        with self._lock:
            return list(self._links)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._place.listener.accept()
            except OSError as error:
                if self.closing or error.errno in (errno.EINVAL, errno.EBADF):
                    return
                if error.errno != errno.ECONNABORTED:  # no descriptors, no memory: others may free some
                    self._ended.wait(_NO_DESCRIPTOR_SECONDS)
                continue
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        link = Link(self, channel)
        with self._lock:
            if not self.closing:
                self._links.add(link)
                with contextlib.suppress(RuntimeError):  # no more threads to be had
                    link.thread.start()
                    return
                self._links.discard(link)
        channel.close()

    def _keep_pace(self) -> None:
        """Tell those who have waited for a while that their reply is still to come."""
        while not self._ended.wait(HEARTBEAT_SECONDS):
            for link in self._snapshot():
                link.beat()

    def _save_often(self) -> None:
        """Save the rounds that have changed, again and again."""
        while not self._ended.wait(self._save_every):
            for hosted in self.rounds.all():
                hosted.try_to_save()

    def _end_checkpoints(self) -> None:
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.close()

    def _forget(self) -> None:
        """Close in a forked child what belongs to the parent."""
        self.closing = True
        self._end_checkpoints()
        place: Address | None = getattr(self, "_place", None)  # there is none yet if it was being made
        if place is not None:
            place.forget()
        for link in list(self._links):
            link.channel.forget()
