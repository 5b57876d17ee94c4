"""Shared memory that has no name and outlives no process: a memory file, and handles by which others find it.

It is a memfd: no name in any file system, so nothing is left when the last process that has it is gone, however
that came about. (`multiprocessing.shared_memory` makes a file that somebody must unlink; its resource tracker unlinks
it under the others as soon as one process that attached ends.) Its size is sealed: whoever maps it can be given wrong
numbers by another who maps it, but never a fault.

A handle says where the memory is found: descriptor N of process P, opened through /proc, and how it is to be called
there. So it may be unpickled any number of times, in a child of any start method as in an unrelated process of the same
user, as long as P has the table. (`multiprocessing.reduction.DupFd` works for children while they are started only;
elsewhere it needs a thread and a socket in the sender, and its handle can be used once.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from gradquorum.errors import GradQuorumError, ResourceExhaustedError, UnavailableError

__all__ = ["Handle", "MemoryFile", "make_sealed", "map_private", "map_shared"]


def make_sealed(name: str, num_bytes: int, *, reserve: bool) -> int:
    """Return the descriptor of new memory of zeros, whose size nobody can change. The caller closes it.

    Args:
        name: what `/proc` says it is; need not be unique.
        num_bytes: 1 or more.
        reserve: whether its pages are there at once; if not, each is looked for when it is first written to, and
            Linux kills somebody if there is none.

    Raises:
        ResourceExhaustedError: there is no memory, or no descriptor.
    """
    import fcntl

    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes) if reserve else os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(descriptor)
            raise
    except (OSError, OverflowError) as error:
        raise ResourceExhaustedError(
            f"no shared memory: {error}; nothing has changed", needed_bytes=num_bytes
        ) from error
    return descriptor


def map_shared(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map a memory file: what one side writes the other reads.

    Raises:
        ResourceExhaustedError: there is no address space.
    """
    return _map(descriptor, num_bytes, mmap.MAP_SHARED)


def map_private(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map a memory file such that what is written here is seen here only; raises like `map_shared`."""
    return _map(descriptor, num_bytes, mmap.MAP_PRIVATE)


def _map(descriptor: int, num_bytes: int, flags: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, num_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError, OverflowError) as error:
        raise ResourceExhaustedError(f"no address space: {error}", needed_bytes=num_bytes) from error


class MemoryFile:
    """A sealed memfd, mapped. Its descriptor is closed when nothing refers to the mapping any more."""

    __slots__ = ("_descriptor", "_name", "map")

    def __init__(self, descriptor: int, name: str, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._name = name
        try:
            self.map = map_shared(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(self.map, os.close, descriptor).atexit = False  # views outlive us, not the mapping

    @classmethod
    def create(cls, num_bytes: int) -> MemoryFile:
        """Make memory of zeros, at least a byte.

        Raises:
            ResourceExhaustedError: there is none of that size.
            GradQuorumError: this is not Linux.
        """
        if sys.platform != "linux":
            raise GradQuorumError(f"shared_table: several processes need Linux, and this is {sys.platform}")
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if num_bytes > physical:  # Linux would promise it, and kill who uses it
            raise ResourceExhaustedError(
                f"shape: expected a table that fits into {physical} bytes of memory, got one of {num_bytes}",
                needed_bytes=num_bytes,
            )
        name = f"gradquorum-{os.urandom(16).hex()}"  # by which `attach` knows it again
        num_bytes = max(num_bytes, 1)
        return cls(make_sealed(name, num_bytes, reserve=False), name, num_bytes)

    @classmethod
    def attach(cls, handle: Handle, num_bytes: int) -> MemoryFile:
        """Map what another process, or this one, has.

        Raises:
            UnavailableError: it is not there any more.
            ResourceExhaustedError: there is no address space.
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
    """Its number."""
    descriptor: int
    """Of that process."""
    name: str
    """Of the memory file: that number may be another file's by now."""

    def lost(self, reason: str | None) -> UnavailableError:
        """Return the error of who does not find it."""
        return UnavailableError(
            f"shared_table: expected process {self.process}, which pickled the table, to have it still; {reason}. "
            "Keep the table there until it is unpickled"
        )


def _name_of(path: str) -> str:
    """Return the name under which the memfd at this path was made."""
    return os.readlink(path).removeprefix("/memfd:").removesuffix(" (deleted)")
