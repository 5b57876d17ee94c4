"""Takes of sessions from a round that is not in their graph: it lives on a server."""

from __future__ import annotations

import functools
import itertools
import threading
from typing import Any

import numpy as np
import tensorflow as tf

from gradquorum.errors import CancelledError
from gradquorum.tensorflow.delivery import cancel_if, check_running, deliver
from gradquorum.tensorflow.offers import Offers
from gradquorum.tensorflow.operations import AbstractWait, as_list

__all__ = ["SessionWait"]

LOOK_SECONDS = 0.1
"""How long a look keeps the thread that it holds, and its session from ending."""

_numbers = itertools.count()
_changed = threading.Condition()
_ended: set[int] = set()
"""The takes, of whatever accumulator, of which there is something to fetch. Guarded by ``_changed``."""


class SessionWait(AbstractWait):
    """Looks, again and again, whether a round has come for a take that is in the line of its accumulator.

    A Python operation can neither be cancelled nor wait without holding one of the session's threads, which applies
    need. So the takes of a session look in turn: the one that holds the mutex, whose waiting holds no thread and ends
    with its run. A look ends as soon as a round has come for anybody, whose turn it then may be.
    """

    def build(self, offers: Offers, num_required: Any, empty: list[Any], name: str) -> list[Any]:
        turn = tf.raw_ops.MutexV2(shared_name="gradquorum/turn")
        begin = functools.partial(self._begin, offers)
        number, line = tf.numpy_function(begin, [num_required], [tf.int64, tf.int64])

        def try_to_fetch(*_: Any) -> list[Any]:
            lock = tf.raw_ops.MutexLock(mutex=turn)
            with tf.control_dependencies([lock]):
                has_ended = tf.numpy_function(functools.partial(self._look, offers), [number], tf.bool)
            with tf.control_dependencies([has_ended]):
                unlock = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
            with tf.control_dependencies([unlock]):
                is_running = check_running()
            with tf.control_dependencies([is_running]):
                read = functools.partial(self._read, offers, empty)
                dtypes = [tf.bool, tf.bool, *(array.dtype for array in empty)]
                done, is_cancelled, *result = tf.numpy_function(read, [has_ended, number], dtypes)
            return [tf.ensure_shape(done, []), tf.ensure_shape(is_cancelled, []), *result]

        _, is_cancelled, *result = tf.while_loop(
            lambda done, *_: tf.logical_not(done),
            try_to_fetch,
            [tf.constant(False), tf.constant(False), *map(tf.constant, empty)],
            shape_invariants=[*[tf.TensorShape([])] * 2, *[tf.TensorShape(None)] * len(empty)],
        )
        with tf.control_dependencies([cancel_if(is_cancelled)]):
            return deliver(line, result, name)

    def ended(self, number: int) -> None:
        with _changed:
            _ended.add(number)
            _changed.notify_all()

    def delivered(self, number: int) -> None:
        """Do nothing: the line is cut when the session's run returns, or TensorFlow is called next."""

    def gone(self, number: int) -> None:
        with _changed:
            _ended.discard(number)

    # What operations call

    def _begin(self, offers: Offers, num_required: Any) -> tuple[Any, Any]:
        number = next(_numbers)
        return np.int64(number), offers.begin(number, num_required)

    def _look(self, offers: Offers, number: Any) -> Any:
        """Wait a moment for the round of this take, but not if there is one of another."""
        with _changed:
            _changed.wait_for(lambda: _ended, LOOK_SECONDS)
        return np.bool_(offers.has_ended(int(number)))

    def _read(self, offers: Offers, empty: list[Any], has_ended: Any, number: Any) -> list[Any]:
        if not has_ended:
            return [False, False, *empty]
        self.gone(int(number))  # others need not look for its sake while its run goes on
        try:
            return [True, False, *as_list(offers.read(int(number)))]
        except CancelledError:
            return [True, True, *empty]
