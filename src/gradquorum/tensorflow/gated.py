"""Sparse accumulators in graphs of TensorFlow 1.

A Python function in a session can neither be cancelled nor raise most of TensorFlow's errors, so TensorFlow's own
accumulator does all that waits or judges: it is the gate of `tickets.py`. Python functions before it keep the values,
and one after it merges them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradquorum.specs import SparseSpec
from gradquorum.tensorflow.backend import AbstractBackend, GradientTensors, as_step_tensor
from gradquorum.tensorflow.tickets import open_store

__all__ = ["GatedBackend"]

_GATE_DTYPE = tf.float16
_gate_numbers = itertools.count(1)


class GatedBackend(AbstractBackend):
    """Builds operations around one gate. Each session has a gate of its own, as with TensorFlow's accumulators."""

    def __init__(self, spec: SparseSpec, dtype: Any, shared_name: str | None, name: str) -> None:
        container = tf.compat.v1.get_default_graph()._container
        with tf.init_scope():  # the graph of the session, and not that of a branch or a loop in it
            graph = tf.compat.v1.get_default_graph()
        self._store = open_store(spec, graph, container, shared_name)
        self._dtype = dtype
        self.reference = tf.raw_ops.SparseConditionalAccumulator(
            dtype=_GATE_DTYPE,
            shape=tf.TensorShape([None, *spec.shape[1:]] if spec.shape else None),
            shared_name=shared_name or "",
            reduction_type="SUM",
            name=name,
        )
        with tf.compat.v1.name_scope(f"{self.reference.op.name}/"):
            self._sessions = tf.raw_ops.MutableHashTableV2(
                key_dtype=tf.int64,
                value_dtype=tf.int64,
                shared_name=f"gradquorum/{shared_name}" if shared_name else "",
                name="session",
            )

    def apply(self, gradient: Sequence[Any], local_step: Any, name: str | None) -> Any:
        tensors = GradientTensors.of(gradient, self._dtype)
        step = as_step_tensor("local_step", local_step)
        with tf.compat.v1.name_scope(name or "SparseAccumulatorApplyGradient") as scope:
            before = self.num_accumulated("before")
            offer = functools.partial(self._offer, has_shape=tensors.has_shape)
            with tf.control_dependencies([before]):
                inputs = [self._find_gate(), *tensors[:3], step]
                gate, ticket, row = tf.numpy_function(offer, inputs, [tf.int64, tf.int64, _GATE_DTYPE])
            with tf.control_dependencies([self._keep_gate(gate)]):
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
                arrived = tf.numpy_function(self._arrive, [ticket, counted], [])
            return tf.group(arrived, name=scope)

    def take(self, num_required: Any, name: str | None) -> Sequence[Any]:
        with tf.compat.v1.name_scope(name or "SparseAccumulatorTakeGradient") as scope:
            gate, number = tf.numpy_function(self._begin_take, [self._find_gate()], [tf.int64, tf.int64])
            with tf.control_dependencies([self._keep_gate(gate)]):
                tickets, _, _ = tf.raw_ops.SparseAccumulatorTakeGradient(
                    handle=self.reference, num_required=num_required, dtype=_GATE_DTYPE, name="gate"
                )
            dtypes = [tf.int64, self._dtype, tf.int64]
            return list(tf.numpy_function(self._store.finish_take, [gate, number, tickets], dtypes, name=scope))

    def num_accumulated(self, name: str) -> Any:
        return tf.raw_ops.AccumulatorNumAccumulated(handle=self.reference, name=name)

    def set_global_step(self, step: Any, name: str | None) -> Any:
        step = as_step_tensor("new_global_step", step)
        return tf.raw_ops.AccumulatorSetGlobalStep(handle=self.reference, new_global_step=step, name=name)

    def _find_gate(self) -> Any:
        """Return the number that stands for the gate of the session in which it is evaluated, 0 if it has none yet.

        Two operations that are the first at once may both give it a number, one of which is soon forgotten: the store
        finds gradients by ticket, and uses the number only to tell when it may forget stale ones.
        """
        nothing = tf.constant(0, tf.int64)
        return tf.raw_ops.LookupTableFindV2(table_handle=self._sessions, keys=nothing, default_value=nothing)

    def _keep_gate(self, gate: Any) -> Any:
        return tf.raw_ops.LookupTableInsertV2(
            table_handle=self._sessions, keys=tf.constant(0, tf.int64), values=tf.reshape(gate, [])
        )

    # What operations call

    def _offer(self, gate: Any, indices: Any, values: Any, shape: Any, step: Any, *, has_shape: bool) -> list[Any]:
        number = int(gate) or next(_gate_numbers)
        ticket, row = self._store.offer(number, indices, values, shape if has_shape else None, step)
        return [np.int64(number), np.int64(ticket), row]

    def _arrive(self, ticket: Any, counted: Any) -> None:
        self._store.arrive(int(ticket), seems_counted=bool(counted))

    def _begin_take(self, gate: Any) -> list[Any]:
        number = int(gate) or next(_gate_numbers)
        return [np.int64(number), np.int64(self._store.begin_take(number))]
