"""The coordinator: an actor that hosts the round. It decides; it never sees a value."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gradquorum.arrivals import arrival_report
from gradquorum.errors import ClosedError, GradQuorumError, InvalidArgumentError
from gradquorum.membership import Worker
from gradquorum.specs import RoundSpec
from gradquorum.targets.ray.cluster import make_shards
from gradquorum.targets.ray.disk import Disk
from gradquorum.targets.ray.incarnations import Incarnations
from gradquorum.targets.ray.records import Detached, Failure, Judged, Offer, Opened, Resumed, Void
from gradquorum.targets.ray.sessions import Session, Take
from gradquorum.waiters import Deadline, Handle, Ticket

__all__ = ["Coordinator"]

C = TypeVar("C", bound=Callable[..., Coroutine[Any, Any, Any]])

_END_SECONDS = 0.2
"""How long an ended coordinator stays to give its last answers."""
_MAX_WAITS = 4096
"""Calls that may wait at the same time, each in a thread that costs nothing while it waits."""

_NOTICE_SECONDS = 2.0
"""How long after a call to a shard has failed we may hear that it has died."""

_logger = logging.getLogger("gradquorum")


def _answered(method: C) -> C:
    """Wait until the round is there, and let errors travel as values."""

    @functools.wraps(method)
    async def call(self: Coordinator, *arguments: Any) -> Any:
        try:
            await self.life.ready()
            return await method(self, *arguments)
        except (GradQuorumError, MemoryError) as error:
            if self.life.is_lost:
                self._end()
            return Failure(error)
        finally:
            self.flush()

    return call  # type: ignore[return-value]


class Coordinator:
    """Hosts one round for any number of processes. Ray calls its methods, all in one event loop.

    What may wait runs in threads beside the loop, so that a waiting call never holds up another one. A process that
    dies is noticed by a call of its own that is pending here: see `Session`.
    """

    def __init__(self, shared_name: str, spec: RoundSpec, target: Any) -> None:
        self._shared_name = shared_name
        self._spec = spec
        self._actors = make_shards(shared_name, spec, target)
        self._keeps = target.lifetime == "detached"
        self._threads = ThreadPoolExecutor(_MAX_WAITS, thread_name_prefix="gradquorum")
        self._sessions: dict[bytes, Session] = {}
        self._leases: dict[Worker, set[bytes]] = {}
        """The sessions over which each worker has joined: it leaves when the last of them ends."""
        self._watches: set[asyncio.Future[None]] = set()
        self._is_over = False
        self._may_wait = spec.options.max_bytes is not None
        disk = None if target.folder is None else Disk(target.folder, shared_name)
        self.life = Incarnations(spec, self._actors, target.bounds, self._threads, self._sessions, disk)

    # Sessions and handles

    async def stay(self, token: bytes) -> None:
        """Return when a session has ended. It is the reference to this call that dies with its process."""
        await self.life.ready()
        await self._session(token).ended.wait()

    @_answered
    async def open(self, token: bytes, stay: list[Any], number: int, spec: RoundSpec | None) -> Opened:
        if self._is_over:
            raise ClosedError("the round has been closed")
        if spec is not None and spec.describe() != self._spec.describe():
            raise InvalidArgumentError(
                f"shared_name {self._shared_name!r}: expected the spec it was made with, {self._spec.describe()}, "
                f"got {spec.describe()}"
            )
        session = self._session(token)
        self._watch(session, stay)
        handle = self.life.host.round.open()
        assert handle is not None
        session.handles[number] = handle
        return Opened(
            self.life.host.engine_name, self._spec, self.life.incarnation, self._actors, self.life.shards.bounds
        )

    @_answered
    async def resume(
        self, token: bytes, stay: list[Any], numbers: Sequence[int], joined: Sequence[Worker], asked: Sequence[Worker]
    ) -> Resumed:
        """Let a process go on in the present incarnation, whatever it missed."""
        if self._is_over:
            raise ClosedError("the round has been closed")
        session = self._session(token)
        self._watch(session, stay)
        for number in numbers:
            if number not in session.handles:
                handle = self.life.host.round.open()
                assert handle is not None
                session.handles[number] = handle
        for worker in joined:
            self._join(session, worker)
            self.life.host.round.join(self.life.keeper, worker)
        marks = {worker: self.life.ground.marks[worker] for worker in asked if worker in self.life.ground.marks}
        return Resumed(self.life.incarnation, self.life.reason, marks, self.life.disk is not None)

    @_answered
    async def close(self, token: bytes, number: int, for_all: bool) -> int:
        session = self._sessions.get(token)
        handle = None if session is None else session.handles.pop(number, None)
        if session is None or handle is None:
            return 0
        count = self.life.host.round.close(handle, for_all=for_all)
        others = any(not other.closed for known in self._sessions.values() for other in known.handles.values())
        if for_all and self.life.disk is not None:
            self.life.disk.remove()
        if for_all or not others:
            count += self.life.host.round.close(self.life.keeper, for_all=True)
            self._end()
        return count

    def _session(self, token: bytes) -> Session:
        if token not in self._sessions:
            self._sessions[token] = Session(token)
        return self._sessions[token]

    def _watch(self, session: Session, stay: list[Any]) -> None:
        """End a session when the process that owns the reference dies."""
        if session.watch is None:
            session.watch = asyncio.ensure_future(self._end_with(session, stay[0]))

    async def _end_with(self, session: Session, stay: Any) -> None:
        from ray.exceptions import RayError

        try:
            await stay
        except RayError as error:
            _logger.info("a process has ended: %s", error)
        await self.life.ready()
        self._sessions.pop(session.token, None)
        session.ended.set()
        round_ = self.life.host.round
        for take in session.takes.values():
            if take.incarnation == self.life.incarnation:
                round_.abandoned.append(take.ticket)
        for handle in session.handles.values():
            round_.close(handle) if not handle.closed else None
        round_.settle()
        for worker in session.workers:
            self._leave(session, worker)
        self.life.forget_session(session.token)
        self.flush()
        if not self._sessions and not self._keeps:
            await asyncio.sleep(_GRACE_SECONDS)
            if not self._sessions:
                self._end()

    def _end(self) -> None:
        """End this actor and the shards, once the last answers are out."""
        if not self._is_over:
            self._is_over = True
            self._ending = asyncio.ensure_future(self._kill())

    async def _kill(self) -> None:
        import ray

        self.life.stop()
        await asyncio.sleep(_END_SECONDS)
        for actor in self._actors:
            ray.kill(actor)
        ray.kill(ray.get_runtime_context().current_actor)

    def _get(self, token: bytes, incarnation: int, number: int) -> tuple[Session, Handle] | None:
        """Return a session and a handle of it, None if they are of another incarnation."""
        if self._is_over:
            raise ClosedError("the round has been closed")
        session = self._sessions.get(token)
        if session is None or incarnation != self.life.incarnation:
            return None
        handle = session.handles.get(number)
        if handle is None:
            raise ClosedError("this handle has been closed; make a new accumulator or group to go on")
        return session, handle

    def _void(self) -> Void:
        return Void(self.life.reason)

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call that may wait. If the incarnation ends meanwhile, that is the answer."""
        incarnation = self.life.incarnation
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
        except GradQuorumError:
            if incarnation != self.life.incarnation:
                return self._void()
            raise

    def flush(self) -> None:
        """Tell the shards what they may let go of."""
        self.life.flush()

    # Applies

    @_answered
    async def offer(self, token: bytes, incarnation: int, number: int, offers: Sequence[Offer], *held: Any) -> Any:
        """Judge gradients. Ray calls this when the shards have answered that they hold them."""
        found = self._get(token, incarnation, number)
        for answer in held:
            if type(answer) is Void:
                return answer
            if type(answer) is Failure:
                raise answer.error
        if found is None:
            return self._void()
        answers: list[Any] = []
        for offer in offers:
            answer = await self._judge(*found, offer)
            if type(answer) is Void:
                return answer
            answers.append(answer)
        if not await self._saved(incarnation):
            return self._void()
        return answers

    async def _saved(self, incarnation: int) -> bool:
        """Save what has changed, if the round is kept; False if the incarnation has ended meanwhile."""
        try:
            await self.life.save()
        except GradQuorumError:
            if incarnation == self.life.incarnation:
                await asyncio.sleep(_NOTICE_SECONDS)  # if a shard has died, we are about to hear of it
            if incarnation == self.life.incarnation:
                raise
        return incarnation == self.life.incarnation

    async def _judge(self, session: Session, handle: Handle, offer: Offer) -> Judged | Failure | Void:
        life, host, terms = self.life, self.life.host, offer.terms
        parts: Any = offer.parts  # to the host gradients like any others, to be put in order by our reducers
        lease = life.shards.offered(offer.key, offer.shards)
        serial = host.round.serial
        try:
            if terms.worker is not None:
                self._join(session, terms.worker)
            if self._may_wait:
                receipt = await self._in_thread(host.apply, handle, parts, terms)
                if type(receipt) is Void:
                    return receipt
            else:
                receipt = host.apply(handle, parts, terms)
        except (GradQuorumError, MemoryError) as error:
            return Failure(error)
        finally:
            del lease
        marks = None if terms.worker is None else life.ground.marks.get(terms.worker)
        return Judged(receipt, serial, host.round.oldest_serial, marks)

    # Takes

    @_answered
    async def take(self, token: bytes, incarnation: int, number: int, take: int, *terms: Any) -> Any:
        queued = self._enqueue(token, incarnation, number, take, *terms)
        return queued if type(queued) is Void else await self._await(token, take)

    @_answered
    async def enqueue(self, token: bytes, incarnation: int, number: int, take: int, *terms: Any) -> Void | None:
        """Put a take in the queue."""
        return self._enqueue(token, incarnation, number, take, *terms)

    @_answered
    async def await_take(self, token: bytes, take: int) -> Any:
        """Wait for a take that is in the queue."""
        return await self._await(token, take)

    def _enqueue(
        self,
        token: bytes,
        incarnation: int,
        number: int,
        take: int,
        num_required: int,
        timeout: float | None,
        exact: bool,
    ) -> Void | None:
        found = self._get(token, incarnation, number)
        if found is None:
            return self._void()
        session, handle = found
        session.forget_delivered()
        loop, decided = asyncio.get_running_loop(), asyncio.Event()
        ticket = Ticket(handle, num_required, exact, wake=functools.partial(loop.call_soon_threadsafe, decided.set))
        self.life.host.round.enqueue(ticket)
        session.takes[take] = Take(ticket, decided, Deadline(timeout), incarnation)
        return None

    async def _await(self, token: bytes, number: int) -> Any:
        session = self._sessions.get(token)
        take = None if session is None else session.takes.get(number)
        if session is None or take is None:
            return Void(self.life.reason, began=True)
        host, ticket = self.life.host, take.ticket
        while not ticket.decided and not take.withdrawn:
            try:
                left = None if take.deadline.timeout is None else take.deadline.left()
                await asyncio.wait_for(take.decided.wait(), left)
            except TimeoutError:
                host.round.expire(ticket)
        if take.incarnation != self.life.incarnation:
            return Void(self.life.reason, began=True)
        if take.withdrawn:
            del session.takes[number]
            return None
        try:
            ticket.raise_error()
            assert ticket.batch is not None
            merged = host.merge(ticket.batch)
        except BaseException:
            session.takes.pop(number, None)
            host.round.abandoned.append(ticket)
            host.round.settle()
            raise
        return Detached(tuple(merged.members), merged.num_gradients, merged.step, merged.workers)

    @_answered
    async def withdraw(self, token: bytes, number: int) -> bool:
        """Take a take out of the queue; False if it has been decided already."""
        session = self._sessions.get(token)
        take = None if session is None else session.takes.get(number)
        if take is None or take.incarnation != self.life.incarnation:
            return False
        take.withdrawn = take.withdrawn or self.life.host.round.withdraw(take.ticket)
        if take.withdrawn:
            take.decided.set()
        return take.withdrawn

    @_answered
    async def deliver(self, token: bytes, number: int, final: bool) -> Void | None:
        """Record that a round has arrived. Unless that is final, it can be given back until the next take."""
        if self.life.ground.was_delivered((token, number)):
            return None
        session = self._sessions.get(token)
        take = None if session is None else session.takes.get(number)
        if session is None or take is None or take.incarnation != self.life.incarnation or take.ticket.batch is None:
            return self._void()
        batch = take.ticket.batch
        self.life.host.round.deliver(take.ticket)
        take.before = self.life.ground.settle(batch.contributions, (token, number))
        if final:
            session.forget_take(number)
        await self.life.record()
        return None

    @_answered
    async def give_back(self, token: bytes, number: int) -> None:
        """Keep a round for the next take: it did not arrive, or was lost by who had received it."""
        session = self._sessions.get(token)
        take = None if session is None else session.takes.pop(number, None)
        if take is None or take.incarnation != self.life.incarnation:
            return
        if take.before is not None:
            self.life.ground.unsettle(take.before, (token, number))
        self.life.host.round.abandoned.append(take.ticket)
        orphaned = self.life.host.round.settle()
        if orphaned:
            _logger.warning("%d gradients were discarded: a take was cut off after the accumulator closed", orphaned)
        take.withdrawn = True
        take.decided.set()
        if take.before is not None:
            await self.life.record()

    # All the rest is the round's own

    @_answered
    async def ask(self, token: bytes, incarnation: int, number: int, what: str, *arguments: Any) -> Any:
        found = self._get(token, incarnation, number)
        if found is None:
            return self._void()
        session, handle = found
        return await getattr(self, f"_{what}")(session, handle, *arguments)

    async def _figures(self, session: Session, handle: Handle) -> Any:
        return self.life.host.round.figures()

    async def _num_accumulated(self, session: Session, handle: Handle) -> int:
        return self.life.host.round.num_accumulated(handle)

    async def _global_step(self, session: Session, handle: Handle) -> int:
        return self.life.host.round.step

    async def _published_step(self, session: Session, handle: Handle) -> int:
        return self.life.host.round.publication.step

    async def _num_workers(self, session: Session, handle: Handle) -> int:
        return self.life.host.round.num_workers

    async def _num_undelivered(self, session: Session, handle: Handle) -> int:
        return self.life.host.round.num_undelivered

    async def _num_deferred(self, session: Session, handle: Handle) -> int:
        return self.life.host.round.num_deferred

    async def _num_waiting(self, session: Session, handle: Handle) -> int:
        return self.life.host.round.num_waiting

    async def _num_blocked(self, session: Session, handle: Handle) -> int:
        return self.life.host.round.budget.num_waiting

    async def _closed(self, session: Session, handle: Handle) -> bool:
        return handle.closed

    async def _set_global_step(self, session: Session, handle: Handle, step: int) -> int:
        before = self.life.host.round.set_step(handle, step)
        await self.life.record()
        return before

    async def _publish(self, session: Session, handle: Handle, step: int | None, only_raise: bool) -> int:
        published = self.life.host.round.publish(handle, step, only_raise=only_raise)
        await self.life.record()
        return published

    async def _wait_published(self, session: Session, handle: Handle, step: int, timeout: float | None) -> Any:
        publication = self.life.host.round.publication
        if timeout == 0 or publication.step >= step:
            return publication.wait(handle, step, Deadline(0.0))
        return await self._in_thread(publication.wait, handle, step, Deadline(timeout))

    def _join(self, session: Session, worker: Worker) -> None:
        session.workers.add(worker)
        self._leases.setdefault(worker, set()).add(session.token)

    async def _join_worker(self, session: Session, handle: Handle, worker: Worker) -> None:
        self.life.host.round.join(handle, worker)
        self._join(session, worker)

    def _leave(self, session: Session, worker: Worker) -> None:
        """End the lease of a session; with the last one the worker leaves."""
        leases = self._leases.get(worker, set())
        leases.discard(session.token)
        if not leases:
            self._leases.pop(worker, None)
            self.life.host.round.leave(worker)

    async def _leave_worker(self, session: Session, handle: Handle, worker: Worker) -> None:
        session.workers.discard(worker)
        self._leases.pop(worker, None)
        self.life.host.round.leave(worker)

    async def _watch_worker(self, session: Session, handle: Handle, worker: Worker, call: list[Any]) -> None:
        """Let a worker be live until a call ends, and leave with its error, if it has one."""
        self.life.host.round.join(handle, worker)
        watch = asyncio.ensure_future(self._leave_with(worker, call[0]))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _leave_with(self, worker: Worker, call: Any) -> None:
        why = None
        try:
            await call
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            why = f"raised {type(cause).__name__}: {cause}"
        await self.life.ready()
        self._leases.pop(worker, None)
        self.life.host.round.leave(worker, why)
        self.flush()

    async def _last_sequence(self, session: Session, handle: Handle, worker: Worker) -> int:
        return self.life.host.round.last_sequence(handle, worker)

    async def _observe(self, session: Session, handle: Handle, num_rounds: int | None) -> None:
        self.life.host.round.observe(handle, num_rounds)

    async def _arrivals(self, session: Session, handle: Handle) -> Any:
        return arrival_report(self.life.host.round.arrival_times(handle))

    async def _discard(self, session: Session, handle: Handle) -> int:
        snapshot = self.life.host.round.snapshot(handle)
        count = self.life.host.round.discard(handle)
        self.life.ground.settle([*snapshot.log, *snapshot.deferred], None)
        await self.life.record()
        return count

    async def _state(self, session: Session, handle: Handle) -> Any:
        return await self._in_thread(self.life.host.state, handle)

    async def _load_state(self, session: Session, handle: Handle, state: Mapping[str, Any]) -> Any:
        loaded = await self._in_thread(self.life.host.load_state, handle, state)
        if type(loaded) is not Void:
            self.life.ground.load(self.life.host.round.snapshot(handle))
            await self.life.record()
        return loaded


_GRACE_SECONDS = 60.0
"""How long a round without any process waits for the next one."""
