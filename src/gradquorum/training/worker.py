"""What `SyncReplicas.worker(id)` returns: begin, compute, apply, in a thread or in a process of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from gradquorum.accumulators import SparseConditionalAccumulator
from gradquorum.errors import CancelledError, ClosedError, DeadlineExceededError
from gradquorum.groups import AccumulatorGroup
from gradquorum.handle import AbstractAccumulator
from gradquorum.receipts import ApplyReceipt, ApplyStatus
from gradquorum.terms import check_timeout
from gradquorum.waiters import Deadline

__all__ = ["ReplicaWorker"]

_LOOK_SECONDS = 0.5
"""How long a worker waits for a step before it looks whether the round has gone back."""


class ReplicaWorker:
    """A worker of a `SyncReplicas`. It belongs to one thread; use it in a ``with`` block, whose end lets it leave.

    The ``with`` block also ends without an exception when the training was closed under it. Any other exception is
    raised as usual, and an `Exception` by `SyncReplicas.run` as well if that is in the same process. With others, such
    as `SystemExit` and `KeyboardInterrupt`, nothing has failed: the worker has left.

    Example:
        See `SyncReplicas`.
    """

    def __init__(
        self,
        group: AbstractAccumulator[Any],
        worker: int,
        max_per_worker: int,
        report: Callable[[int, Exception], None],
    ) -> None:
        self._group = group
        self._worker: Any = group.worker(worker)  # type: ignore[attr-defined]  # every leaf of the class has it
        self._max_per_worker = max_per_worker
        self._report = report
        self._num_applied = 0
        """Gradients accepted for the step `_applied_step`."""
        self._applied_step: int | None = None
        self._wait_for: int | None = None
        """The step to wait for before the next gradient; None to begin at once."""
        self._left = False
        self._process = os.getpid()
        self._over = False
        """Whether the training was closed under this worker."""

    @property
    def name(self) -> int:
        """The worker's number."""
        number: int = self._worker.name
        return number

    @property
    def step(self) -> int:
        """The step of the parameters that this worker computes on: what the last `begin` returned."""
        step: int = self._worker.step
        return step

    def begin(self, *, timeout: float | None = None) -> int:
        """Wait until there are parameters to compute on, remember their step, and return it.

        After an accepted gradient (with `max_per_worker`, the last of them) that is the next step, after a stale one
        the step that made it stale, and otherwise the published one at once. Twice a second a worker that waits looks
        whether the round wants a gradient of it all the same, as after a `discard`, a lowered step or an older state.

        Args:
            timeout: seconds, 0 or more; None waits without end.

        Raises:
            DeadlineExceededError: the chief did not publish the step in time.
            CancelledError: the training was closed meanwhile.
            ClosedError: it has been closed, or this worker has left.
        """
        deadline = Deadline(check_timeout(timeout))
        with self._watch_for_the_end():
            if self._wait_for is not None:
                self._wait(self._wait_for, deadline)
                self._wait_for = None
            step: int = self._worker.begin()
        return step

    def _wait(self, step: int, deadline: Deadline) -> None:
        """Wait until a step is published, or the round wants a gradient computed on the parameters that are out."""
        while True:
            try:
                self._group.wait_published(step, timeout=deadline.left(_LOOK_SECONDS))
                return
            except DeadlineExceededError as error:
                if self._is_wanted():
                    return
                if deadline.passed:
                    raise DeadlineExceededError(
                        f"begin: have {error.have}, need {step} after {deadline.timeout} s", have=error.have, need=step
                    ) from None

    def _is_wanted(self) -> bool:
        group = self._group
        if group._target.num_accepted(self.name) >= self._max_per_worker:
            return False
        step = group.global_step  # in this order: that of the round looked at, or a later one's
        return group.published_step >= step

    def __iter__(self) -> Iterator[int]:
        """Begin again and again, and yield the step each time, until the training is closed."""
        while True:
            try:
                step = self.begin()
            except (CancelledError, ClosedError):
                if self._over:
                    return
                raise
            yield step

    def apply(
        self, gradient: Any, *, weight: float = 1.0, copy: bool = True, timeout: float | None = None
    ) -> ApplyReceipt:
        """Offer a gradient computed on the parameters of `step`.

        Args:
            gradient: for a group what `AccumulatorGroup.apply` takes, a mapping; for a sparse accumulator what
                `SparseConditionalAccumulator.apply_indexed_slices_grad` takes, as a tuple ``(indices, values)``; for
                a dense one an array.
            weight: under ``"MEAN_BY_WEIGHT"``, a finite number above 0.
            copy: False lends the values.
            timeout: seconds to wait for memory under ``on_full="block"``.

        Returns:
            What became of it. What is stale or skipped is dropped; the batch may be tried again after `begin`.

        Raises:
            InvalidArgumentError: the gradient cannot be right, like all other errors of that method. Nothing has
                changed.
        """
        worker = self._worker
        if isinstance(self._group, AccumulatorGroup):
            offer = worker.apply
        elif isinstance(self._group, SparseConditionalAccumulator):
            offer = worker.apply_indexed_slices_grad
        else:
            offer = worker.apply_grad
        with self._watch_for_the_end():
            receipt: ApplyReceipt = offer(gradient, weight=weight, copy=copy, timeout=timeout)
        self._wait_for = self._next_step(receipt)
        return receipt

    def _next_step(self, receipt: ApplyReceipt) -> int | None:
        """Return the step whose parameters are worth computing on after this answer; None for the published one."""
        status, step = receipt.status, receipt.step
        if status in (ApplyStatus.STALE, ApplyStatus.DEFERRED):
            return step  # the chief may still be at its update
        if status is ApplyStatus.ACCEPTED:
            if step != self._applied_step:
                self._applied_step, self._num_applied = step, 0
            self._num_applied += 1
            return step + 1 if self._num_applied >= self._max_per_worker else None
        if status is ApplyStatus.REFUSED:  # by the open round, or too late for it and by what is deferred
            return step if receipt.lag > self._group._spec.policy.max_lag else step + 1
        return None

    @contextlib.contextmanager
    def _watch_for_the_end(self) -> Iterator[None]:
        """Notice that the training has been closed: with other causes, these errors do not come from our calls."""
        try:
            yield
        except (CancelledError, ClosedError):
            self._over = not self._left and os.getpid() == self._process  # a forked child is told that it is one
            raise

    def leave(self) -> None:
        """Leave the training: what is required then follows the declared rule. Leaving again does nothing."""
        self._left = True
        with contextlib.suppress(ClosedError):
            self._worker.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        ended = self._over and isinstance(error, (CancelledError, ClosedError))
        if isinstance(error, Exception) and not ended:
            self._report(self.name, error)  # before leaving, which may wake the chief
        self.leave()
        return ended

    def __repr__(self) -> str:
        return f"<ReplicaWorker {self.name}: step {self.step}>"
