"""Wrong usage: each marked line is an error that mypy --strict must find (and no other)."""

import numpy as np

import gradquorum as gq

acc = gq.SparseConditionalAccumulator("float32", (5, 2))
gq.SparseConditionalAccumulator("float32", order="random")  # wrong
gq.SparseConditionalAccumulator("float32", reduction_type="AVERAGE")  # wrong
gq.SparseConditionalAccumulator("float32", None, None, "name", "MEAN", "local")  # wrong
acc.take_grad("2")  # wrong
acc.take_grad(2, None, 1.0)  # wrong
acc.apply_grad([0], np.ones((1, 2)), None, 0, None, "worker")  # wrong
acc.global_step = 3  # wrong
number: str = acc.num_accumulated()  # wrong
acc.accumulator_ref  # wrong  # noqa: B018
gq.ConditionalAccumulator("float32").take_indexed_slices_grad(1)  # wrong
gq.AccumulatorGroup([gq.DenseSpec("float32", (1,))])  # wrong
