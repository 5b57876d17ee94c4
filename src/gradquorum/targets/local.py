"""The local target: the round lives in this process and is shared by its threads."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from gradquorum.arrivals import ArrivalReport, arrival_report
from gradquorum.background import Timer, background
from gradquorum.errors import ClosedError, InvalidArgumentError
from gradquorum.receipts import ApplyReceipt
from gradquorum.round import Round
from gradquorum.specs import RoundSpec
from gradquorum.targets.host import RoundHost
from gradquorum.targets.interface import AbstractTarget, Merged, Terms
from gradquorum.targets.waits import log_waiting, try_to_resolve
from gradquorum.validation import CheckedGradient
from gradquorum.waiters import Deadline, Handle, Ticket

__all__ = ["LocalTarget", "open_local"]

T = TypeVar("T")

FIRST_LOG_SECONDS = 60.0
"""A take that has waited this long says so in the log, ..."""
NEXT_LOG_SECONDS = 600.0
"""... and again whenever this much more has passed."""

_logger = logging.getLogger("gradquorum")

_hosts: weakref.WeakValueDictionary[str, RoundHost] = weakref.WeakValueDictionary()
"""The rounds that have a shared name. Guarded by _hosts_lock."""
_hosts_lock = threading.RLock()
_num_forks = 0


def _after_fork() -> None:
    global _hosts, _hosts_lock, _num_forks
    _hosts, _hosts_lock = weakref.WeakValueDictionary(), threading.RLock()
    _num_forks += 1


os.register_at_fork(after_in_child=_after_fork)


def open_local(spec: RoundSpec, shared_name: str | None) -> LocalTarget:
    """Create a round in this process, or attach to the one of that name.

    Raises:
        InvalidArgumentError: the round of that name was made from another spec.
    """
    if shared_name is None:
        return _attach(RoundHost(spec), None)
    with _hosts_lock:
        host = _hosts.get(shared_name)
        if host is not None:
            handle = host.round.open()
            if handle is not None:
                if host.spec.describe() == spec.describe():
                    return _attach(host, handle)
                host.round.close(handle)
                raise InvalidArgumentError(
                    f"shared_name {shared_name!r}: expected the spec it was made with, "
                    f"{host.spec.describe()}, got {spec.describe()}"
                )
        host = _hosts[shared_name] = RoundHost(spec)
        return _attach(host, None)


def attach_local(shared_name: str) -> tuple[LocalTarget, RoundSpec]:
    """Attach to the round of that name in this process, and return its spec.

    Raises:
        InvalidArgumentError: there is none.
    """
    with _hosts_lock:
        host = _hosts.get(shared_name)
        handle = None if host is None else host.round.open()
        if host is None or handle is None:
            raise InvalidArgumentError(
                f"shared_name {shared_name!r}: expected one that is in use, and this process has no such round. "
                "Is it in a server? Give target=, its address, or call gradquorum.connect first"
            )
        return _attach(host, handle), host.spec


def _attach(host: RoundHost, handle: Handle | None) -> LocalTarget:
    handle = handle or host.round.open()
    assert handle is not None
    return LocalTarget(host, handle)


class LocalTarget(AbstractTarget):
    """One handle on a round of this process."""

    def __init__(self, host: RoundHost, handle: Handle) -> None:
        self._host = host
        self._handle = handle
        self._made_at_fork = _num_forks
        self.engine_name = host.engine_name

    @property
    def _round(self) -> Round:
        if self._made_at_fork != _num_forks:
            raise ClosedError(
                "a local accumulator belongs to the process that made it and this is a forked child of that "
                "one; make one here, or start the child with the 'spawn' method"
            )
        return self._host.round

    def hold_little(self, growth: float) -> None:
        """Let memory count more than time: see `RoundHost.hold_little`. To be called before any apply."""
        self._host.hold_little(growth)

    def make_room(self) -> None:
        """Merge what is held now if that frees much memory."""
        self._host.make_room()

    # Applies

    def apply(self, gradients: CheckedGradient, terms: Terms) -> ApplyReceipt:
        self._round  # noqa: B018 - checks the process
        return self._host.apply(self._handle, gradients, terms)

    def apply_plain(self, indices: Any, values: Any, terms: Terms) -> ApplyReceipt | None:
        if self._made_at_fork != _num_forks:
            return None  # `apply` says why not
        return self._host.apply_plain(self._handle, indices, values, terms)

    # Takes. From the moment a ticket exists until its result is returned, an exception leads to
    # `abandon(ticket)`: one C call, so that no second signal can come between, after which the round keeps
    # what the ticket held. Nothing is called between `deliver` and `return`.

    def take(self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]) -> T:
        host = self._host
        round_ = host.round if self._made_at_fork == _num_forks else self._round
        if host.coroutines:
            _reclaim(host)
        abandon = round_.abandoned.append
        ticket = Ticket(self._handle, num_required, exact)
        try:
            round_.enqueue(ticket)
            if ticket.batch is None:
                _wait(round_, ticket, Deadline(timeout))
                ticket.raise_error()
            assert ticket.batch is not None
            result = build(host.merge(ticket.batch))
            round_.deliver(ticket)
            return result
        except BaseException:
            abandon(ticket)
            _settle(round_)
            raise

    def submit_take(
        self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]
    ) -> concurrent.futures.Future[T]:
        round_ = self._round
        _reclaim(self._host)
        future: _TakeFuture[T] = _TakeFuture()

        def finish(ticket: Ticket, result: T | None, error: BaseException | None) -> None:
            job.stop()
            future.withdraw = _too_late  # a done future keeps nothing alive but its result
            if error is not None:
                round_.abandoned.append(ticket)
                _settle(round_)
                future.set_exception(error)
            else:
                round_.deliver(ticket)
                ticket.batch = None
                future.set_result(result)  # type: ignore[arg-type]

        job = _BackgroundTake(self._host, build, finish)
        ticket = Ticket(self._handle, num_required, exact, wake=functools.partial(background.jobs.put, job))
        future.withdraw = functools.partial(job.withdraw, ticket)
        try:
            job.start(ticket, Deadline(timeout))
            return future
        except BaseException:
            round_.abandoned.append(ticket)
            job.stop()
            _settle(round_)
            raise

    async def take_async(
        self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]
    ) -> T:
        import asyncio

        round_ = self._round
        _reclaim(self._host)
        abandon = round_.abandoned.append
        loop = asyncio.get_running_loop()
        merged: asyncio.Future[T] = loop.create_future()

        def finish(ticket: Ticket, result: T | None, error: BaseException | None) -> None:
            if not try_to_resolve(loop, merged, result, error):
                abandon(ticket)
                _settle(round_)

        job = _BackgroundTake(self._host, build, finish, is_orphan=loop.is_closed)
        ticket = Ticket(self._handle, num_required, exact, wake=functools.partial(background.jobs.put, job))
        try:
            self._host.coroutines.add(job)
            job.start(ticket, Deadline(timeout))
            result = await merged
            round_.deliver(ticket)
            ticket.batch = None
            job.stop()
            return result
        except BaseException:
            abandon(ticket)
            job.stop()
            _settle(round_)
            raise

    # All the rest is the round's own

    def num_accumulated(self) -> int:
        return self._round.num_accumulated(self._handle)

    @property
    def global_step(self) -> int:
        return self._round.step

    def set_global_step(self, step: int) -> int:
        return self._round.set_step(self._handle, step)

    @property
    def published_step(self) -> int:
        return self._round.publication.step

    def publish(self, step: int | None, *, only_raise: bool = False) -> int:
        return self._round.publish(self._handle, step, only_raise=only_raise)

    def wait_published(self, step: int, timeout: float | None) -> int:
        return self._round.publication.wait(self._handle, step, Deadline(timeout))

    def join(self, worker: int | str) -> None:
        self._round.join(self._handle, worker)

    def leave(self, worker: int | str) -> None:
        self._round.leave(worker)

    def last_sequence(self, worker: int | str) -> int:
        return self._round.last_sequence(self._handle, worker)

    def num_accepted(self, worker: int | str) -> int:
        return self._round.num_accepted(self._handle, worker)

    @property
    def num_workers(self) -> int:
        return self._round.num_workers

    @property
    def num_undelivered(self) -> int:
        _reclaim(self._host)
        return self._round.num_undelivered

    @property
    def num_deferred(self) -> int:
        return self._round.num_deferred

    def state(self) -> dict[str, NDArray[Any]]:
        self._round  # noqa: B018 - checks the process
        _reclaim(self._host)
        return self._host.state(self._handle)

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._round  # noqa: B018 - checks the process
        _reclaim(self._host)
        self._host.load_state(self._handle, state)

    def observe(self, num_rounds: int | None) -> None:
        self._round.observe(self._handle, num_rounds)

    def arrivals(self) -> ArrivalReport:
        return arrival_report(self._round.arrival_times(self._handle))

    def discard(self) -> int:
        return self._round.discard(self._handle)

    def close(self, for_all: bool) -> int:
        return self._round.close(self._handle, for_all=for_all)

    @property
    def closed(self) -> bool:
        return self._handle.closed


def _wait(round_: Round, ticket: Ticket, deadline: Deadline) -> None:
    """Wait until the ticket is decided, at the latest by its deadline."""
    if ticket.decided:
        return
    if deadline.timeout != 0:
        round_.may_wait()
    since = time.monotonic()
    log_at = since + FIRST_LOG_SECONDS
    while not ticket.wait(deadline.left(max(log_at - time.monotonic(), 0.0))):
        if deadline.passed:
            round_.expire(ticket)  # decides it, if nobody has
        elif time.monotonic() >= log_at:
            log_waiting(round_.figures, ticket.num_required, since)
            log_at += NEXT_LOG_SECONDS


def _settle(round_: Round) -> None:
    orphaned = round_.settle()
    if orphaned:
        _logger.warning("%d gradients were discarded: their take was cut off after the accumulator closed", orphaned)


def _reclaim(host: RoundHost) -> None:
    """Take back the rounds of coroutines whose event loop was closed under them."""
    if not host.coroutines:
        return
    for job in tuple(host.coroutines):
        if job.ticket is not None and job.is_orphan():
            host.round.abandoned.append(job.ticket)
            job.stop()
            _settle(host.round)


def _too_late() -> bool:
    return False


class _TakeFuture(concurrent.futures.Future[T]):
    """A future whose `cancel` works until the round is detached."""

    withdraw: Callable[[], bool]

    def cancel(self) -> bool:
        if not self.withdraw():
            return self.cancelled()
        super().cancel()
        return not self.set_running_or_notify_cancel()


class _BackgroundTake(Generic[T]):
    """A take whose merge runs in the background: called there when its ticket is decided."""

    def __init__(
        self,
        host: RoundHost,
        build: Callable[[Merged], T],
        finish: Callable[[Ticket, T | None, BaseException | None], None],
        is_orphan: Callable[[], bool] | None = None,
    ) -> None:
        self._host = host
        self._work: tuple[Callable[[Merged], T], Callable[[Ticket, T | None, BaseException | None], None]] | None
        self._work = build, finish
        self.is_orphan = is_orphan
        """Tells whether nobody can wait for it any more."""
        self.ticket: Ticket | None = None
        """Until the take has ended."""
        self._timer: Timer | None = None
        self._since = 0.0

    def start(self, ticket: Ticket, deadline: Deadline) -> None:
        """Queue the ticket, then watch its deadline."""
        background.start()
        self.ticket = ticket
        self._since = time.monotonic()
        self._host.round.enqueue(ticket)
        self._watch(deadline, self._since + FIRST_LOG_SECONDS)

    def withdraw(self, ticket: Ticket) -> bool:
        """Take the ticket out of the queue; False if it has been decided already."""
        withdrawn = self._host.round.withdraw(ticket)
        if withdrawn:
            self.stop()
        return withdrawn

    def stop(self) -> None:
        """Forget the take: it has ended, and what waited for it may be freed."""
        self.ticket = self._work = None
        self._host.coroutines.discard(self)
        if self._timer is not None:
            background.cancel(self._timer)

    def _watch(self, deadline: Deadline, log_at: float) -> None:
        self._timer = background.call_at(min(deadline.at, log_at), lambda: self._on_time(deadline, log_at))
        if self.ticket is None:  # it ended meanwhile, before there was a timer to cancel
            background.cancel(self._timer)

    def _on_time(self, deadline: Deadline, log_at: float) -> None:
        ticket = self.ticket
        if ticket is None or ticket.decided:
            return
        if deadline.passed:
            self._host.round.expire(ticket)
            return
        log_waiting(self._host.round.figures, ticket.num_required, self._since)
        self._watch(deadline, log_at + NEXT_LOG_SECONDS)

    def __call__(self) -> None:
        ticket, work = self.ticket, self._work
        if ticket is None or work is None:
            return
        if self._timer is not None:
            background.cancel(self._timer)
        try:
            ticket.raise_error()
            assert ticket.batch is not None
            result = work[0](self._host.merge(ticket.batch))
        except BaseException as error:
            work[1](ticket, None, error)
        else:
            work[1](ticket, result, None)
        finally:
            del ticket, work  # an error's traceback refers to this frame
