"""One connection of a client, with the blocks of shared memory that the server has lent to it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.memory_file import map_shared
from gradquorum.targets.process import messages as m
from gradquorum.targets.process.channel import Channel, frame
from gradquorum.targets.process.memory import as_bytes

__all__ = ["Connection"]


class Connection:
    """One connection with its blocks of shared memory. One call at a time uses it."""

    __slots__ = ("channel", "free", "lent", "retract", "take")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.free: dict[int, NDArray[np.uint8]] = {}
        """Blocks that may be written to."""
        self.lent: dict[int, NDArray[np.uint8]] = {}
        """Blocks that the server still reads."""
        self.take = 0
        """The number of the last take."""
        self.retract: Callable[[], Any] = _nothing
        """Gives the round of the last take back: one C call, so that no second signal comes between."""

    def begin_take(self) -> int:
        """Return the number of a new take. From here on `retract` means that one."""
        self.take += 1
        self.retract = functools.partial(os.write, self.channel.fileno(), frame(m.encode(m.Retract(self.take))))
        return self.take

    def give_back(self, freed: Sequence[int], reclaimed: Sequence[int] = ()) -> None:
        """Take note that the server reads these blocks no longer, and that those are no more."""
        for number in reclaimed:
            self.lent.pop(number, None)
        for number in freed:
            memory = self.lent.pop(number, None)
            if memory is not None:
                self.free[number] = memory

    def add_block(self, lent: m.Lent) -> int:
        """Map a block whose descriptor comes now, and return its number."""
        descriptor = self.channel.receive_descriptor()
        try:
            self.free[lent.block] = as_bytes(map_shared(descriptor, lent.num_bytes))
        finally:
            os.close(descriptor)
        self.give_back(lent.freed, lent.reclaimed)
        return lent.block


def _nothing() -> None:
    """There has been no take."""
