"""How Python learns that a run of TensorFlow has ended, of which TensorFlow itself says nothing to Python functions."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["lifeline"]

_ALIGNMENT = 64
"""Of memory that TensorFlow takes over; all else it copies."""


def lifeline(cut: Callable[[], object]) -> NDArray[np.int64]:
    """Return an array `[1]` of a one, for one operation to return and another to take.

    When TensorFlow lets go of it, `cut` is called.
    A run that ends before the second operation lets go of it, too. Then `cut` is called in any thread: at once where
    the array was handed over by DLPack, else when the session's `run` returns or when TensorFlow is called next.
    """
    memory = np.zeros(_ALIGNMENT + 8, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    line = memory[start : start + 8].view(np.int64)
    line[0] = 1
    weakref.finalize(line, cut).atexit = False
    return line
