"""Sparse accumulators in graphs of TensorFlow 1.

A Python function in a session can neither be cancelled nor raise most of TensorFlow's errors, so TensorFlow's own
accumulator does all that waits or judges: it is the gate of `tickets.py`. Python functions before it keep the values,
and one after it merges them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradquorum.arrays import as_integer
from gradquorum.specs import SparseSpec
from gradquorum.tensorflow.backend import AbstractBackend, GradientTensors, as_step_tensor
from gradquorum.tensorflow.delivery import deliver
from gradquorum.tensorflow.sessions import session_number
from gradquorum.tensorflow.tickets import open_store

__all__ = ["GatedBackend"]

_GATE_DTYPE = tf.float16


class GatedBackend(AbstractBackend):
    """Builds operations around one gate. Each session has a gate of its own, as with TensorFlow's accumulators."""

    def __init__(self, dtype: Any, shape: Any, shared_name: str | None, name: str, reduction_type: str) -> None:
        spec = SparseSpec(dtype, shape, reduction_type)
        container = tf.compat.v1.get_default_graph()._container
        with tf.init_scope():  # the graph of the session, and not that of a branch or a loop in it
            graph = tf.compat.v1.get_default_graph()
        self._store = open_store(spec, graph, container, shared_name)
        self._dtype = tf.as_dtype(spec.dtype)
        self.reference = tf.raw_ops.SparseConditionalAccumulator(
            dtype=_GATE_DTYPE,
            shape=tf.TensorShape([None, *spec.shape[1:]] if spec.shape else None),
            shared_name=shared_name or "",
            reduction_type="SUM",
            name=name,
        )
        self._gate = session_number(self.reference)

    def apply(self, gradient: Sequence[Any], local_step: Any, name: str | None) -> Any:
        tensors = GradientTensors.of(gradient, self._dtype)
        step = as_step_tensor("local_step", local_step)
        with tf.compat.v1.name_scope(name or "SparseAccumulatorApplyGradient") as scope:
            offer = functools.partial(self._offer, has_shape=tensors.has_shape)
            inputs = [self._gate, *tensors[:3], step]
            ticket, row, line = tf.numpy_function(offer, inputs, [tf.int64, _GATE_DTYPE, tf.int64])
            with tf.control_dependencies([ticket]):
                before = self.num_accumulated("before")
            with tf.control_dependencies([before]):
                passed = tf.raw_ops.SparseAccumulatorApplyGradient(
                    handle=self.reference,
                    local_step=tf.reshape(step, []),
                    gradient_indices=tf.reshape(ticket, [1]),
                    gradient_values=row,
                    gradient_shape=tf.constant([], tf.int64),
                    has_known_shape=False,
                    name="gate",
                )
            with tf.control_dependencies([passed]):
                counted = self.num_accumulated("after") > before
                arrived = tf.numpy_function(self._arrive, [self._gate, ticket, counted, line], [])
            return tf.group(arrived, name=scope)

    def take(self, num_required: Any, name: str | None) -> Sequence[Any]:
        with tf.compat.v1.name_scope(name or "SparseAccumulatorTakeGradient") as scope:
            begin = [self._gate, _as_number(num_required)]
            number, has_round, line = tf.numpy_function(self._begin_take, begin, [tf.int64, tf.bool, tf.int64])
            waits, none = tf.raw_ops.Switch(data=tf.zeros([0], tf.int64), pred=tf.reshape(has_round, []))
            with tf.control_dependencies([tf.identity(waits)]):  # of the value, not of the switch
                tickets, _, _ = tf.raw_ops.SparseAccumulatorTakeGradient(
                    handle=self.reference, num_required=num_required, dtype=_GATE_DTYPE, name="gate"
                )
            tickets, _ = tf.raw_ops.Merge(inputs=[tickets, none])
            dtypes = [tf.int64, self._dtype, tf.int64]
            merged = tf.numpy_function(self._merge_take, [self._gate, number, tickets], dtypes)
            return deliver(line, merged, scope)

    def num_accumulated(self, name: str) -> Any:
        return tf.raw_ops.AccumulatorNumAccumulated(handle=self.reference, name=name)

    def set_global_step(self, step: Any, name: str | None) -> Any:
        step = as_step_tensor("new_global_step", step)
        return tf.raw_ops.AccumulatorSetGlobalStep(handle=self.reference, new_global_step=step, name=name)

    # What operations call

    def _offer(self, gate: Any, indices: Any, values: Any, shape: Any, step: Any, *, has_shape: bool) -> list[Any]:
        offered = self._store.offer(int(gate), indices, values, shape if has_shape else None, step)
        return [np.int64(offered.ticket), offered.row, offered.line]

    def _arrive(self, gate: Any, ticket: Any, counted: Any, _line: Any) -> None:
        self._store.arrive(int(gate), int(ticket), seems_counted=bool(counted))

    def _begin_take(self, gate: Any, num_required: Any) -> list[Any]:
        begun = self._store.begin_take(int(gate), as_integer("num_required", num_required))
        return [np.int64(begun.number), np.bool_(begun.has_round), begun.line]

    def _merge_take(self, gate: Any, number: Any, tickets: Any) -> Any:
        return self._store.merge_take(int(gate), int(number), tickets)


def _as_number(num_required: Any) -> Any:
    """Return a number as the gate will see it; 0 where the gate is going to refuse it while the graph is built."""
    try:
        return tf.convert_to_tensor(num_required, tf.int32)
    except (TypeError, ValueError):
        return tf.constant(0)
