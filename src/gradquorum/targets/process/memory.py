"""Shared memory: memfds that the server makes, sizes and seals. Nobody ever takes a descriptor from a client.

A sealed memfd neither shrinks nor grows: whoever maps it can be given wrong numbers by another who maps it, but never
a fault. It has no name and vanishes with its last descriptor and mapping, however its users die.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.errors import ResourceExhaustedError

__all__ = ["SharedMemory", "as_bytes", "make_sealed", "map_private", "map_shared"]

_LARGE_BYTES = 1 << 24
"""From here on it is worth asking first whether there is so much memory."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _available_bytes() -> int:
    """Return how much memory this process can still get without anybody being killed for it, as far as Linux tells."""
    available = 2**63
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        kilobytes = next(line.split()[1] for line in file if line.startswith("MemAvailable:"))
        available = int(kilobytes) * 1024
    with contextlib.suppress(OSError, ValueError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, group = line.rstrip("\n").split(":", 2)
            if controllers == "memory":
                root, most, used = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            elif not controllers:
                root, most, used = "/sys/fs/cgroup", "memory.max", "memory.current"
            else:
                continue
            directory = os.path.join(root, group.lstrip("/"))
            with contextlib.suppress(OSError, ValueError):  # "max" is no number: there is no limit
                left = int(_read(directory, most)) - int(_read(directory, used))
                # Pages of files that nobody has used lately count as used, and make room when room is needed.
                words = _read(directory, "memory.stat").split()
                name = "total_inactive_file" if "total_inactive_file" in words else "inactive_file"
                available = min(available, left + int(words[words.index(name) + 1]))
    return available


def _read(directory: str, name: str) -> str:
    with open(os.path.join(directory, name)) as file:
        return file.read()


def make_sealed(num_bytes: int) -> int:
    """Return the descriptor of new shared memory, whose pages are there already.

    Raises:
        ResourceExhaustedError: there is no memory, or no descriptor.
    """
    if num_bytes >= _LARGE_BYTES and num_bytes > (available := _available_bytes()):
        # Linux would not refuse: it would hand out page after page and then kill somebody.
        raise ResourceExhaustedError(
            f"no shared memory: {num_bytes} bytes are needed and {available} available; nothing has changed",
            needed_bytes=num_bytes,
        )
    try:
        descriptor = os.memfd_create("gradquorum", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # asked for now: a page that is missing later kills
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
    except (OSError, OverflowError) as error:
        raise ResourceExhaustedError(
            f"no shared memory: {error}; nothing has changed", needed_bytes=num_bytes
        ) from error
    return descriptor


def map_shared(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map shared memory: what one side writes the other reads.

    Raises:
        ResourceExhaustedError: there is no address space.
    """
    return _map(descriptor, num_bytes, mmap.MAP_SHARED)


def map_private(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map shared memory such that what is written here is seen here only."""
    return _map(descriptor, num_bytes, mmap.MAP_PRIVATE)


def _map(descriptor: int, num_bytes: int, flags: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, num_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError, OverflowError) as error:
        raise ResourceExhaustedError(f"no address space: {error}", needed_bytes=num_bytes) from error


def as_bytes(memory: Any) -> NDArray[np.uint8]:
    """Return memory as an array of bytes that keeps it alive."""
    return np.frombuffer(memory, np.uint8)


class SharedMemory:
    """The shared memory of a server, and how much of it there is.

    Guarded by ``_lock``: ``_alive`` and ``_num_bytes``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._alive: dict[weakref.ref[Any], int] = {}
        """The mappings, and how large each is."""
        self._dead: SimpleQueue[weakref.ref[Any]] = SimpleQueue()
        """Mappings that died, in whatever thread: to put one here is one C call."""

    def _account(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._num_bytes -= self._alive.pop(self._dead.get_nowait(), 0)

    @property
    def num_bytes(self) -> int:
        """The bytes that are mapped now."""
        with self._lock:
            self._account()
            return self._num_bytes

    def make(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """Return new memory as we map it, and its descriptor, which the caller closes.

        Raises:
            ResourceExhaustedError: there is none.
        """
        descriptor = make_sealed(num_bytes)
        try:
            mapping = map_shared(descriptor, num_bytes)
            with self._lock:
                self._account()
                self._alive[weakref.ref(mapping, self._dead.put)] = num_bytes
                self._num_bytes += num_bytes
            return mapping, descriptor
        except BaseException:
            os.close(descriptor)
            raise
