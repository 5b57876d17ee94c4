"""A small model with sparse and dense gradients, and what its merged gradients should be."""

import torch


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
