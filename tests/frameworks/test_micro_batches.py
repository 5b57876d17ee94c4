"""`MicroBatchAccumulator`: gradients of several micro-batches, merged as if they had been one batch."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradquorum as gq
from tests.support import failing_merges, round_of

torch = pytest.importorskip("torch")
gqt = pytest.importorskip("gradquorum.torch")
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),  # optimizers make tensors
]


def model(dtype=torch.float32):
    torch.manual_seed(3)
    return torch.nn.ModuleDict(
        {
            "emb": torch.nn.Embedding(50, 4, sparse=True, dtype=dtype),
            "bag": torch.nn.EmbeddingBag(50, 4, mode="sum", sparse=True, dtype=dtype),
            "out": torch.nn.Linear(4, 1, dtype=dtype),
        }
    )


def loss(net, ids):
    ids = torch.tensor(ids)
    return (net["out"](net["emb"](ids) * net["bag"](ids[None])) ** 2).mean()


BATCHES = [[7, 1, 7], [2, 7, 9], [1, 1, 1], [0, 49, 9]]


def gradients(net):
    return {name: None if p.grad is None else p.grad.to_dense().clone() for name, p in net.named_parameters()}


def expected(reduce, batches=BATCHES):
    """Return dense gradients, a stack of those of single batches reduced to one."""
    each = []
    for ids in batches:
        net = model()
        loss(net, ids).backward()
        each.append(gradients(net))
    return {name: reduce(torch.stack([grads[name] for grads in each])) for name in each[0]}


def assert_close(got, want):
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-7)


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


def test_a_micro_batch_that_is_not_finite_is_skipped_as_a_whole_and_counted():
    net = model()
    micro_batches = gqt.MicroBatchAccumulator(net.parameters(), 2)
    for ids, factor in ((BATCHES[0], 1.0), (BATCHES[1], float("inf")), (BATCHES[2], float("nan")), (BATCHES[3], 1.0)):
        (loss(net, ids) * factor).backward()
        done = micro_batches.step()
    assert done
    assert micro_batches.num_skipped == 2
    assert_close(gradients(net), expected(lambda grads: grads.mean(0), [BATCHES[0], BATCHES[3]]))


def test_many_skipped_in_a_row_are_worth_a_warning(caplog):
    weight = torch.nn.Parameter(torch.zeros(1))
    micro_batches = gqt.MicroBatchAccumulator([weight], 2)
    with caplog.at_level(logging.WARNING, "gradquorum"):
        for _ in range(25):
            weight.grad = torch.tensor([float("nan")])
            assert not micro_batches.step()
            assert weight.grad is None
    assert [record.getMessage()[:28] for record in caplog.records] == ["10 micro-batches in a row ha"]
    assert micro_batches.num_skipped == 25


def test_nonfinite_is_refused_or_carried_if_so_asked():
    weight = torch.nn.Parameter(torch.zeros(1))
    for on_nonfinite in ("raise", "keep"):
        micro_batches = gqt.MicroBatchAccumulator([weight], 1, on_nonfinite=on_nonfinite, max_norm=1.0)
        weight.grad = grad = torch.tensor([float("inf")])
        if on_nonfinite == "keep":
            assert micro_batches.step()
            assert weight.grad.item() == float("inf")
            continue
        with pytest.raises(gq.InvalidArgumentError, match=r"params\[0\].grad: expected finite values"):
            micro_batches.step()
        assert weight.grad is grad
        assert micro_batches.num_accumulated == micro_batches.num_skipped == 0


@pytest.mark.parametrize("init_scale", [2.0, 2.0**120])  # the second one overflows until it has come down
def test_grad_scaler_learns_of_what_is_skipped_and_training_goes_on(init_scale):
    net, plain = model(), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5 / 2**20)
    micro_batches = gqt.MicroBatchAccumulator(net.parameters(), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=10**6)
    steps = calls = 0
    while steps < 2:
        ids = BATCHES[micro_batches.num_accumulated + 2 * steps]
        scaler.scale(loss(net, ids) * 2**20).backward()
        scaler.unscale_(optimizer)
        if micro_batches.step():
            scaler.step(optimizer)
            optimizer.zero_grad()
            steps += 1
        scaler.update()
        calls += 1
        assert calls < 200
    assert micro_batches.num_skipped == calls - 4
    assert (micro_batches.num_skipped > 0) == (init_scale > 2)
    stepping = torch.optim.SGD(plain.parameters(), lr=0.5)
    for pair in (BATCHES[:2], BATCHES[2:]):
        (sum(loss(plain, ids) for ids in pair) / 2).backward()
        stepping.step()
        stepping.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(net.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)


def test_max_norm_scales_all_merged_gradients_down_together():
    net, plain = model(), model()
    total = (sum(loss(plain, ids) for ids in BATCHES) / 4).detach()
    assert total > 0
    want = expected(lambda grads: grads.mean(0))
    norm = torch.sqrt(sum((grad.double() ** 2).sum() for grad in want.values())).item()
    for max_norm in (norm / 4, norm * 4):
        micro_batches = gqt.MicroBatchAccumulator(net.parameters(), 4, max_norm=max_norm)
        assert micro_batches.total_norm is None
        for ids in BATCHES:
            loss(net, ids).backward()
            micro_batches.step()
        assert micro_batches.total_norm == pytest.approx(norm, rel=1e-5)
        factor = min(1.0, max_norm / norm)
        assert_close(gradients(net), {name: grad * factor for name, grad in want.items()})
        net.zero_grad()


def test_max_norm_of_complex_and_of_huge_numbers():
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    micro_batches = gqt.MicroBatchAccumulator([weight], 1, max_norm=5.0)
    weight.grad = torch.tensor([3e30 + 4e30j, 0j])
    assert micro_batches.step()
    assert micro_batches.total_norm == pytest.approx(5e30)
    torch.testing.assert_close(weight.grad, torch.tensor([3 + 4j, 0j]))


@pytest.mark.parametrize("sparse", [True, False])
def test_forgotten_zero_grad_is_refused_and_nothing_changes(sparse):
    embedding = torch.nn.Embedding(5, 1, sparse=sparse)
    micro_batches = gqt.MicroBatchAccumulator(embedding.parameters(), 1)
    embedding(torch.tensor([1])).sum().backward()
    assert micro_batches.step()
    embedding(torch.tensor([1])).sum().backward()  # adds to what was merged
    with pytest.raises(gq.InvalidArgumentError, match=r"got the merged one again; call optimizer\.zero_grad\(\)"):
        micro_batches.step()
    assert embedding.weight.grad.to_dense()[1] == 2
    assert micro_batches.num_accumulated == 0


def test_step_without_a_backward_pass_is_refused():
    net = model()
    micro_batches = gqt.MicroBatchAccumulator(net.parameters(), 2)
    with pytest.raises(gq.InvalidArgumentError, match=r"got none; call backward\(\)"):
        micro_batches.step()
    loss(net, BATCHES[0]).backward()
    micro_batches.step()
    loss(net, BATCHES[1]).backward()
    grad = net["out"].weight.grad
    with pytest.raises(gq.InvalidArgumentError, match=r"call step\(\), or zero it, first"):
        micro_batches.flush()
    assert net["out"].weight.grad is grad


def test_a_gradient_that_cannot_be_right_changes_nothing():
    weight = torch.nn.Parameter(torch.zeros(5, 2))
    micro_batches = gqt.MicroBatchAccumulator([weight], 2)
    weight.grad = grad = torch.ones(5, 2).to_sparse()
    with pytest.raises(gq.InvalidArgumentError, match="one sparse dimension"):
        micro_batches.step()
    assert weight.grad is grad
    assert micro_batches.num_accumulated == 0


@pytest.mark.parametrize("again", ["flush", "step"])
def test_a_merge_that_fails_loses_nothing(again):
    weight = torch.nn.Parameter(torch.zeros(1))
    micro_batches = gqt.MicroBatchAccumulator([weight], 2)
    weight.grad = torch.tensor([1.0])
    micro_batches.step()
    weight.grad = torch.tensor([3.0])
    with failing_merges(gq.engine_name, kind="dense"), pytest.raises(gq.ResourceExhaustedError):
        micro_batches.step()
    assert weight.grad is None
    if again == "flush":
        assert micro_batches.flush()
    else:
        weight.grad = torch.tensor([7.0])
        assert micro_batches.step()
        assert micro_batches.num_accumulated == 1
    assert weight.grad.item() == 2


def test_what_is_held_is_proportional_to_distinct_rows():
    embedding = torch.nn.Embedding(100_000, 16, sparse=True)
    micro_batches = gqt.MicroBatchAccumulator(embedding.parameters(), 1000)
    ids = torch.randint(1000, (4096,))
    for _ in range(200):
        embedding(ids).sum().backward()
        micro_batches.step()
    assert round_of(micro_batches._group).budget.log_bytes < 3 * 1000 * (8 + 16 * 4) + 2**20
    assert micro_batches.flush()


def test_rounds_are_of_this_process_also_after_connect(server):
    gq.connect(server.address)
    try:
        micro_batches = gqt.MicroBatchAccumulator([torch.nn.Parameter(torch.zeros(1))], 1)
    finally:
        gq.connect("local")
    assert not hasattr(micro_batches._group._target, "address")


LEAF = torch.nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("params", "steps", "options", "words"),
    [
        ([], 1, {}, "one parameter or more, got none"),
        (LEAF, 1, {}, "expected an iterable of parameters, got Parameter"),
        ({"a": LEAF}, 1, {}, "got dict"),
        (3, 1, {}, "got int"),
        ([LEAF, None], 1, {}, r"params\[1\]: expected a parameter, got NoneType"),
        ([LEAF, LEAF], 1, {}, "got one twice"),
        ([LEAF * 2], 1, {}, "result of an operation"),
        ([torch.zeros(2, dtype=torch.bool)], 1, {}, "dtype"),
        ([LEAF], 0, {}, "steps: expected 1 or more, got 0"),
        ([LEAF], 1.5, {}, "steps: expected an integer"),
        ([LEAF], 1, {"reduction": "mean"}, "reduction_type: expected one of"),
        ([LEAF], 1, {"on_nonfinite": "ignore"}, "on_nonfinite"),
        ([LEAF], 1, {"max_norm": 0}, "max_norm: expected a finite number above 0"),
        ([LEAF], 1, {"max_norm": float("nan")}, "max_norm"),
        ([LEAF], 1, {"max_norm": True}, "max_norm"),
        ([LEAF], 1, {"max_norm": "1"}, "max_norm"),
    ],
    ids=range(16),
)
def test_odd_arguments_are_refused(params, steps, options, words):
    with pytest.raises(gq.InvalidArgumentError, match=words):
        gqt.MicroBatchAccumulator(params, steps, **options)


def test_weight_without_that_reduction_is_refused_and_nothing_changes():
    weight = torch.nn.Parameter(torch.zeros(1))
    micro_batches = gqt.MicroBatchAccumulator([weight], 1)
    weight.grad = torch.ones(1)
    with pytest.raises(gq.InvalidArgumentError, match="MEAN_BY_WEIGHT"):
        micro_batches.step(weight=2.0)
    assert weight.grad is not None
    assert "0 of 1 micro-batches, 0 skipped" in repr(micro_batches)


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
