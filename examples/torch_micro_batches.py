"""Matrix factorisation in PyTorch: the gradients of several micro-batches make one step of the optimizer.

python examples/torch_micro_batches.py
"""

import torch

import gradquorum.torch as gqt

USERS, ITEMS, DIM, MICRO_BATCHES, STEPS = 200, 150, 4, 4, 80


class Factors(torch.nn.Module):
    """Ratings are inner products of a user's and an item's factors."""

    def __init__(self) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(USERS, DIM, sparse=True)
        self.items = torch.nn.Embedding(ITEMS, DIM, sparse=True)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the ratings of pairs."""
        return (self.users(users) * self.items(items)).sum(1)


def main() -> None:
    torch.manual_seed(0)
    truth, model = Factors(), Factors()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    micro_batches = gqt.MicroBatchAccumulator(model.parameters(), MICRO_BATCHES, max_norm=10.0)
    losses = []
    for _ in range(STEPS * MICRO_BATCHES):
        users, items = torch.randint(USERS, (512,)), torch.randint(ITEMS, (512,))
        loss = torch.nn.functional.mse_loss(model(users, items), truth(users, items).detach())
        loss.backward()
        losses.append(loss.item())
        if micro_batches.step():  # every fourth time: the mean of four gradients is in .grad
            optimizer.step()
            optimizer.zero_grad()
    print(f"{STEPS} steps; loss {losses[0]:.1f} at first, {sum(losses[-20:]) / 20:.2f} at last")


if __name__ == "__main__":
    main()
