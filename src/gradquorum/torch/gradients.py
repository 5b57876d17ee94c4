"""Gradients between parameters and accumulators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradquorum.accumulators import SparseConditionalAccumulator
from gradquorum.arrays import MAX_INT64
from gradquorum.dtypes import is_bfloat16
from gradquorum.engine import coo_memory, coo_tensors
from gradquorum.errors import InvalidArgumentError
from gradquorum.groups import AccumulatorGroup
from gradquorum.handle import AbstractAccumulator
from gradquorum.receipts import ApplyReceipt
from gradquorum.specs import DenseSpec, SparseSpec
from gradquorum.targets import Merged
from gradquorum.terms import check_timeout
from gradquorum.workers import GroupWorker

__all__ = ["apply_grad", "as_sparse_tensor", "as_tensor", "gradient_of", "take_grad"]

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_sparse_coo_tensor = torch.sparse_coo_tensor
"""Looking them up in a module that has a `__getattr__` takes as long as calling a function."""


def apply_grad(accumulator: Any, parameter_or_grad: Any, **options: Any) -> ApplyReceipt:
    """Offer a parameter's gradient to an accumulator, a group or a worker of one. The `.grad` stays as it is.

    Args:
        accumulator: a `SparseConditionalAccumulator`, a `ConditionalAccumulator`, or what its `worker(name)` returned;
            for a mapping, an `AccumulatorGroup` or a worker of one.
        parameter_or_grad: a parameter, whose `.grad` is meant, or a gradient: a sparse COO tensor, coalesced or not,
            with one sparse dimension, or for a dense accumulator a dense tensor. A tensor of another device is copied
            to this machine's memory, once. For a group: a mapping of these by member.
        **options: as for the accumulator's own method: `local_step`, `worker`, `sequence`, `weight`, `copy`, `timeout`.

    Returns:
        What became of it.

    Raises:
        InvalidArgumentError: there is no gradient, or it cannot be right, as for the accumulator's own method. Nothing
            has changed.

    Threads:
        Any number, as for the accumulator's own method.

    Example:
        >>> import torch, gradquorum as gq, gradquorum.torch as gqt
        >>> embedding = torch.nn.Embedding(10, 2, sparse=True)
        >>> embedding(torch.tensor([7, 1, 7])).sum().backward()
        >>> acc = gq.SparseConditionalAccumulator("float32", (10, 2))
        >>> gqt.apply_grad(acc, embedding.weight, local_step=None)
        ApplyReceipt(ACCEPTED, step=0, num_accumulated=1)
    """
    receipt: ApplyReceipt
    member = getattr(accumulator, "_member", None)
    grad = parameter_or_grad.grad if type(parameter_or_grad) is _Parameter else parameter_or_grad
    if (
        type(grad) is _Tensor
        and type(member) is SparseSpec
        and grad.shape == member.shape
        and not grad.requires_grad  # as of a sparse parameter, whose gradient is another tensor
    ):
        # What the general way below would find, with fewer calls. The values of a sparse tensor carry no autograd, and
        # neither a conjugate nor a negative bit.
        try:
            memory = coo_memory(grad._indices(), grad._values(), member.dtype.char)
        except RuntimeError:  # it is not sparse
            memory = None
        if memory is not None:
            receipt = accumulator.apply_grad(*memory, **options)
            return receipt
    if not isinstance(parameter_or_grad, torch.Tensor) and isinstance(parameter_or_grad, Mapping):
        if not isinstance(accumulator, AccumulatorGroup | GroupWorker):
            raise InvalidArgumentError(
                f"accumulator: expected a group, or a worker of one, for a mapping, got {type(accumulator).__name__}; "
                "give the gradient itself"
            )
        gradients = {name: gradient_of(name, each) for name, each in parameter_or_grad.items()}
        receipt = accumulator.apply(gradients, **options)
        return receipt
    grad = gradient_of("grad", parameter_or_grad)
    if isinstance(member, DenseSpec):
        receipt = accumulator.apply_grad(grad, **options)
    elif member is None:
        raise InvalidArgumentError(
            f"accumulator: expected one, or a worker of one, got {type(accumulator).__name__}; "
            "a group takes a mapping of gradients by member"
        )
    else:
        receipt = accumulator.apply_indexed_slices_grad(grad, **options)
    return receipt


def gradient_of(what: str, tensor: Any) -> Any:
    """Return the gradient that is meant: of a parameter its `.grad`, any other tensor itself.

    Raises:
        InvalidArgumentError: it is no tensor, or a parameter without a gradient.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"{what}: expected a parameter or a gradient, got {type(tensor).__name__}")
    if not (tensor.requires_grad and tensor.is_leaf) and not isinstance(tensor, torch.nn.Parameter):
        return tensor
    grad = tensor.grad
    if grad is None:
        raise InvalidArgumentError(f"{what}: expected a parameter with a gradient, got one without; call backward()")
    return grad


def take_grad(
    accumulator: Any, num_required: int, *, device: Any = None, timeout: Any = None, exact: bool = False
) -> Any:
    """Wait until the round holds enough gradients, and return them reduced to one, as a tensor.

    Args:
        accumulator: a `SparseConditionalAccumulator`, `ConditionalAccumulator` or `AccumulatorGroup`.
        num_required: gradients to wait for, 1 or more.
        device: where the tensor shall be; None leaves it in this machine's memory, where it is the result itself.
        timeout: seconds, 0 (do not wait) or more; None waits without end.
        exact: take the first `num_required` accepted and leave the rest. Only with `compact=False`.

    Returns:
        A sparse COO tensor of `[rows, *row]`, coalesced and marked as such, in the accumulator's dtype, owned by the
        caller; a dense tensor for a dense accumulator; a dict of these for a group. Where the accumulator's shape does
        not say how many rows there are, they end with the highest id.

    Raises:
        InvalidArgumentError: an argument cannot be, as for the accumulator's own method, like all other errors, or
            this machine has no such device. Nothing has changed. Or the ids end too high for a tensor; the round is
            kept whole for the next take, as it is when the device has no memory for it.

    Threads:
        Blocks, as the accumulator's own method does.

    Example:
        >>> import torch, gradquorum as gq, gradquorum.torch as gqt
        >>> acc = gq.SparseConditionalAccumulator("float32", (10, 2))
        >>> _ = acc.apply_grad(torch.tensor([7, 1]), torch.ones(2, 2))
        >>> grad = gqt.take_grad(acc, 1)
        >>> grad.is_coalesced(), grad.shape, grad.indices()
        (True, torch.Size([10, 2]), tensor([[1, 7]]))
    """
    if type(accumulator) is SparseConditionalAccumulator and device is None:
        # What the general way below would do, with fewer calls.
        number = accumulator._check_take(num_required, exact)
        seconds = None if timeout is None else check_timeout(timeout)
        return accumulator._target.take(number, seconds, exact, partial(_only_tensor, accumulator._member))
    if not isinstance(accumulator, AbstractAccumulator):
        raise InvalidArgumentError(f"accumulator: expected one, or a group, got {type(accumulator).__name__}")
    if device is not None:
        device = _check_device(device)
    number, seconds = accumulator._check_take(num_required, exact), check_timeout(timeout)
    specs = accumulator._spec.members

    def build(merged: Merged) -> Any:
        # An error that is raised here leaves the round as it is: it is not delivered yet.
        tensors = {
            name: _as_any_tensor(name, spec, member, device)
            for (name, spec), member in zip(specs.items(), merged.members, strict=True)
        }
        return tensors[""] if "" in specs else tensors

    return accumulator._target.take(number, seconds, exact, build)


def _check_device(device: Any) -> Any:
    """Return a device that this machine has."""
    try:
        checked = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as error:
        # PyTorch has no error of its own for this: without CUDA it is even an AssertionError.
        why = str(error).split("\n")[0].split(". ")[0].rstrip(".")
        raise InvalidArgumentError(
            f"device: expected one that this machine has, got {device!r}: {why}. Nothing has been taken"
        ) from error
    if checked.type == "meta":
        raise InvalidArgumentError("device: expected one with memory, got 'meta'. Nothing has been taken")
    return checked


def _only_tensor(spec: SparseSpec, merged: Merged) -> Any:
    """Return what a reducer returned for the only member, a sparse one."""
    indices, values, _ = member = merged.members[0]
    size: Any = spec.shape
    tensors = coo_tensors(_Tensor, indices, values)
    if tensors is not None and len(size) == values.ndim and None not in size:
        try:
            return _sparse_coo_tensor(*tensors, size, is_coalesced=True, check_invariants=False)
        except RuntimeError:  # there can be no so large one
            pass
    return _as_any_tensor("", spec, member, None)


def _as_any_tensor(name: str, spec: SparseSpec | DenseSpec, member: Any, device: Any) -> Any:
    """Return what a reducer returned for a member as a tensor."""
    if isinstance(spec, DenseSpec):
        tensor = as_tensor(member)
    else:
        indices, values, _ = member
        rows = spec.shape[0] if spec.shape else None
        if rows is None:
            rows = int(indices[-1]) + 1 if len(indices) else 0
        size = (rows, *values.shape[1:])
        if max(rows, math.prod(size)) > MAX_INT64:  # PyTorch counts even the numbers that are not stored
            raise InvalidArgumentError(
                f"{name or 'shape'}: expected a table of up to {MAX_INT64} numbers, as a tensor holds no more, got "
                f"{list(size)}. The round is kept for the next take; the accumulator's own take returns it as arrays"
            )
        tensor = as_sparse_tensor(indices, values, size)
    return tensor if device is None else tensor.to(device)


def as_tensor(array: NDArray[Any]) -> Any:
    """Return an array's memory as a tensor."""
    if is_bfloat16(array.dtype):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_sparse_tensor(indices: NDArray[np.int64], values: NDArray[Any], size: tuple[int, ...]) -> Any:
    """Return the memory of a reduced gradient as a coalesced sparse COO tensor."""
    # Ids ascend without repeats: what an invariant check would look for is what the library promises.
    return torch.sparse_coo_tensor(
        torch.from_numpy(indices[None]), as_tensor(values), size, is_coalesced=True, check_invariants=False
    )
