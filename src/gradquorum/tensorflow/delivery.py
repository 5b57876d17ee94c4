"""Operations between the Python function that returns a round and whatever uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gradquorum.tensorflow.lifelines import mark

__all__ = ["cancel_if", "check_running", "deliver"]

_CANCELLED = "TakeGrad operation was cancelled"
"""The name of a queue, which is what TensorFlow says when it was closed."""


def check_running() -> Any:
    """Return an operation that fails where its run has ended, which Python operations do not notice.

    Operations of a queue look for that in the thread that they are in. What is put in is taken out, unless the run
    ends in between.
    """
    queue = _queue("gradquorum/running")
    with tf.control_dependencies([_put(queue)]):
        return tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.bool])[0]


def cancel_if(is_cancelled: Any) -> Any:
    """Return an operation that fails with a CancelledError if so: of a Python function it would be an UnknownError."""

    def cancel() -> Any:
        queue = _queue(_CANCELLED)
        with tf.control_dependencies([tf.raw_ops.QueueCloseV2(handle=queue)]), tf.control_dependencies([_put(queue)]):
            return tf.constant(True)

    return tf.cond(tf.reshape(is_cancelled, []), cancel, lambda: tf.constant(False))


def deliver(line: Any, result: Sequence[Any], name: str, check: Callable[[], Any] = check_running) -> list[Any]:
    """Return the results of a take, which is delivered from here on: nothing waits for Python any more.

    Args:
        line: the lifeline of the take, which is marked if the run still goes on.
        result: of a Python function.
        name: of the operation.
        check: builds the operation that fails where the run has ended.
    """
    with tf.control_dependencies(result[:1]):
        is_running = check()
    with tf.control_dependencies([is_running]):
        is_delivered = mark(line)
    with tf.control_dependencies([is_delivered]):
        return list(tf.identity_n(result, name=name))


def _queue(name: str) -> Any:
    return tf.raw_ops.FIFOQueueV2(component_types=[tf.bool], shapes=[[]], shared_name=name)


def _put(queue: Any) -> Any:
    return tf.raw_ops.QueueEnqueueV2(handle=queue, components=[tf.constant(True)])
