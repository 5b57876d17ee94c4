"""Gradients of several micro-batches merged into one before the optimizer steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Literal

import torch

from gradquorum.arrays import as_integer
from gradquorum.errors import InvalidArgumentError, InvalidDTypeError
from gradquorum.groups import AccumulatorGroup, GroupGradient
from gradquorum.specs import DenseSpec, SparseSpec
from gradquorum.targets.local import LocalTarget
from gradquorum.torch.arguments import check_forms, check_max_norm, check_parameters, form_of
from gradquorum.torch.clipping import scale_down
from gradquorum.torch.gradients import as_sparse_tensor, as_tensor
from gradquorum.torch.handed_out import HandedOut

__all__ = ["MicroBatchAccumulator"]

GROWTH = 2.0
"""What is held is merged when it is so many times as large as its distinct rows: memory counts more here than time."""
WARN_AFTER_SKIPPED = 10
"""So many micro-batches skipped in a row are worth a warning: no step of the optimizer comes out of them."""

_logger = logging.getLogger("gradquorum")


class MicroBatchAccumulator:
    """Accumulates the gradients of several micro-batches in little memory and time, sparse ones above all.

    PyTorch adds sparse gradients by keeping all their rows, and copies what it has with each of them. Here rows of one
    id are added up: what is held is proportional to the distinct rows.

    Call `step()` after each backward pass. It moves every `.grad` in and leaves None there; after the `steps`-th
    it puts the merged gradients into `.grad` and returns True: now let the optimizer step and zero its gradients.

    A merged row of `"MEAN_BY_COUNT"` is the sum of the rows that the micro-batches had for it, divided by the number of
    micro-batches: with a loss that is a mean, and micro-batches of one size, the gradient of one batch of them all.
    `"SUM"` divides by nothing, `"MEAN"` by the number of micro-batches that touched the row, and `"MEAN_BY_WEIGHT"` by
    the sum of the weights given to `step`.

    Args:
        params: parameters, `model.parameters()` for one. A parameter may get sparse gradients (`Embedding`,
            `EmbeddingBag`), dense ones, or either in turn, which makes the merged one dense.
        steps: micro-batches to merge, 1 or more.
        reduction: see above.
        on_nonfinite: ``"skip"`` drops a micro-batch with a NaN or an infinity in any gradient: it is counted in
            `num_skipped` and not among the `steps`. ``"raise"`` refuses it, ``"keep"`` carries it.
        max_norm: what the 2-norm of all merged gradients together may be at most; if it is more, they are scaled down.
            None for no limit.

    Raises:
        InvalidArgumentError: an argument cannot be.
        InvalidDTypeError: a parameter has a dtype that is not supported.

    Threads:
        It belongs to one thread at a time. Its round lives in this process, also after `gradquorum.connect`.

    Example:
        >>> import torch, gradquorum.torch as gqt
        >>> embedding = torch.nn.Embedding(10, 2, sparse=True)
        >>> optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        >>> micro_batches = gqt.MicroBatchAccumulator(embedding.parameters(), steps=2)
        >>> for ids in ([7, 1], [1, 1], [2, 3]):
        ...     embedding(torch.tensor(ids)).sum().backward()
        ...     if micro_batches.step():
        ...         print(embedding.weight.grad.values().tolist())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        [[1.5, 1.5], [0.5, 0.5]]
        >>> micro_batches.flush(), embedding.weight.grad.indices()  # what is left, divided by its own count
        (True, tensor([[2, 3]]))

    Note:
        With a `torch.amp.GradScaler`, unscale and update it for each micro-batch, so that it learns of those that are
        skipped, and gradients of different scales are not mixed::

            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if micro_batches.step():
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()

        What `flush` puts into `.grad` at the end is unscaled, and finite: step without the scaler, which would unscale
        it again, or leave it out because the last micro-batch was skipped::

            if micro_batches.flush():
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Iterable[Any],
        steps: int,
        *,
        reduction: Literal["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"] = "MEAN_BY_COUNT",
        on_nonfinite: Literal["keep", "skip", "raise"] = "skip",
        max_norm: float | None = None,
    ) -> None:
        self._parameters = check_parameters(params)
        self._forms = [form_of(parameter) for parameter in self._parameters]
        self._steps = as_integer("steps", steps)
        if self._steps < 1:
            raise InvalidArgumentError(f"steps: expected 1 or more, got {self._steps}")
        self._max_norm = check_max_norm(max_norm)
        # Which layout a gradient will have is known only when it comes, and may change. What is left out costs nothing.
        members: dict[str, SparseSpec | DenseSpec] = {}
        for i, (size, dtype) in enumerate(self._forms):
            members[_dense(i)] = DenseSpec(dtype, None, reduction)
            if size:
                members[_sparse(i)] = SparseSpec(dtype, size, reduction)
        self._group = AccumulatorGroup(members, name="micro_batches", target="local", on_nonfinite=on_nonfinite)
        assert isinstance(self._group._target, LocalTarget)
        self._target = self._group._target
        self._target.hold_little(GROWTH)
        self._needs_one_layout = reduction == "MEAN"
        self._layouts: dict[int, str] = {}
        self._num_skipped = self._skipped_in_a_row = 0
        self._taken: GroupGradient | None = None
        """What has been taken and not yet put into `.grad`."""
        self._members: set[str] = set()
        """Those that any of the micro-batches held has a gradient of."""
        self._handed_out = HandedOut()
        self._total_norm: float | None = None

    @property
    def steps(self) -> int:
        """The micro-batches that are merged into one gradient."""
        return self._steps

    @property
    def num_accumulated(self) -> int:
        """The micro-batches that are held now."""
        return self._group.num_accumulated()

    @property
    def num_skipped(self) -> int:
        """The micro-batches that were dropped for a NaN or an infinity, since this was made."""
        return self._num_skipped

    @property
    def total_norm(self) -> float | None:
        """The 2-norm of the last merged gradients before they were scaled down; None without `max_norm`."""
        return self._total_norm

    def step(self, *, weight: float = 1.0) -> bool:
        """Move the gradients of a micro-batch in; put the merged ones into `.grad` when it was the last.

        Args:
            weight: of the micro-batch, under ``"MEAN_BY_WEIGHT"``: its number of examples for one.

        Returns:
            Whether merged gradients are in `.grad`. If not, each `.grad` is None. A parameter that no micro-batch had
            a gradient for has None in either case, and one whose gradients had no rows gets one without rows.

        Raises:
            InvalidArgumentError: there is no gradient at all; or the merged one of before is still in a `.grad` (zero
                them after the optimizer's step); or a parameter has got another shape or dtype; or under
                ``on_nonfinite="raise"`` a gradient is not finite. Nothing has changed.
            InvalidDTypeError: a gradient has not the dtype of its parameter (its `grad_dtype`). Nothing has changed.
            ResourceExhaustedError: no memory. If it was the merge that failed, the micro-batch has been moved in, and
                `flush()` tries again; else nothing has changed.
        """
        check_forms(self._parameters, self._forms)
        gradients, layouts = self._collect()
        receipt = self._group.apply(gradients, local_step=None, weight=weight)
        for parameter in self._parameters:
            parameter.grad = None
        self._handed_out.clear()
        if receipt:
            self._layouts, self._skipped_in_a_row = layouts, 0
            self._members.update(gradients)
            if receipt.num_accumulated == (self._steps + 1) // 2:
                self._target.make_room()  # the second half has the memory of the first
        else:
            self._count_skipped()
        return self._is_due() and self.flush()

    def flush(self) -> bool:
        """Put the merged gradients of what is held into `.grad`, divided by its own count.

        Returns:
            Whether there was anything. If not, each `.grad` is as it was.

        Raises:
            InvalidArgumentError: a `.grad` has a gradient that has not been moved in: call `step()` first; or a
                parameter has got another shape or dtype. Nothing has changed.
            ResourceExhaustedError: no memory. Nothing is lost; call it again.
        """
        if self._taken is None and not self._group.num_undelivered and not self._group.num_accumulated():
            return False
        check_forms(self._parameters, self._forms)
        grads = [(i, parameter.grad) for i, parameter in enumerate(self._parameters)]
        if any(grad is not None and not self._handed_out.is_zeroed(i, grad) for i, grad in grads):
            raise InvalidArgumentError(
                "grad: expected none, got one that would be lost; call step(), or zero it, first"
            )
        if self._taken is None:
            self._taken = self._group.take(1, timeout=0)
        merged = [self._merged(i, self._taken) for i in range(len(self._parameters))]
        if self._max_norm is not None:
            self._total_norm = scale_down([grad for grad in merged if grad is not None], self._max_norm)
        on_devices = [
            None if grad is None else grad.to(parameter.device)
            for parameter, grad in zip(self._parameters, merged, strict=True)
        ]
        self._handed_out.clear()
        for i, (parameter, grad) in enumerate(zip(self._parameters, on_devices, strict=True)):
            parameter.grad = grad
            if grad is not None:
                self._handed_out.add(i, parameter, grad)
        self._taken = None
        if not self._group.num_accumulated():
            self._members.clear()
        return True

    def _is_due(self) -> bool:
        """Whether a gradient is full, or one is left whose merge was cut off."""
        return (
            self._taken is not None or self._group.num_accumulated() >= self._steps or self._group.num_undelivered > 0
        )

    def _collect(self) -> tuple[dict[str, Any], dict[int, str]]:
        """Return the gradients by member, and which member each parameter's go to from now on."""
        gradients, layouts = {}, dict(self._layouts)
        for i, parameter in enumerate(self._parameters):
            grad = parameter.grad
            if grad is None:
                continue
            if self._handed_out.still_in(i, grad):
                raise InvalidArgumentError(
                    f"params[{i}].grad: expected the gradient of a micro-batch, got the merged one again; "
                    "call optimizer.zero_grad() after optimizer.step()"
                )
            if grad.dtype is not self._forms[i][1]:
                raise InvalidDTypeError(
                    f"params[{i}].grad: expected a gradient of {self._forms[i][1]}, got {grad.dtype}"
                )
            dense = grad.layout is torch.strided
            member = _dense(i) if dense else _sparse(i)
            if layouts.setdefault(i, member) != member and self._needs_one_layout:
                raise InvalidArgumentError(
                    f"params[{i}].grad: expected the layout it had before, as reduction is 'MEAN', got {grad.layout}"
                )
            # One number is sent as a vector: the shape () stands for a gradient that nobody had.
            gradients[member] = grad.detach().reshape(1) if dense and not grad.ndim else grad
        if not gradients:
            raise InvalidArgumentError("grad: expected a gradient in one parameter or more, got none; call backward()")
        return gradients, layouts

    def _merged(self, i: int, taken: GroupGradient) -> Any:
        """Return the merged gradient of a parameter, or None."""
        size, _ = self._forms[i]
        dense = taken[_dense(i)]
        sparse = taken[_sparse(i)] if size else None
        if sparse is not None and not len(sparse.indices) and _sparse(i) not in self._members:
            sparse = None
        if not dense.ndim:
            return None if sparse is None else as_sparse_tensor(sparse.indices, sparse.values, size)
        grad = as_tensor(dense).reshape(size)
        if sparse is not None:
            grad = grad.index_add(0, torch.from_numpy(sparse.indices), as_tensor(sparse.values))
        return grad

    def _count_skipped(self) -> None:
        self._num_skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == WARN_AFTER_SKIPPED:
            _logger.warning(
                "%d micro-batches in a row had a NaN or an infinity in a gradient and were skipped; with a GradScaler, "
                "call unscale_() before step() and update() after each micro-batch, so that it lowers its scale",
                self._skipped_in_a_row,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a MicroBatchAccumulator lives in its process and does not pickle, nor copy; save between steps, when it "
            "holds nothing, and make a new one from the loaded parameters"
        )

    def __repr__(self) -> str:
        return (
            f"<MicroBatchAccumulator of {len(self._parameters)} parameters: {self.num_accumulated} of {self._steps} "
            f"micro-batches, {self._num_skipped} skipped>"
        )


def _dense(i: int) -> str:
    return f"params[{i}].grad"


def _sparse(i: int) -> str:
    return f"params[{i}].grad, sparse"
