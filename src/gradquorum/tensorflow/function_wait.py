"""Takes of a `tf.function`."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import tensorflow as tf

from gradquorum.errors import CancelledError
from gradquorum.tensorflow.backend import as_tensor, plain
from gradquorum.tensorflow.delivery import cancel_if, deliver
from gradquorum.tensorflow.offers import Offers
from gradquorum.tensorflow.operations import AbstractWait, as_list

__all__ = ["FunctionWait"]

_numbers = itertools.count()


class FunctionWait(AbstractWait):
    """Waits for a queue of TensorFlow's, which is fed when the take has ended.

    A Python operation that waited would hold one of the few threads that run all operations: 8 waiting takes kept an
    apply waiting until they ended. Waiting for a queue holds none.

    In the end the queue holds the lifeline: it is cut in a thread of ours, as the result must not wait for Python then.
    """

    def __init__(self) -> None:
        self._queues: dict[int, Any] = {}
        """The queue of each take."""
        self._dead: list[Any] = []
        """Queues to be destroyed. Both are changed by single calls of theirs."""

    def build(self, offers: Offers, num_required: Any, empty: list[Any], name: str) -> list[Any]:
        begin, read = functools.partial(self._begin, offers), functools.partial(self._read, offers, empty)
        number, line, queue = tf.py_function(begin, [num_required], [tf.int64, tf.int64, tf.resource])
        woken = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64])
        with tf.control_dependencies(woken):
            dtypes = [tf.bool, *(array.dtype for array in empty)]
            is_cancelled, *result = tf.numpy_function(read, [number], dtypes)
        with tf.control_dependencies([cancel_if(is_cancelled)]):
            hold = functools.partial(tf.raw_ops.QueueEnqueueV2, handle=queue, components=[line])
            return deliver(line, result, name, hold)

    def ended(self, number: int) -> None:
        tf.raw_ops.QueueEnqueueV2(handle=self._queues[number], components=[tf.constant([0], tf.int64)])

    def delivered(self, number: int) -> None:
        self.gone(number)
        self._destroy_dead()

    def gone(self, number: int) -> None:
        queue = self._queues.pop(number, None)
        if queue is not None:
            self._dead.append(queue)

    # What operations call

    def _begin(self, offers: Offers, num_required: Any) -> tuple[int, Any, Any]:
        self._destroy_dead()
        number = next(_numbers)
        queue = tf.raw_ops.FIFOQueueV2(
            component_types=[tf.int64], shapes=[[1]], capacity=1, shared_name=f"gradquorum/take {number}"
        )
        self._queues[number] = queue
        try:
            return number, as_tensor(offers.begin(number, plain(num_required))), queue
        except BaseException:
            self.gone(number)
            raise

    def _read(self, offers: Offers, empty: list[Any], number: Any) -> list[Any]:
        self._destroy_dead()
        try:
            return [False, *as_list(offers.read(int(number)))]
        except CancelledError:
            return [True, *empty]

    def _destroy_dead(self) -> None:
        while self._dead:
            with contextlib.suppress(IndexError):  # another thread may be quicker
                tf.raw_ops.DestroyResourceOp(resource=self._dead.pop())
