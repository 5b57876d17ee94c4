"""Tensors of PyTorch wherever arrays go: what is accepted, without a copy too many, and what is refused."""

import numpy as np
import pytest

import gradquorum as gq
from tests.support import only_local, unchanged

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]

IDS = torch.tensor([7, 1, 7])
MERGED = [1, 7]


def rows(dtype="float32", count=3):
    return torch.arange(1.0, 2 * count + 1).reshape(count, 2).to(getattr(torch, dtype))


def taken(acc, count=1):
    return acc.take_grad(count, timeout=0)


@pytest.mark.parametrize("coalesce", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_sparse_coo_gradient_is_accepted_coalesced_or_not(make, coalesce, requires_grad):
    acc = make.sparse("float32", (10, 2))
    gradient = torch.sparse_coo_tensor(IDS[None], rows(), (10, 2), check_invariants=True)
    gradient = gradient.coalesce() if coalesce else gradient
    assert acc.apply_indexed_slices_grad(gradient.requires_grad_(requires_grad))
    result = taken(acc)
    np.testing.assert_array_equal(result.indices, MERGED)
    np.testing.assert_array_equal(result.values, [[3, 4], [6, 8]])
    np.testing.assert_array_equal(result.shape, [10, 2])


def test_sparse_coo_gradient_of_embedding_bag_is_accepted(make):
    bag = torch.nn.EmbeddingBag(10, 2, mode="sum", sparse=True)
    bag(IDS, torch.tensor([0, 2])).sum().backward()
    acc = make.sparse("float32", (10, 2))
    assert acc.apply_indexed_slices_grad(bag.weight.grad)
    np.testing.assert_array_equal(taken(acc).values, [[1, 1], [2, 2]])


def test_sparse_coo_gradient_without_rows_counts(make):
    acc = make.sparse("float32", (10, 2))
    empty = torch.sparse_coo_tensor(torch.empty((1, 0), dtype=torch.int64), torch.empty((0, 2)), (10, 2))
    assert acc.apply_indexed_slices_grad(empty).num_accumulated == 1
    assert taken(acc).values.shape == (0, 2)


def test_sparse_coo_gradient_whose_ids_or_values_are_views_is_right(make):
    views = {
        "strided ids": (torch.tensor([[7, 0, 1, 0, 7, 0]])[:, ::2], rows()),
        "transposed ids": (torch.tensor([[7], [1], [7]]).T, rows()),
        "expanded ids": (torch.tensor([[7]]).expand(1, 3), rows()),
        "strided values": (IDS[None], torch.repeat_interleave(rows(), 2, 0)[::2]),
        "expanded values": (IDS[None], torch.tensor(2.0).expand(3, 2)),
        "negative values": (IDS[None], torch.complex(rows(), rows()).conj().imag),
        "values with a graph": (IDS[None], rows().requires_grad_() * 2),
    }
    for form, (ids, values) in views.items():
        acc = make.sparse("float32", (10, 2), reduction_type="SUM")
        gradient = torch.sparse_coo_tensor(ids, values, (10, 2), check_invariants=False)
        assert acc.apply_indexed_slices_grad(gradient), form
        expected = torch.zeros(10, 2).index_add(0, ids[0], values.detach())
        result = taken(acc)
        np.testing.assert_array_equal(result.values, expected[torch.from_numpy(result.indices)], err_msg=form)
        assert not expected[[i for i in range(10) if i not in result.indices]].any(), form


def test_sparse_coo_gradient_of_scalar_rows_is_accepted(make):
    acc = make.sparse("float32", (10,))
    assert acc.apply_indexed_slices_grad(torch.sparse_coo_tensor(IDS[None], torch.ones(3), (10,)))
    np.testing.assert_array_equal(taken(acc).values, [1, 2])


def test_sparse_coo_gradient_in_parts_and_in_a_group(make):
    gradient = torch.sparse_coo_tensor(IDS[None], rows(), (10, 2))
    acc = make.sparse("float32", (10, 2))
    assert acc.apply_indexed_slices_grad([gradient, gradient]).num_accumulated == 1
    np.testing.assert_array_equal(taken(acc).values, [[6, 8], [12, 16]])
    group = make.group({"emb": gq.SparseSpec(torch.float32, (10, 2)), "bias": gq.DenseSpec(torch.float32, (2,))})
    assert group.apply({"emb": gradient, "bias": torch.ones(2, requires_grad=True)})
    result = group.take(1, timeout=0)
    np.testing.assert_array_equal(result["emb"].values, [[3, 4], [6, 8]])
    np.testing.assert_array_equal(result["bias"], [1, 1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_every_dtype_crosses(make, dtype):
    acc = make.sparse(getattr(torch, dtype), (10, 2))
    assert acc.apply_grad(IDS, rows(dtype))
    result = taken(acc)
    assert result.values.dtype.name == dtype
    np.testing.assert_array_equal(result.values.astype(complex), [[3, 4], [6, 8]])


VIEWS = {
    "requires_grad": lambda: rows().requires_grad_(),
    "transposed": lambda: rows().T.contiguous().T,
    "strided": lambda: torch.repeat_interleave(rows(), 2, 0)[::2],
    "expanded": lambda: torch.tensor([[1.0, 2.0]]).expand(3, 2),
    "negative": lambda: torch.complex(rows(), rows()).conj().imag,
    "result": lambda: rows().requires_grad_() * 2,
    "inference": lambda: _inference(),
}


def _inference():
    with torch.inference_mode():
        return rows() * 1


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_right(make, view, copy):
    values = VIEWS[view]()
    expected = values.detach().resolve_neg().numpy().copy()
    acc = make.sparse("float32", (10, 2))
    acc.apply_grad(torch.tensor([1, 3, 7]), values, copy=copy)
    np.testing.assert_array_equal(taken(acc).values, expected)


@pytest.mark.parametrize("view", ["transposed", "strided", "expanded", "requires_grad"])
def test_every_view_of_bfloat16_is_right(make, view):
    values = VIEWS[view]()
    strided = torch.empty_strided(values.shape, values.stride() if view != "expanded" else (2, 1), dtype=torch.bfloat16)
    strided.copy_(values.detach())
    if view == "expanded":
        strided = strided[:1].expand(3, 2)
    acc = make.sparse("bfloat16", (10, 2))
    acc.apply_grad(torch.tensor([1, 3, 7]), strided)
    np.testing.assert_array_equal(taken(acc).values.astype(np.float32), values.detach().numpy())


def test_conjugate_view_is_right(make):
    values = torch.complex(rows(), rows()).conj()
    assert values.is_conj()
    acc = make.sparse("complex64", (10, 2))
    acc.apply_grad(torch.tensor([1, 3, 7]), values)
    np.testing.assert_array_equal(taken(acc).values.imag, -rows().numpy())


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "int16"])
def test_ids_of_every_integer_dtype_are_accepted(make, dtype):
    acc = make.sparse("float32", (10, 2))
    assert acc.apply_grad(IDS.to(getattr(torch, dtype)), rows(), local_step=torch.tensor(0))
    np.testing.assert_array_equal(taken(acc).indices, MERGED)


def test_what_is_written_to_a_tensor_later_changes_nothing(make):
    acc, values, ids = make.sparse("float32", (10, 2)), rows(), torch.tensor([1, 3, 7])
    assert acc.apply_grad(ids, values)
    values.zero_()
    ids.zero_()
    np.testing.assert_array_equal(taken(acc).values, rows().numpy())


@only_local("arrays are lent within a process")
def test_a_lent_tensor_is_read_where_it_lies(make):
    acc, values = make.sparse("float32", (10, 2)), rows()
    gradient = torch.sparse_coo_tensor(torch.tensor([[1, 3, 7]]), values, (10, 2), is_coalesced=True)
    receipt = acc.apply_indexed_slices_grad(gradient, copy=False)
    assert receipt.lent
    assert not receipt.released
    gradient._values().mul_(2)  # allowed for nobody: it shows that there is no copy
    np.testing.assert_array_equal(taken(acc).values, 2 * rows().numpy())
    assert receipt.released


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on another device, and counts how often it is copied to this one."""

    is_cpu = False
    copies = 0

    def detach(self):
        return self

    def cpu(self):
        type(self).copies += 1
        return self.as_subclass(torch.Tensor).clone()


@only_local("whether an array is lent shows only there")
def test_a_tensor_of_another_device_is_copied_once(make):
    acc = make.sparse("float32", (10, 2))
    Elsewhere.copies = 0
    receipt = acc.apply_grad(torch.tensor([1, 3, 7]), rows().as_subclass(Elsewhere), copy=False)
    assert Elsewhere.copies == 1
    assert not receipt.lent  # what is kept is our copy, not copied again
    np.testing.assert_array_equal(taken(acc).values, rows().numpy())


SPARSE = {
    "hybrid of two sparse dims": (lambda: torch.eye(10, 2).to_sparse(), "one sparse dimension, the rows, got 2"),
    "no sparse dim": (lambda: torch.sparse_coo_tensor(torch.empty(0, 1), torch.ones(1, 10, 2)), "got 0"),
    "csr": (lambda: torch.eye(10, 2).to_sparse_csr(), "sparse_csr"),
    "bsr": (lambda: torch.eye(10, 2).to_sparse_bsr((1, 1)), "sparse_bsr"),
    "dense": (lambda: torch.eye(10, 2), r"strided; write grad.to_sparse\(1\)"),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("form", SPARSE)
def test_a_gradient_of_another_layout_is_refused_and_says_what_to_write(make, form):
    build, words = SPARSE[form]
    acc = make.sparse("float32", (10, 2))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=words):
        acc.apply_indexed_slices_grad(build())


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


class Opaque(torch.Tensor):
    """A tensor without any operation."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("no operation")


def _fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return rows()


VALUES = {
    "freed": (lambda: freed(rows()), "its memory was freed"),
    "freed bfloat16": (lambda: freed(rows("bfloat16")), "its memory was freed"),
    "lazy": (lambda: torch.nn.parameter.UninitializedParameter(), "got UninitializedParameter"),
    "fake": (_fake, "got FakeTensor"),
    "opaque": (lambda: rows().as_subclass(Opaque), "got Opaque: no operation"),
    "jagged": (lambda: torch.nested.nested_tensor(list(rows()), layout=torch.jagged), "layout jagged"),
    "meta": (lambda: torch.ones((3, 2), device="meta"), "numbers in memory"),
    "float8": (lambda: torch.ones(3, 2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "sparse": (lambda: torch.eye(3, 2).to_sparse(1), "sparse_coo; give a sparse gradient"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "numbers in memory"),
    "float64": (lambda: torch.ones(3, 2, dtype=torch.float64), r"float32.*float64.*\.to\(torch\.float32\)"),
    "bool": (lambda: torch.ones(3, 2, dtype=torch.bool), "bool"),
    "complex": (lambda: torch.ones(3, 2, dtype=torch.complex64), "complex64"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("form", VALUES)
def test_values_that_cannot_be_read_are_refused(make, form):
    build, words = VALUES[form]
    acc = make.sparse("float32", (10, 2))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=words):
        acc.apply_grad(IDS, build())


@pytest.mark.parametrize("part", ["_indices", "_values"])
def test_a_sparse_gradient_whose_memory_was_freed_is_refused(make, part):
    acc = make.sparse("float32", (10, 2))
    gradient = torch.sparse_coo_tensor(IDS[None].clone(), rows(), (10, 2), check_invariants=False)
    freed(getattr(gradient, part)())
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="its memory was freed"):
        acc.apply_indexed_slices_grad(gradient)


@pytest.mark.parametrize("ids", [[3.0], [True], [1 + 0j]], ids=str)
def test_ids_that_are_no_integers_are_refused(make, ids):
    acc = make.sparse("float32", (10, 2))
    with unchanged(acc), pytest.raises(gq.InvalidDTypeError, match="indices"):
        acc.apply_grad(torch.tensor(ids), rows()[:1])


@pytest.mark.parametrize(("ids", "words"), [([-1, 2, 3], "slice 0 is negative"), ([2, 10, 3], "index is 10 exceeded")])
def test_ids_out_of_range_in_an_unchecked_coo_tensor_are_refused(make, ids, words):
    acc = make.sparse("float32", (10, 2))
    gradient = torch.sparse_coo_tensor([ids], rows(), (10, 2), check_invariants=False, is_coalesced=True)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=words):
        acc.apply_indexed_slices_grad(gradient)


def test_a_gradient_that_lies_about_being_coalesced_is_right_all_the_same(make):
    acc = make.sparse("float32", (10, 2))
    lying = torch.sparse_coo_tensor(IDS[None], rows(), (10, 2), check_invariants=False, is_coalesced=True)
    assert acc.apply_indexed_slices_grad(lying, copy=False)
    np.testing.assert_array_equal(taken(acc).values, [[3, 4], [6, 8]])


def test_a_gradient_of_a_table_of_another_size_is_refused(make):
    acc = make.sparse("float32", (10, 2))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="expected shape dim 0 to be 10, got 12"):
        acc.apply_indexed_slices_grad(torch.sparse_coo_tensor(IDS[None], rows(), (12, 2)))
