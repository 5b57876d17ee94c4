"""CASES, input forms (I1-I12), cost (C1; C2 and C3 are in test_memory.py) and hostile input (H1, H2)."""

import numpy as np
import pytest

import gradquorum as gq
from tests.support import accept, apply, assert_rows, assert_same_bits, column, reducer_class, unchanged


@pytest.mark.frameworks
def test_i1_torch_gradients_are_applied_as_they_are(make):
    torch = pytest.importorskip("torch")
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    acc = make.sparse("float32", (10, 3), reduction_type="SUM")
    for _ in range(2):
        embedding.zero_grad()
        embedding(torch.tensor([7, 1, 3])).sum().backward()
        gradient = embedding.weight.grad
        assert acc.apply_grad(gradient._indices()[0], gradient._values(), local_step=None)
        gradient._values().fill_(-9)
    weights = torch.ones(3, 3, requires_grad=True)
    taken = acc.take_grad(2, timeout=0)
    np.testing.assert_array_equal(taken.indices, [1, 3, 7])
    np.testing.assert_array_equal(taken.values, np.full((3, 3), 2))
    assert acc.apply_grad(torch.tensor([7, 1, 3]), weights, local_step=None)
    assert acc.apply_indexed_slices_grad(gradient, local_step=None)


@pytest.mark.parametrize("values", [np.zeros((0,), np.float32), np.zeros((0, 3), np.float32)])
def test_i2_batch_of_nothing_but_padding_counts_as_one(make, values):
    acc = make.sparse("float32", (5, 3))
    assert acc.apply_grad([], values).num_accumulated == 1
    taken = acc.take_grad(1, timeout=0)
    assert taken.values.shape == (0, 3)
    np.testing.assert_array_equal(taken.shape, [5, 3])
    assert taken.num_gradients == 1


def test_i3_negative_id_never_wraps(make):
    acc = make.sparse("float32", (5, 1))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=r"index of slice 0 is negative.*-1"):
        apply(acc, [-1, 2], [1, 2])


@pytest.mark.parametrize("ids", [[2**40], np.array([2**40]), np.array([2**40], np.uint64), np.array([2**40], ">i8")])
def test_i4_id_beyond_32_bits_is_right_in_every_type(make, ids):
    acc = make.sparse("float32", None)
    acc.apply_grad(ids, column(1))
    assert_rows(acc.take_grad(1, timeout=0), [2**40], [1])


@pytest.mark.parametrize("ids", [[7], np.array([7], np.int32), np.array([7], np.uint64), np.array([7], np.int8)])
def test_i4_small_id_is_right_in_every_type(make, ids):
    acc = make.sparse("float32", None)
    acc.apply_grad(ids, column(1))
    assert_rows(acc.take_grad(1, timeout=0), [7], [1])


def test_i5_slices_without_dense_shape_are_accepted(make):
    acc = make.sparse("float32", (5, 1))
    assert acc.apply_indexed_slices_grad(gq.IndexedSlices(column(1), np.array([2]), None))


@pytest.mark.parametrize("form", ["strided", "fortran", "read_only", "big_endian"])
def test_i6_values_of_any_layout_are_right(make, form):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    given = {
        "strided": np.repeat(values, 2, axis=1)[:, ::2],
        "fortran": np.asfortranarray(values),
        "read_only": np.frombuffer(values.tobytes(), np.float32).reshape(2, 3),
        "big_endian": values.astype(">f4"),
    }[form]
    acc = make.sparse("float32", (5, 3))
    acc.apply_grad([3, 1], given)
    assert_same_bits(acc.take_grad(1, timeout=0).values, values[::-1].copy())


@pytest.mark.parametrize("ids", [[3.7], np.array([3.7]), np.array([3.0], np.float32)])
def test_i7_float_id_is_an_error_not_a_row(make, ids):
    acc = make.sparse("float32", (5, 1))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.apply_grad(ids, column(1))


def test_i8_float64_array_is_an_error_naming_both_dtypes_and_a_list_is_fine(make):
    acc = make.sparse("float32", (5, 1))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=r"float32.*float64"):
        acc.apply_grad([0], np.array([[1.0]]))
    assert acc.apply_grad([0], [[1.0]])


def test_i9_grad_shape_of_other_columns_than_the_values_is_an_error(make):
    acc = make.sparse("float32", None)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="expected values dim 1 to be 2, got 3"):
        acc.apply_grad([0], np.ones((1, 3), np.float32), [6, 2])


@pytest.mark.parametrize("other", [{"dtype": "float64"}, {"shape": (6, 1)}, {"reduction_type": "SUM"}], ids=str)
def test_i10_same_shared_name_with_another_spec_is_an_error_printing_both(make, other):
    spec = {"dtype": "float32", "shape": (5, 1), "reduction_type": "MEAN", "shared_name": make.shared_name()}
    first = make.sparse(**spec)
    with pytest.raises(gq.InvalidArgumentError) as caught:
        make.sparse(**{**spec, **other})
    ((name, value),) = other.items()
    for given in (spec[name], value):
        assert (", ".join(map(str, given)) if name == "shape" else given) in str(caught.value)
    assert first.num_accumulated() == 0


def test_i11_result_of_one_is_a_gradient_for_another(make):
    a, b = make.sparse("float32", None), make.sparse("float32", None)
    accept(a, [3, 1], np.array([[1, 2], [3, 4]], np.float32))
    assert b.apply_grad(*a.take_grad(1, timeout=0))
    taken = b.take_grad(1, timeout=0)
    np.testing.assert_array_equal(taken.shape, [-1, 2])
    np.testing.assert_array_equal(taken.values, [[3, 4], [1, 2]])
    assert a.apply_indexed_slices_grad(gq.IndexedSlices(taken.values, taken.indices, taken.shape), local_step=None)


def test_i12_empty_grad_shape_is_right_for_scalar_rows_without_constraint(make):
    acc = make.sparse("float32", [])
    assert acc.apply_grad([2], np.ones(1, np.float32), [])
    np.testing.assert_array_equal(acc.take_grad(1, timeout=0).shape, [-1])


def test_c1_applies_without_overlap_do_nothing_with_what_is_in_the_round(make, monkeypatch):
    # What that means in seconds is for the benchmarks (`--only flat`).
    rng = np.random.default_rng(0)
    acc = make.sparse("float32", (2_000_000, 16))
    rows = np.ones((20_000, 16), np.float32)
    touched = []
    for name in ("merge", "compact"):
        monkeypatch.setattr(reducer_class(acc.engine), name, lambda *_, name=name: touched.append(name))
    for _ in range(64):
        accept(acc, np.sort(rng.choice(2_000_000, 20_000, replace=False)), rows)
    assert not touched
    monkeypatch.undo()
    assert acc.take_grad(64, timeout=0).num_gradients == 64


def test_c2_applies_with_overlap_merge_each_row_a_bounded_number_of_times(make, monkeypatch):
    acc = make.sparse("float32", (20_000, 16))
    reducer, num_merged = reducer_class(acc.engine), 0
    compact = reducer.compact

    def counting(self, blocks):
        nonlocal num_merged
        num_merged += sum(block.num_bytes for block in blocks)
        return compact(self, blocks)

    monkeypatch.setattr(reducer, "compact", counting)
    ids, rows = np.arange(20_000), np.ones((20_000, 16), np.float32)
    for _ in range(64):
        accept(acc, ids, rows)
    offered = 64 * (ids.nbytes + rows.nbytes)
    assert 0 < num_merged < 4 * offered
    assert acc.take_grad(64, timeout=0).num_gradients == 64


def test_h1_uint64_rows_are_exceptions_and_the_process_lives(make):
    acc = make.sparse("float32", (5, 1))
    for _ in range(2):
        with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=r"float32.*uint64"):
            acc.apply_grad([0], np.ones((1, 1), np.uint64))
    accept(acc, [0], [1])
    assert_rows(acc.take_grad(1, timeout=0), [0], [1])


@pytest.mark.parametrize(
    "shape", [(5, 2**62), (5, 2**31, 2**31), (None, 2**61), (5, 2**63 - 1), (None, 0, 2**62)], ids=str
)
def test_h2_row_beyond_2_to_the_63_bytes_is_refused_at_construction(make, shape):
    with pytest.raises(gq.InvalidArgumentError):
        make.sparse("float32", shape)


def test_h2_ids_times_row_beyond_2_to_the_63_bytes_is_refused_before_any_allocation(make):
    acc = make.sparse("float32", None, accumulate_dtype="float64")
    values = np.broadcast_to(np.float32(1), (4, 2**30, 2**28))
    for ids in ([0, 1, 2, 3], [3, 3, 1, 0]):
        with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
            acc.apply_grad(ids, values)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.apply_grad([], np.broadcast_to(np.float32(1), (0, 2**30, 2**30)))


@pytest.mark.parametrize("ids", [[0, 1], [1, 0], [1, 1]])
def test_h2_values_beyond_the_memory_of_the_machine_are_a_memory_error_and_change_nothing(make, ids):
    acc = make.sparse("float32", None)
    values = np.broadcast_to(np.float32(1), (2, 2**48))
    with unchanged(acc), pytest.raises(MemoryError):
        acc.apply_grad(ids, values, worker="w", sequence=0)
    accept(acc, [0], [1.0], worker="w", sequence=0)


def test_h2_huge_dim_0_is_fine(make):
    acc = make.sparse("float32", (2**62, 3))
    accept(acc, [2**61], np.ones((1, 3), np.float32))
    taken = acc.take_grad(1, timeout=0)
    np.testing.assert_array_equal(taken.indices, [2**61])
    np.testing.assert_array_equal(taken.shape, [2**62, 3])


@pytest.mark.frameworks
def test_i1_torch_bfloat16_and_views_are_right(make):
    torch = pytest.importorskip("torch")
    acc = make.sparse("bfloat16", (10, 2), reduction_type="SUM")
    values = torch.tensor([[1.5, 2.5], [3.5, 4.5]], dtype=torch.bfloat16, requires_grad=True)
    assert acc.apply_grad(torch.tensor([7, 1]), values, copy=False)
    assert acc.apply_grad(torch.tensor([7, 1], dtype=torch.int32), values.detach().T.contiguous().T, local_step=None)
    np.testing.assert_array_equal(acc.take_grad(2, timeout=0).values.astype(float), [[7, 9], [3, 5]])
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="float32"):
        acc.apply_grad(torch.tensor([7]), torch.ones(1, 2), local_step=None)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.apply_grad(torch.tensor([7.0]), values[:1], local_step=None)
