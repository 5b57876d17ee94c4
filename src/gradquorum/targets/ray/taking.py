"""The taker's side: it has the shards merge, puts their parts together, and says that the round has arrived.

A round is delivered when the coordinator hears that. An exception before the result is returned leads to `give_back`:
the round is kept for the next take after all.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from gradquorum.errors import GradQuorumError, ResourceExhaustedError, UnavailableError
from gradquorum.specs import RoundSpec, SparseSpec
from gradquorum.targets import local
from gradquorum.targets.interface import Merged
from gradquorum.targets.ray.client import Client
from gradquorum.targets.ray.records import Detached, Void
from gradquorum.targets.ray.splitting import dense_shard, join, own
from gradquorum.targets.ray.waiting import FutureTake, Handover
from gradquorum.targets.waits import log_waiting

__all__ = ["Taker"]

T = TypeVar("T")

_LOOK_UP_SECONDS = 30.0


class Taker:
    """The takes of one handle."""

    def __init__(self, client: Client, number: int, spec: RoundSpec) -> None:
        self._client = client
        self._number = number
        self._members = tuple(spec.members.values())
        self._handovers: set[Handover[Any]] = set()
        """Takes that coroutines wait for, in case their event loop is closed under them."""
        self._owed: set[int] = set()
        """Takes that are to be given back, in case that is cut off by a second Ctrl-C."""

    def take(self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]) -> T:
        """Wait for a round and return what `build` makes of it."""
        self.reclaim()
        client, take = self._client, self._client.new_number()
        terms = (num_required, timeout, exact)
        try:
            call = client.coordinator.take.remote
            received = self._receive(lambda seen: call(*self._take(seen, take), *terms), num_required, build)
            assert received is not None  # nobody withdraws it
            self._deliver(take)
            return received[0]
        except BaseException:
            self._owed.add(take)
            self._give_back(take)
            raise

    def take_shards(self, num_required: int, timeout: float | None) -> tuple[list[Any], Detached]:
        """Wait for a round and have it merged, but leave what that comes to where it is.

        Returns:
            For each shard a reference to a list of its results by member, None for a dense one that is elsewhere.
        """
        self.reclaim()
        client, take = self._client, self._client.new_number()
        terms = (num_required, timeout, False)
        call = client.coordinator.take.remote
        references: list[Any] = []

        def merge(seen: int, detached: Detached) -> Detached | Void:
            calls = [actor.merge_apart.options(num_returns=2) for actor in client.shards]
            returns = [call.remote(seen, detached.plans) for call in calls]
            void = next((wrong for wrong in [client.get(wrong) for wrong, _ in returns] if wrong is not None), None)
            references[:] = [results for _, results in returns]
            return detached if void is None else void._replace(began=True)

        try:
            received = self._receive(
                lambda seen: call(*self._take(seen, take), *terms), num_required, lambda detached: detached, merge
            )
            assert received is not None  # nobody withdraws it
            self._deliver(take)
            return references, received[0]
        except BaseException:
            self._owed.add(take)
            self._give_back(take)
            raise

    def _take(self, seen: int, take: int) -> tuple[bytes, int, int, int]:
        return self._client.token, seen, self._number, take

    def _receive(
        self,
        call: Callable[[int], Any],
        num_required: int,
        build: Callable[[Any], T],
        merge: Callable[[int, Detached], Any] | None = None,
        made: tuple[int, Any] | None = None,
    ) -> tuple[T] | None:
        """Wait for a take, and return what `build` makes of its round once merged; None if it was withdrawn.

        `made` is an incarnation and a first call that was made in it already.
        """
        from ray.exceptions import RayError

        client = self._client
        while True:
            if made is None:
                client.check()
            seen = client.incarnation if made is None else made[0]
            try:
                answer = self._wait(call(seen) if made is None else made[1], num_required)
                made = None
                if type(answer) is Detached:
                    answer = (merge or self._merge)(seen, answer)
            except RayError as error:
                made = None
                client.resume(seen, error)
                if client.incarnation == seen:  # the coordinator knows of nobody who has died
                    words = "a call was lost; the round is kept for the next take, unless an actor has just died"
                    raise UnavailableError(f"{words}: {error}") from error
                if not client.is_durable:
                    client.raise_void(error)
                continue
            if type(answer) is Void:
                client.resume(seen)
                if answer.began and not client.is_durable:
                    client.raise_void()
                continue
            return None if answer is None else (build(answer),)

    def _wait(self, call: Any, num_required: int) -> Any:
        """Wait for the answer to a take, and say now and then that it does not come."""
        from ray.exceptions import GetTimeoutError

        since = time.monotonic()
        log_at = since + local.FIRST_LOG_SECONDS
        while True:
            try:
                return self._client.get(call, timeout=min(max(log_at - time.monotonic(), 0.0), _LOOK_UP_SECONDS))
            except GetTimeoutError:
                if time.monotonic() >= log_at:
                    log_waiting(lambda: self._client.ask(self._number, "figures"), num_required, since)
                    log_at += local.NEXT_LOG_SECONDS

    def _merge(self, seen: int, detached: Detached) -> Merged | Void:
        """Have the shards merge a round, and return it as one."""
        client = self._client
        calls = [actor.merge.remote(seen, detached.plans) for actor in client.shards]
        each = [client.get(call) for call in calls]
        void = next((answer for answer in each if type(answer) is Void), None)
        if void is not None:
            return void._replace(began=True)
        members: list[Any] = []
        try:
            for i, member in enumerate(self._members):
                if isinstance(member, SparseSpec):
                    members.append(join([results[i] for results in each], member.dtype))
                else:
                    members.append(own(each[dense_shard(i, len(each))][i], member.dtype))
        except MemoryError as error:
            raise ResourceExhaustedError(
                f"no memory for the result: {error or 'allocation failed'}; the round is kept whole for the next take"
            ) from error
        return Merged(members, detached.num_gradients, detached.step, detached.workers)

    def _deliver(self, take: int) -> None:
        """Say that a round has arrived. If the coordinator was restarted, it may have heard so before that.

        Raises:
            UnavailableError: the round was void before that.
        """
        from ray.exceptions import RayError

        client = self._client
        # Signals, and with them Ctrl-C, come to the main thread only.
        final = threading.current_thread() is not threading.main_thread()
        while True:
            seen = client.incarnation
            try:
                answer = client.get(client.coordinator.deliver.remote(client.token, take, final))
            except RayError as error:
                client.resume(seen, error)
                continue
            if type(answer) is Void:
                client.resume(seen)
                client.raise_void()
            return

    def _give_back(self, take: int) -> None:
        """Keep a round for the next take, or take a take out of the queue, whatever became of it."""
        from ray.exceptions import RayError

        if self._client.usable:
            with contextlib.suppress(RayError, GradQuorumError):
                self._client.get(self._client.coordinator.give_back.remote(self._client.token, take))
        self._owed.discard(take)

    # Takes that nobody blocks on

    def _queue(self, *terms: Any) -> int:
        """Put a take in the queue, and return its number."""
        self.reclaim()
        client, take = self._client, self._client.new_number()
        client.insist(lambda seen: client.coordinator.enqueue.remote(*self._take(seen, take), *terms))
        return take

    def _withdraw(self, take: int) -> bool:
        """Take a take out of the queue; False if it has been decided already."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, GradQuorumError):
            return bool(self._client.get(self._client.coordinator.withdraw.remote(self._client.token, take)))
        return False

    def _start(
        self,
        take: int,
        terms: tuple[int, float | None, bool],
        build: Callable[[Merged], T],
        on_result: Callable[[T], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Wait for a take in a thread, where one of the two is called, unless it was withdrawn."""
        coordinator = self._client.coordinator
        # Now, not in the thread: whoever closes the round after this finds somebody who waits for what was decided.
        made = self._client.incarnation, coordinator.await_take.remote(self._client.token, take)

        def call(seen: int) -> Any:
            return coordinator.take.remote(*self._take(seen, take), *terms)  # again: the queue of before is gone

        def run() -> None:
            try:
                result = self._receive(call, terms[0], build, made=made)
                if result is not None:
                    on_result(result[0])
            except BaseException as error:
                self._give_back(take)
                on_error(error)

        threading.Thread(target=run, name="gradquorum-take", daemon=True).start()

    def submit_take(
        self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]
    ) -> concurrent.futures.Future[T]:
        """Do the same as `take` without blocking; the round is delivered when the future is done."""
        take = self._queue(num_required, timeout, exact)
        future: FutureTake[T] = FutureTake(lambda: self._withdraw(take))

        def deliver(result: T) -> None:
            self._deliver(take)
            future.set_result(result)

        try:
            self._start(take, (num_required, timeout, exact), build, deliver, future.set_exception)
        except BaseException:
            self._owed.add(take)
            self._give_back(take)
            raise
        return future

    async def take_async(
        self, num_required: int, timeout: float | None, exact: bool, build: Callable[[Merged], T]
    ) -> T:
        """Do the same as `take` without blocking the event loop."""
        import asyncio

        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[T] = loop.create_future()
        take = self._queue(num_required, timeout, exact)
        handover: Handover[T] = Handover(loop, arrived, lambda: self._give_back(take))
        self._handovers.add(handover)
        try:
            self._start(take, (num_required, timeout, exact), build, handover.offer, handover.fail)
            result = await arrived
            self._deliver(take)
            return result
        except BaseException:
            self._owed.add(take)
            self._give_back(take)
            raise
        finally:
            self._handovers.discard(handover)

    def reclaim(self) -> None:
        """Give back what is owed, and the rounds of coroutines whose event loop was closed under them."""
        for take in tuple(self._owed):
            self._give_back(take)
        for handover in tuple(self._handovers):
            if handover.reclaim():
                self._handovers.discard(handover)
