"""`gradquorum.torch`: gradients of parameters in, tensors out, and optimizers that step as after a backward pass."""

import numpy as np
import pytest

import gradquorum as gq
from tests.support import only_local, unchanged

torch = pytest.importorskip("torch")
gqt = pytest.importorskip("gradquorum.torch")
pytestmark = pytest.mark.frameworks


def embedding_with_gradient(ids=(7, 1, 7), dtype=torch.float32, sparse=True):
    torch.manual_seed(2)
    embedding = torch.nn.Embedding(10, 2, sparse=sparse, dtype=dtype)
    embedding(torch.tensor(ids)).sum().backward()
    return embedding


def test_parameter_or_its_gradient_is_applied_and_stays(make):
    acc = make.sparse("float32", (10, 2))
    weight = embedding_with_gradient().weight
    grad = weight.grad
    assert gqt.apply_grad(acc, weight, local_step=None).num_accumulated == 1
    assert gqt.apply_grad(acc, grad, local_step=None, worker="w", sequence=3).num_accumulated == 2
    assert weight.grad is grad
    taken = acc.take_grad(2, timeout=0)
    np.testing.assert_array_equal(taken.values, [[1, 1], [2, 2]])
    assert taken.workers == ("w",)


@pytest.mark.parametrize("shape", [None, (10, 2), (None, 2), (10, None)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_dtype_and_shape_goes_in_and_comes_out(make, dtype, shape):
    acc = make.sparse(dtype, shape)
    gqt.apply_grad(acc, embedding_with_gradient(dtype=getattr(torch, dtype)).weight)
    grad = gqt.take_grad(acc, 1, timeout=0)
    assert grad.dtype is getattr(torch, dtype)
    assert grad.is_coalesced()
    assert grad.shape == ((10, 2) if shape and shape[0] else (8, 2))
    np.testing.assert_array_equal(grad.indices().numpy(), [[1, 7]])
    np.testing.assert_array_equal(grad.values().float().numpy(), [[1, 1], [2, 2]])
    torch.sparse_coo_tensor(grad.indices(), grad.values(), grad.shape, check_invariants=True, is_coalesced=True)


@pytest.mark.parametrize("shape", [None, (10, 2)])
def test_of_a_sparse_parameter_its_gradient_is_meant(make, shape):
    acc = make.sparse("float32", shape)
    matrix = torch.sparse_coo_tensor([[7, 1]], torch.ones(2, 2), (10, 2), check_invariants=True).coalesce()
    matrix.requires_grad_()
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="got one without"):
        gqt.apply_grad(acc, matrix)
    torch.sparse.sum(matrix * 3).backward()
    gqt.apply_grad(acc, matrix)
    np.testing.assert_array_equal(acc.take_grad(1, timeout=0).values, [[3, 3], [3, 3]])


def test_what_is_taken_may_be_written_to_and_a_round_without_rows_is_empty(make):
    acc = make.sparse("float32", None)
    acc.apply_grad([], np.empty((0, 2), np.float32))
    grad = gqt.take_grad(acc, 1, timeout=0)
    assert grad.shape == (0, 2)
    assert grad._nnz() == 0
    gqt.apply_grad(acc, embedding_with_gradient().weight, local_step=None)
    gqt.take_grad(acc, 1, timeout=0)._values().mul_(2)


def test_worker_dense_and_group(make):
    weight = embedding_with_gradient().weight
    bias = torch.nn.Parameter(torch.zeros(2))
    bias.grad = torch.tensor([1.0, 2.0])
    acc = make.sparse("float32", (10, 2))
    with acc.worker("a") as worker:
        assert gqt.apply_grad(worker, weight)
    dense = make.dense("float32", (2,))
    assert gqt.apply_grad(dense, bias)
    with dense.worker("a") as worker:
        assert gqt.apply_grad(worker, bias.grad, weight=1.0)
    np.testing.assert_array_equal(gqt.take_grad(dense, 2, timeout=0), [1, 2])
    group = make.group({"emb": gq.SparseSpec("float32", (10, 2)), "bias": gq.DenseSpec("float32", (2,))})
    assert gqt.apply_grad(group, {"emb": weight, "bias": bias.grad})
    with group.worker("a") as worker:
        assert gqt.apply_grad(worker, {"emb": weight.grad})
    taken = gqt.take_grad(group, 2, timeout=0)
    assert taken["emb"].is_coalesced()
    np.testing.assert_array_equal(taken["emb"].values(), [[1, 1], [2, 2]])
    np.testing.assert_array_equal(taken["bias"], [1, 2])


@only_local("arrays are lent within a process")
def test_nothing_is_copied_beyond_what_the_engine_copies(make):
    acc = make.sparse("float32", (10, 2))
    grad = embedding_with_gradient((1, 3, 7)).weight.grad.coalesce()
    receipt = gqt.apply_grad(acc, grad, copy=False)
    assert receipt.lent
    grad._values().mul_(2)  # allowed for nobody: it shows that there is no copy
    taken = acc.take_grad(1, timeout=0)
    np.testing.assert_array_equal(taken.values, 2)
    weight = torch.nn.Parameter(torch.zeros(10, 2))
    gqt.assign_grads(weight, taken)
    assert weight.grad._values().data_ptr() == taken.values.ctypes.data
    assert weight.grad._indices().data_ptr() == taken.indices.ctypes.data


@pytest.mark.parametrize(
    ("grad", "words"),
    [
        (torch.nn.Parameter(torch.zeros(10, 2)), r"got one without; call backward\(\)"),
        (torch.nn.Parameter(torch.zeros(10, 2), requires_grad=False), r"got one without"),
        (torch.zeros(10, 2), r"write grad.to_sparse\(1\)"),
        (np.zeros((10, 2), np.float32), "expected a parameter or a gradient, got ndarray"),
        (None, "got NoneType"),
        (torch.zeros(10, 2, device="meta"), r"write grad.to_sparse\(1\)"),
        (torch.zeros(10, 2, dtype=torch.float64).to_sparse(1), r"float64.*\.to\(torch\.float32\)"),
        (torch.ones(10, 2).to_sparse(), "one sparse dimension"),
        (torch.zeros(12, 2).to_sparse(1), "dim 0 to be 10, got 12"),
    ],
    ids=range(9),
)
def test_what_is_no_gradient_is_refused(make, grad, words):
    acc = make.sparse("float32", (10, 2))
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=words):
        gqt.apply_grad(acc, grad)
    with acc.worker("w") as worker, pytest.raises(gq.InvalidArgumentError, match=words):
        gqt.apply_grad(worker, grad)


def test_what_is_no_accumulator_is_refused(make):
    weight = embedding_with_gradient().weight
    group = make.group({"emb": gq.SparseSpec("float32", (10, 2))})
    with unchanged(group), pytest.raises(gq.InvalidArgumentError, match="a group takes a mapping"):
        gqt.apply_grad(group, weight)
    with unchanged(group), pytest.raises(gq.InvalidArgumentError, match="got 'other'"):
        gqt.apply_grad(group, {"other": weight})
    with unchanged(group), pytest.raises(gq.InvalidArgumentError, match="emb: expected a parameter with a gradient"):
        gqt.apply_grad(group, {"emb": torch.nn.Parameter(torch.zeros(10, 2))})
    with pytest.raises(gq.InvalidArgumentError, match="got str"):
        gqt.apply_grad("acc", weight)
    acc = make.sparse("float32", (10, 2))
    with acc.worker("w") as worker:
        for each in (acc, worker):
            with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=r"expected a group.* for a mapping"):
                gqt.apply_grad(each, {"emb": weight})


def test_stale_and_timed_out_are_what_they_are_for_the_accumulator(make):
    acc = make.sparse("float32", (10, 2))
    acc.set_global_step(3)
    assert gqt.apply_grad(acc, embedding_with_gradient().weight, local_step=2).lag == 1
    with unchanged(acc), pytest.raises(gq.DeadlineExceededError):
        gqt.take_grad(acc, 1, timeout=0)


@pytest.mark.parametrize("device", ["nonsense", "meta", [], f"cuda:{torch.cuda.device_count()}"], ids=str)
def test_a_device_that_is_not_there_is_refused_before_anything_is_taken(make, device):
    acc = make.sparse("float32", (10, 2))
    gqt.apply_grad(acc, embedding_with_gradient().weight)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="device: expected one"):
        gqt.take_grad(acc, 1, device=device, timeout=0)
    assert gqt.take_grad(acc, 1, device="cpu", timeout=0)._nnz() == 2


@pytest.mark.parametrize("row", [(), (2,), (0,)], ids=str)
def test_ids_that_no_tensor_holds_are_an_error_and_the_round_is_kept(make, row):
    acc, group = make.sparse("float32", None), make.group({"emb": gq.SparseSpec("float32", None)})
    high, rows = 2**63 - 1, np.ones((1, *row), np.float32)
    acc.apply_grad([high], rows)
    with pytest.raises(gq.InvalidArgumentError, match="as a tensor holds no more"):
        gqt.take_grad(acc, 1, timeout=0)
    assert acc.num_undelivered == 1
    assert acc.take_grad(1, timeout=0).indices.tolist() == [high]
    group.apply({"emb": gq.IndexedSlices(rows, np.array([high]))})
    with pytest.raises(gq.InvalidArgumentError, match="emb: expected a table"):
        gqt.take_grad(group, 1, timeout=0)
    assert group.num_undelivered == 1
    assert group.take(1, timeout=0)["emb"].indices.tolist() == [high]


def test_a_take_from_what_is_no_accumulator_is_refused(make):
    acc = make.sparse("float32", (10, 2))
    with acc.worker("w") as worker:
        for bad in (None, "acc", worker):
            with pytest.raises(gq.InvalidArgumentError, match=f"or a group, got {type(bad).__name__}"):
                gqt.take_grad(bad, 1)


OPTIMIZERS = {
    "SparseAdam": lambda params: torch.optim.SparseAdam(list(params)),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # optimizers make sparse tensors
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_step_as_after_a_backward_pass(make, optimizer):
    ours, theirs = embedding_with_gradient(), embedding_with_gradient()
    stepping = [OPTIMIZERS[optimizer](embedding.parameters()) for embedding in (ours, theirs)]
    acc = make.sparse("float32", (10, 2))
    for _ in range(3):
        gqt.apply_grad(acc, ours.weight, local_step=None)
        gqt.assign_grads(ours.weight, acc.take_grad(1, timeout=0))
        for each in stepping:
            each.step()
            each.zero_grad()
        for each in (ours, theirs):
            (each(torch.tensor([3, 7, 3])) ** 2).sum().backward()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)  # SGD adds repeats one by one
    assert not torch.equal(ours.weight, embedding_with_gradient().weight)


FORMS = {
    "sparse": lambda acc: acc.take_grad(1, timeout=0),
    "slices": lambda acc: acc.take_indexed_slices_grad(1, timeout=0),
    "tensor": lambda acc: gqt.take_grad(acc, 1, timeout=0),
    "dense tensor": lambda acc: gqt.take_grad(acc, 1, timeout=0).to_dense(),
    "array": lambda acc: gqt.take_grad(acc, 1, timeout=0).to_dense().numpy(),
}


@pytest.mark.parametrize("form", FORMS)
def test_results_of_every_form_are_assigned(make, form):
    acc = make.sparse("float32", (10, 2))
    weight = embedding_with_gradient().weight
    gqt.apply_grad(acc, weight)
    gqt.assign_grads(weight, FORMS[form](acc))
    np.testing.assert_array_equal(weight.grad.to_dense()[[1, 7]], [[1, 1], [2, 2]])


def test_results_of_a_group_are_assigned_by_name_and_the_rest_stays():
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(10, 2, sparse=True), "out": torch.nn.Linear(2, 1)})
    parameters = dict(model.named_parameters())
    model["out"].weight.grad = kept = torch.ones(1, 2)
    group = gq.AccumulatorGroup(
        {"emb.weight": gq.SparseSpec("float32", (10, 2)), "out.bias": gq.DenseSpec("float32", (1,))}
    )
    group.apply({"emb.weight": ([3], [[1.0, 2.0]]), "out.bias": [5.0]})
    gqt.assign_grads(parameters, group.take(1, timeout=0))
    np.testing.assert_array_equal(model["emb"].weight.grad.to_dense()[3], [1, 2])
    np.testing.assert_array_equal(model["out"].bias.grad, [5])
    assert model["out"].weight.grad is kept


def gradient(indices=(1, 7), width=2, num_rows=10, dtype=np.float32):
    indices = np.array(indices, np.int64)
    return gq.IndexedSlices(np.ones((len(indices), width), dtype), indices, np.array([num_rows, width]))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (gradient(width=3), r"expected a gradient of shape \[10, 2\], got \[10, 3\]"),
        (gradient(num_rows=11), r"got \[11, 2\]"),
        (gradient((1, 10)), "from 0 to 9; got 1 to 10"),
        (gradient((7, 1)), "ascend without repeats"),
        (gradient((1, 1)), "ascend without repeats"),
        (gradient((-1, 1)), "from 0 to 9"),
        (gradient(dtype=np.float64), "expected a gradient of torch.float32, got torch.float64"),
        (gq.IndexedSlices([[1.0]], [1]), "arrays that a take returns"),
        (torch.ones(2, 2), r"got \[2, 2\]"),
        (None, "got NoneType"),
        (np.ones((10, 2), ">f4"), "PyTorch takes as the .grad of its parameter, got .* byte order"),
        (np.ones((10, 2), np.float32)[::-1], "negative"),
        (np.full((10, 2), "a"), "numpy.str_"),
        (gradient(dtype=">f4"), "byte order"),
        (torch.ones(10, 2, device="meta"), "meta tensor"),
        (torch.ones(10, 2).to_mkldnn(), "a different type"),
    ],
    ids=range(16),
)
def test_a_gradient_that_does_not_fit_is_refused_and_no_grad_changes(bad, words):
    one, two = (embedding_with_gradient().weight for _ in range(2))
    before = one.grad, two.grad
    with pytest.raises(gq.InvalidArgumentError, match=words):
        gqt.assign_grads({"one": one, "two": two}, {"one": gradient(), "two": bad})
    assert one.grad is before[0]
    assert two.grad is before[1]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has no grad_dtype")
def test_a_gradient_has_the_dtype_that_its_parameter_says():
    weight = torch.nn.Parameter(torch.zeros(10, 2, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    gqt.assign_grads(weight, gradient())
    assert weight.grad.dtype is torch.float32
    with pytest.raises(gq.InvalidDTypeError, match=r"torch\.float32, got torch\.bfloat16"):
        gqt.assign_grads(weight, torch.zeros(10, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("parameters", "gradients"), [({}, {"a": None}), ([], []), ({}, 3), ({"a": 3}, {"a": gradient()})]
)
def test_names_that_do_not_fit_are_refused(parameters, gradients):
    with pytest.raises(gq.InvalidArgumentError):
        gqt.assign_grads(parameters, gradients)


def test_a_sparse_gradient_for_a_dense_accumulator_is_refused(make):
    dense = make.dense("float32", (10, 2))
    with unchanged(dense), pytest.raises(gq.InvalidArgumentError, match="expected a dense tensor, got one of layout"):
        gqt.apply_grad(dense, embedding_with_gradient().weight)
