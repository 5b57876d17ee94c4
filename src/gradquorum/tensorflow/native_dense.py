"""Dense accumulators in graphs of TensorFlow 1: TensorFlow's own, which is right and is cancelled as it should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradquorum.tensorflow.backend import AbstractBackend

__all__ = ["NativeDenseBackend"]


class NativeDenseBackend(AbstractBackend):
    """Hands everything to `tf.compat.v1.ConditionalAccumulator`."""

    def __init__(self, dtype: Any, shape: Any, shared_name: str | None, name: str, reduction_type: str) -> None:
        self._acc = tf.compat.v1.ConditionalAccumulator(dtype, shape, shared_name, name, reduction_type)
        self.reference = self._acc.accumulator_ref

    def apply(self, gradient: Sequence[Any], local_step: Any, name: str | None) -> Any:
        return self._acc.apply_grad(gradient[0], local_step, name)

    def take(self, num_required: Any, name: str | None) -> Sequence[Any]:
        return [self._acc.take_grad(num_required, name)]

    def num_accumulated(self, name: str) -> Any:
        return self._acc.num_accumulated(name)

    def set_global_step(self, step: Any, name: str | None) -> Any:
        return self._acc.set_global_step(step, name)
