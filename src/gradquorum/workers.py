"""What `worker(name)` returns: a worker's identity, its place in its sequence, and the step it computes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from gradquorum.errors import ClosedError
from gradquorum.handle import AbstractAccumulator
from gradquorum.receipts import ApplyReceipt
from gradquorum.slices import check_slices
from gradquorum.terms import check_worker
from gradquorum.validation import CheckedGradient, check_dense, check_sparse

if TYPE_CHECKING:
    from gradquorum.accumulators import ConditionalAccumulator, SparseConditionalAccumulator
    from gradquorum.groups import AccumulatorGroup

__all__ = ["AbstractWorker", "DenseWorker", "GroupWorker", "SparseWorker"]


class AbstractWorker:
    """A worker of an accumulator or group. It numbers its gradients, so that a retry never counts twice.

    A handle belongs to one thread at a time, and there is one for each name: a newer one of the same name goes on with
    the numbering, and what an older one then offers can be dropped as a duplicate. `with` ends it.
    """

    def __init__(self, accumulator: AbstractAccumulator[Any], name: int | str) -> None:
        self._accumulator = accumulator
        self._name = name = check_worker(name)
        accumulator._target.join(name)
        self._live = True
        self._step = accumulator.published_step
        self._sequence = accumulator.last_sequence(name) + 1

    @property
    def name(self) -> int | str:
        """The worker's identity."""
        return self._name

    @property
    def step(self) -> int:
        """The step of the parameters that this worker computes on: what the last `begin` returned."""
        return self._step

    @property
    def sequence(self) -> int:
        """The number of the next gradient."""
        return self._sequence

    def begin(self) -> int:
        """Remember the published step, with which the next gradients are applied, and return it.

        Raises:
            ClosedError: this worker has left, or its accumulator is closed.
        """
        self._check_live()
        self._step = self._accumulator.published_step
        return self._step

    def leave(self) -> None:
        """Leave the round; a take that cannot be satisfied without this worker ends. Leaving again does nothing."""
        if self._live:
            self._live = False
            self._accumulator._target.leave(self._name)

    def _check_live(self) -> None:
        if not self._live:
            raise ClosedError(f"worker {self._name!r} has left; ask for a new handle with worker({self._name!r})")

    def _offer(self, gradients: CheckedGradient, weight: float, copy: bool, timeout: float | None) -> ApplyReceipt:
        """Apply with the next number. It is used up when the gradient is judged, not when the call fails."""
        self._check_live()
        receipt = self._accumulator._apply(
            gradients, self._step, self._name, self._sequence, weight, copy, timeout, warn_stale=False
        )
        self._sequence += 1
        return receipt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def __repr__(self) -> str:
        state = f"step {self._step}, sequence {self._sequence}" if self._live else "left"
        return f"<{type(self).__name__} {self._name!r}: {state}>"


class SparseWorker(AbstractWorker):
    """A worker of a `SparseConditionalAccumulator`."""

    def __init__(self, accumulator: SparseConditionalAccumulator, name: int | str) -> None:
        super().__init__(accumulator, name)
        self._member = accumulator._member

    def apply_grad(
        self,
        grad_indices: Any,
        grad_values: Any,
        grad_shape: Any = None,
        *,
        weight: float = 1.0,
        copy: bool = True,
        timeout: float | None = None,
    ) -> ApplyReceipt:
        """Offer a gradient computed on the parameters of `step`.

        Arguments, result and errors are those of `SparseConditionalAccumulator.apply_grad`.
        """
        self._check_live()
        if grad_shape is None:
            receipt = self._accumulator._apply_plain(
                grad_indices,
                grad_values,
                self._step,
                self._name,
                self._sequence,
                weight,
                copy,
                timeout,
                warn_stale=False,
            )
            if receipt is not None:
                self._sequence += 1
                return receipt
        gradient, _ = check_sparse(self._member, "", grad_indices, grad_values, grad_shape)
        return self._offer((gradient,), weight, copy, timeout)

    def apply_indexed_slices_grad(
        self, grad: Any, *, weight: float = 1.0, copy: bool = True, timeout: float | None = None
    ) -> ApplyReceipt:
        """Offer a gradient, whole or in parts, computed on the parameters of `step`."""
        gradient, _ = check_slices(self._member, "", grad, 0)
        return self._offer((gradient,), weight, copy, timeout)


class DenseWorker(AbstractWorker):
    """A worker of a `ConditionalAccumulator`."""

    def __init__(self, accumulator: ConditionalAccumulator, name: int | str) -> None:
        super().__init__(accumulator, name)
        self._member = accumulator._member

    def apply_grad(
        self, grad: Any, *, weight: float = 1.0, copy: bool = True, timeout: float | None = None
    ) -> ApplyReceipt:
        """Offer a gradient computed on the parameters of `step`."""
        return self._offer((check_dense(self._member, "", grad),), weight, copy, timeout)


class GroupWorker(AbstractWorker):
    """A worker of an `AccumulatorGroup`."""

    def __init__(self, group: AccumulatorGroup, name: int | str) -> None:
        super().__init__(group, name)
        self._group = group

    def apply(
        self, gradients: Mapping[str, Any], *, weight: float = 1.0, copy: bool = True, timeout: float | None = None
    ) -> ApplyReceipt:
        """Offer a gradient, a part for each member, computed on the parameters of `step`."""
        return self._offer(self._group._check(gradients), weight, copy, timeout)
