"""Reduced gradients into the `.grad` of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gradquorum.errors import GradQuorumError, InvalidArgumentError, InvalidDTypeError
from gradquorum.indexed_slices import IndexedSlices, SparseGradient
from gradquorum.torch.arguments import gradient_dtype
from gradquorum.torch.gradients import as_sparse_tensor, as_tensor

__all__ = ["assign_grads"]


def assign_grads(parameters: Any, gradients: Any) -> None:
    """Put reduced gradients into the `.grad` of their parameters, in place of what is there.

    `SparseAdam`, `SGD` and `Adagrad` then step as after a backward pass. Sparse gradients stay sparse.

    Args:
        parameters: a parameter, or a mapping of parameters by name, `dict(model.named_parameters())` for one. Those
            that have no gradient in `gradients` keep their `.grad`.
        gradients: what a take returned: a `SparseGradient`, `IndexedSlices`, an array or a tensor; with a mapping of
            parameters, one of these by name: what `AccumulatorGroup.take` or `take_grad` returned. Memory of this
            machine is not copied for a parameter that lies there.

    Raises:
        InvalidArgumentError: a gradient has no parameter, or another shape, or PyTorch cannot take it as the `.grad`
            of its parameter. No `.grad` has changed.
        InvalidDTypeError: a gradient has another dtype than its parameter. No `.grad` has changed.

    Threads:
        It writes to the parameters without any lock.

    Example:
        >>> import torch, gradquorum as gq, gradquorum.torch as gqt
        >>> embedding = torch.nn.Embedding(10, 2, sparse=True)
        >>> optimizer = torch.optim.SparseAdam(embedding.parameters())
        >>> acc = gq.SparseConditionalAccumulator("float32", (10, 2))
        >>> _ = acc.apply_grad([7, 1], [[1.0, 2.0], [3.0, 4.0]])
        >>> gqt.assign_grads(embedding.weight, acc.take_grad(1))
        >>> optimizer.step()
        >>> embedding.weight.grad.coalesce().values()
        tensor([[3., 4.],
                [1., 2.]])
    """
    if isinstance(parameters, torch.Tensor):
        parameters, gradients = {"grad": parameters}, {"grad": gradients}
    for what, mapping in (("parameters", parameters), ("gradients", gradients)):
        if not isinstance(mapping, Mapping):
            raise InvalidArgumentError(f"{what}: expected a mapping by name, got {type(mapping).__name__}")
    unknown = [name for name in gradients if name not in parameters]
    if unknown:
        raise InvalidArgumentError(f"gradients: expected names among those of the parameters, got {unknown[0]!r}")
    assigned = {}
    for name, grad in gradients.items():
        with _refusals_of_torch(name):
            assigned[name] = parameters[name], _grad_for(name, parameters[name], grad)
    before = [(parameter, parameter.grad) for parameter, _ in assigned.values()]
    try:
        for name, (parameter, grad) in assigned.items():
            with _refusals_of_torch(name):
                parameter.grad = grad
    except BaseException:
        for parameter, grad in before:
            parameter.grad = grad
        raise


@contextlib.contextmanager
def _refusals_of_torch(name: str) -> Iterator[None]:
    """Say in the library's words what PyTorch refuses: a byte order, steps backwards, strings, a layout."""
    try:
        yield
    except (GradQuorumError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        why = str(error).split("\n")[0].split(". ")[0].rstrip(".")
        raise InvalidArgumentError(
            f"{name}: expected a gradient that PyTorch takes as the .grad of its parameter, got one that it refuses: "
            f"{why}. No .grad has changed"
        ) from error


def _grad_for(name: str, parameter: Any, gradient: Any) -> Any:
    """Return a gradient as a tensor that can be the parameter's `.grad`."""
    if not isinstance(parameter, torch.Tensor):
        raise InvalidArgumentError(f"{name}: expected a parameter, got {type(parameter).__name__}")
    size = tuple(parameter.shape)
    if isinstance(gradient, SparseGradient):
        gradient = gradient.as_indexed_slices()
    if isinstance(gradient, IndexedSlices):
        _check_reduced(name, gradient, size)
        tensor = as_sparse_tensor(gradient.indices, gradient.values, size)
    elif isinstance(gradient, torch.Tensor):
        tensor = gradient.detach()
    elif isinstance(gradient, np.ndarray):
        tensor = as_tensor(gradient)
    else:
        raise InvalidArgumentError(
            f"{name}: expected a SparseGradient, IndexedSlices, an array or a tensor, got {type(gradient).__name__}"
        )
    if tuple(tensor.shape) != size:
        raise InvalidArgumentError(f"{name}: expected a gradient of shape {list(size)}, got {list(tensor.shape)}")
    if tensor.dtype is not gradient_dtype(parameter):
        raise InvalidDTypeError(f"{name}: expected a gradient of {gradient_dtype(parameter)}, got {tensor.dtype}")
    return tensor.to(parameter.device)


def _check_reduced(name: str, gradient: IndexedSlices, size: tuple[int, ...]) -> None:
    """Check that slices are what a take returns, for a table of that size."""
    indices, values, shape = gradient.indices, gradient.values, gradient.dense_shape
    if not isinstance(indices, np.ndarray) or not isinstance(values, np.ndarray) or indices.dtype != np.int64:
        raise InvalidArgumentError(f"{name}: expected the arrays that a take returns, got others; apply them first")
    rows = size[0] if size else 0
    got = (-1, *values.shape[1:]) if shape is None else tuple(int(dim) for dim in shape)
    if got not in ((-1, *size[1:]), size) or values.shape != (len(indices), *size[1:]):
        raise InvalidArgumentError(
            f"{name}: expected a gradient of shape {list(size)}, got {list(got)} with values {list(values.shape)}"
        )
    if len(indices) and not (indices[0] >= 0 and indices[-1] < rows and (indices[1:] > indices[:-1]).all()):
        raise InvalidArgumentError(
            f"{name}: expected ids that ascend without repeats, as a take returns them, from 0 to {rows - 1}; "
            f"got {indices[0]} to {indices[-1]}"
        )
