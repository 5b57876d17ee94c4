"""How Python learns that a run of TensorFlow has ended, of which TensorFlow itself says nothing to Python functions."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

__all__ = ["Lifeline", "lifeline", "mark"]

_ALIGNMENT = 64
"""Of memory that TensorFlow takes over; all else it copies."""
_UNMARKED, _MARKED = 1, 2


class Lifeline(NamedTuple):
    """What `lifeline` returns."""

    line: NDArray[np.int64]
    """An array `[1]` for one operation to return and another to take."""
    is_marked: Callable[[], bool]
    """Tells in any thread whether it is marked. It does not hold the array."""


def lifeline(cut: Callable[[bool], object]) -> Lifeline:
    """Make an array that tells how far a run of operations has come.

    When TensorFlow lets go of the array, `cut` is called, with whether it was marked.
    A run that ends before the second operation lets go of it, too. Then `cut` is called in any thread: at once where
    the array was handed over by DLPack, else when the session's `run` returns or when TensorFlow is called next.
    """
    memory = np.zeros(_ALIGNMENT + 8, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    line, state = (memory[start : start + 8].view(np.int64) for _ in range(2))
    line[0] = _UNMARKED

    def is_marked() -> bool:
        return bool(state[0] == _MARKED)

    weakref.finalize(line, lambda: cut(is_marked())).atexit = False
    return Lifeline(line, is_marked)


def mark(line: Any) -> Any:
    """Return an operation that marks a lifeline, in its memory and without Python.

    Args:
        line: as it came from a `tf.numpy_function`, whose device has the memory.
    """
    with tf.compat.v1.colocate_with(line.op):
        line = tf.reshape(line, [1])
        return tf.raw_ops.InplaceUpdate(x=line, i=[0], v=tf.constant([_MARKED], tf.int64)).op
