"""Gradient accumulation over k batches that stays sparse, as one `tf.function`: the table is never touched as a whole.

python examples/tensorflow_accumulation.py
"""

import numpy as np
import tensorflow as tf

import gradquorum.tensorflow as gqtf

ROWS, DIM, BATCHES = 100_000, 16, 8

table = tf.Variable(tf.random.stateless_normal([ROWS, DIM], seed=[1, 2]))
acc = gqtf.SparseConditionalAccumulator(table.dtype, shape=table.shape, reduction_type="MEAN_BY_COUNT")


@tf.function
def accumulated_step(ids, local_step):
    """One step of plain SGD on the mean gradient of the batches `ids [batches, n]`."""
    for batch in ids:
        with tf.GradientTape() as tape:
            tape.watch(table)
            loss = tf.reduce_sum(tf.gather(table, batch) ** 2)
        acc.apply_indexed_slices_grad(tape.gradient(loss, table), local_step=local_step)
    mean = acc.take_indexed_slices_grad(BATCHES)  # the gradient of the mean loss, in as many rows as there are ids
    table.scatter_sub(tf.IndexedSlices(0.1 * mean.values, mean.indices))
    return mean


rng = np.random.default_rng(0)
for step in range(3):
    ids = rng.integers(0, 50, [BATCHES, 64])
    before = table.numpy()
    mean = accumulated_step(tf.constant(ids), tf.constant(step, tf.int64))
    dense = np.zeros([ROWS, DIM], np.float32)
    np.add.at(dense, ids.ravel(), 2 * before[ids.ravel()] / BATCHES)
    np.testing.assert_allclose(before - table.numpy(), 0.1 * dense, atol=1e-5)
    print(f"step {step}: {mean.indices.shape[0]} rows of {ROWS} held, taken and updated")
