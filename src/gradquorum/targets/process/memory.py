"""Shared memory: memory files that the server makes, and counts. Nobody ever takes a descriptor from a client."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.errors import ResourceExhaustedError
from gradquorum.memory_file import make_sealed, map_shared

__all__ = ["SharedMemory", "as_bytes", "make_memory"]

_LARGE_BYTES = 1 << 24
"""From here on it is worth asking first whether there is so much memory."""


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


def make_memory(num_bytes: int) -> int:
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
    return make_sealed("gradquorum", num_bytes, reserve=True)


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
        descriptor = make_memory(num_bytes)
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
