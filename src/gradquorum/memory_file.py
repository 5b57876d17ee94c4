"""Shared memory that has no name and outlives no process: a memory file, and handles by which others find it.

It is a memfd: no name in any file system, so nothing is left when the last process that has it is gone, however
that came about. (`multiprocessing.shared_memory` makes a file that somebody must unlink; its resource tracker unlinks
it under the others as soon as one process that attached ends.) Its size is sealed: no process can truncate it under
the others.

A handle says where the memory is found: descriptor N of process P, opened through /proc, and how it is to be called
there. So it may be unpickled any number of times, in a child of any start method as in an unrelated process of the same
user, as long as P has the table. (`multiprocessing.reduction.DupFd` works for children while they are started only;
elsewhere it needs a thread and a socket in the sender, and its handle can be used once.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from gradquorum.errors import ResourceExhaustedError, UnavailableError

__all__ = ["Handle", "MemoryFile"]


class MemoryFile:
    """A sealed memfd, mapped. Its descriptor is closed when nothing refers to the mapping any more."""

    __slots__ = ("_descriptor", "_name", "map")

    def __init__(self, descriptor: int, name: str, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._name = name
        try:
            self.map = mmap.mmap(descriptor, max(num_bytes, 1))
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(self.map, os.close, descriptor).atexit = False  # views outlive us, not the mapping

    @classmethod
    def create(cls, num_bytes: int) -> MemoryFile:
        """Make memory of zeros.

        Raises:
            ResourceExhaustedError: there is none of that size.
        """
        if not hasattr(os, "memfd_create"):
            raise NotImplementedError("shared_table: expected Linux, whose memory files it uses")
        import fcntl

        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if num_bytes > physical:  # Linux would promise it, and kill who uses it
            raise ResourceExhaustedError(
                f"shape: expected a table that fits into {physical} bytes of memory, got one of {num_bytes}",
                needed_bytes=num_bytes,
            )
        name = f"gradquorum-{os.urandom(16).hex()}"
        try:
            descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, max(num_bytes, 1))
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            except BaseException:
                os.close(descriptor)
                raise
            return cls(descriptor, name, num_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise ResourceExhaustedError(
                f"no shared memory for a table of {num_bytes} bytes: {error}", needed_bytes=num_bytes
            ) from error

    @classmethod
    def attach(cls, handle: Handle, num_bytes: int) -> MemoryFile:
        """Map what another process, or this one, has.

        Raises:
            UnavailableError: it is not there any more.
        """
        path = f"/proc/{int(handle.process)}/fd/{int(handle.descriptor)}"
        try:
            found = _name_of(path)  # before it is opened: the number may be another file's by now
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC) if found == handle.name else -1
        except OSError as error:
            raise handle.lost(error.strerror) from error
        if descriptor < 0 or _name_of(f"/proc/self/fd/{descriptor}") != handle.name:
            if descriptor >= 0:
                os.close(descriptor)
            raise handle.lost(f"descriptor {handle.descriptor} of that process is another file")
        return cls(descriptor, handle.name, num_bytes)

    def handle(self) -> Handle:
        """Return where another process finds this memory, as long as this process has it."""
        return Handle(os.getpid(), self._descriptor, self._name)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until no other thread or process is in here, and keep it out. A lock ends with its process."""
        import fcntl

        # Opened anew each time, as such a lock is shared by all that have the same open file: threads, forked children.
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile has the descriptor, too
            os.close(descriptor)


class Handle(NamedTuple):
    """Where memory is found."""

    process: int
    descriptor: int
    name: str

    def lost(self, reason: str | None) -> UnavailableError:
        """Return the error of who does not find it."""
        return UnavailableError(
            f"shared_table: expected process {self.process}, which pickled the table, to have it still; {reason}. "
            "Keep the table there until it is unpickled"
        )


def _name_of(path: str) -> str:
    """Return the name under which the memfd at this path was made."""
    return os.readlink(path).removeprefix("/memfd:").removesuffix(" (deleted)")
