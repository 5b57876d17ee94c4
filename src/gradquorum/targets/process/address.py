"""Where a server is found: its socket, and the key beside it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shlex
import shutil
import socket
import stat
import tempfile
import time

from gradquorum.errors import InvalidArgumentError, UnavailableError

__all__ = ["Address", "as_path", "check_key", "dial", "find_key", "know_key", "known_key"]

_KEY_SUFFIX = ".key"
_KEY_BYTES = 32
_MAX_KEY_BYTES = 4096
_MAX_PATH_BYTES = 107
"""Of a Unix socket on Linux."""
_MAX_BACKLOG = 2**16 - 1
"""Linux makes it as much as it allows (net.core.somaxconn)."""
_DIAL_SECONDS = 30.0
_REDIAL_SECONDS = 0.01

_keys: dict[str, bytes] = {}
"""Keys that the user gave, by path."""


def check_key(authkey: bytes | None) -> None:
    """Check a key that the user gives.

    Raises:
        InvalidArgumentError: it is none.
    """
    if authkey is not None and (not isinstance(authkey, bytes) or not authkey):
        got = "b''" if authkey == b"" else type(authkey).__name__  # never the key itself
        raise InvalidArgumentError(f"authkey: expected bytes, at least one, or None; got {got}")


def know_key(path: str, key: bytes | None) -> None:
    """Remember the key of a server; None forgets it, and the file beside the socket counts."""
    if key is None:
        _keys.pop(path, None)
    else:
        _keys[path] = key


def known_key(path: str) -> bytes | None:
    """Return the key that the user gave for a server."""
    return _keys.get(path)


def find_key(path: str) -> bytes:
    """Return the key of a server: what the user gave, else what lies beside the socket.

    Raises:
        UnavailableError: there is none for us.
    """
    return known_key(path) or _read_key(path)


def as_path(address: str | os.PathLike[str]) -> str:
    """Return the absolute path of a socket.

    Raises:
        InvalidArgumentError: there can be no socket of that path.
    """
    if not isinstance(address, (str, os.PathLike)) or isinstance(os.fspath(address), bytes):
        raise InvalidArgumentError(f"address: expected a path, got {address!r}")
    path = os.path.abspath(os.fspath(address))
    if len(os.fsencode(path)) + len(_KEY_SUFFIX) > _MAX_PATH_BYTES or "\0" in path:
        raise InvalidArgumentError(
            f"address: expected the path of a Unix socket, at most {_MAX_PATH_BYTES - len(_KEY_SUFFIX)} bytes, "
            f"got {path!r}"
        )
    return path


def _read_key(path: str) -> bytes:
    """Return the key that lies beside a socket.

    Raises:
        UnavailableError: there is none for us.
    """
    try:
        with open(path + _KEY_SUFFIX, "rb") as file:
            key = file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise UnavailableError(f"no server at {path}, or not one for this user: {error}{_start_one(path)}") from error
    if not key:
        raise UnavailableError(f"the server at {path} was given a key: call gradquorum.connect(address, authkey) first")
    return key


def dial(path: str) -> socket.socket:
    """Return a socket that is connected to a server.

    Raises:
        UnavailableError: nobody listens there, or whoever does has not accepted anybody for long.
    """
    until = time.monotonic() + _DIAL_SECONDS
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)  # a blocking connect that a signal interrupts would seem to have succeeded
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:  # the listener's queue is full
                if time.monotonic() >= until:
                    raise
            time.sleep(_REDIAL_SECONDS)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise UnavailableError(f"no server at {path}: {error}{_start_one(path)}") from error
        raise
    return sock


def _start_one(path: str) -> str:
    return f"; start one: gradquorum serve --address {shlex.quote(path)}, or gradquorum.Server(...) in a program"


class Address:
    """The socket of one server, its key file, and its right to be there: a lock on the key file, for its lifetime.

    The folder of the path is made, for this user only, if it is not there; it is left when the server ends.
    """

    def __init__(self, address: str | os.PathLike[str] | None, authkey: bytes | None) -> None:
        check_key(authkey)
        self._directory: str | None = None
        if address is None:
            self._directory = tempfile.mkdtemp(prefix="gradquorum-")
            address = os.path.join(self._directory, "server")
        made: str | None = None
        try:
            self.path = as_path(address)
            made = _make_folder(os.path.dirname(self.path))
            self._pid = os.getpid()
            self._lock = self._lock_key_file()
            try:
                self.key = authkey or secrets.token_bytes(_KEY_BYTES)
                os.ftruncate(self._lock, 0)
                if authkey is None:
                    os.write(self._lock, self.key)
                self.listener = self._listen()
            except BaseException:
                _unlink(self.path + _KEY_SUFFIX)
                os.close(self._lock)
                raise
        except BaseException:
            self._remove_directory()
            if made is not None:
                with contextlib.suppress(OSError):  # somebody has put something there meanwhile
                    os.rmdir(made)
            raise
        know_key(self.path, authkey)

    def _lock_key_file(self) -> int:
        name = self.path + _KEY_SUFFIX
        while True:
            try:
                lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise InvalidArgumentError(
                    f"address: expected a path in a folder where files can be made: {error}; give another path"
                ) from error
            try:
                os.fchmod(lock, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock), os.stat(name)):
                        return lock
            except BlockingIOError:
                os.close(lock)
                raise InvalidArgumentError(
                    f"address: expected one without a server, but a living one has {self.path}"
                ) from None
            except BaseException as error:
                os.close(lock)
                if isinstance(error, OSError):
                    raise InvalidArgumentError(f"address: cannot lock {name}: {error}") from error
                raise
            os.close(lock)  # a server that was just closed has removed it: make a new one

    def _listen(self) -> socket.socket:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise InvalidArgumentError(f"address: {self.path} is there already and is no socket")
            os.unlink(self.path)  # of a dead server: we hold the lock
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.path)
            os.chmod(self.path, 0o600)  # nobody can connect before listen()
            listener.listen(_MAX_BACKLOG)
        except BaseException as error:
            listener.close()
            if isinstance(error, OSError):
                raise InvalidArgumentError(f"address: cannot listen at {self.path}: {error}") from error
            raise
        return listener

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child of the process that the address belongs to."""
        return os.getpid() != self._pid

    def remove(self) -> None:
        """Remove what is in the file system, then free the address. Does nothing in a forked child."""
        if self.is_foreign:
            return
        know_key(self.path, None)
        _unlink(self.path)
        _unlink(self.path + _KEY_SUFFIX)
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self.listener.close()
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._remove_directory()

    def forget(self) -> None:
        """Close the descriptors in a forked child: the address belongs to the parent."""
        self.listener.close()
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def _make_folder(folder: str) -> str | None:
    """Make the folder of an address, for this user only; return None if it is there already."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return None
    except OSError as error:
        raise InvalidArgumentError(
            f"address: the folder {folder} is not there and cannot be made: {error.strerror}; make it first, with "
            f"mkdir -p {shlex.quote(folder)}, or give another path"
        ) from error
    return folder


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
