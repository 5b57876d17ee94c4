"""The coordinator: an actor that hosts the round. It decides; it never sees a value."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gradquorum.errors import ClosedError, GradQuorumError, InvalidArgumentError
from gradquorum.membership import Worker
from gradquorum.specs import RoundSpec
from gradquorum.targets.ray.answers import Answers
from gradquorum.targets.ray.cluster import make_shards
from gradquorum.targets.ray.disk import Disk
from gradquorum.targets.ray.incarnations import Incarnations
from gradquorum.targets.ray.leases import Leases
from gradquorum.targets.ray.offers import Offers
from gradquorum.targets.ray.queue import TakeQueue
from gradquorum.targets.ray.records import Failure, Opened, Resumed, Void
from gradquorum.targets.ray.sessions import Session
from gradquorum.waiters import Handle

__all__ = ["Coordinator"]

C = TypeVar("C", bound=Callable[..., Coroutine[Any, Any, Any]])

_GRACE_SECONDS = 60.0
"""How long a round without any process waits for the next one."""
_BACK_SECONDS = 60.0
"""How long calls wait for a shard that is being restarted, and an ended coordinator for takers."""
_END_SECONDS = 0.2
"""How long an ended coordinator stays to give its last answers."""
_MAX_WAITS = 4096
"""Calls that may wait at the same time, each in a thread that costs nothing while it waits."""

_logger = logging.getLogger("gradquorum")


def _answered(method: C) -> C:
    """Wait until the round is there, and let errors travel as values."""

    @functools.wraps(method)
    async def call(self: Coordinator, *arguments: Any) -> Any:
        try:
            await self.life.ready(_BACK_SECONDS)
            return await method(self, *arguments)
        except (GradQuorumError, MemoryError) as error:
            if self.life.is_lost:
                self._end()
            return Failure(error)
        finally:
            self.life.flush()

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
        self._is_over = False
        disk = None if target.folder is None else Disk(target.folder, shared_name)
        self.life = Incarnations(spec, self._actors, target.bounds, self._threads, self._sessions, disk)
        self._leases = Leases(self.life)
        self._takes = TakeQueue(self.life, self._sessions)
        self._offers = Offers(self.life, self._leases, may_wait=spec.options.max_bytes is not None)
        self._answers = Answers(self.life, self._leases)

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
        self,
        token: bytes,
        seen: int,
        stay: list[Any],
        numbers: Sequence[int],
        joined: Sequence[Worker],
        asked: Sequence[Worker],
    ) -> Resumed:
        """Let a process go on in the present incarnation, whatever it missed since the one that it has seen."""
        if self._is_over:
            raise ClosedError("the round has been closed")
        session = self._session(token)
        self._watch(session, stay)
        if seen == self.life.incarnation:
            await self.life.check()
        for number in numbers:
            if number not in session.handles:
                handle = self.life.host.round.open()
                assert handle is not None
                session.handles[number] = handle
        for worker in joined:
            self._leases.join(session, worker)
            self.life.host.round.join(self.life.keeper, worker)
        ground = self.life.ground
        marks = {worker: ground.marks[worker] for worker in asked if worker in ground.marks}
        settled = ground.settled.get(seen)
        return Resumed(self.life.incarnation, self.life.reason, marks, settled, self.life.disk is not None)

    @_answered
    async def close(self, token: bytes, number: int, for_all: bool) -> int:
        session = self._sessions.get(token)
        handle = None if session is None else session.handles.pop(number, None)
        if session is None or handle is None:
            return 0
        count = self.life.host.round.close(handle, for_all=for_all)
        if for_all and self.life.disk is not None:
            self.life.disk.remove()
        if for_all or not (self._has_handles or self.life.is_young):
            count += self.life.host.round.close(self.life.keeper, for_all=True)
            self._end()
        elif not self._has_handles:
            self._closing = asyncio.ensure_future(self._end_if_alone())
        return count

    @property
    def _has_handles(self) -> bool:
        return any(not handle.closed for session in self._sessions.values() for handle in session.handles.values())

    async def _end_if_alone(self) -> None:
        """End a round that nobody has a handle on, unless somebody comes who has not heard of the restart yet."""
        await asyncio.sleep(_GRACE_SECONDS)
        if not self._has_handles:
            self._end()

    def _session(self, token: bytes) -> Session:
        if token not in self._sessions:
            self._sessions[token] = Session(token)
        return self._sessions[token]

    def _watch(self, session: Session, stay: list[Any]) -> None:
        """End a session when the process that owns the reference dies."""
        if session.watch is None:
            session.watch = asyncio.ensure_future(self._end_with(session, stay[0]))

    async def _end_with(self, session: Session, stay: Any) -> None:
        from ray.exceptions import RayActorError, RayError

        try:
            await stay
        except RayActorError:  # a call to the coordinator before this one: that says nothing of the process
            session.watch = None
            return
        except RayError as error:
            _logger.info("a process has ended: %s", error)
        await self.life.ready()
        self._sessions.pop(session.token, None)
        session.ended.set()
        round_ = self.life.host.round
        self._takes.end_session(session)
        for handle in session.handles.values():
            round_.close(handle) if not handle.closed else None
        round_.settle()
        self._leases.lose(session)
        self.life.forget_session(session.token)
        self.life.flush()
        if not self._sessions and not self._keeps:
            await asyncio.sleep(_GRACE_SECONDS)
            if not self._sessions:
                self._end()

    def _end(self) -> None:
        """End this actor and the shards, once the last answers are out and the last rounds have arrived."""
        if not self._is_over:
            self._is_over = True
            self._ending = asyncio.ensure_future(self._kill())

    async def _kill(self) -> None:
        import ray

        self.life.stop()
        until = time.monotonic() + _BACK_SECONDS
        is_awaited = True
        while is_awaited and time.monotonic() < until:
            is_awaited = self.life.is_awaited  # before the sleep, in which the answer to the last delivery gets out
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

    # Applies

    @_answered
    async def offer(self, token: bytes, incarnation: int, number: int, offers: bytes, *held: Any) -> Any:
        """Judge gradients, packed. Ray calls this when the shards have answered that they hold them."""
        return await self._offers.judge(self._get(token, incarnation, number), token, offers, held)

    # Takes

    @_answered
    async def take(self, token: bytes, incarnation: int, number: int, take: int, *terms: Any) -> Any:
        found = self._get(token, incarnation, number)
        if found is None:
            return self.life.void()
        self._takes.enqueue(*found, take, *terms)
        return await self._takes.wait(token, take)

    @_answered
    async def enqueue(self, token: bytes, incarnation: int, number: int, take: int, *terms: Any) -> Void | None:
        """Put a take in the queue, for `await_take`."""
        found = self._get(token, incarnation, number)
        if found is None:
            return self.life.void()
        self._takes.enqueue(*found, take, *terms)
        return None

    @_answered
    async def await_take(self, token: bytes, take: int) -> Any:
        return await self._takes.wait(token, take)

    @_answered
    async def withdraw(self, token: bytes, take: int) -> bool:
        return await self._takes.withdraw(token, take)

    @_answered
    async def deliver(self, token: bytes, take: int, final: bool) -> Void | None:
        return await self._takes.deliver(token, take, final)

    @_answered
    async def give_back(self, token: bytes, take: int) -> None:
        await self._takes.give_back(token, take)

    # All the rest is the round's own

    @_answered
    async def ask(self, token: bytes, incarnation: int, number: int, what: str, *arguments: Any) -> Any:
        found = self._get(token, incarnation, number)
        if found is None:
            return self.life.void()
        return await getattr(self._answers, what)(*found, *arguments)
