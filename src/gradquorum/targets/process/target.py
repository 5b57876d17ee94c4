"""The process target: a handle on a round that lives in a server."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from numpy.typing import NDArray

from gradquorum.arrivals import ArrivalReport, QuorumFigures
from gradquorum.background import background
from gradquorum.errors import ClosedError, GradQuorumError, UnavailableError
from gradquorum.memory_file import map_private
from gradquorum.receipts import ApplyReceipt
from gradquorum.specs import RoundSpec, SparseSpec
from gradquorum.targets import local
from gradquorum.targets.interface import AbstractTarget, Merged, Terms
from gradquorum.targets.process import messages as m
from gradquorum.targets.process.channel import BrokenChannel
from gradquorum.targets.process.client import Client, client_of
from gradquorum.targets.process.connection import Connection
from gradquorum.targets.process.failures import to_error
from gradquorum.targets.process.memory import as_bytes
from gradquorum.targets.process.parts import arrays_of
from gradquorum.targets.process.reentry import is_inside, log_discarded
from gradquorum.targets.process.sending import Sender
from gradquorum.targets.process.specs import from_spec, to_spec
from gradquorum.targets.process.states import receive_state, send_state
from gradquorum.targets.process.waiting import FutureTake, Handover, WaitingTake
from gradquorum.targets.waits import log_waiting
from gradquorum.validation import CheckedGradient

__all__ = ["ProcessTarget", "open_remote"]

T = TypeVar("T")

_logger = logging.getLogger("gradquorum")
_CANCEL_SECONDS = 1.0
"""How long a cancelled coroutine waits to hear that its take has ended."""


def open_remote(address: str, shared_name: str, spec: RoundSpec | None, create: bool) -> ProcessTarget:
    """Create a round in a server, or attach to the one of that name.

    Args:
        address: the server's.
        shared_name: the round's.
        spec: None to attach to whatever it is.
        create: whether a round of that spec is made if there is none.

    Raises:
        ClosedError: the round may not be made and is not there.
        UnavailableError: there is no server.
        InvalidArgumentError: the round of that name was made from another spec, or there is none to attach to.
    """
    client = client_of(address)
    opened = client.call(m.Open(m.to_text(shared_name), None if spec is None else to_spec(spec), create))
    return ProcessTarget(client, shared_name, opened, spec or from_spec(opened.spec))


class ProcessTarget(AbstractTarget):
    """One handle on a round of a server."""

    def __init__(self, client: Client, shared_name: str, opened: m.Opened, spec: RoundSpec) -> None:
        self._client = client
        self._handle = handle = opened.handle
        self._closed = False
        self.engine_name = m.from_text(opened.engine_name)
        self.address = client.path
        self.shared_name = shared_name
        self.spec = spec
        self._members = tuple(spec.members.values())
        self._sender = Sender(client, handle, spec)
        weakref.finalize(self, client.dropped.append, handle).atexit = False

    def _check_open(self) -> None:
        self._client.check()
        if self._closed:
            raise ClosedError("this handle has been closed; make a new accumulator or group to go on")

    # Applies

    def apply(self, gradients: CheckedGradient, terms: Terms) -> ApplyReceipt:
        return self._sender.apply(gradients, terms)  # the server knows what is wrong first, also with a closed handle

    def apply_plain(self, indices: Any, values: Any, terms: Terms) -> ApplyReceipt | None:
        return self._sender.apply_plain(indices, values, terms)

    # Takes. A round is delivered when the server hears that it arrived. An exception after that, until the result
    # is returned, leads to `retract`: the server keeps the round for the next take after all.

    def take(self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]) -> T:
        self._check_open()
        self._reclaim()
        client = self._client
        connection = client.check_out()
        number = connection.begin_take()
        try:
            client.send(connection, m.Take(self._handle, number, num_required, timeout, exact, announce=False))
            reply = self._receive(connection, num_required)
            if type(reply) is m.Taken:
                result = build(self._merged(connection, reply))
                self._acknowledge(connection)
                return result
        except BaseException:
            client.give_up(connection)
            raise
        client.check_in(connection)
        raise to_error(reply)

    def _receive(self, connection: Connection, num_required: int, on_detached: Callable[[], None] | None = None) -> Any:
        """Return the reply to a take."""
        since = time.monotonic()

        def log() -> float:
            log_waiting(lambda: self._client.call(m.Ask(self._handle, "figures")), num_required, since)
            return time.monotonic() + local.NEXT_LOG_SECONDS

        try:
            return self._client.receive(connection, since + local.FIRST_LOG_SECONDS, log, on_detached)
        except BrokenChannel as error:
            self._client.fail(error)

    def _acknowledge(self, connection: Connection) -> None:
        """Say that the round has arrived. If the server cannot be told, it has or will have the round again."""
        try:
            # Signals, and with them Ctrl-C, come to the main thread only.
            final = threading.current_thread() is not threading.main_thread()
            self._client.exchange(connection, m.Acknowledge(reply=True, final=final))
        except UnavailableError as error:
            connection.channel.close()
            _logger.warning("a round has arrived, but its server may not know, and then it is taken again: %s", error)
        else:
            self._client.check_in(connection)

    def _merged(self, connection: Connection, taken: m.Taken) -> Merged:
        """Return a round that has arrived, its arrays where they arrived."""
        memory: Any = taken.inline
        if memory is None:
            try:
                descriptor = connection.channel.receive_descriptor()
            except BrokenChannel as error:
                self._client.fail(error)
            try:
                memory = map_private(descriptor, taken.num_bytes)
            finally:
                os.close(descriptor)
        arrays = iter(arrays_of(as_bytes(memory), self._members, taken.parts, counts=True))
        members = [
            (next(arrays), next(arrays), next(arrays)) if isinstance(member, SparseSpec) else next(arrays)
            for member in self._members
        ]
        workers = tuple(m.from_worker(worker) for worker in taken.workers)
        return Merged(members, taken.num_gradients, taken.step, workers)

    def submit_take(
        self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]
    ) -> concurrent.futures.Future[T]:
        future: FutureTake[T] = FutureTake()

        def on_result(connection: Connection, result: T) -> None:
            self._acknowledge(connection)
            future.set_result(result)

        job = self._waiting_take(num_required, timeout, exact, build, on_result, future.set_exception)
        future.withdraw = job.withdraw
        job.start()
        return future

    async def take_async(
        self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]
    ) -> T:
        import asyncio

        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[tuple[Connection, T]] = loop.create_future()
        handover: Handover[T] = Handover(self._client, loop, arrived)
        job = self._waiting_take(num_required, timeout, exact, build, handover.offer, handover.fail)
        handover.job = job
        self._client.handovers.add(handover)
        try:
            job.start()
            connection, result = await arrived
            self._client.send(connection, m.Acknowledge(reply=False, final=False))
            handover.accept()
            return result
        except BaseException:
            if not job.withdraw(_CANCEL_SECONDS):
                handover.refuse()
            raise
        finally:
            self._client.handovers.discard(handover)

    def _waiting_take(
        self,
        num_required: int,
        timeout: float | None,
        exact: bool,
        build: Callable[[Merged], T],
        on_result: Callable[[Connection, T], None],
        on_error: Callable[[BaseException], None],
    ) -> WaitingTake[T]:
        """Return a take that is in the queue and waits in a thread, once that is started.

        `on_result` gives the connection back. Both are called in that thread.
        """

        def on_reply(connection: Connection, reply: Any) -> None:
            if type(reply) is m.Taken:
                on_result(connection, build(self._merged(connection, reply)))
            else:
                self._client.check_in(connection)
                on_error(to_error(reply))

        connection = self._queue(num_required, timeout, exact)
        wait = functools.partial(self._receive, num_required=num_required)
        return WaitingTake(self._client, connection, wait, on_reply, on_error)

    def _queue(self, num_required: int, timeout: float | None, exact: bool) -> Connection:
        """Put a take that nobody blocks on in the queue, and return the connection over which it is answered."""
        self._check_open()
        self._reclaim()
        client = self._client
        connection = client.check_out()
        number = connection.begin_take()
        try:
            message = m.Take(self._handle, number, num_required, timeout, exact, announce=True)
            reply = client.exchange(connection, message)
        except BaseException:
            client.give_up(connection)
            raise
        if type(reply) is m.Failure:
            client.check_in(connection)
            raise to_error(reply)
        return connection

    def _reclaim(self) -> None:
        """Give back the rounds of coroutines whose event loop was closed under them."""
        for handover in tuple(self._client.handovers):
            if handover.reclaim():
                self._client.handovers.discard(handover)

    # All the rest is the round's own

    def _number(self, message: Any, *, outcome_known: bool = True) -> int:
        """Make a request that is answered by a number."""
        number: int = self._client.call(message, outcome_known=outcome_known).value
        return number

    def _ask(self, what: str) -> int:
        return self._number(m.Ask(self._handle, what))

    def num_accumulated(self) -> int:
        return self._ask("num_accumulated")

    @property
    def global_step(self) -> int:
        return self._ask("global_step")

    def set_global_step(self, step: int) -> int:
        return self._number(m.SetStep(self._handle, step), outcome_known=False)

    @property
    def published_step(self) -> int:
        return self._ask("published_step")

    def publish(self, step: int | None, *, only_raise: bool = False) -> int:
        return self._number(m.Publish(self._handle, step, only_raise), outcome_known=False)

    def wait_published(self, step: int, timeout: float | None) -> int:
        return self._number(m.WaitPublished(self._handle, step, timeout))

    def join(self, worker: int | str) -> None:
        self._number(m.Member(self._handle, "join", m.to_worker(worker)))

    def leave(self, worker: int | str) -> None:
        if is_inside(self._client.path):  # a finalizer, which must not wait here
            background.jobs.put(functools.partial(self.leave, worker))
            return
        with contextlib.suppress(UnavailableError, ClosedError):  # then it has left already
            self._number(m.Member(self._handle, "leave", m.to_worker(worker)))

    def last_sequence(self, worker: int | str) -> int:
        return self._number(m.Member(self._handle, "last_sequence", m.to_worker(worker)))

    def num_accepted(self, worker: int | str) -> int:
        return self._number(m.Member(self._handle, "num_accepted", m.to_worker(worker)))

    @property
    def num_workers(self) -> int:
        return self._ask("num_workers")

    @property
    def num_undelivered(self) -> int:
        self._reclaim()
        return self._ask("num_undelivered")

    @property
    def num_deferred(self) -> int:
        return self._ask("num_deferred")

    def discard(self) -> int:
        return self._number(m.Ask(self._handle, "discard"), outcome_known=False)

    def observe(self, num_rounds: int | None) -> None:
        self._number(m.Observe(self._handle, num_rounds))

    def arrivals(self) -> ArrivalReport:
        report = self._client.call(m.Ask(self._handle, "arrivals"))
        figures = [
            QuorumFigures(q.num_required, q.num_rounds, q.mean_wait, q.longest_wait, q.mean_dropped)
            for q in report.quorums
        ]
        return ArrivalReport(report.num_rounds, tuple(figures))

    def state(self) -> dict[str, NDArray[Any]]:
        self._check_open()
        self._reclaim()
        return receive_state(self._client, self._handle)

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._check_open()
        self._reclaim()
        send_state(self._client, self._handle, self._sender, state)

    def close(self, for_all: bool) -> int:
        if self._closed:
            return 0
        if self._client.ended:
            self._closed = True
            return 0
        if is_inside(self._client.path):  # a finalizer, which must not wait here
            background.jobs.put(lambda: log_discarded(self._request_close(for_all)))
            self._closed = True
            return 0
        count = self._request_close(for_all)
        self._closed = True
        return count

    def _request_close(self, for_all: bool) -> int:
        with contextlib.suppress(UnavailableError, ClosedError):  # then it has been closed already
            return self._number(m.Close(self._handle, for_all))
        return 0

    @property
    def closed(self) -> bool:
        if not self._closed and not self._client.ended:
            with contextlib.suppress(GradQuorumError):
                self._closed = bool(self._ask("closed"))
        return self._closed or self._client.was_closed
