"""The Ray target: a handle on a round that lives on a Ray cluster."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradquorum.arrivals import ArrivalReport
from gradquorum.errors import ClosedError, InvalidArgumentError, UnavailableError
from gradquorum.receipts import ApplyReceipt
from gradquorum.specs import DenseSpec, RoundSpec
from gradquorum.staleness import to_words
from gradquorum.targets.interface import AbstractTarget, Merged, Terms
from gradquorum.targets.ray.client import Client, client_for, drop
from gradquorum.targets.ray.records import Standing
from gradquorum.targets.ray.sending import Sender
from gradquorum.targets.ray.splitting import own
from gradquorum.targets.ray.taking import Taker
from gradquorum.validation import CheckedGradient, plain_sparse

__all__ = ["RayTarget", "open_on_ray"]

T = TypeVar("T")


def open_on_ray(target: Any, shared_name: str, spec: RoundSpec | None, create: bool) -> RayTarget:
    """Create a round on a Ray cluster, or attach to the one of that name.

    Args:
        target: a `gradquorum.ray.Target`, or "ray".
        shared_name: the round's.
        spec: None to attach to whatever it is.
        create: whether a round of that spec is made if there is none.

    Raises:
        ClosedError: the round may not be made and is not there.
        InvalidArgumentError: the round of that name was made from another spec, there is none to attach to, or it
            weighs late gradients by a function of the user's.
        UnavailableError: there is no cluster.
        GradQuorumError: Ray is not installed.
    """
    from gradquorum.ray import Target

    if target == "ray":
        target = Target()
    if spec is not None:
        to_words(spec.options.staleness)  # refuses a function of the user's, which the coordinator may not have
    try:
        client, number, opened = client_for(shared_name, spec, target, create)
    except LookupError:
        if spec is None:
            raise InvalidArgumentError(
                f"shared_name {shared_name!r}: expected one that is in use, and this Ray namespace has no such round"
            ) from None
        raise ClosedError(
            f"the round {shared_name!r} has been closed, or was never in this Ray namespace; make a new accumulator or "
            "group of that name to go on"
        ) from None
    return RayTarget(client, number, opened.engine_name, opened.spec, target)


class RayTarget(AbstractTarget):
    """One handle on a round of a Ray cluster."""

    def __init__(self, client: Client, number: int, engine_name: str, spec: RoundSpec, target: Any) -> None:
        self._client = client
        self._number = number
        self._closed = False
        self.engine_name = engine_name
        self.address = target
        self.shared_name = client.shared_name
        self.spec = spec
        self._members = tuple(spec.members.values())
        self._sender = Sender(client, number, spec)
        self._taker = Taker(client, number, spec)
        weakref.finalize(self, drop, client, number).atexit = False

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this handle has been closed; make a new accumulator or group to go on")
        self._client.check()

    # Applies

    def apply(self, gradients: CheckedGradient, terms: Terms) -> ApplyReceipt:
        if self._closed:
            for gradient in gradients:
                if gradient.late_error is not None:  # as everywhere, what is wrong in itself is said first
                    raise InvalidArgumentError(gradient.late_error)
        self._check_open()
        return self._sender.apply(gradients, terms)

    def apply_plain(self, indices: Any, values: Any, terms: Terms) -> ApplyReceipt | None:
        member = self._members[0]
        if self._closed or len(self._members) > 1 or isinstance(member, DenseSpec):
            return None
        gradient = plain_sparse(member, indices, values)
        return None if gradient is None else self.apply((gradient,), terms)

    # Takes

    def take(self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]) -> T:
        self._check_open()
        return self._taker.take(num_required, timeout, exact, build)

    async def take_async(
        self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]
    ) -> T:
        self._check_open()
        return await self._taker.take_async(num_required, timeout, exact, build)

    def submit_take(
        self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]
    ) -> concurrent.futures.Future[T]:
        self._check_open()
        return self._taker.submit_take(num_required, timeout, exact, build)

    # All the rest is the round's own

    def _ask(self, what: str, *arguments: Any) -> Any:
        self._check_open()
        return self._client.ask(self._number, what, *arguments)

    def _report(self, worker: int | str | None = None) -> None:
        """Raise if something is lost of a worker, or with None of those that this thread has offered for."""
        self._client.losses.report(self._client.reason, worker)

    def num_accumulated(self) -> int:
        number: int = self._ask("num_accumulated")
        return number

    @property
    def global_step(self) -> int:
        step: int = self._ask("global_step")
        return step

    def set_global_step(self, step: int) -> int:
        before: int = self._ask("set_global_step", step)
        return before

    @property
    def published_step(self) -> int:
        step: int = self._ask("published_step")
        self._report()
        return step

    def publish(self, step: int | None, *, only_raise: bool = False) -> int:
        published: int = self._ask("publish", step, only_raise)
        return published

    def wait_published(self, step: int, timeout: float | None) -> int:
        self._check_open()
        self._report()
        client, number = self._client, self._number
        published: int = client.insist(
            lambda seen: client.coordinator.ask.remote(client.token, seen, number, "wait_published", step, timeout),
            self._report,  # else the step might never come: it waits for what is lost
        )
        return published

    def join(self, worker: int | str) -> None:
        self._ask("join_worker", worker)
        self._client.join(worker)
        self._report(worker)

    def leave(self, worker: int | str) -> None:
        with contextlib.suppress(UnavailableError, ClosedError):  # then it has left already
            self._client.leave(worker)
            self._ask("leave_worker", worker)

    def last_sequence(self, worker: int | str) -> int:
        standing: Standing = self._ask("last_sequence", worker)
        self._client.losses.take_over(worker, standing, threading.get_ident())
        self._report(worker)
        return standing.sequence

    def num_accepted(self, worker: int | str) -> int:
        number: int = self._ask("num_accepted", worker)
        return number

    @property
    def num_workers(self) -> int:
        number: int = self._ask("num_workers")
        return number

    @property
    def num_undelivered(self) -> int:
        self._taker.reclaim()
        number: int = self._ask("num_undelivered")
        return number

    @property
    def num_deferred(self) -> int:
        number: int = self._ask("num_deferred")
        return number

    def discard(self) -> int:
        count: int = self._ask("discard")
        return count

    def observe(self, num_rounds: int | None) -> None:
        self._ask("observe", num_rounds)

    def arrivals(self) -> ArrivalReport:
        report: ArrivalReport = self._ask("arrivals")
        return report

    def state(self) -> dict[str, NDArray[Any]]:
        self._taker.reclaim()
        state: dict[str, NDArray[Any]] = self._ask("state")
        return {name: own(array, np.dtype(array.dtype.str)) for name, array in state.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._taker.reclaim()
        self._ask("load_state", state)

    def close(self, for_all: bool) -> int:
        from ray.exceptions import RayError

        if self._closed:
            return 0
        self._closed = True
        count = 0
        if self._client.usable:
            with contextlib.suppress(UnavailableError, ClosedError, RayError):
                count = self._client.close(self._number, for_all=for_all)
        return count

    @property
    def closed(self) -> bool:
        if not self._closed and self._client.usable:
            try:
                self._closed = self._client.ask(self._number, "closed")
            except ClosedError:
                self._closed = True
            except UnavailableError:
                pass  # nobody knows
        return self._closed or self._client.over
