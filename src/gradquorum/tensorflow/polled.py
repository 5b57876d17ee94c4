"""Accumulators of a server in graphs of TensorFlow 1: the round lives there, and TensorFlow has no part in it."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradquorum.errors import CancelledError, DeadlineExceededError
from gradquorum.tensorflow.backend import AbstractBackend, GradientTensors, as_integer_tensor, as_step_tensor

__all__ = ["PolledBackend"]

POLL_SECONDS = 0.1
"""How long a take waits before it lets its session look whether it has been closed or its time is over."""


FETCH_SECONDS = 1.0
"""How long a round waits for the operation that fetches it. A run that has ended never does: the round goes back."""

_numbers = itertools.count()


class _Unfetched(CancelledError):
    """Nobody has fetched a round, which goes back."""


class _Offer:
    """A round that has come for a run of a session, which may have ended meanwhile."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        """The round is here, or the take has failed."""
        self._fetched = threading.Event()
        self._lock = threading.Lock()
        self._accepted: bool | None = None

    def wait(self, _: Any) -> None:
        """Wait until the round is fetched. In the thread of the take, which then acknowledges it.

        Raises:
            _Unfetched: nobody has fetched it.
        """
        self.arrived.set()
        self._fetched.wait(FETCH_SECONDS)
        if not self._settle(False):
            raise _Unfetched("take_grad: the run of the session ended before it had the round, which went back")

    def accept(self) -> bool:
        """Fetch the round; False if it is on its way back."""
        return self._settle(True)

    def _settle(self, accepted: bool) -> bool:
        with self._lock:
            if self._accepted is None:
                self._accepted = accepted
            self._fetched.set()
            return self._accepted


class PolledBackend(AbstractBackend):
    """Builds operations that call an accumulator of this library.

    A take is a loop of short takes, between which its session may end it. A Python operation that waits holds one of
    the session's threads, which applies need, so the takes of a session look in turn: the one that holds the mutex,
    whose waiting holds no thread, which the end of its run releases, and which lets other operations run before the
    next one looks. So takes are not served strictly in the order in which they began.

    A take is acknowledged when an operation fetches it: a round that comes when its run has just ended goes back.

    Guarded by ``_lock``: ``_offers``.
    """

    def __init__(self, accumulator: Any, *, sparse: bool, dtype: Any) -> None:
        self.reference = accumulator
        self._acc = accumulator
        self._sparse = sparse
        self._dtype = dtype
        self._lock = threading.Lock()
        self._offers: dict[int, tuple[_Offer, Any]] = {}
        self._turn = tf.raw_ops.MutexV2(shared_name="gradquorum_turn")
        self._running = tf.raw_ops.MutexV2(shared_name="gradquorum_running")
        """Nobody holds it for long. Locking it fails where a run has ended, which Python operations do not notice."""

    def apply(self, gradient: Sequence[Any], local_step: Any, name: str | None) -> Any:
        step = as_step_tensor("local_step", local_step)
        if self._sparse:
            tensors = GradientTensors.of(gradient, self._dtype)
            call = functools.partial(self._apply_sparse, has_shape=tensors.has_shape)
            return tf.numpy_function(call, [*tensors[:3], step], [], name=name or "SparseAccumulatorApplyGradient")
        grad = tf.convert_to_tensor(gradient[0], self._dtype)
        return tf.numpy_function(self._apply_dense, [grad, step], [], name=name or "AccumulatorApplyGradient")

    def take(self, num_required: Any, name: str | None) -> Sequence[Any]:
        num_required = as_integer_tensor("num_required", num_required)
        dtypes = [tf.int64, self._dtype, tf.int64] if self._sparse else [self._dtype]
        nothing = [tf.zeros([0], dtype) for dtype in dtypes]
        anything = [tf.TensorShape(None)] * len(dtypes)
        with tf.name_scope(name or ("SparseAccumulatorTakeGradient" if self._sparse else "AccumulatorTakeGradient")):
            _, *result = tf.while_loop(
                lambda done, *_: tf.logical_not(done),
                lambda *_: self._try(num_required, dtypes),
                [tf.constant(False), *nothing],
                shape_invariants=[tf.TensorShape([]), *anything],
            )
            return list(result)

    def num_accumulated(self, name: str) -> Any:
        return tf.ensure_shape(tf.numpy_function(self._count, [], tf.int32), [], name=name)

    def set_global_step(self, step: Any, name: str | None) -> Any:
        step = as_step_tensor("new_global_step", step)
        return tf.numpy_function(self._set_step, [step], [], name=name or "AccumulatorSetGlobalStep")

    def _try(self, num_required: Any, dtypes: list[Any]) -> list[Any]:
        lock = tf.raw_ops.MutexLock(mutex=self._turn)
        with tf.control_dependencies([lock]):
            number = tf.numpy_function(self._look, [num_required], tf.int64)
        with tf.control_dependencies([number]):
            unlock = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        with tf.control_dependencies([unlock]):
            is_running = tf.raw_ops.MutexLock(mutex=self._running)
        with tf.control_dependencies([is_running]):
            done, *result = tf.numpy_function(self._fetch, [number], [tf.bool, *dtypes])
        return [tf.ensure_shape(done, []), *result]

    # What operations call

    def _look(self, num_required: Any) -> Any:
        """Wait a moment for a round; return the number under which it may be fetched, or -1."""
        number, offer = next(_numbers), _Offer()
        future = self._acc._submit_offer(num_required, POLL_SECONDS, offer.wait)
        with self._lock:
            self._offers[number] = offer, future
        future.add_done_callback(lambda _: self._forget(number, offer))
        offer.arrived.wait()
        if not future.done():
            return np.int64(number)
        error = future.exception()
        if error is None or isinstance(error, (DeadlineExceededError, _Unfetched)):
            return np.int64(-1)
        raise error

    def _forget(self, number: int, offer: _Offer) -> None:
        with self._lock:
            self._offers.pop(number, None)
        offer.arrived.set()

    def _fetch(self, number: Any) -> list[Any]:
        with self._lock:
            found = self._offers.pop(int(number), None)
        if found is not None and found[0].accept():
            result = found[1].result()
            return [True, *(result if self._sparse else [result])]
        empty = [np.zeros(0, np.int64), np.zeros(0, self._acc.dtype), np.zeros(0, np.int64)]
        return [False, *(empty if self._sparse else empty[1:2])]

    def _apply_sparse(self, indices: Any, values: Any, shape: Any, step: Any, *, has_shape: bool) -> None:
        self._acc.apply_grad(indices, values, shape if has_shape else None, local_step=step)

    def _apply_dense(self, grad: Any, step: Any) -> None:
        self._acc.apply_grad(grad, local_step=step)

    def _count(self) -> Any:
        return np.int32(self._acc.num_accumulated())

    def _set_step(self, step: Any) -> None:
        self._acc.set_global_step(step)
