"""The lives of a round: it begins anew, from what was delivered, whenever a shard or the coordinator dies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from gradquorum.errors import GradQuorumError, UnavailableError
from gradquorum.specs import RoundSpec
from gradquorum.targets.ray.disk import Disk
from gradquorum.targets.ray.ground import Ground
from gradquorum.targets.ray.hosting import RemoteHost
from gradquorum.targets.ray.planning import Shards
from gradquorum.targets.ray.records import Key, Void
from gradquorum.targets.ray.sessions import Session
from gradquorum.waiters import Handle

__all__ = ["Incarnations"]

_RETRY_SECONDS = 0.1
_RETURN_SECONDS = 60.0
"""How long after the coordinator was restarted a process may come back to it, at the latest with its next call."""

_logger = logging.getLogger("gradquorum")


class Incarnations:
    """The round as it lives now. Only the coordinator's event loop calls this; what is public here changes with it."""

    def __init__(
        self,
        spec: RoundSpec,
        actors: Sequence[Any],
        bounds: tuple[int, ...] | None,
        threads: Executor,
        sessions: Mapping[bytes, Session],
        disk: Disk | None,
    ) -> None:
        self._spec = spec
        self._actors = actors
        self._bounds = bounds
        self._threads = threads
        self._sessions = sessions
        self.disk = disk
        """Where the round is kept beyond all actors, if it is."""
        self._beginning: asyncio.Future[None] | None = None
        self._watches: list[asyncio.Future[None]] = []
        self._told: set[asyncio.Future[Any]] = set()
        self._unneeded: dict[int, list[Key]] = {}
        """By shard: what it is to let go of when it has answered."""
        self._freeing: set[int] = set()
        """The shards that are being told of others."""
        self.reason = "the coordinator was restarted"
        """Why the incarnation before this one ended."""
        self._must_begin_again = False
        """Whether a shard has died since the incarnation which is beginning asked the first of them."""
        self._has_begun = False
        self._known_at = 0.0
        """When those who are there will have come back to us."""
        self.is_lost = False
        """Whether there is nothing to begin from."""
        self.incarnation = 0
        self.ground: Ground
        self.shards: Shards
        self.host: RemoteHost
        self.keeper: Handle
        """The coordinator's own handle: the round outlives processes that die."""

    async def ready(self, timeout: float | None = None) -> None:
        """Wait until the round is there. The first time that takes what it takes: a cluster may have to grow.

        Raises:
            UnavailableError: it was there, and does not come back in so many seconds.
        """
        if self._beginning is None:
            self._beginning = asyncio.ensure_future(self._first())
        until = None if timeout is None or not self._has_begun else time.monotonic() + timeout
        while not self._beginning.done():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise UnavailableError(f"the round does not come back: {self.reason}, and Ray does not start another")
            await asyncio.wait([self._beginning], timeout=left)
        self._beginning.result()

    async def _first(self) -> None:
        """Begin the first incarnation, or the first after the coordinator was restarted."""
        import ray

        found = await self._all("recall")
        known = [recorded for recorded in found if recorded is not None]
        if known:
            self._known_at = time.monotonic() + _RETURN_SECONDS
        if not known and self.disk is None and ray.get_runtime_context().was_current_actor_reconstructed:
            self.is_lost = True  # to begin from nothing would let what was delivered count again
            raise UnavailableError(
                "the coordinator and all shards have died together, and with them the marks of what was delivered; "
                "make a new accumulator or group of that name to go on"
            )
        await self._begin(Ground(max(known, key=lambda recorded: recorded[:2], default=None)))

    def end(self, reason: str) -> None:
        """Declare the open round void and begin the next incarnation."""
        if self._beginning is None or not self._beginning.done():
            self._must_begin_again = True
            return
        _logger.warning("the open round is void: %s", reason)
        self.reason = reason
        self.ground.look(self.host, self.keeper)
        self.incarnation += 1
        self._beginning = asyncio.ensure_future(self._begin(self.ground))
        self.host.round.close(self.keeper, for_all=True)  # who waits hears that its incarnation is over

    @property
    def num_sessions(self) -> int:
        """The processes that are known to be there."""
        return len(self._sessions)

    @property
    def is_young(self) -> bool:
        """Whether the coordinator was restarted so lately that processes may not have heard of it."""
        return time.monotonic() < self._known_at

    @property
    def is_awaited(self) -> bool:
        """Whether a round has been detached that has not arrived yet."""
        return self._has_begun and self.host.round.oldest_serial < self.host.round.serial

    def stop(self) -> None:
        """Watch the shards no more."""
        for watch in self._watches:
            watch.cancel()

    async def _begin(self, ground: Ground) -> None:
        loop = asyncio.get_running_loop()

        def wait(calls: Sequence[Any]) -> list[Any]:
            return asyncio.run_coroutine_threadsafe(_gather(calls), loop).result()

        self.ground = ground
        while True:
            # By the clock, so that no two are the same even if nobody is left who knows of the one before.
            ground.incarnation = self.incarnation = max(self.incarnation, ground.incarnation + 1, time.time_ns())
            self._watch_all()  # before they begin: else one that dies at once would be missed
            await self._all("begin", ground.record()[0])
            self.shards = Shards(self._actors, self.incarnation, self._bounds, wait)
            self.host = RemoteHost(self._spec, self.shards, self._threads)
            keeper = self.host.round.open()
            assert keeper is not None
            self.keeper = keeper
            try:
                restored = await self._restored()
            except UnavailableError as error:  # a shard has died; begin again with the next one
                _logger.info("a round could not be restored: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if not self._must_begin_again:
                break
        ground.begin()
        self._has_begun = True
        if not restored:
            self.host.round.restore(keeper, ground.snapshot(len(self._spec.members)))
        for session in self._sessions.values():
            session.takes.clear()
            for worker in session.workers:
                self.host.round.join(keeper, worker)
            for number in session.handles:
                handle = self.host.round.open()
                assert handle is not None
                session.handles[number] = handle

    async def _restored(self) -> bool:
        """Put what was saved in the place of a new round; False if nothing was, or is."""
        loaded = None if self.disk is None else self.disk.load()
        if loaded is None:
            return False
        state, delivered = loaded
        restore = functools.partial(self.host.load_state, self.keeper, state, rejoin=True)
        await asyncio.get_running_loop().run_in_executor(self._threads, restore)
        for take in delivered:
            self.ground.remember(take)
        return True

    async def save(self) -> None:
        """Have the round in its file, if it has one, before anybody hears of a change.

        Raises:
            GradQuorumError: it could not be saved.
            UnavailableError: a shard has died.
        """
        if self.disk is not None:
            arguments = self.host, self.keeper, self.ground.delivered
            await asyncio.get_running_loop().run_in_executor(self._threads, self.disk.save, *arguments)

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Make a call to all shards, again and again to those that are being restarted."""
        return list(await asyncio.gather(*[self._insist(actor, method, *arguments) for actor in self._actors]))

    async def _insist(self, actor: Any, method: str, *arguments: Any) -> Any:
        from ray.exceptions import RayActorError

        while True:
            try:
                return await getattr(actor, method).remote(*arguments)
            except RayActorError:
                await asyncio.sleep(_RETRY_SECONDS)

    def _watch_all(self) -> None:
        self.stop()
        self._must_begin_again = False
        self._watches = [asyncio.ensure_future(self._watch(i, actor)) for i, actor in enumerate(self._actors)]

    async def _watch(self, index: int, actor: Any) -> None:
        from ray.exceptions import RayError

        try:
            await actor.live.remote()
        except RayError as error:
            self.end(f"shard {index} has died ({type(error).__name__})")

    async def check(self) -> None:
        """Ask the shards whether they are those that have begun, as somebody could not work with them."""
        calls = [actor.recall.remote() for actor in self._actors]
        incarnation = self.incarnation
        answers = await asyncio.gather(*[_answer(call) for call in calls], return_exceptions=True)
        if any(getattr(answer, "incarnation", None) != incarnation for answer in answers):
            if incarnation == self.incarnation:
                self.end("a shard has died or was restarted")
            await self.ready()

    async def record(self) -> None:
        """Have the shards keep what has been delivered. All do when this returns, or the file does.

        Nothing goes back to what a round was that has been closed: then there is nothing to keep.
        """
        if self.keeper.closed:
            return
        ground = self.ground
        ground.look(self.host, self.keeper)
        recorded, deliveries = ground.record()
        if self.disk is not None:
            await self.save()
            ground.recorded(deliveries)
            return
        calls = [actor.record.remote(recorded) for actor in self._actors]
        answers = await asyncio.gather(*[_answer(call) for call in calls], return_exceptions=True)
        if any(type(answer) is Void or isinstance(answer, BaseException) for answer in answers):
            if recorded.incarnation == self.incarnation:
                self.end("a shard has died or was restarted")
            await self.ready()  # to begin is to record, too
        else:
            ground.recorded(deliveries)

    # For calls

    def void(self) -> Void:
        """Return the answer to a call about an incarnation that is over."""
        return Void(self.reason)

    async def in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call that may wait. If the incarnation ends meanwhile, that is the answer."""
        incarnation = self.incarnation
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
        except GradQuorumError:
            if incarnation != self.incarnation:
                return self.void()
            raise

    # What shards may let go of

    def flush(self) -> None:
        """Tell the shards which keys nobody refers to any more."""
        if self._beginning is None or not self._beginning.done() or self.is_lost:
            return
        freed = self.shards.freed
        while freed:
            key, shards = freed.popleft()
            for shard in shards:
                self._unneeded.setdefault(shard, []).append(key)
        for shard in set(self._unneeded) - self._freeing:
            self._freeing.add(shard)
            self._tell(self._free(shard, self._actors[shard].free.remote(self._unneeded.pop(shard))))

    async def _free(self, shard: int, call: Any) -> None:
        """Wait until a shard has let go of some keys; what comes up meanwhile goes together."""
        try:
            await _ignored(call)
            while keys := self._unneeded.pop(shard, None):
                await _ignored(self._actors[shard].free.remote(keys))
        finally:
            self._freeing.discard(shard)

    def forget_session(self, token: bytes) -> None:
        """Have the shards let go of what a process that has ended had not offered."""
        kept = [key for key in self.shards.leases if key[0] == token]
        for actor in self._actors:
            self._tell(_ignored(actor.end_session.remote(token, kept)))

    def _tell(self, call: Coroutine[Any, Any, None]) -> None:
        """Let a call be made without waiting for it."""
        told = asyncio.ensure_future(call)
        self._told.add(told)
        told.add_done_callback(self._told.discard)


async def _answer(call: Any) -> Any:
    return await call


async def _ignored(call: Any) -> None:
    from ray.exceptions import RayActorError

    with contextlib.suppress(RayActorError):  # then it holds nothing any more
        await call


async def _gather(calls: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*[_answer(call) for call in calls]))
