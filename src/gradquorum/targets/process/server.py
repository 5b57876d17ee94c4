"""The server: hosts rounds by name for the processes of this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from multiprocessing import util
from typing import TYPE_CHECKING, Any, Self

from gradquorum.errors import ClosedError, GradQuorumError, InvalidArgumentError
from gradquorum.specs import RoundSpec
from gradquorum.targets.process.address import Address
from gradquorum.targets.process.channel import HEARTBEAT_SECONDS, Channel
from gradquorum.targets.process.checkpoints import Checkpoints
from gradquorum.targets.process.hosted import HostedTarget, Rounds
from gradquorum.targets.process.link import Link
from gradquorum.targets.process.memory import SharedMemory
from gradquorum.targets.process.session import Session

if TYPE_CHECKING:
    from gradquorum.accumulators import ConditionalAccumulator, SparseConditionalAccumulator
    from gradquorum.groups import AccumulatorGroup

__all__ = ["Server"]

_NO_DESCRIPTOR_SECONDS = 0.1
_QUIET_SECONDS = 0.001
_CLOSE_SECONDS = 5.0
"""How long those who are about to receive a round may take to acknowledge it."""

_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _after_fork() -> None:
    for server in list(_servers):
        server._forget()
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork)


class Server:
    """Hosts accumulators and groups that other processes of this machine use by `target=address, shared_name=...`.

    It serves from threads of this process, from the moment it is made until `close()`, the end of the ``with`` block
    or the end of the process. The rounds live here: a client that dies takes nothing with it but what it had not
    committed. A round closes with its last handle, unless that handle's process died: then it stays, with its step
    and its marks, until somebody attaches again and closes it, or the server is closed.

    Args:
        address: path of the Unix socket, in a folder that is made with mode 0700 if it is not there; None for a socket
            in a new directory of its own. What a dead server left there is replaced.
        authkey: what clients must know, bytes; None makes a key and keeps it in a file of mode 0600 beside the socket,
            where every process of this user finds it.
        max_bytes: budget for shared memory and for what all rounds hold; None without one. What does not fit is
            refused with `ResourceExhaustedError`, or waits where the accumulator was made with ``on_full="block"``.
        checkpoint: a folder to keep rounds in, made if it is not there; None keeps none. Rounds that have a
            `shared_name` then outlive their handles and the server: the next server of the folder begins with them,
            and ``close(for_all=True)`` ends them. Needs the extra ``checkpoint``.
        checkpoint_every: seconds after which a round that has changed is saved, besides before and after each take; 0
            saves each change before the client hears of it. ``docs/processes.md`` says what that promises.

    Raises:
        InvalidArgumentError: there is a living server at the address or with the folder, the folder of the address
            cannot be made, or an argument cannot be.
        GradQuorumError: this is not Linux, or safetensors is not installed.

    Threads:
        All methods may be called from any thread. One thread for each connection; idle ones cost nothing.

    Example:
        >>> import gradquorum as gq
        >>> with gq.Server() as server:
        ...     acc = gq.SparseConditionalAccumulator("float32", (5, 1), "emb", target=server.address)
        ...     _ = acc.apply_grad([3], [[1.0]])
        ...     print(gq.attach("emb", server.address).take_grad(1).indices)
        [3]
    """

    def __init__(
        self,
        address: str | os.PathLike[str] | None = None,
        *,
        authkey: bytes | None = None,
        max_bytes: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: float = 30.0,
    ) -> None:
        if sys.platform != "linux":
            raise GradQuorumError(f"several processes need Linux, and this is {sys.platform}; use the local target")
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            raise InvalidArgumentError(f"max_bytes: expected 1 or more, or None; got {max_bytes!r}")
        if checkpoint is not None and not (isinstance(checkpoint, (str, os.PathLike)) and os.fspath(checkpoint)):
            raise InvalidArgumentError(f"checkpoint: expected the path of a folder, or None; got {checkpoint!r}")
        if type(checkpoint_every) not in (int, float) or not 0 <= checkpoint_every <= threading.TIMEOUT_MAX:
            raise InvalidArgumentError(f"checkpoint_every: expected seconds, 0 or more; got {checkpoint_every!r}")
        self._checkpoints = None if checkpoint is None else Checkpoints(checkpoint, checkpoint_every)
        self.keeps = checkpoint is not None
        """Whether rounds are saved."""
        self.keeps_each = checkpoint is not None and checkpoint_every == 0
        """Whether each change is saved before the client hears of it."""
        self.rounds = Rounds(self._checkpoints)
        self.memory = SharedMemory()
        self.max_bytes = max_bytes
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        """Guarded by _lock, as the next two are."""
        self._sessions: dict[bytes, Session] = {}
        self.closing = False
        """Whether it has been closed."""
        try:
            self.rounds.restore_all()
            self._place = Address(address, authkey)
        except BaseException:
            self._end_checkpoints()
            raise
        try:
            works = [(self._accept, "accept"), (self._keep_pace, "heartbeat")]
            if self._checkpoints is not None and checkpoint_every:
                works.append((self._save_often, "checkpoint"))
            for work, name in works:
                threading.Thread(target=work, name=f"gradquorum-{name}", daemon=True).start()
        except BaseException:
            self.close()
            raise
        self._finalizer = util.Finalize(None, self.close, exitpriority=1)
        _servers.add(self)

    # Public

    @property
    def address(self) -> str:
        """The absolute path of the socket: what clients give as `target`."""
        return self._place.path

    def accumulator(
        self, dtype: Any, shape: Any = None, shared_name: str | None = None, *, dense: bool = False, **options: Any
    ) -> SparseConditionalAccumulator | ConditionalAccumulator:
        """Return an accumulator on a round of this server, for this process: its calls do not leave it.

        It pickles, and attaches over the socket where it is unpickled.

        Args:
            dtype: as for the class, like all that follows.
            shape: of the table, or of the whole gradient.
            shared_name: None makes a name that nobody else has.
            dense: make a `ConditionalAccumulator`.
            options: of the class.

        Returns:
            A `SparseConditionalAccumulator`, or with `dense` a `ConditionalAccumulator`.

        Raises:
            InvalidArgumentError: what the class refuses, or the round of that name was made from another spec.
            ClosedError: the server has been closed.
        """
        from gradquorum.accumulators import ConditionalAccumulator, SparseConditionalAccumulator

        kind = ConditionalAccumulator if dense else SparseConditionalAccumulator
        return kind(dtype, shape, shared_name, target=self, **options)

    def group(self, members: Mapping[str, Any], shared_name: str | None = None, **options: Any) -> AccumulatorGroup:
        """Return a group on a round of this server, as `accumulator` does: `members` and options are of the class."""
        from gradquorum.groups import AccumulatorGroup

        return AccumulatorGroup(members, shared_name, target=self, **options)

    def close(self) -> int:
        """Close all rounds, end all conversations and remove the socket; closing again does nothing.

        Waiting takes, here and in other processes, end with `CancelledError`, later calls with `ClosedError`. Rounds
        that are kept are saved.

        Returns:
            How many accepted, not delivered gradients of other rounds that discarded.

        Raises:
            GradQuorumError: a round could not be saved: its file is as it was. All is closed nevertheless.
        """
        with self._lock:
            if self.closing:
                return 0
            # Before any conversation ends: who then finds its connection or the socket gone knows that all is well.
            for session in self._sessions.values():
                session.say_bye()
            self.closing = True
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
        count, error = self.rounds.discard_all()
        self._ended.set()
        self._end_checkpoints()
        with contextlib.suppress(AttributeError):
            self._finalizer.cancel()
        if error is not None:
            raise error
        return count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server at {self.address}: {'closed' if self.closing else f'{len(self.rounds.all())} rounds'}>"

    # For the rest of the package

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
        assert self._checkpoints is not None
        while not self._ended.wait(self._checkpoints.every):
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
        self._place.forget()
        for link in list(self._links):
            link.channel.forget()
