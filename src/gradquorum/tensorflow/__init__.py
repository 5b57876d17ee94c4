"""TensorFlow 1's conditional accumulators, with this library's engine behind them.

Change ``tf.compat.v1.SparseConditionalAccumulator`` to ``gradquorum.tensorflow.SparseConditionalAccumulator``, and the
same program takes ids in any order and repeated, in eager mode, in `tf.function` and in a graph with a session.
Importing this module imports TensorFlow; importing `gradquorum` does not. ``docs/from-tensorflow.md`` has what differs.
"""

try:
    import tensorflow as _tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ModuleNotFoundError(
        "gradquorum.tensorflow needs TensorFlow; install it with: pip install tensorflow", name="tensorflow"
    ) from error

from gradquorum.tensorflow.accumulators import (
    ConditionalAccumulator,
    ConditionalAccumulatorBase,
    SparseConditionalAccumulator,
)

__all__ = ["ConditionalAccumulator", "ConditionalAccumulatorBase", "SparseConditionalAccumulator"]
