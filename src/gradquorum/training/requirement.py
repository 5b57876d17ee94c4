"""How many gradients a round waits for: a fixed number, all that can come, or all but some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from gradquorum.arrays import as_integer
from gradquorum.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from gradquorum.handle import AbstractAccumulator

__all__ = ["Requirement", "check_membership", "check_requirement"]

R = TypeVar("R")

_MAX_DIGITS = 18
"""Of a number of workers."""


class Requirement(NamedTuple):
    """The declared rule.

    Attributes:
        fixed: how many gradients; None to follow the workers that are there.
        spare: with `fixed` None, how many of those that can come are not waited for.
        num_workers: how many workers there are when all are there.
    """

    fixed: int | None
    spare: int
    num_workers: int

    def take(self, group: AbstractAccumulator[Any], take: Callable[[int, float], R], seconds: float) -> R:
        """Take by the rule as it stands now, or wait for at most so many seconds.

        Raises:
            DeadlineExceededError: not yet. Call again: somebody may have left, or come back, meanwhile.
            UnavailableError: the workers that are left cannot do it.
        """
        if self.fixed is not None:
            try:
                return take(self.fixed, seconds)
            except UnavailableError as error:
                raise self._out_of_reach(error, group) from None
        while True:
            number = self.num_workers
            while group.num_workers < self.num_workers:  # some have not joined, or have left: which, the round knows
                try:
                    return take(number, 0.0)  # that is all that can come
                except DeadlineExceededError:
                    break  # so many can come
                except UnavailableError as error:
                    number = min(number - 1, _at_most(error, group))
                    if number < 1:
                        raise self._out_of_reach(error, group) from None
            try:
                return take(max(number - self.spare, 1), seconds)
            except UnavailableError as error:
                if error.live is None:
                    raise
                # Somebody has left just now.

    def _out_of_reach(self, error: UnavailableError, group: AbstractAccumulator[Any]) -> UnavailableError:
        """Return an error that names the rule and what it needs, not what a single take asked for."""
        if error.live is None:  # not the workers are missing, but the server
            return error
        rule, needed = (
            (self.fixed, self.fixed) if self.fixed is not None else (f"all-{self.spare}" if self.spare else "all", 1)
        )
        return UnavailableError(
            f"num_required={rule!r}: {error.live} of {self.num_workers} workers live, {needed} gradients needed "
            f"({group.num_accumulated()} are here); left: {', '.join(map(repr, error.left)) or 'nobody'}",
            live=error.live,
            needed=needed,
            left=error.left,
        )


def _at_most(error: UnavailableError, group: AbstractAccumulator[Any]) -> int:
    """Return a bound on what a round can hold: those who have left can have applied before."""
    if error.live is None:  # not the workers are missing, but the server
        raise error
    return error.live + group.num_accumulated()


def check_requirement(num_required: Any, num_workers: int, max_per_worker: int) -> Requirement:
    """Return the rule that an argument declares.

    Raises:
        InvalidArgumentError: it declares none that these workers could meet.
    """
    if isinstance(num_required, str):
        rule, _, spare = num_required.partition("-")
        is_number = spare.isdecimal() and len(spare) <= _MAX_DIGITS
        if rule != "all" or not (is_number if "-" in num_required else not spare):
            raise InvalidArgumentError(
                f"num_required: expected a number, 'all' or 'all-b' with a number b, got {num_required[:80]!r}"
            )
        if max_per_worker != 1:
            raise InvalidArgumentError(
                f"num_required: expected a number with max_per_worker={max_per_worker}, got {num_required!r}: a second "
                "gradient of one worker would stand for that of another"
            )
        number = int(spare or 0)
        if number >= num_workers:
            raise InvalidArgumentError(
                f"num_required: expected to spare fewer than num_workers={num_workers}, got {num_required!r}"
            )
        return Requirement(None, number, num_workers)
    number = as_integer("num_required", num_required)
    if not 1 <= number <= num_workers * max_per_worker:
        raise InvalidArgumentError(
            f"num_required: expected 1 to num_workers x max_per_worker = {num_workers * max_per_worker}, got {number}"
        )
    return Requirement(number, 0, num_workers)


def check_membership(group: AbstractAccumulator[Any], num_workers: int, max_per_worker: int) -> None:
    """Refuse a group whose round would not know who is still to come, or would count otherwise."""
    options = group._spec.options
    if (options.expected_workers, options.max_per_worker) != (num_workers, max_per_worker):
        raise InvalidArgumentError(
            f"group: expected one made with expected_workers={num_workers}, max_per_worker={max_per_worker}, got "
            f"expected_workers={options.expected_workers}, max_per_worker={options.max_per_worker}. The round enforces "
            "both, wherever its workers are: make the group with these options"
        )
