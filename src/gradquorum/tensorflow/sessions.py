"""What Python learns of the sessions of TensorFlow 1: which of them runs an operation, and that it is gone."""

from __future__ import annotations

import functools
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gradquorum.tensorflow.lifelines import lifeline

__all__ = ["AbstractSessionObserver", "observe_sessions", "session_number"]

_COLLECTION = "gradquorum/session"
_numbers = itertools.count(1)


class AbstractSessionObserver(ABC):
    """What is told when a session is gone."""

    @abstractmethod
    def session_gone(self, number: int) -> None:
        """Forget a session: it was deleted, and with it all that is TensorFlow's. May be called in any thread."""


_observers: weakref.WeakSet[AbstractSessionObserver] = weakref.WeakSet()


def observe_sessions(observer: AbstractSessionObserver) -> None:
    """Tell an observer of all sessions that go from now on, as long as somebody else holds it."""
    _observers.add(observer)


def session_number(gate: Any) -> Any:
    """Return a tensor of the default graph, which in each session and on each device of a gate is another number.

    What has a shared name is another one on another device, and which device that is shows when the session runs.
    """
    op = gate.op
    others = [group for group in op.colocation_groups() if group != f"loc:@{op.name}".encode()]
    return _once_in_graph(f"number of {op.device} {others}", functools.partial(_build_number, op))


def _once_in_graph(what: str, build: Callable[[], Any]) -> Any:
    """Return a tensor that is made once for each graph and outside of all scopes."""
    with tf.init_scope():  # the graph of the session, and not that of a branch or a loop in it
        graph = tf.compat.v1.get_default_graph()
        made: list[Any] = graph.get_collection_ref(f"{_COLLECTION}/{what}")
        if not made:
            with graph.as_default(), tf.control_dependencies(None), tf.compat.v1.name_scope("gradquorum/"):
                made.append(build())
        return made[0]


def _build_number(gate: Any) -> Any:
    """Build what looks the number up where the gate is and, if there is none yet, gives it one under a mutex.

    A lifeline is staged in the session: it is cut when the session is deleted.
    """
    with tf.compat.v1.colocate_with(gate, ignore_existing=True):
        key = tf.constant(0, tf.int64)
        table = tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64, value_dtype=tf.int64, shared_name="gradquorum/numbers", name="numbers"
        )

        def find() -> Any:
            return tf.raw_ops.LookupTableFindV2(table_handle=table, keys=key, default_value=key)

        found = find()
        old, absent = tf.raw_ops.Switch(data=found, pred=tf.equal(found, 0))
        with tf.control_dependencies([tf.identity(absent)]):  # of the value, not of the switch
            lock = tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2(shared_name="gradquorum/opening", name="opening"))
        with tf.control_dependencies([lock]):
            number, line = tf.numpy_function(_open, [find()], [tf.int64, tf.int64])
            number = tf.reshape(number, [])
            kept = tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=key, values=number)
            staged = tf.raw_ops.Stage(values=[line])
        with tf.control_dependencies([kept, staged]):
            unlock = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        with tf.control_dependencies([unlock]):
            new = tf.identity(number)
        return tf.raw_ops.Merge(inputs=[old, new])[0]


def _open(found: Any) -> tuple[Any, NDArray[np.int64]]:
    """Give a session a number, unless another operation was quicker."""
    if found:
        return found, np.zeros(1, np.int64)
    number = next(_numbers)
    return np.int64(number), lifeline(functools.partial(_tell, number)).line


def _tell(number: int, _is_marked: bool) -> None:
    for observer in tuple(_observers):
        observer.session_gone(number)
