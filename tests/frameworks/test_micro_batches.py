"""`MicroBatchAccumulator`: gradients of several micro-batches, merged as if they had been one batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradquorum as gq
from tests.support import round_of

torch = pytest.importorskip("torch")
gqt = pytest.importorskip("gradquorum.torch")
factorisation = pytest.importorskip("tests.frameworks.factorisation")
BATCHES, model, loss = factorisation.BATCHES, factorisation.model, factorisation.loss
gradients, expected, assert_close = factorisation.gradients, factorisation.expected, factorisation.assert_close

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),  # optimizers make tensors
]


REDUCTIONS = {"MEAN_BY_COUNT": lambda grads: grads.mean(0), "SUM": lambda grads: grads.sum(0)}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_merged_gradients_are_those_of_one_batch(reduction):
    net = model()
    micro_batches = gqt.MicroBatchAccumulator(net.parameters(), 4, reduction=reduction)
    for i, ids in enumerate(BATCHES):
        loss(net, ids).backward()
        assert micro_batches.step() is (i == 3)
        assert i == 3 or all(p.grad is None for p in net.parameters())
        assert micro_batches.num_accumulated == (i + 1) % 4
    assert_close(gradients(net), expected(REDUCTIONS[reduction]))
    assert net["emb"].weight.grad.is_sparse
    assert net["emb"].weight.grad.is_coalesced()
    assert net["emb"].weight.grad._nnz() == 6
    assert not net["out"].weight.grad.is_sparse


def test_mean_divides_by_the_micro_batches_that_touched_a_row():
    weight = torch.nn.Embedding(9, 1, sparse=True).weight
    micro_batches = gqt.MicroBatchAccumulator([weight], 2, reduction="MEAN")
    for ids in ([1, 1], [1, 2]):
        torch.nn.functional.embedding(torch.tensor(ids), weight, sparse=True).sum().backward()
        micro_batches.step()
    np.testing.assert_array_equal(weight.grad.values(), [[1.5], [1.0]])


def test_mean_by_weight_weighs_micro_batches_of_unequal_size():
    bias = torch.nn.Parameter(torch.zeros(1))
    micro_batches = gqt.MicroBatchAccumulator([bias], 2, reduction="MEAN_BY_WEIGHT")
    for value, weight in ((2.0, 1), (10.0, 3)):
        bias.grad = torch.tensor([value])
        done = micro_batches.step(weight=weight)
    assert done
    assert bias.grad.item() == 8


@pytest.mark.filterwarnings("error")
def test_v11_what_is_left_is_divided_by_its_own_count():
    weight = torch.nn.Parameter(torch.zeros(1))
    micro_batches = gqt.MicroBatchAccumulator([weight], 4)
    merged = []
    for i in range(10):
        weight.grad = torch.tensor([float(i)])
        if micro_batches.step():
            merged.append(weight.grad.item())
            weight.grad = None
    assert micro_batches.flush()
    merged.append(weight.grad.item())
    assert merged == [1.5, 5.5, 8.5]
    weight.grad = None
    assert not micro_batches.flush()
    assert weight.grad is None


def test_v12_a_layer_called_twice_in_one_micro_batch_counts_once():
    embedding = torch.nn.Embedding(9, 1, sparse=True)
    micro_batches = gqt.MicroBatchAccumulator(embedding.parameters(), 1, reduction="MEAN")
    (embedding(torch.tensor([1, 2])).sum() + embedding(torch.tensor([2, 3])).sum()).backward()
    assert micro_batches.step()
    np.testing.assert_array_equal(embedding.weight.grad.values(), [[1], [2], [1]])


def test_a_parameter_without_gradients_has_none_and_counts_as_zero_where_it_has_one():
    one, two, number = (torch.nn.Parameter(torch.zeros(size)) for size in ((2,), (2,), ()))
    micro_batches = gqt.MicroBatchAccumulator([one, two, number], 2)
    one.grad, number.grad = torch.ones(2), torch.tensor(3.0)
    assert not micro_batches.step()
    one.grad = torch.ones(2)
    assert micro_batches.step()
    np.testing.assert_array_equal(one.grad, 1)
    assert two.grad is None
    assert number.grad.shape == ()
    assert number.grad.item() == 1.5


def test_a_parameter_whose_gradients_have_no_rows_gets_one_without_rows():
    one, two = (torch.nn.Parameter(torch.zeros(5, 2)) for _ in range(2))
    micro_batches = gqt.MicroBatchAccumulator([one, two], 2)
    for _ in range(2):
        one.grad = torch.zeros(5, 2).to_sparse(1)
        done = micro_batches.step()
    assert done
    assert one.grad.is_coalesced()
    assert (one.grad._nnz(), one.grad.shape) == (0, (5, 2))
    assert two.grad is None
    one.grad, two.grad = None, torch.zeros(5, 2).to_sparse(1)
    micro_batches.step()
    assert micro_batches.flush()
    assert one.grad is None
    assert two.grad._nnz() == 0


def test_a_parameter_with_sparse_and_dense_gradients_in_turn_gets_their_mean():
    weight = torch.nn.Parameter(torch.zeros(5, 2))
    micro_batches = gqt.MicroBatchAccumulator([weight], 2)
    torch.nn.functional.embedding(torch.tensor([1, 1]), weight, sparse=True).sum().backward()
    micro_batches.step()
    weight.grad = torch.full((5, 2), 4.0)
    assert micro_batches.step()
    np.testing.assert_array_equal(weight.grad, np.array([[2, 2], [3, 3], [2, 2], [2, 2], [2, 2]]))
    by_row = gqt.MicroBatchAccumulator([weight], 2, reduction="MEAN")
    weight.grad = torch.ones(5, 2)
    by_row.step()
    weight.grad = torch.ones(5, 2).to_sparse(1)
    with pytest.raises(gq.InvalidArgumentError, match="layout it had before"):
        by_row.step()
    assert weight.grad is not None
    assert by_row.num_accumulated == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_those_of_the_parameters(dtype):
    net = model(dtype)
    micro_batches = gqt.MicroBatchAccumulator(net.parameters(), 2)
    for ids in BATCHES[:2]:
        loss(net, ids).backward()
        micro_batches.step()
    assert {p.grad.dtype for p in net.parameters()} == {dtype}


def test_half_precision_is_added_up_in_single_precision():
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    micro_batches = gqt.MicroBatchAccumulator([weight], 2)
    for _ in range(2):
        weight.grad = torch.tensor([40000.0], dtype=torch.float16)
        micro_batches.step()
    assert weight.grad.item() == 40000


def test_what_is_held_is_proportional_to_distinct_rows():
    embedding = torch.nn.Embedding(100_000, 16, sparse=True)
    micro_batches = gqt.MicroBatchAccumulator(embedding.parameters(), 1000)
    ids = torch.randint(1000, (4096,))
    for _ in range(200):
        embedding(ids).sum().backward()
        micro_batches.step()
    assert round_of(micro_batches._group).budget.log_bytes < 3 * 1000 * (8 + 16 * 4) + 2**20
    assert micro_batches.flush()


@pytest.mark.parametrize("steps", [2, 7, 8])
def test_the_second_half_has_the_memory_of_the_first_and_the_bits_are_those_of_adding_one_by_one(steps):
    rng = np.random.default_rng(3)
    weight = torch.nn.Parameter(torch.empty(5000, 64))
    micro_batches = gqt.MicroBatchAccumulator([weight], steps, reduction="SUM")
    for _ in range(3):
        total, half = np.zeros((5000, 64), np.float32), (steps + 1) // 2
        for k in range(1, steps + 1):
            ids, rows = rng.permutation(5000), rng.standard_normal((5000, 64), np.float32)
            weight.grad = torch.sparse_coo_tensor(ids[None], torch.from_numpy(rows), (5000, 64), check_invariants=False)
            done = micro_batches.step()
            total[ids] += rows
            if 1 < k == half:  # what is held is one merged block
                assert round_of(micro_batches._group).budget.log_bytes < 1.2 * total.nbytes
        assert done
        np.testing.assert_array_equal(weight.grad.to_dense(), total)
        weight.grad = None


def test_rounds_are_of_this_process_also_after_connect(server):
    gq.connect(server.address)
    try:
        micro_batches = gqt.MicroBatchAccumulator([torch.nn.Parameter(torch.zeros(1))], 1)
    finally:
        gq.connect("local")
    assert not hasattr(micro_batches._group._target, "address")


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=8),
    st.integers(1, 4),
    st.sampled_from(["MEAN_BY_COUNT", "SUM"]),
)
def test_any_sequence_of_micro_batches_gives_their_sums(batches, steps, reduction):
    embedding = torch.nn.Embedding(10, 1, sparse=True)
    micro_batches = gqt.MicroBatchAccumulator(embedding.parameters(), steps, reduction=reduction)
    held = []
    for ids in batches:
        embedding(torch.tensor(ids, dtype=torch.int64)).sum().backward()
        held.append(np.bincount(ids, minlength=10))
        if micro_batches.step() or (ids is batches[-1] and micro_batches.flush()):
            sums = np.sum(held, axis=0) / (len(held) if reduction != "SUM" else 1)
            grad = embedding.weight.grad
            got = np.zeros(10) if grad is None else grad.to_dense().numpy().ravel()
            np.testing.assert_allclose(got, sums, rtol=1e-6)
            embedding.zero_grad()
            held = []
    assert not micro_batches.num_accumulated
