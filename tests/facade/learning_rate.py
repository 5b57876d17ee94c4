"""How large a step TensorFlow's accumulator makes on raw ids: `python -m tests.facade.learning_rate`.

Four workers offer gradients of ones on Zipf-distributed ids as a batch has them, unsorted and repeated. What a take
returns is added to a table, as an optimizer does, and summed. The true mean of four gradients has a fourth of the sum
of all their rows.
"""

import os

import numpy as np

WORKERS, ROWS = 4, 1_000_000


def sums(classes, batches, reduction):
    """Return the sum of a take by the accumulator, as TensorFlow's graphs and sessions do it."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        acc = classes.SparseConditionalAccumulator(tf.float64, [ROWS, 1], reduction_type=reduction)
        ids = v1.placeholder(tf.int64)
        apply, take = acc.apply_grad(ids, tf.ones([tf.size(ids), 1], tf.float64)), acc.take_grad(len(batches))
        for batch in batches:
            session.run(apply, {ids: batch})
        return float(session.run(take).values.sum())


def measure(classes, exponent, size, reduction, seed=0):
    """Return how many times the true mean the result is."""
    rng = np.random.default_rng(seed)
    batches = [np.minimum(rng.zipf(exponent, size), ROWS) - 1 for _ in range(WORKERS)]
    return sums(classes, batches, reduction) / (sum(map(len, batches)) / WORKERS)


def main():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    import gradquorum.tensorflow as gqtf

    print("exponent  ids in a batch  TensorFlow MEAN  ours MEAN  ours MEAN_BY_COUNT")
    for exponent in (1.1, 1.3, 1.6):
        for size in (256, 4096, 16384):
            theirs, mean = (measure(classes, exponent, size, "MEAN") for classes in (tf.compat.v1, gqtf))
            count = measure(gqtf, exponent, size, "MEAN_BY_COUNT")
            print(f"{exponent:8} {size:15} {theirs:16.2f} {mean:10.2f} {count:19.2f}")


if __name__ == "__main__":
    main()
