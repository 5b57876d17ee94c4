"""The blocks of shared memory that one connection may write gradients to, and which of them rounds still read."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.targets.process.memory import as_bytes
from gradquorum.targets.process.parts import LEND_FROM_BYTES

__all__ = ["Blocks"]


class _Reader(weakref.ref[Any]):
    """Watches the array through which a block is read."""

    __slots__ = ("is_lent", "number")
    number: int
    is_lent: bool
    """Whether a round holds what is read, instead of a copy of it."""


class Blocks:
    """The thread of the connection calls this, but for `lent_bytes` and `reclaim`, which any may.

    Guarded by ``_lock``: all that is assigned outside `__init__`, but for ``_dead``. Only the thread of the connection
    touches ``_small`` and ``_copied``.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reclaimed: list[int] = []
        """Blocks that are no more, as the client has not heard yet."""
        self._blocks: dict[int, mmap.mmap] = {}
        """Those that are large enough to be lent."""
        self._next = 0
        self._readers: dict[int, _Reader] = {}
        """Of the blocks in use: when the array dies, nobody reads the block."""
        self._dead: deque[Any] = deque()
        """Arrays that died, in whatever thread: to append one is one C call."""
        self._small: dict[int, NDArray[np.uint8]] = {}
        """The others. What they hold is copied before a request is answered."""
        self._copied: tuple[int, ...] = ()
        """The small block from which a gradient is being copied."""

    def add(self, mapping: mmap.mmap) -> int:
        """Return the number of a new block, which the client may write to."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            if len(mapping) < LEND_FROM_BYTES:
                self._small[number] = as_bytes(mapping)
            else:
                self._blocks[number] = mapping
            return number

    def drop(self, numbers: Iterable[int]) -> None:
        """Take back blocks that the client does not need, unless they are in use."""
        with self._lock:
            for number in numbers:
                self._small.pop(number, None)
                if number not in self._readers:
                    self._blocks.pop(number, None)

    def read(self, number: int) -> NDArray[np.uint8]:
        """Return the memory of a block.

        One that is large enough to be lent is in use while the array or a view of it lives. What others hold is copied
        before the request is answered: they are free with the next call of `freed`.

        Raises:
            ValueError: this connection has no such block, or has just given it away.
        """
        small = self._small.get(number)
        if small is not None:
            self._copied = (number,)
            return small
        with self._lock:
            mapping = self._blocks.get(number)
            if mapping is None or number in self._readers:
                raise ValueError("no such block to offer")
            memory = as_bytes(mapping)
            reader = _Reader(memory, self._dead.append)
            reader.number, reader.is_lent = number, False
            self._readers[number] = reader
            return memory

    def mark_lent(self, number: int) -> None:
        """Record that a round holds what is read from a block, if it still does."""
        with self._lock:
            if number in self._readers:
                self._readers[number].is_lent = True

    def take_back(self, number: int) -> NDArray[np.uint8]:
        """Return a copy of a block, which the client can change no more. The block itself is no more.

        Raises:
            ValueError: as for `read`.
            MemoryError: there is no room for the copy.
        """
        small = self._small.pop(number, None)
        if small is not None:
            return small.copy()
        with self._lock:
            if number not in self._blocks or number in self._readers:
                raise ValueError("no such block to offer")
            mapping = self._blocks.pop(number)
        return as_bytes(mapping).copy()

    def freed(self) -> tuple[int, ...]:
        """Return the blocks that the client may write to again, each once."""
        numbers, self._copied = self._copied, ()
        return numbers + self._unread() if self._dead else numbers

    def _unread(self) -> tuple[int, ...]:
        """Return the blocks that nothing lent reads any more, each once."""
        numbers = []
        with self._lock:
            while self._dead:
                number = self._dead.popleft().number
                del self._readers[number]
                numbers.append(number)
        return tuple(numbers)

    def reclaim(self) -> None:
        """Give the memory back to the system of which the client does not know yet that it may write to it again."""
        with self._lock:
            for number in self._unread():
                # The client still maps it: take the pages away. It writes there only if it breaks the rules.
                self._blocks.pop(number).madvise(mmap.MADV_REMOVE)
                self._reclaimed.append(number)

    def reclaimed(self) -> tuple[int, ...]:
        """Return the blocks that are no more, each once."""
        if not self._reclaimed:
            return ()
        with self._lock:
            numbers, self._reclaimed = tuple(self._reclaimed), []
        return numbers

    @property
    def num_in_use(self) -> int:
        """The blocks that are read."""
        return len(self._readers) - len(self._dead)

    @property
    def lent_bytes(self) -> int:
        """The bytes of the blocks that rounds hold. May be called from any thread."""
        with self._lock:
            arrays = [reader() for reader in self._readers.values() if reader.is_lent]
        return sum(array.nbytes for array in arrays if array is not None)
