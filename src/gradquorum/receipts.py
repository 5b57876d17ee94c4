"""What an apply answers."""

from __future__ import annotations

import enum
from collections.abc import Callable

__all__ = ["ApplyReceipt", "ApplyStatus"]


class ApplyStatus(enum.Enum):
    """What became of a gradient."""

    ACCEPTED = "accepted"
    """It is in the round and counts once; under `Weighted` by the weight of its lag."""
    STALE = "stale"
    """Its `local_step` lies before the round's step, further than the staleness policy allows: dropped."""
    DUPLICATE = "duplicate"
    """Its `(worker, sequence)` has been judged before: nothing happened."""
    SKIPPED = "skipped"
    """It holds a NaN or an infinity and `on_nonfinite="skip"`: dropped."""
    REFUSED = "refused"
    """Its worker already has `max_per_worker` gradients in this round: dropped."""
    DEFERRED = "deferred"
    """It is late, and `Defer` keeps it: it will count once in the next round."""


class ApplyReceipt:
    """What became of one gradient. True exactly when it was accepted.

    Attributes:
        status: the judgement.
        step: the round's step that it was judged against.
        lag: how many steps too late the gradient was, whatever became of it; 0 for one in time.
        num_accumulated: gradients in the round right after the judgement: with this one, if it was
            accepted, and before a take that it completed.
        first_status: for a duplicate, what became of the first one, where that is remembered.

    Example:
        >>> import gradquorum as gq
        >>> with gq.SparseConditionalAccumulator("float32", (5, 1)) as acc:
        ...     receipt = acc.apply_grad([3], [[1.0]])
        >>> receipt.status.name, bool(receipt), receipt.num_accumulated
        ('ACCEPTED', True, 1)
    """

    __slots__ = ("_borrower", "first_status", "lag", "num_accumulated", "status", "step")

    def __init__(
        self,
        status: ApplyStatus,
        step: int,
        lag: int,
        num_accumulated: int,
        first_status: ApplyStatus | None = None,
        borrower: Callable[[], object] | None = None,
    ) -> None:
        self.status = status
        self.step = step
        self.lag = lag
        self.num_accumulated = num_accumulated
        self.first_status = first_status
        self._borrower = borrower

    @property
    def lent(self) -> bool:
        """Whether the accumulator has kept the caller's array instead of copying it: only ever with `copy=False`."""
        return self._borrower is not None

    @property
    def released(self) -> bool:
        """Whether the caller may write to its arrays again.

        True at once unless `lent`; then true when the gradient has been merged and delivered, compacted or
        discarded: nothing that reads the array is left.
        """
        return self._borrower is None or self._borrower() is None

    def __bool__(self) -> bool:
        return self.status is ApplyStatus.ACCEPTED

    def __reduce__(self) -> tuple[object, ...]:
        # A receipt in another process cannot watch the array: it says what was true when it left.
        state = (self.status, self.step, self.lag, self.num_accumulated, self.first_status, self.lent)
        return _rebuild, (*state, self.released)

    def __repr__(self) -> str:
        parts = [self.status.name, f"step={self.step}", f"num_accumulated={self.num_accumulated}"]
        if self.lag:
            parts.append(f"lag={self.lag}")
        if self.first_status is not None:
            parts.append(f"first_status={self.first_status.name}")
        if self.lent:
            parts.append(f"lent, released={self.released}")
        return f"ApplyReceipt({', '.join(parts)})"


def _rebuild(
    status: ApplyStatus,
    step: int,
    lag: int,
    num_accumulated: int,
    first_status: ApplyStatus | None,
    lent: bool,
    released: bool,
) -> ApplyReceipt:
    borrower = (_gone if released else _never_gone) if lent else None
    return ApplyReceipt(status, step, lag, num_accumulated, first_status, borrower)


def _gone() -> None:
    """Stand for a borrower that let go of the array."""


def _never_gone() -> bool:
    """Stand for a borrower of whose end nobody will hear."""
    return True
