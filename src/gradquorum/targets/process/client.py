"""The client's side: one session for each server, and connections that are used one call at a time."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import util
from typing import Any, NoReturn

import msgspec

from gradquorum.errors import ClosedError, UnavailableError
from gradquorum.targets.process import messages as m
from gradquorum.targets.process.address import as_path, check_key, dial, find_key, know_key, known_key
from gradquorum.targets.process.channel import ANSWER_SECONDS, AUTHENTICATE_SECONDS, BrokenChannel, Channel
from gradquorum.targets.process.connection import Connection
from gradquorum.targets.process.failures import to_error
from gradquorum.targets.process.reentry import check_outside

__all__ = ["Client", "client_of", "connect_to"]

_MAX_IDLE = 16
_MAX_REPLY_BYTES = 1 << 30
"""A client believes its server."""
_LOOK_UP_SECONDS = 0.5
"""How often a wait in the main thread looks for signals that came just before it began."""
_GIVE_UP_SECONDS = 1.0
_clients: dict[str, Client] = {}
"""By path. Guarded by _clients_lock."""
_clients_lock = threading.RLock()


def client_of(address: str | os.PathLike[str]) -> Client:
    """Return this process's session with a server, a new one if the last has ended.

    Raises:
        UnavailableError: there is no server, or it does not know us.
    """
    path = as_path(address)
    check_outside(path)
    with _clients_lock:
        client = _clients.get(path)
        if client is None or not client.alive:
            client = _clients[path] = Client(path)
        return client


def connect_to(address: str | os.PathLike[str], authkey: bytes | None) -> str:
    """Remember a server's key, see whether the server is there, and return its path.

    Raises:
        InvalidArgumentError: the address or the key is none.
        UnavailableError: it is not, or does not know us. The key is as it was.
    """
    check_key(authkey)
    path = as_path(address)
    before = known_key(path)
    know_key(path, authkey)
    try:
        client_of(path)
    except BaseException:
        know_key(path, before)
        raise
    return path


def _after_fork() -> None:
    global _clients, _clients_lock, _main_thread
    for client in _clients.values():
        client.forget()
    _clients, _clients_lock, _main_thread = {}, threading.RLock(), threading.main_thread().ident


os.register_at_fork(after_in_child=_after_fork)

_main_thread = threading.main_thread().ident
"""Changes in a fork only."""


def _in_main_thread() -> bool:
    return threading.get_ident() == _main_thread


class Client:
    """The session of this process with one server.

    Any thread may call; each call has a connection to itself. A call that is cut off (Ctrl-C, an error) closes its
    connection: the server ends what it was doing for it, and takes a round back that was not acknowledged.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._idle: dict[bool, list[Connection]] = {False: [], True: []}
        """Those of the main thread apart: a signal may come after a connection was given back and before its call has
        ended, and then nobody else must have it. `append`, `pop` and `remove` need no lock."""
        self._failure: BaseException | None = None
        """Why the session has ended."""
        self._lock = threading.RLock()
        """Held while the session ends."""
        self.handovers: set[Any] = set()
        """Takes that coroutines wait for, in case their event loop is closed under them."""
        self.dropped: deque[int] = deque()
        """Handles that nobody can use any more, to be released with the next call."""
        self._anchor, self._token = self._connect(None)
        self._finalizer = util.Finalize(None, self._say_goodbye, exitpriority=1)

    # Sessions

    def _connect(self, token: bytes | None) -> tuple[Channel, bytes]:
        """Return a connection and the session's token.

        A server drops who is slow to prove its key, which on a busy machine can be anybody: then it is asked again.
        """
        until = time.monotonic() + ANSWER_SECONDS
        while True:
            began = time.monotonic()
            try:
                return self._shake_hands(token)
            except UnavailableError:
                if time.monotonic() - began < AUTHENTICATE_SECONDS or time.monotonic() > until:
                    raise

    def _shake_hands(self, token: bytes | None) -> tuple[Channel, bytes]:
        channel = Channel(dial(self.path), timeout=ANSWER_SECONDS)
        try:
            channel.show_key(find_key(self.path))
            channel.send(m.encode(m.Hello(m.VERSION, token)))
            welcome = m.FROM_SERVER.decode(channel.receive())
            if isinstance(welcome, m.Failure):
                raise to_error(welcome)
            if isinstance(welcome, m.Bye):
                raise ClosedError("the server has been closed")
            if not isinstance(welcome, m.Welcome):
                raise BrokenChannel("the server does not speak our language")
            return channel, welcome.session
        except BaseException as error:
            channel.close()
            if isinstance(error, (BrokenChannel, msgspec.MsgspecError)):
                raise UnavailableError(f"the server at {self.path} cannot be reached: {error}") from error
            raise

    @property
    def ended(self) -> bool:
        """Whether the session has ended, and another is needed."""
        return self._failure is not None

    @property
    def alive(self) -> bool:
        """Whether the session goes on, as far as can be seen without asking the server."""
        if not self.ended and self._anchor.readable(0):  # nothing but an end or a farewell comes there
            self._end(BrokenChannel("it has ended"))
        return not self.ended

    @property
    def was_closed(self) -> bool:
        """Whether the session has ended because the server was closed in an orderly way."""
        return isinstance(self._failure, ClosedError)

    def check(self) -> None:
        """Raise if the session has ended."""
        if self._failure is not None:
            self._raise_ended(self._failure, outcome_known=True)

    def _raise_ended(self, failure: BaseException, *, outcome_known: bool) -> NoReturn:
        if isinstance(failure, ClosedError):
            raise ClosedError(str(failure))
        unknown = "" if outcome_known else "; whether this has taken effect is not known"
        raise UnavailableError(
            f"the server at {self.path} is gone: {failure}; make a new handle once there is one again{unknown}",
            outcome_known=outcome_known,
        )

    def _end(self, failure: BaseException) -> BaseException:
        """End the session because a connection broke, and return why it really did."""
        with self._lock:
            if self._failure is None:
                with contextlib.suppress(BrokenChannel, msgspec.MsgspecError):
                    if self._anchor.readable(0) and isinstance(m.FROM_SERVER.decode(self._anchor.receive()), m.Bye):
                        failure = ClosedError("the server has been closed")
                self._failure = failure
                self._finalizer.cancel()
                self._anchor.close()  # if the server lives, it ends our leases now
                for idle in self._idle.values():
                    while idle:
                        idle.pop().channel.close()
            return self._failure

    def _say_goodbye(self) -> None:
        """End the session in an orderly way, as the process ends."""
        with contextlib.suppress(BrokenChannel):
            self._anchor.send(m.encode(m.Goodbye()))

    def forget(self) -> None:
        """Close in a forked child what belongs to the parent."""
        self._failure = ClosedError(
            "this handle belongs to the process that made it and this is a forked child of that one; make a new "
            "one here (the same shared_name and target), or start the child with the 'spawn' method"
        )
        self._anchor.forget()
        for connection in [*self._idle[False], *self._idle[True]]:
            connection.channel.forget()

    # Calls

    def check_out(self) -> Connection:
        """Return a connection for one call.

        Raises:
            ClosedError: the server has been closed, or this is a forked child.
            UnavailableError: the server is gone.
            GradQuorumError: the call might wait for itself: see `reentry.py`.
        """
        self.check()
        check_outside(self.path)
        try:
            return self._idle[_in_main_thread()].pop()
        except IndexError:
            try:
                return Connection(self._connect(self._token)[0])
            except (UnavailableError, ClosedError) as error:
                self._raise_ended(self._end(error), outcome_known=True)

    def check_in(self, connection: Connection) -> None:
        """Give a connection back whose call has ended."""
        idle = self._idle[_in_main_thread()]
        if self._failure is None and len(idle) < _MAX_IDLE:
            idle.append(connection)
        else:
            connection.channel.close()

    def call(self, message: Any, *, outcome_known: bool = True) -> Any:
        """Make a request and return its reply. `outcome_known` is as for `exchange`.

        Raises:
            GradQuorumError: what the server answered.
            UnavailableError: the server is gone.
        """
        connection = self.check_out()
        try:
            reply = self.exchange(connection, message, outcome_known=outcome_known)
        except BaseException:
            connection.channel.close()
            raise
        self.check_in(connection)
        if type(reply) is m.Failure:
            raise to_error(reply)
        return reply

    def exchange(self, connection: Connection, message: Any, *, outcome_known: bool = True, ahead: bool = False) -> Any:
        """Make a request over a connection and return its reply, be it a failure.

        Args:
            connection: checked out by the caller, who closes it if this raises.
            message: the request.
            outcome_known: whether nothing has changed if no reply comes.
            ahead: whether no reply to this is followed by a descriptor, so that one read may get all of it.

        Raises:
            UnavailableError: the server is gone.
        """
        self.send(connection, message)
        try:
            return self.receive(connection, ahead=ahead)
        except BrokenChannel as error:
            self.fail(error, outcome_known=outcome_known)

    def fail(self, error: BrokenChannel, *, outcome_known: bool = True) -> NoReturn:
        """End the session because a connection broke, and raise what callers see."""
        self._raise_ended(self._end(error), outcome_known=outcome_known)

    def send(self, connection: Connection, message: Any) -> None:
        """Send a request; raises like `exchange`, and InvalidArgumentError for one that no server reads."""
        data = m.encode_request(message)
        try:
            if self.dropped:
                connection.channel.send(m.encode(m.Release(tuple(self._drain()))))
            connection.channel.send(data)
        except BrokenChannel as error:
            self.fail(error)

    def receive(
        self,
        connection: Connection,
        log_at: float = float("inf"),
        log: Callable[[], float] | None = None,
        on_detached: Callable[[], None] | None = None,
        *,
        ahead: bool = False,
    ) -> Any:
        """Return the reply to a request.

        Args:
            connection: that the request was sent over.
            log_at: a moment of the monotonic clock; if no reply has come by then,
            log: is called, and returns the next such moment.
            on_detached: is called when a take cannot be cancelled any more.
            ahead: as for `exchange`.

        Raises:
            BrokenChannel: the server is gone.
        """
        while True:
            if log is not None:
                log_at = self._wait(connection.channel, log_at, log)
            try:
                reply = m.FROM_SERVER.decode(connection.channel.receive(_MAX_REPLY_BYTES, ahead=ahead))
            except msgspec.MsgspecError as error:
                raise BrokenChannel(f"the server does not speak our language: {error}") from error
            if type(reply) is m.Detached:
                if on_detached is not None:
                    on_detached()
            elif type(reply) is not m.Heartbeat:
                break
        if type(reply) is m.Failure:
            connection.give_back(reply.freed)
        return reply

    def give_up(self, connection: Connection) -> None:
        """Close a connection in the middle of a take, and wait until the server has taken the round back."""
        with contextlib.suppress(OSError):
            connection.retract()
        with contextlib.suppress(ValueError):
            self._idle[_in_main_thread()].remove(connection)
        channel = connection.channel
        try:
            channel.shut_down(socket.SHUT_WR)
            until = time.monotonic() + _GIVE_UP_SECONDS
            while channel.readable(max(until - time.monotonic(), 0.0)):
                channel.receive(_MAX_REPLY_BYTES)
        except BrokenChannel:
            pass
        finally:
            channel.close()

    def _wait(self, channel: Channel, log_at: float, log: Callable[[], float]) -> float:
        """Wait until there is something to receive. A signal that comes just before a wait begins does not end it."""
        heard_at = time.monotonic()
        most = _LOOK_UP_SECONDS if _in_main_thread() else ANSWER_SECONDS
        while not channel.readable(min(most, max(log_at - time.monotonic(), 0.0))):
            if time.monotonic() >= log_at:
                log_at = log()
            if time.monotonic() - heard_at > ANSWER_SECONDS:
                raise BrokenChannel(f"no answer for {ANSWER_SECONDS:.0f} s")
        return log_at

    def _drain(self) -> list[int]:
        handles: list[int] = []
        with contextlib.suppress(IndexError):
            while len(handles) < m.MAX_IDS:
                handles.append(self.dropped.popleft())
        return handles
