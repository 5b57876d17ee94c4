"""What decides on the form of gradients in `gradquorum.jax.MultiSteps`, ids outside of a table, and when JAX traces."""

import numpy as np
import pytest

import gradquorum as gq

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
optax = pytest.importorskip("optax")
gqj = pytest.importorskip("gradquorum.jax")
tracing = pytest.importorskip("gradquorum.jax.tracing")
pytestmark = pytest.mark.frameworks

modes = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
PARAMS = {"table": np.ones((10, 1), np.float32)}


def rows(ids, dtype=np.float32):
    return {"table": gqj.as_bcoo(jnp.array(ids), jnp.ones((len(ids), 1), dtype), 10)}


@modes
@pytest.mark.parametrize("bad", [rows([10, 11]), rows([-1, 2])], ids=["above", "below"])
def test_a_refused_first_gradient_decides_on_no_form(jit, bad):
    tx = gqj.MultiSteps(optax.sgd(1.0), 2, size=4)
    state = tx.init(PARAMS)
    update = jax.jit(tx.update) if jit else tx.update
    bad = {"table": gqj.as_bcoo(bad["table"].indices[:, 0], bad["table"].data.astype(jnp.float16), 10)}
    with pytest.raises(jax.errors.JaxRuntimeError if jit else gq.InvalidArgumentError, match="index of slice 0"):
        jax.block_until_ready(update({"table": bad["table"]}, state, PARAMS))
    for ids in ([7, 1], [1, 1]):
        updates, state = update(rows(ids), state, PARAMS)
    table = gqj.apply_updates(PARAMS, updates)["table"].ravel()
    np.testing.assert_array_equal(table[np.array([0, 1, 7])], [1, -0.5, 0.5])
    with pytest.raises(gq.InvalidArgumentError, match="expected gradients as before"):
        update({"table": jnp.ones((10, 1))}, state, PARAMS)


def test_a_program_that_was_traced_before_another_form_was_held_is_refused_when_it_runs():
    tx = gqj.MultiSteps(optax.sgd(1.0), 2, size=4)
    state = tx.init(PARAMS)
    sparse = jax.jit(tx.update).lower(rows([1]), state, PARAMS).compile()
    dense = {"table": jnp.ones((10, 1))}
    tx.update(dense, state, PARAMS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected gradients as before"):
        jax.block_until_ready(sparse(rows([1]), state, PARAMS))
    updates, _ = tx.update(dense, state, PARAMS)
    np.testing.assert_array_equal(updates["table"], -1)


@modes
def test_updates_of_ids_outside_of_the_table_are_left_out(jit):
    apply = jax.jit(gqj.apply_updates) if jit else gqj.apply_updates
    for num_rows, dtype, low in ((3, jnp.int32, -1), (3, jnp.int8, -1), (3, jnp.uint8, 3), (200, jnp.int8, -1)):
        ids = jnp.array([low, 2, 127, 1], dtype)
        update = gqj.as_bcoo(ids, jnp.array([[1.0], [2.0], [4.0], [8.0]]), num_rows)
        want = np.zeros(num_rows)
        want[[1, 2]] = 8, 2
        want[127:128] = 4
        np.testing.assert_array_equal(apply(jnp.zeros((num_rows, 1)), update).ravel(), want)


def test_whether_jax_traces_is_told_without_an_array(monkeypatch):
    assert not tracing.is_tracing()
    seen = []
    jax.jit(lambda x: seen.append(tracing.is_tracing()) or x)(1.0)
    jax.vmap(lambda x: seen.append(tracing.is_tracing(x)) or x)(jnp.ones(2))
    jax.grad(lambda x: seen.append(tracing.is_tracing(x)) or x)(1.0)
    assert seen == [True] * 3
    monkeypatch.setattr(tracing.jnp, "zeros", None)  # called, it would be an error
    assert not tracing.is_tracing({"a": np.ones(2)})
