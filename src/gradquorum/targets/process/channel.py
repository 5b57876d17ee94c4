"""The wire: whole messages of bytes over a Unix socket, with caps and deadlines, and descriptors from the server.

A message is framed as `multiprocessing.connection` frames bytes, with whose handshake a conversation begins, by fewer
steps of Python than it takes. What goes over the wire is never an object.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError, connection, reduction

from gradquorum.targets.process.messages import MAX_MESSAGE_BYTES

__all__ = ["ANSWER_SECONDS", "AUTHENTICATE_SECONDS", "HEARTBEAT_SECONDS", "BrokenChannel", "Channel", "frame"]

ANSWER_SECONDS = 30.0
"""Whoever hears nothing for so long takes the other side for dead."""
AUTHENTICATE_SECONDS = 2.0
"""A server drops who has not proven its key by then."""
HEARTBEAT_SECONDS = 5.0
"""How often the server says that a reply is still to come."""
_LENGTH = struct.Struct("!i")
"""Before each message. A negative one would announce a message longer than anybody reads."""
_READ_AHEAD_BYTES = 1 << 13
"""Most messages are shorter: they come with their length in one system call."""


def frame(message: bytes) -> bytes:
    """Return a message as it goes over the wire."""
    return _LENGTH.pack(len(message)) + message


class BrokenChannel(Exception):
    """The other side is gone, does not answer, or does not speak our language. Never leaves the package."""


class Channel:
    """One connection. One thread at a time receives; any may send."""

    __slots__ = ("__weakref__", "_ahead", "_connection", "_descriptor", "_lock", "_poll")

    def __init__(self, sock: socket.socket, timeout: float | None = None) -> None:
        """Take over a connected socket.

        Args:
            sock: left empty.
            timeout: seconds after which a receive or a send has failed; None waits without end.
        """
        sock.setblocking(True)
        if timeout is not None:
            _set_timeout(sock, socket.SO_RCVTIMEO, timeout)
        _set_timeout(sock, socket.SO_SNDTIMEO, ANSWER_SECONDS)
        self._connection = connection.Connection(sock.detach())
        self._descriptor = self._connection.fileno()
        """-1 once it is closed: no system call takes it for another file's."""
        self._lock = threading.Lock()
        """Held while a message is sent, and while the descriptor is closed or borrowed."""
        self._poll: select.poll | None = None
        self._ahead = b""
        """What was read beyond the last message. Only the receiving thread touches it."""

    def fileno(self) -> int:
        return self._connection.fileno()

    @contextlib.contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        """Lend the socket as such, for what few calls need it."""
        try:
            descriptor = os.dup(self._connection.fileno())
        except OSError as error:
            raise BrokenChannel(f"no descriptor: {error}") from error
        with socket.socket(fileno=descriptor) as sock:
            yield sock

    def set_receive_timeout(self, timeout: float) -> None:
        """Set the seconds after which a receive has failed; 0 waits without end."""
        with self._lock, self._socket() as sock:
            _set_timeout(sock, socket.SO_RCVTIMEO, timeout)

    def send(self, message: bytes, descriptor: int | None = None) -> None:
        """Send one message and, right behind it, a descriptor.

        Raises:
            BrokenChannel: the other side is gone, or has not read for long.
        """
        try:
            data = _LENGTH.pack(len(message)) + message
            with self._lock:
                written = os.write(self._descriptor, data)
                while written < len(data):
                    written += os.write(self._descriptor, memoryview(data)[written:])
                if descriptor is not None:
                    reduction.send_handle(self._connection, descriptor, None)
        except OSError as error:
            raise BrokenChannel(_words(error)) from error

    def send_at_once(self, message: bytes) -> bool:
        """Send a short message if that needs no wait and nobody is sending; False if the other side is gone."""
        if not self._lock.acquire(blocking=False):
            return True
        try:
            with self._socket() as sock:
                sock.send(frame(message), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except (OSError, BrokenChannel):
            return False
        finally:
            self._lock.release()
        return True

    def receive(self, max_bytes: int = MAX_MESSAGE_BYTES, *, ahead: bool = False) -> bytes:
        """Return the next message.

        Args:
            max_bytes: how long it may be.
            ahead: read what has come behind it, too, which saves a system call. Not where a descriptor may follow: who
                reads past one loses it.

        Raises:
            BrokenChannel: the other side is gone or silent for too long, or the message is too long.
        """
        try:
            data = self._ahead or os.read(self._descriptor, _READ_AHEAD_BYTES if ahead else _LENGTH.size)
            if len(data) < _LENGTH.size:
                data += _read(self._descriptor, _LENGTH.size - len(data))
            (length,) = _LENGTH.unpack_from(data)
            if 0 <= length <= max_bytes:
                end = _LENGTH.size + length
                if len(data) < end:
                    data += _read(self._descriptor, end - len(data))
                self._ahead = data[end:] if len(data) > end else b""
                return data[_LENGTH.size : end]
        except (EOFError, OSError) as error:
            raise BrokenChannel(_words(error)) from error
        raise BrokenChannel(f"a message is too long: {length} bytes")

    def receive_descriptor(self) -> int:
        """Return the descriptor that follows a message.

        Raises:
            BrokenChannel: there is none.
        """
        try:
            return reduction.recv_handle(self._connection)
        except (EOFError, OSError, RuntimeError, AssertionError) as error:
            raise BrokenChannel(_words(error)) from error

    def readable(self, seconds: float) -> bool:
        """Wait until there is something to receive, be it the end; False if the seconds pass first."""
        if self._ahead:
            return True
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._connection.fileno(), select.POLLIN)
        return bool(self._poll.poll(seconds * 1000))

    @property
    def has_read_ahead(self) -> bool:
        """Whether there is something to receive of which a poll of the descriptor does not tell."""
        return bool(self._ahead)

    @property
    def closed(self) -> bool:
        """Whether we have closed it."""
        return self._connection.closed

    @property
    def at_end(self) -> bool:
        """Whether the other side has closed and nothing is left to receive."""
        if self._ahead:
            return False
        try:
            with self._lock, self._socket() as sock:
                return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except (OSError, BrokenChannel):
            return True

    def demand_key(self, key: bytes) -> None:
        """Let the other side prove that it knows the key, then prove that we do.

        Raises:
            BrokenChannel: it does not.
        """
        self._prove(key, connection.deliver_challenge, connection.answer_challenge)

    def show_key(self, key: bytes) -> None:
        """Do the same from the other side."""
        self._prove(key, connection.answer_challenge, connection.deliver_challenge)

    def _prove(self, key: bytes, *steps: Callable[[connection.Connection, bytes], None]) -> None:
        try:
            for step in steps:
                step(self._connection, key)
        except AuthenticationError as error:
            raise BrokenChannel("the authentication key is not the right one") from error
        except (EOFError, OSError, ValueError, AssertionError) as error:
            raise BrokenChannel(_words(error)) from error

    def shut_down(self, how: int = socket.SHUT_RDWR) -> None:
        """End the conversation: whoever receives, here or there, sees the end."""
        with self._lock, contextlib.suppress(OSError, BrokenChannel), self._socket() as sock:
            sock.shutdown(how)

    def close(self) -> None:
        """Close the descriptor. No other thread may be receiving."""
        with self._lock:
            self._descriptor = -1
            self._connection.close()

    def forget(self) -> None:
        """Close the descriptor in a forked child, where locks may be held for ever."""
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._connection.close()


def _read(descriptor: int, size: int) -> bytes:
    data = os.read(descriptor, size)
    if len(data) == size:
        return data
    parts = [data]
    while data and (size := size - len(data)):
        data = os.read(descriptor, size)
        parts.append(data)
    if size:
        raise EOFError
    return b"".join(parts)


def _set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    whole = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, int((seconds - whole) * 1e6)))


def _words(error: BaseException) -> str:
    if isinstance(error, BlockingIOError):
        return f"no answer for {ANSWER_SECONDS:.0f} s"
    return str(error) or "the connection was closed"
