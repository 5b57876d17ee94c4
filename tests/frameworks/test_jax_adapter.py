"""`gradquorum.jax`: gradients in and out, outside and inside of traced functions."""

import numpy as np
import pytest

import gradquorum as gq
from tests.support import Call, only_local, unchanged, wait_for_waiters

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
gqj = pytest.importorskip("gradquorum.jax")
pytestmark = pytest.mark.frameworks

IDS = np.array([7, 1, 7], np.int32)
ROWS = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
MERGED = np.array([[3, 4], [6, 8]])


def both(apply):
    """Return the call as it is and as a traced function."""
    return pytest.mark.parametrize("run", [lambda function: function, jax.jit], ids=["eager", "jit"])(apply)


def fails(run):
    return gq.InvalidArgumentError if run is not jax.jit else jax.errors.JaxRuntimeError


@both
@pytest.mark.parametrize("form", ["pair", "bcoo"])
def test_gradients_go_in(make, run, form):
    acc = make.sparse("float32", (10, 2))

    def apply(ids, rows):
        grad = (ids, rows * 2) if form == "pair" else gqj.as_bcoo(ids, rows * 2, 10)
        return gqj.apply_grad(acc, grad, local_step=None)

    apply = run(apply)
    for _ in range(2):
        assert bool(apply(IDS, ROWS))
    taken = acc.take_grad(2, timeout=0)
    assert taken.num_gradients == 2
    np.testing.assert_array_equal(taken.values, 2 * MERGED)


@both
def test_dense_worker_and_group(make, run):
    dense, acc = make.dense("float32", (2,)), make.sparse("float32", (10, 2))
    group = make.group({"emb": gq.SparseSpec("float32", (10, 2)), "bias": gq.DenseSpec("float32", (2,))})

    def apply(worker, x):
        accepted = gqj.apply_grad(dense, x[0]), gqj.apply_grad(worker, (IDS, x))
        return [bool(each) if run is not jax.jit else each for each in accepted] + [
            gqj.apply_grad(group, {"emb": gqj.as_bcoo(IDS, x, 10), "bias": x[1]}, worker="w", sequence=1) is not None
        ]

    with acc.worker("a") as worker:
        assert all(run(lambda x: apply(worker, x))(ROWS))
    jax.effects_barrier()
    np.testing.assert_array_equal(gqj.take_grad(dense, 1, timeout=0), [1, 2])
    np.testing.assert_array_equal(acc.take_grad(1, timeout=0).values, MERGED)
    taken = gqj.take_bcoo(group, 1, timeout=0)
    np.testing.assert_array_equal(taken["emb"].todense()[np.array([1, 7])], MERGED)
    np.testing.assert_array_equal(taken["bias"], [3, 4])


@both
def test_a_stale_gradient_is_dropped_and_the_step_may_be_traced(make, run):
    acc = make.sparse("float32", (10, 2))
    acc.set_global_step(3)

    def apply(step, rows):
        return gqj.apply_grad(acc, (IDS, rows), local_step=step)

    apply = run(apply)
    assert not bool(apply(2, ROWS))
    assert bool(apply(3, ROWS))
    assert acc.num_accumulated() == 1


@both
def test_a_wrong_gradient_is_an_error_and_changes_nothing(make, run):
    acc = make.sparse("float32", (10, 2))

    def apply(ids, rows):
        return gqj.apply_grad(acc, (ids, rows))

    apply = run(apply)
    with unchanged(acc), pytest.raises(fails(run), match="index is 10 exceeded 10"):
        jax.block_until_ready(apply(np.array([3, 10, 4]), ROWS))
    with unchanged(acc), pytest.raises(fails(run), match="expected values dim 1 to be 2, got 1"):
        jax.block_until_ready(apply(IDS, ROWS[:, :1]))
    assert bool(apply(IDS, ROWS))


@both
def test_a_mapping_for_what_is_no_group_is_refused(make, run):
    acc = make.sparse("float32", (10, 2))
    with unchanged(acc), pytest.raises(fails(run), match=r"expected a group.* for a mapping"):
        jax.block_until_ready(run(lambda rows: gqj.apply_grad(acc, {"emb": (IDS, rows)}))(ROWS))


@only_local("it is JAX that orders")
def test_callbacks_run_once_each_and_in_order(make):
    acc = make.sparse("float32", (10, 1), compact=False)

    @jax.jit
    def scan(values):
        return jax.lax.scan(lambda n, v: (n + 1, gqj.apply_grad(acc, (jnp.array([3]), v[None, None]))), 0, values)

    _, accepted = scan(jnp.arange(1.0, 6.0))
    assert accepted.all()
    got = [acc.take_grad(1, timeout=0, exact=True).values.item() for _ in range(1)]
    acc.set_global_step(0)
    got += [acc.take_grad(1, timeout=0, exact=True).values.item() for _ in range(4)]
    assert got == [1, 2, 3, 4, 5]


@only_local("jit refuses before anything is sent")
def test_lending_in_a_traced_function_and_vmap_are_refused(make):
    acc = make.sparse("float32", (10, 2))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="copy=False"):
        jax.jit(lambda rows: gqj.apply_grad(acc, (IDS, rows), copy=False))(ROWS)
    with unchanged(acc), pytest.raises(ValueError, match="vmap"):
        jax.vmap(lambda row: gqj.apply_grad(acc, (IDS[:1], row[None])))(ROWS)


@only_local("large arrays cross a callback the same way for every target")
def test_large_gradients_cross_a_callback(make):
    acc = make.sparse("float32", (20_000, 64))
    rows = jnp.ones((20_000, 64))
    assert bool(jax.jit(lambda ids, rows: gqj.apply_grad(acc, (ids, rows * 2)))(jnp.arange(20_000), rows))
    np.testing.assert_array_equal(acc.take_grad(1, timeout=0).values, 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("size", [None, 2, 5])
def test_gradients_come_out_in_every_dtype(make, dtype, size):
    acc = make.sparse(dtype, (10, 2))
    gqj.apply_grad(acc, (IDS, jnp.asarray(ROWS).astype(dtype)))
    ids, rows = gqj.take_grad(acc, 1, timeout=0, size=size)
    assert isinstance(rows, jax.Array)
    assert rows.dtype.name == dtype
    assert ids.tolist() == [1, 7] + [10] * ((size or 2) - 2)
    table = jnp.zeros((10, 2), dtype).at[ids].add(rows, mode="drop")
    np.testing.assert_array_equal(np.asarray(table).astype(complex)[[1, 7]], MERGED)
    assert not np.asarray(table).astype(complex)[[0, 9]].any()


def test_gradients_come_out_in_a_traced_function(make):
    acc = make.sparse("float32", (10, 2))

    @jax.jit
    def round_trip(rows):
        accepted = gqj.apply_grad(acc, (IDS, rows), local_step=None)
        return accepted, gqj.take_grad(acc, 1, size=3, timeout=10), gqj.as_bcoo(IDS, rows, 10)

    for factor in (1, 2):
        accepted, (ids, rows), _ = round_trip(ROWS * factor)
        assert bool(accepted)
        assert ids.tolist() == [1, 7, 10]
        np.testing.assert_array_equal(rows, factor * np.vstack([MERGED, [[0, 0]]]))
    assert acc.global_step == 2


def test_bcoo_comes_out_in_a_traced_function(make):
    acc = make.sparse("float32", (10, 2))
    gqj.apply_grad(acc, (IDS, ROWS))
    dense = jax.jit(lambda: gqj.take_bcoo(acc, 1, size=4, timeout=0).todense() * 2)()
    np.testing.assert_array_equal(dense[np.array([1, 7])], 2 * MERGED)
    assert dense.sum() == 2 * MERGED.sum()


def test_a_take_waits_for_its_quorum(make):
    acc = make.sparse("float32", (10, 2))
    call = Call(gqj.take_grad, acc, 2)
    wait_for_waiters(acc, 1)
    for _ in range(2):
        gqj.apply_grad(acc, (IDS, ROWS), local_step=None)
    np.testing.assert_array_equal(call.result()[1], MERGED)


@both
def test_a_round_of_more_rows_than_size_is_kept(make, run):
    acc = make.sparse("float32", (10, 2))
    gqj.apply_grad(acc, (IDS, ROWS))
    expected = jax.errors.JaxRuntimeError
    with pytest.raises(expected, match="a size of 2 or more, as the round has so many rows, got 1"):
        jax.block_until_ready(run(lambda: gqj.take_grad(acc, 1, size=1, timeout=0))())
    assert acc.num_undelivered == 1
    np.testing.assert_array_equal(gqj.take_grad(acc, 1, timeout=0)[1], MERGED)
    assert acc.num_undelivered == 0


def test_ids_that_jax_cannot_hold_are_an_error_and_the_round_is_kept(make):
    acc = make.sparse("float32", None)
    acc.apply_grad([2**40], [[1.0]])
    with pytest.raises(gq.InvalidArgumentError, match=r"got 1099511627776; set jax.config.update\(\"jax_enable_x64\""):
        gqj.take_grad(acc, 1, timeout=0)
    assert acc.num_undelivered == 1
    jax.config.update("jax_enable_x64", True)
    try:
        ids, _ = gqj.take_grad(acc, 1, timeout=0)
        assert ids.tolist() == [2**40]
    finally:
        jax.config.update("jax_enable_x64", False)


def test_dtypes_that_jax_narrows_are_refused_before_anything_is_taken(make):
    acc = make.sparse("float64", (10, 2))
    acc.apply_grad(IDS, ROWS.astype(np.float64))
    with unchanged(acc), pytest.raises(gq.InvalidDTypeError, match=r"float64; set jax\.config\.update"):
        gqj.take_grad(acc, 1, timeout=0)


@pytest.mark.parametrize(
    ("ids", "rows", "words"),
    [
        ([1.5], [[1.0]], "ids: expected integers, got float32"),
        ([True], [[1.0]], "ids: expected integers, got bool"),
        ([[1]], [[1.0]], r"expected a vector and a row for each id, got shapes \(1, 1\)"),
        ([1, 2], [[1.0]], r"got shapes \(2,\) and \(1, 1\)"),
        ([1], 1.0, r"got shapes \(1,\) and \(\)"),
    ],
)
def test_ids_and_rows_that_make_no_matrix_are_refused(ids, rows, words):
    with pytest.raises(gq.InvalidArgumentError, match=words):
        gqj.as_bcoo(jnp.asarray(ids), rows, 10)
    assert gqj.as_bcoo([], jnp.zeros((0, 2)), 10).shape == (10, 2)


def test_odd_arguments_are_refused_and_nothing_is_taken(make):
    acc = make.sparse("float32", None)
    group = make.group({"a": gq.SparseSpec("float32", (10, 2)), "b": gq.DenseSpec("float32", None)})
    acc.apply_grad(IDS, ROWS)
    group.apply({"a": (IDS, ROWS)})
    for call, words in [
        (lambda: gqj.take_grad(acc, 0), "must be positive"),
        (lambda: gqj.take_grad(acc, 1, size=-1), "size: expected 0 or more"),
        (lambda: gqj.take_grad(acc, 1, size=1.5), "size: expected an integer"),
        (lambda: gqj.take_grad(acc, 1, size=5), "knows the shape of what it returns"),
        (lambda: gqj.take_bcoo(acc, 1), "one with a number of rows"),
        (lambda: jax.jit(lambda: gqj.take_grad(acc, 1))(), "size: expected a number of rows in a traced function"),
        (lambda: gqj.take_grad(group, 1, size={"c": 1}), r"a number for each of \['a'\]"),
        (lambda: gqj.take_grad(group, 1, size=5), "b: expected an accumulator that knows"),
        (lambda: jax.jit(lambda copy: gqj.apply_grad(acc, (IDS, ROWS), copy=copy))(True), "expected True in a traced"),
        (lambda: gqj.take_grad("acc", 1), "got str"),
        (lambda: gqj.apply_grad("acc", (IDS, ROWS)), "got str"),
        (lambda: gqj.apply_grad(group, (IDS, ROWS)), "a group takes a mapping"),
    ]:
        with unchanged(acc), unchanged(group), pytest.raises(gq.InvalidArgumentError, match=words):
            call()
    with unchanged(group), pytest.raises(gq.DeadlineExceededError):
        gqj.take_grad(group, 2, timeout=0)
