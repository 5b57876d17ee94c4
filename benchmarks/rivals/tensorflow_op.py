"""TensorFlow's SparseConditionalAccumulator, run through callables: the fastest way to drive it from Python."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from benchmarks.cases import Gradient
from benchmarks.rivals import Job

FUTURE_STEP = 2**62
"""Never stale."""


def prepare(gradients: list[Gradient]) -> Job:
    dtype, dim = gradients[0][1].dtype, gradients[0][1].shape[1]
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        accumulator = v1.SparseConditionalAccumulator(dtype, shape=[None, dim])
        ids, values = v1.placeholder(tf.int64, [None]), v1.placeholder(dtype, [None, dim])
        apply_op = accumulator.apply_grad(ids, values, local_step=FUTURE_STEP)
        take_op = accumulator.take_grad(len(gradients))[:2]
    session = v1.Session(graph=graph)
    apply = session.make_callable(apply_op, feed_list=[ids, values])
    take = session.make_callable(take_op)

    def job():
        for gradient in gradients:
            apply(*gradient)
        return take()

    return job
