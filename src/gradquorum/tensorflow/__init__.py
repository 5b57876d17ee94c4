"""TensorFlow 1's conditional accumulators, with this library's engine behind them.

Change ``tf.compat.v1.SparseConditionalAccumulator`` to ``gradquorum.tensorflow.SparseConditionalAccumulator``, and the
same program takes ids in any order and repeated, in eager mode, in `tf.function` and in a graph with a session.
Importing this module imports TensorFlow; importing `gradquorum` does not. ``docs/from-tensorflow.md`` has what differs.
"""

from gradquorum.tensorflow.accumulators import (
    ConditionalAccumulator,
    ConditionalAccumulatorBase,
    SparseConditionalAccumulator,
)

__all__ = ["ConditionalAccumulator", "ConditionalAccumulatorBase", "SparseConditionalAccumulator"]
