"""The errors this library raises: each is a `GradQuorumError` and the fitting built-in at once.

Numbers that a program may want to act on are attributes. All of them survive pickling, because errors
cross process borders.
"""

from __future__ import annotations

import concurrent.futures
from typing import ClassVar

__all__ = [
    "CancelledError",
    "ClosedError",
    "DeadlineExceededError",
    "GradQuorumError",
    "InvalidArgumentError",
    "InvalidDTypeError",
    "ResourceExhaustedError",
    "StaleGradientWarning",
    "UnavailableError",
]


class GradQuorumError(Exception):
    """Parent of every error of this library."""

    _numbers: ClassVar[tuple[str, ...]] = ()
    """The attributes that its constructor takes by keyword."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exception.__reduce__ would leave the keyword arguments out.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[GradQuorumError], args: tuple[object, ...], attributes: dict[str, object]) -> object:
    error = cls(*args, **{name: attributes[name] for name in cls._numbers})
    error.__dict__.update(attributes)
    return error


class InvalidArgumentError(GradQuorumError, ValueError):
    """An argument cannot be right. Nothing has changed."""


class InvalidDTypeError(InvalidArgumentError, TypeError):
    """An array or an accumulator has a dtype that does not fit. Nothing has changed."""


class DeadlineExceededError(GradQuorumError, TimeoutError):
    """A wait ended at its deadline. Nothing has changed.

    Attributes:
        have: gradients accumulated at that moment (`wait_published`: the step published; apply: bytes held).
        need: gradients asked for (`wait_published`: the step asked for; apply: bytes needed).
        step: the round's step; None except for a take.
        num_stale: gradients dropped as stale since the round began; None except for a take.
        missing: for `SyncReplicas.run`, the workers that have not been heard from; empty otherwise.
    """

    _numbers = ("have", "need", "step", "num_stale")

    def __init__(
        self,
        message: str,
        *,
        have: int,
        need: int,
        step: int | None = None,
        num_stale: int | None = None,
        missing: tuple[int | str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.have = have
        self.need = need
        self.step = step
        self.num_stale = num_stale
        self.missing = missing


class CancelledError(GradQuorumError, concurrent.futures.CancelledError):
    """A wait was ended by closing what it waited on. Nothing has changed."""


class ClosedError(GradQuorumError, RuntimeError):
    """The accumulator, group or worker handle has been closed, or belongs to another process."""


class ResourceExhaustedError(GradQuorumError, MemoryError):
    """There is no memory for a gradient or a result. Nothing has changed, and nothing is lost.

    Attributes:
        needed_bytes: what the gradient needs, or None where it is not known.
        held_bytes: what is held already, or None.
        max_bytes: the budget of the accumulator, or None without one.
    """

    _numbers = ("needed_bytes", "held_bytes", "max_bytes")

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int | None = None,
        held_bytes: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.held_bytes = held_bytes
        self.max_bytes = max_bytes


def no_memory(error: MemoryError) -> ResourceExhaustedError:
    """Return what an apply raises when there is no memory for its gradient."""
    return ResourceExhaustedError(
        f"no memory to keep the gradient: {error or 'allocation failed'}; nothing has changed"
    )


class UnavailableError(GradQuorumError, ConnectionError):
    """What is needed is not there: workers have left, or a connection broke.

    Attributes:
        outcome_known: False only where a connection broke and the call may have taken effect.
        live: workers that are still there, or None.
        needed: gradients that the take asked for, or None.
        left: names of the workers that have left.
        resend: worker and sequence of the gradients that were accepted and are lost: each may be sent again, and then
            counts. Only rounds on Ray lose any.
        num_lost: gradients that were accepted without a sequence and are lost.
    """

    _numbers = ("outcome_known", "live", "needed", "left")

    def __init__(
        self,
        message: str,
        *,
        outcome_known: bool = True,
        live: int | None = None,
        needed: int | None = None,
        left: tuple[int | str, ...] = (),
        resend: tuple[tuple[int | str, int], ...] = (),
        num_lost: int = 0,
    ) -> None:
        super().__init__(message)
        self.outcome_known = outcome_known
        self.live = live
        self.needed = needed
        self.left = left
        self.resend = resend
        self.num_lost = num_lost


class StaleGradientWarning(UserWarning):
    """A gradient whose `local_step` was left at 0 was dropped as stale."""
