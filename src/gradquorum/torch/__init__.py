"""Gradients of PyTorch in and out, and micro-batches of them.

`import gradquorum.torch as gqt` loads PyTorch; `import gradquorum` does not.

The documented classes themselves take tensors and sparse COO gradients wherever they take arrays; what is here knows
parameters, and gives tensors back.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "gradquorum.torch needs PyTorch; install it with: pip install torch", name="torch"
    ) from error

from gradquorum.torch.assignment import assign_grads
from gradquorum.torch.gradients import apply_grad, take_grad
from gradquorum.torch.micro_batches import MicroBatchAccumulator

__all__ = ["MicroBatchAccumulator", "apply_grad", "assign_grads", "take_grad"]
