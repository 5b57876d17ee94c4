"""The ways to take a round, and the checks that they share."""

from __future__ import annotations

import concurrent.futures
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from gradquorum.arrays import MAX_INT64, as_integer
from gradquorum.errors import CancelledError, ClosedError, InvalidArgumentError
from gradquorum.specs import RoundSpec
from gradquorum.targets import AbstractTarget, Merged
from gradquorum.terms import check_timeout

__all__ = ["Taking"]

R = TypeVar("R")


class Taking(ABC, Generic[R]):
    """The methods of `AbstractAccumulator` for that. Takes return an `R`."""

    _spec: RoundSpec
    _target: AbstractTarget

    @abstractmethod
    def _build(self, merged: Merged) -> R:
        """Return what a take returns."""

    def _take(self, num_required: Any, timeout: float | None, exact: bool) -> R:
        number = self._check_take(num_required, exact)
        return self._target.take(number, check_timeout(timeout), exact, self._build)

    def _take_with_step(self, num_required: int, timeout: float | None) -> tuple[R, int]:
        """Take, and return the round's step as well, which an array does not say."""
        number = self._check_take(num_required, exact=False)
        return self._target.take(number, timeout, False, lambda merged: (self._build(merged), merged.step))

    async def _take_async(self, num_required: Any, timeout: float | None, exact: bool) -> R:
        number = self._check_take(num_required, exact)
        return await self._target.take_async(number, check_timeout(timeout), exact, self._build)

    def _submit_take(self, num_required: Any, timeout: float | None, exact: bool) -> concurrent.futures.Future[R]:
        number = self._check_take(num_required, exact)
        return self._target.submit_take(number, check_timeout(timeout), exact, self._build)

    def _submit_offer(
        self, num_required: Any, timeout: float | None, accept: Callable[[R], None]
    ) -> concurrent.futures.Future[R]:
        """Do what `_submit_take` does, but let `accept` say whether the round is taken: if it raises, it goes back.

        It may block where the target gives each such take a thread of its own, as a server's does.
        """

        def build(merged: Merged) -> R:
            result = self._build(merged)
            accept(result)
            return result

        return self._target.submit_take(self._check_take(num_required, False), check_timeout(timeout), False, build)

    def _check_take(self, num_required: Any, exact: bool) -> int:
        if type(num_required) is int and 1 <= num_required <= MAX_INT64 and exact is False:
            return num_required
        number = as_integer("num_required", num_required)
        if exact is not False and not isinstance(exact, (bool, np.bool_)):
            raise InvalidArgumentError(f"exact: expected True or False, got {exact!r}")
        if number < 1:
            raise InvalidArgumentError(
                f"num_required must be positive, but was {number}; give the gradients to wait for, 1 or more"
            )
        if exact and self._spec.options.compact:
            raise InvalidArgumentError(
                "exact=True: expected an accumulator made with compact=False, got one made with compact=True: it may "
                "have merged gradients that such a take would have to leave; make it with compact=False"
            )
        return number

    def _rounds(self, num_required: Any, timeout: float | None) -> Iterator[R]:
        return self._iterate(self._check_take(num_required, exact=False), check_timeout(timeout))

    def _iterate(self, num_required: int, timeout: float | None) -> Iterator[R]:
        while True:
            try:
                result, step = self._take_with_step(num_required, timeout)
            except (CancelledError, ClosedError):
                return
            yield result
            del result  # the caller's from here on
            try:
                self._target.publish(step + 1, only_raise=True)
            except ClosedError:
                return
