"""`MicroBatchAccumulator`: numbers that are not finite, limits of the norm, calls out of turn, and odd arguments."""

import copy
import logging
import pickle

import pytest

import gradquorum as gq
from tests.support import failing_merges

torch = pytest.importorskip("torch")
gqt = pytest.importorskip("gradquorum.torch")
factorisation = pytest.importorskip("tests.frameworks.factorisation")
BATCHES, model, loss = factorisation.BATCHES, factorisation.model, factorisation.loss
gradients, expected, assert_close = factorisation.gradients, factorisation.expected, factorisation.assert_close

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),  # optimizers make tensors
]


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


@pytest.mark.parametrize("last", [1.0, float("inf")], ids=["held", "skipped"])
def test_what_is_flushed_after_a_grad_scaler_is_unscaled_and_steps_without_it(last):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    micro_batches = gqt.MicroBatchAccumulator([weight], 4)
    for factor in (1.0, 1.0, last):
        scaler.scale((weight * factor).sum()).backward()
        scaler.unscale_(optimizer)
        assert not micro_batches.step()
        scaler.update()
    assert micro_batches.flush()
    optimizer.step()
    assert weight.tolist() == [-1, -1]
    assert scaler.get_scale() == (1024 if last == 1 else 512)


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


@pytest.mark.parametrize("size", [1e300, 1e-300])
def test_max_norm_of_numbers_whose_squares_leave_float64(size):
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    other = torch.nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
    micro_batches = gqt.MicroBatchAccumulator([weight, other], 1, max_norm=size)
    weight.grad, other.grad = torch.tensor([3.0, 4.0], dtype=torch.float64) * size, torch.zeros_like(other)
    assert micro_batches.step()
    assert micro_batches.total_norm == pytest.approx(5 * size, rel=1e-12)
    torch.testing.assert_close(weight.grad / size, torch.tensor([0.6, 0.8], dtype=torch.float64))


def test_it_does_not_pickle_nor_copy():
    micro_batches = gqt.MicroBatchAccumulator([torch.nn.Parameter(torch.zeros(1))], 1)
    for each in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="a MicroBatchAccumulator lives in its process"):
            each(micro_batches)


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


def test_a_micro_batch_that_is_skipped_or_refused_decides_on_no_layout():
    weight = torch.nn.Parameter(torch.zeros(5, 2))
    micro_batches = gqt.MicroBatchAccumulator([weight], 1, reduction="MEAN")
    weight.grad = torch.full((5, 2), float("nan"))
    assert not micro_batches.step()
    weight.grad = torch.ones(5, 2)
    with pytest.raises(gq.InvalidArgumentError, match="weight"):
        micro_batches.step(weight=2.0)
    weight.grad = torch.ones(5, 2).to_sparse(1)
    assert micro_batches.step()
    assert weight.grad.is_sparse


OTHERS = {
    "dtype": lambda: torch.zeros(5, 2, dtype=torch.float16),
    "rows": lambda: torch.zeros(7, 2),
    "transposed": lambda: torch.zeros(2, 5),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_parameter_that_was_replaced_is_refused_and_nothing_is_lost(sparse, other):
    weight = torch.nn.Parameter(torch.zeros(5, 2))
    micro_batches = gqt.MicroBatchAccumulator([weight], 3)
    weight.grad = torch.ones(5, 2).to_sparse(1) if sparse else torch.ones(5, 2)
    micro_batches.step()
    data, weight.data = weight.data, OTHERS[other]()
    with pytest.raises(gq.InvalidArgumentError, match=r"params\[0\]: expected the shape \[5, 2\]"):
        micro_batches.flush()
    weight.grad = grad = torch.ones_like(weight).to_sparse(1) if sparse else torch.ones_like(weight)
    with pytest.raises(gq.InvalidArgumentError, match=r"and the dtype torch.float32 that it had, got"):
        micro_batches.step()
    assert weight.grad is grad
    weight.grad, weight.data = None, data
    assert micro_batches.flush()
    torch.testing.assert_close(weight.grad.to_dense(), torch.ones(5, 2))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has no grad_dtype")
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_are_merged_in_the_dtype_that_their_parameter_says(sparse):
    weight = torch.nn.Parameter(torch.zeros(5, 2, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    micro_batches = gqt.MicroBatchAccumulator([weight], 2)
    one = torch.full((5, 2), 1 + 2.0**-20)  # of which bfloat16 would keep the 1
    for _ in range(2):
        weight.grad = one.to_sparse(1) if sparse else one.clone()
        done = micro_batches.step()
    assert done
    assert torch.equal(weight.grad.to_dense(), one)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has no grad_dtype")
def test_a_gradient_of_another_dtype_is_refused_where_pytorch_takes_any():
    weight = torch.nn.Parameter(torch.zeros(5, 2))
    weight.grad_dtype = None
    micro_batches = gqt.MicroBatchAccumulator([weight], 2)
    weight.grad = grad = torch.ones(5, 2, dtype=torch.float64)
    with pytest.raises(gq.InvalidDTypeError, match=r"torch\.float32, got torch\.float64"):
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_merge_that_is_cut_off_when_its_blocks_are_consumed_loses_nothing(monkeypatch, error):
    weight = torch.nn.Parameter(torch.zeros(50_000, 64))
    micro_batches = gqt.MicroBatchAccumulator([weight], 3, max_norm=1e9)
    rows = torch.arange(64.0) + torch.arange(40_000.0)[:, None]
    ids = torch.arange(40_000)
    for k in range(3):
        weight.grad = torch.sparse_coo_tensor(ids[None] + k, rows, (50_000, 64), check_invariants=False)
        if k == 2:
            with monkeypatch.context() as patch:
                patch.setattr(micro_batches._group, "_build", lambda merged: (_ for _ in ()).throw(error()))
                with pytest.raises(error):
                    micro_batches.step()
        else:
            micro_batches.step()
    want = torch.zeros(50_000, 64)
    for k in range(3):
        want.index_add_(0, ids + k, rows)
    assert micro_batches.flush()
    torch.testing.assert_close(weight.grad.to_dense(), want / 3)


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
        (torch.nn.LazyLinear(2).parameters(), 1, {}, r"params\[0\]: expected a parameter with a shape"),
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
    ids=range(17),
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
