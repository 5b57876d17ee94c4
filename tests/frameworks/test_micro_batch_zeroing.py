"""`MicroBatchAccumulator` after the optimizer's step: gradients zeroed, zeroed in place, or forgotten."""

import weakref

import numpy as np
import pytest

import gradquorum as gq

torch = pytest.importorskip("torch")
gqt = pytest.importorskip("gradquorum.torch")
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),  # optimizers make tensors
]


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


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("reduction", ["MEAN_BY_COUNT", "SUM"])
def test_gradients_that_are_zeroed_in_place_are_added_to_and_right(sparse, reduction):
    used, unused = (torch.nn.Embedding(5, 1, sparse=sparse) for _ in range(2))
    optimizer = torch.optim.SGD([used.weight, unused.weight], lr=0.0)
    micro_batches = gqt.MicroBatchAccumulator([used.weight, unused.weight], 2, reduction=reduction)
    for k in range(1, 4):
        for ids in ([k, 0], [k, k]):
            (used(torch.tensor(ids)).sum() + (unused(torch.tensor([k])).sum() if k == 1 else 0)).backward()
            done = micro_batches.step()
        assert done
        scale = 1 if reduction == "SUM" else 2
        np.testing.assert_array_equal(used.weight.grad.to_dense().ravel()[[0, k]], [1 / scale, 3 / scale])
        assert used.weight.grad.to_dense().sum() == 4 / scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert used.weight.grad is not None
        assert not micro_batches.flush()


def test_no_hook_stays_and_what_was_handed_out_is_freed():
    weight = torch.nn.Parameter(torch.zeros(2))
    micro_batches = gqt.MicroBatchAccumulator([weight], 1)
    for _ in range(2):
        weight.grad = torch.ones(2)
        assert micro_batches.step()
        assert len(weight._backward_hooks) == 1
        grad = weakref.ref(weight.grad)
        weight.grad = None
        assert grad() is None
    weight.grad = torch.tensor([float("nan")] * 2)
    assert not micro_batches.step()
    assert not weight._backward_hooks
