"""Arrays and BCOO matrices of JAX wherever arrays go: what is accepted, and what is refused."""

import os
import subprocess
import sys

import numpy as np
import pytest

import gradquorum as gq
from tests.support import only_local, unchanged

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
sparse = pytest.importorskip("jax.experimental.sparse")
pytestmark = pytest.mark.frameworks

IDS = np.array([7, 1, 7])
ROWS = np.arange(1, 7, dtype=np.float32).reshape(3, 2)


def bcoo(ids=IDS, rows=ROWS, num_rows=10):
    rows = jnp.asarray(rows)
    return sparse.BCOO((rows, jnp.asarray(ids)[:, None]), shape=(num_rows, *rows.shape[1:]))


def taken(acc):
    return acc.take_grad(1, timeout=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_every_dtype_crosses(make, dtype):
    acc = make.sparse(getattr(jnp, dtype), (10, 2))
    assert acc.dtype.name == dtype
    assert acc.apply_grad(jnp.asarray(IDS), jnp.asarray(ROWS).astype(dtype), local_step=jnp.int32(0))
    result = taken(acc)
    assert result.values.dtype.name == dtype
    np.testing.assert_array_equal(result.values.astype(complex), [[3, 4], [6, 8]])


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "int32", "uint32"])
def test_ids_of_every_integer_dtype_are_accepted(make, dtype):
    acc = make.sparse("float32", (10, 2))
    assert acc.apply_grad(jnp.asarray(IDS, dtype), jnp.asarray(ROWS))
    np.testing.assert_array_equal(taken(acc).indices, [1, 7])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "int4", "uint4", "bool"])
def test_a_dense_gradient_of_a_narrower_dtype_is_converted(make, dtype):
    dense = make.dense("float32", (3, 2))
    narrow = jnp.asarray(ROWS).astype(dtype)
    assert dense.apply_grad(narrow)
    np.testing.assert_array_equal(taken(dense), narrow.astype(jnp.float32))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_a_dense_gradient_of_floats_is_no_gradient_of_integers(make, dtype):
    dense = make.dense("int32", (3, 2), reduction_type="SUM")
    with unchanged(dense), pytest.raises(gq.InvalidDTypeError, match="lose what kind of number"):
        dense.apply_grad(jnp.asarray(ROWS).astype(dtype))


def deleted(array):
    array = jnp.asarray(array) + 0
    array.delete()
    return array


def donated(array):
    array = jnp.asarray(array) + 0
    jax.jit(lambda array: array + 1, donate_argnums=0)(array)
    return array


@pytest.mark.parametrize("gone", [deleted, donated])
def test_arrays_that_are_gone_are_refused(make, gone):
    acc, dense = make.sparse("float32", (10, 2)), make.dense("float32", (3, 2))
    for call in (
        lambda: acc.apply_grad(IDS, gone(ROWS)),
        lambda: acc.apply_grad(gone(IDS), ROWS),
        lambda: acc.apply_indexed_slices_grad(sparse.BCOO((gone(ROWS), jnp.asarray(IDS)[:, None]), shape=(10, 2))),
        lambda: acc.apply_indexed_slices_grad(sparse.BCOO((jnp.asarray(ROWS), gone(IDS[:, None])), shape=(10, 2))),
        lambda: acc.apply_indexed_slices_grad(sparse.BCOO((gone(ROWS), jnp.array([[1], [10], [3]])), shape=(10, 2))),
        lambda: dense.apply_grad(gone(ROWS)),
    ):
        with unchanged(acc), unchanged(dense), pytest.raises(gq.InvalidArgumentError, match="Array has been deleted"):
            call()


@only_local("arrays are lent within a process")
def test_a_lent_array_that_is_deleted_or_donated_afterwards_is_still_right(make):
    for _ in range(2):
        acc, rows = make.sparse("float32", (10, 2)), jnp.asarray(ROWS) + 0
        assert acc.apply_grad([1, 3, 7], rows, copy=False).lent
        jax.block_until_ready(jax.jit(lambda rows: rows * 100, donate_argnums=0)(rows))
        rows.delete()
        np.testing.assert_array_equal(taken(acc).values, ROWS)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, gradquorum as gq, gradquorum.jax as gqj
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
rows = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
for spec in (PartitionSpec("x", "y"), PartitionSpec("x"), PartitionSpec(None, "y"), PartitionSpec()):
    sharded, ids = jax.device_put(rows, NamedSharding(mesh, spec)), jnp.array([1, 3, 7, 9])
    acc = gq.SparseConditionalAccumulator("float32", (10, 2))
    assert acc.apply_grad([1, 3, 7, 9], sharded, copy=False)
    assert gqj.apply_grad(acc, gqj.as_bcoo(ids, sharded, 10))
    assert jax.jit(lambda rows: gqj.apply_grad(acc, (ids, rows)))(sharded)
    jax.effects_barrier()
    np.testing.assert_array_equal(acc.take_grad(3, timeout=0).values, rows)
"""


@only_local("what is sharded never reaches a target")
def test_an_array_that_is_sharded_over_devices_is_taken_whole(make):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SHARDED], env={**os.environ, **flags}, check=True, timeout=120)


@only_local("arrays are lent within a process")
def test_an_array_is_read_where_it_lies(make):
    acc, rows = make.sparse("float32", (10, 2)), jnp.asarray(ROWS)
    assert np.asarray(rows).ctypes.data == rows.unsafe_buffer_pointer()
    receipt = acc.apply_grad(jnp.asarray([1, 3, 7]), rows, copy=False)
    assert receipt.lent
    del rows  # the accumulator keeps the memory
    np.testing.assert_array_equal(taken(acc).values, ROWS)
    assert receipt.released


def test_bcoo_is_accepted_with_repeats_and_with_padding(make):
    acc = make.sparse("float32", (10, 2))
    assert acc.apply_indexed_slices_grad(bcoo())
    np.testing.assert_array_equal(taken(acc).values, [[3, 4], [6, 8]])
    padded = bcoo().sum_duplicates(nse=5)
    assert padded.nse == 5
    assert acc.apply_indexed_slices_grad(padded, local_step=None)
    result = taken(acc)
    np.testing.assert_array_equal(result.indices, [1, 7])
    np.testing.assert_array_equal(result.values, [[3, 4], [6, 8]])


def test_bcoo_of_bfloat16_and_of_scalar_rows_and_without_rows(make):
    acc = make.sparse("bfloat16", (10, 2))
    assert acc.apply_indexed_slices_grad(bcoo(rows=jnp.asarray(ROWS, jnp.bfloat16)))
    np.testing.assert_array_equal(taken(acc).values.astype(np.float32), [[3, 4], [6, 8]])
    scalars = make.sparse("float32", (10,))
    assert scalars.apply_indexed_slices_grad(bcoo(rows=np.ones(3, np.float32)))
    np.testing.assert_array_equal(taken(scalars).values, [1, 2])
    empty = make.sparse("float32", (10, 2))
    assert empty.apply_indexed_slices_grad(bcoo(np.zeros(0, int), np.zeros((0, 2), np.float32)))
    assert taken(empty).values.shape == (0, 2)


def test_bcoo_in_a_group_and_arrays_for_dense_members(make):
    group = make.group({"emb": gq.SparseSpec(jnp.float32, (10, 2)), "bias": gq.DenseSpec(jnp.bfloat16, (2,))})
    assert group.apply({"emb": bcoo(), "bias": jnp.ones(2, jnp.bfloat16)})
    result = group.take(1, timeout=0)
    np.testing.assert_array_equal(result["emb"].values, [[3, 4], [6, 8]])
    np.testing.assert_array_equal(result["bias"].astype(float), [1, 1])


BAD = {
    "two sparse dims": (lambda: sparse.BCOO.fromdense(jnp.eye(10, 2)), "n_sparse=2, n_batch=0; make it with n_dense=1"),
    "batched": (lambda: sparse.BCOO.fromdense(jnp.ones((10, 2)), n_batch=1, n_dense=0), "n_batch=1"),
    "another table": (lambda: bcoo(num_rows=12), "expected shape dim 0 to be 10, got 12"),
    "beyond the padding": (lambda: bcoo([7, 11, 1]), "index is 11 exceeded 10"),
    "negative": (lambda: bcoo([7, -1, 1]), "slice 1 is negative"),
    "another dtype": (lambda: bcoo(rows=jnp.asarray(ROWS, jnp.float16)), r"float32.*float16.*astype"),
    "bcsr": (lambda: sparse.BCSR.fromdense(jnp.eye(10, 2)), "expected IndexedSlices"),
    "an array": (lambda: jnp.asarray(ROWS), "expected IndexedSlices"),
}


@pytest.mark.parametrize("form", BAD)
def test_other_gradients_are_refused(make, form):
    build, words = BAD[form]
    acc = make.sparse("float32", (10, 2))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=words):
        acc.apply_indexed_slices_grad(build())


@pytest.mark.parametrize("values", [lambda: bcoo(), lambda: jnp.asarray(ROWS, jnp.int32), lambda: jax.random.key(0)])
def test_other_values_are_refused(make, values):
    acc, dense = make.sparse("float32", (10, 2)), make.dense("float32", (3, 2))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.apply_grad(IDS, values())
    if values().dtype != jnp.int32:
        with unchanged(dense), pytest.raises(gq.InvalidArgumentError):
            dense.apply_grad(values())


@pytest.mark.parametrize("ids", [[3.0], [True]])
def test_ids_that_are_no_integers_are_refused(make, ids):
    acc = make.sparse("float32", (10, 2))
    with unchanged(acc), pytest.raises(gq.InvalidDTypeError, match="indices"):
        acc.apply_grad(jnp.asarray(ids), ROWS[:1])


@only_local("what is traced never reaches a target")
def test_tracers_are_refused_and_told_what_to_call(make):
    acc = make.sparse("float32", (10, 2))
    calls = [
        lambda rows: acc.apply_grad(IDS, rows),
        lambda rows: acc.apply_grad(rows[:, 0].astype(int), ROWS),
        lambda rows: acc.apply_indexed_slices_grad(bcoo(rows=rows)),
        lambda rows: make.dense("float32", (3, 2)).apply_grad(rows),
    ]
    for call in calls:
        with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=r"call gradquorum\.jax\.apply_grad"):
            jax.jit(call)(ROWS)
