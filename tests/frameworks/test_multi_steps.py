"""`gradquorum.jax.MultiSteps`: several gradients merged before an optax transformation steps, without a dense table."""

import numpy as np
import pytest

import gradquorum as gq
from tests.support import failing_merges

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
optax = pytest.importorskip("optax")
gqj = pytest.importorskip("gradquorum.jax")
pytestmark = pytest.mark.frameworks

BATCHES = [[7, 1, 7], [2, 7, 9], [1, 1, 1], [0, 9, 9]]
modes = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])


def parameters(dtype=jnp.float32):
    return {"table": jnp.arange(20, dtype=dtype).reshape(10, 2) / 10, "bias": jnp.ones(2, dtype)}


def gradients(params, ids, factor=1.0):
    """Return gradients of the squares of the rows of those ids, and of the bias."""
    rows = 2 * params["table"][ids] * factor
    return {"table": gqj.as_bcoo(ids, rows, 10), "bias": 2 * params["bias"] * factor}


def dense(grads):
    return {"table": grads["table"].todense(), "bias": grads["bias"]}


def train(tx, batches, jit=False, params=None, factors=None):
    params = parameters() if params is None else params
    state = tx.init(params)

    def step(params, state, ids, factor):
        updates, state = tx.update(gradients(params, ids, factor), state, params)
        return gqj.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    for ids, factor in zip(batches, factors or [1.0] * len(batches), strict=True):
        params, state = step(params, state, jnp.array(ids), factor)
    return params, state


def train_dense(inner, groups, params=None):
    """The same with optax on dense gradients: each group of batches is a step."""
    params = parameters() if params is None else params
    state = inner.init(params)
    for group in groups:
        grads = jax.tree.map(
            lambda *each: sum(each) / len(each), *[dense(gradients(params, jnp.array(g))) for g in group]
        )
        updates, state = inner.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(got, want):
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


@modes
@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))])
def test_merged_gradients_are_those_of_one_batch(inner, jit):
    params, state = train(gqj.MultiSteps(inner, 2, size=6), BATCHES, jit)
    assert_close(params, train_dense(inner, [BATCHES[:2], BATCHES[2:]]))
    assert (int(state.mini_step), int(state.gradient_step), int(state.num_skipped)) == (0, 2, 0)


@modes
def test_in_between_nothing_changes(jit):
    params, state = train(gqj.MultiSteps(optax.adam(0.1), 4, size=6), BATCHES[:3], jit)
    assert_close(params, parameters())
    assert int(state.mini_step) == 3
    assert int(state.inner_state[0].count) == 0


@modes
@pytest.mark.parametrize(
    "inner", [optax.adam(0.1), optax.sgd(0.1, momentum=0.9), optax.adagrad(0.1), optax.adamw(0.1, weight_decay=0.1)],
    ids=["adam", "momentum", "adagrad", "adamw"],
)  # fmt: skip
def test_what_is_done_to_each_row_is_done_to_the_touched_rows_only(inner, jit):
    batches = [[7, 1, 7], [7, 1, 1]]  # the same rows in each step: as if the table had only these
    params, _ = train(gqj.MultiSteps(inner, 1, size=4), batches, jit)
    want = train_dense(inner, [[each] for each in batches])
    touched = np.array([1, 7])
    np.testing.assert_allclose(params["table"][touched], want["table"][touched], rtol=1e-5, atol=1e-6)
    others = np.setdiff1d(np.arange(10), touched)
    np.testing.assert_array_equal(params["table"][others], parameters()["table"][others])
    np.testing.assert_allclose(params["bias"], want["bias"], rtol=1e-5, atol=1e-6)


@modes
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(jit):
    tx = gqj.MultiSteps(optax.sgd(0.1), 2, size=6)
    params, state = train(tx, [BATCHES[0], BATCHES[1], BATCHES[1]], jit, factors=[1.0, float("nan"), 1.0])
    assert_close(params, train_dense(optax.sgd(0.1), [BATCHES[:2]]))
    assert (int(state.gradient_step), int(state.num_skipped)) == (1, 1)


def test_v11_what_is_left_is_divided_by_its_own_count():
    tx = gqj.MultiSteps(optax.sgd(0.1), 4)
    params, state = train(tx, BATCHES[:2])
    updates, state = tx.flush(state, params)
    assert_close(gqj.apply_updates(params, updates), train_dense(optax.sgd(0.1), [BATCHES[:2]]))
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)
    with pytest.raises(gq.InvalidArgumentError, match="gradients that are held, got none"):
        tx.flush(state, params)


@pytest.mark.parametrize("then", ["flush", "update"])
def test_a_jitted_update_that_still_runs_is_waited_for(then):
    tx = gqj.MultiSteps(optax.sgd(1.0), 3, size=4)
    params = {"table": jnp.zeros((10, 1))}
    update = jax.jit(lambda state, ids, x: tx.update({"table": gqj.as_bcoo(ids, x + jnp.ones((1, 1)), 10)}, state))
    long = jax.jit(lambda matrix: jax.lax.fori_loop(0, 8, lambda _, each: each @ each / 500, matrix)[0, 0])
    ones = jnp.ones((500, 500))
    last = {"table": gqj.as_bcoo(jnp.array([3]), jnp.ones((1, 1)), 10)}
    jax.block_until_ready((long(ones), last["table"].data))
    state = tx.init(params)
    _, state = update(state, jnp.array([1]), jnp.float32(0))
    _, state = update(state, jnp.array([2]), long(ones))
    if then == "flush":
        updates, state = tx.flush(state)
        ids = [1, 2]
    else:
        updates, state = tx.update(last, state)
        ids = [1, 2, 3]
    assert updates["table"].indices.ravel().tolist() == ids
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)


@modes
def test_bfloat16_and_a_tree_of_one_leaf(jit):
    table = jnp.ones((10, 2), jnp.bfloat16)
    tx = gqj.MultiSteps(optax.sgd(0.5), 1, size=3)

    def step(table, state):
        updates, state = tx.update(gqj.as_bcoo(jnp.array([3, 3]), jnp.ones((2, 2), jnp.bfloat16), 10), state, table)
        return gqj.apply_updates(table, updates)

    got = (jax.jit(step) if jit else step)(table, tx.init(table))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32)[jnp.array([2, 3])], [[1, 1], [0, 0]])


@modes
def test_tables_of_numpy_are_taken(jit):
    params = jax.tree.map(np.asarray, parameters())
    tx = gqj.MultiSteps(optax.adam(0.1), 1, size=3)
    grads = gradients(parameters(), jnp.array(BATCHES[0]))
    update = jax.jit(tx.update) if jit else tx.update
    updates, state = update(grads, jax.tree.map(np.asarray, tx.init(params)), params)
    want, _ = tx.update(grads, tx.init(parameters()), parameters())
    assert_close(gqj.apply_updates(params, updates), gqj.apply_updates(parameters(), want))
    assert int(state.gradient_step) == 1


def test_two_states_share_nothing():
    tx = gqj.MultiSteps(optax.sgd(0.1), 2)
    params = parameters()
    one, two = tx.init(params), tx.init(params)
    _, one = tx.update(gradients(params, jnp.array([1])), one, params)
    _, two = tx.update(gradients(params, jnp.array([1])), two, params)
    assert int(one.mini_step) == int(two.mini_step) == 1


def test_init_in_a_traced_function_is_refused():
    with pytest.raises(gq.InvalidArgumentError, match="init: expected a call outside of traced functions"):
        jax.jit(gqj.MultiSteps(optax.sgd(0.1), 2).init)(parameters())


def test_the_state_may_be_donated():
    tx = gqj.MultiSteps(optax.sgd(0.1), 2, size=6)
    params = parameters()
    update = jax.jit(lambda state, ids: tx.update(gradients(params, ids), state)[1], donate_argnums=0)
    state = before = tx.init(params)
    for _ in range(3):
        state = update(state, jnp.array([1]))
    assert before.gradient_step.is_deleted()
    assert (int(state.mini_step), int(state.gradient_step), int(state.num_skipped)) == (1, 1, 0)


def test_optax_takes_it_as_a_transformation():
    chained = optax.chain(gqj.MultiSteps(optax.identity(), 2))
    params = parameters()
    state = chained.init(params)
    for _ in range(2):
        updates, state = chained.update(gradients(params, jnp.array([1])), state, params)
    np.testing.assert_allclose(updates["bias"], 2 * params["bias"])


def test_more_rows_than_size_are_an_error_and_nothing_is_lost():
    tx = gqj.MultiSteps(optax.sgd(0.1), 2, size=2)
    params = parameters()
    state = tx.init(params)
    update = jax.jit(lambda state, ids: tx.update(gradients(params, ids), state, params))
    _, state = update(state, jnp.array([1, 2]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a size of 4 or more"):
        jax.block_until_ready(update(state, jnp.array([3, 4]))[1])
    updates, _ = tx.flush(state, params)
    np.testing.assert_array_equal(updates["table"].indices.ravel(), [1, 2, 3, 4])


def test_a_merge_that_fails_loses_nothing():
    tx = gqj.MultiSteps(optax.sgd(0.1), 1)
    params = parameters()
    state = tx.init(params)
    with failing_merges(gq.engine_name), pytest.raises(gq.ResourceExhaustedError):
        tx.update(gradients(params, jnp.array([1])), state, params)
    updates, _ = tx.flush(state, params)
    np.testing.assert_array_equal(updates["table"].indices.ravel(), [1])


@pytest.mark.parametrize("again", ["flush", "update"])
def test_an_inner_transformation_that_fails_loses_nothing(again):
    fails = []

    def step(grads, state, params=None):
        if fails:
            raise RuntimeError("the inner one")
        return grads, state

    tx = gqj.MultiSteps(optax.GradientTransformation(lambda params: (), step), 2)
    params = parameters()
    _, state = tx.update(gradients(params, jnp.array([1])), tx.init(params), params)
    fails.append(1)
    with pytest.raises(RuntimeError, match="the inner one"):
        tx.update(gradients(params, jnp.array([2])), state, params)
    fails.clear()
    if again == "flush":
        updates, state = tx.flush(state, params)
    else:
        updates, state = tx.update(gradients(params, jnp.array([3])), state, params)
    assert updates["table"].indices.ravel().tolist() == [1, 2]
    assert (int(state.mini_step), int(state.gradient_step)) == (int(again == "update"), 1)


def test_gradients_that_do_not_fit_are_refused_and_nothing_changes():
    tx = gqj.MultiSteps(optax.sgd(0.1), 2)
    params = parameters()
    state = tx.init(params)
    grads = gradients(params, jnp.array([1]))
    for bad, words in [
        ({"table": grads["table"]}, "expected a tree like that of the parameters"),
        ({**grads, "bias": jnp.ones(3)}, "bias.*expected a gradient of the shape"),
        (
            {**grads, "table": gqj.as_bcoo(jnp.array([1]), jnp.ones((1, 2)), 11)},
            "table.*expected a gradient of the shape",
        ),
    ]:
        with pytest.raises(gq.InvalidArgumentError, match=words):
            tx.update(bad, state, params)
    _, state = tx.update(grads, state, params)
    for bad, words in [
        (dense(grads), "expected gradients as before"),
        ({**grads, "bias": grads["bias"].astype(jnp.float16)}, "expected gradients as before"),
        ({**grads, "table": gqj.as_bcoo(jnp.array([12]), jnp.ones((1, 2)), 10)}, "index is 12 exceeded 10"),
    ]:
        with pytest.raises(gq.InvalidArgumentError, match=words):
            tx.update(bad, state, params)
    _, state = tx.update(grads, state, params)
    assert int(state.gradient_step) == 1
    with pytest.raises(gq.InvalidArgumentError, match="size"):
        jax.jit(lambda s: gqj.MultiSteps(optax.sgd(0.1), 2).update(grads, s, params)[0])(tx.init(params))


def test_an_inner_state_that_is_no_table_of_rows_is_refused():
    crossed = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape[::-1]), params), lambda g, s, p=None: (g, s)
    )
    params = {"table": jnp.ones((10, 2))}
    tx = gqj.MultiSteps(crossed, 1)
    with pytest.raises(gq.InvalidArgumentError, match="a row for each row of the parameter"):
        tx.update({"table": gradients(parameters(), jnp.array([1]))["table"]}, tx.init(params), params)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_two_embeddings_have_a_state_each(num_rows):
    params = {"one": jnp.ones((5, 1)), "two": jnp.ones((num_rows, 1))}
    grads = {name: gqj.as_bcoo(jnp.array([0]), jnp.ones((1, 1)), len(table)) for name, table in params.items()}
    tx = gqj.MultiSteps(optax.sgd(0.5, momentum=0.5), 1)
    _, state = tx.update(grads, tx.init(params), params)
    trace = state.inner_state[0].trace
    assert trace["one"].ravel().tolist() == [1, 0, 0, 0, 0]
    assert trace["two"].ravel().tolist() == [1] + [0] * (num_rows - 1)


@modes
@pytest.mark.parametrize("factored", [True, False])
def test_adafactor_is_refused_if_its_state_is_factored(factored, jit):
    params = {"table": jnp.ones((10, 8)), "other": jnp.ones((10, 8))}
    tx = gqj.MultiSteps(optax.adafactor(0.1, min_dim_size_to_factor=4 if factored else 16), 1, size=2)
    grads = {"table": gqj.as_bcoo(jnp.array([1, 7]), jnp.ones((2, 8)), 10), "other": jnp.ones((10, 8))}
    update = jax.jit(tx.update) if jit else tx.update
    if factored:
        with pytest.raises(gq.InvalidArgumentError, match=r"table.*a row for each row.*min_dim_size_to_factor"):
            update(grads, tx.init(params), params)
    else:
        assert int(update(grads, tx.init(params), params)[1].gradient_step) == 1


@pytest.mark.parametrize(
    ("steps", "options"),
    [(0, {}), (1.5, {}), (1, {"reduction": "mean"}), (1, {"reduction": "MEAN_BY_WEIGHT"}), (1, {"size": -1}),
     (1, {"size": 1.5}), (1, {"on_nonfinite": "ignore"})],
    ids=str,
)  # fmt: skip
def test_odd_arguments_are_refused(steps, options):
    with pytest.raises(gq.InvalidArgumentError):
        gqj.MultiSteps(optax.sgd(0.1), steps, **options)
