"""Keras 3 on TensorFlow: four threads as replicas train an Embedding, and the slowest is not waited for.

python examples/keras_replicas.py
"""

import threading
import warnings

import keras
import numpy as np
import tensorflow as tf

import gradquorum as gq
import gradquorum.tensorflow as gqtf

REPLICAS, QUORUM, STEPS = 4, 3, 60
WORDS, DIM = 1000, 8

warnings.simplefilter("ignore", gq.StaleGradientWarning)  # whoever is late for the first step is meant to be dropped
keras.utils.set_random_seed(7)
embedding = keras.layers.Embedding(WORDS, DIM)
embedding.build()
table = embedding.trainable_variables[0]
target = tf.random.normal([WORDS, DIM])  # what the embedding is to become
optimizer = keras.optimizers.SGD(learning_rate=8.0)
acc = gqtf.SparseConditionalAccumulator(table.dtype, shape=table.shape)
round_ = acc.accumulator_ref  # this library's accumulator behind the face, which can publish steps


def loss_of(ids):
    return tf.reduce_mean((embedding(ids) - tf.gather(target, ids)) ** 2)


def draw(rng, number):
    """Draw ids as a text has words: a few very often, most rarely."""
    return tf.constant(np.minimum(rng.zipf(1.3, number), WORDS) - 1)


def replica(number):
    rng = np.random.default_rng(number)
    try:
        while True:
            step = round_.published_step  # of the parameters that are out, and are read now
            with tf.GradientTape() as tape:
                loss = loss_of(draw(rng, 256))
            (slices,) = tape.gradient(loss, embedding.trainable_variables)  # ids repeated and unsorted, as they came
            acc.apply_indexed_slices_grad(slices, local_step=step)
            round_.wait_published(step + 1)
    except (gq.ClosedError, gq.CancelledError, tf.errors.FailedPreconditionError):
        pass  # the training is over


held_out = draw(np.random.default_rng(99), 10_000)
before = float(loss_of(held_out))
threads = [threading.Thread(target=replica, args=(number,)) for number in range(REPLICAS)]
for thread in threads:
    thread.start()
for _ in range(STEPS):
    slices = acc.take_indexed_slices_grad(QUORUM)
    optimizer.apply_gradients([(slices, table)])
    round_.publish()
round_.close()
for thread in threads:
    thread.join()
after = float(loss_of(held_out))
print(f"{STEPS} steps of {QUORUM} of {REPLICAS} replicas: loss {before:.3f} -> {after:.3f}")
assert after < 0.6 * before
