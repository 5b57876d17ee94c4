"""Actors that are used again: to start one takes a second, and the contract suite asks for thousands.

What a test gets is the real coordinator and real shards in processes of their own, made anew by `adopt`.
"""

import asyncio
import contextlib

from gradquorum.targets.ray import client, cluster, coordinator
from gradquorum.targets.ray.coordinator import Coordinator
from gradquorum.targets.ray.shard import Shard


class PooledShard(Shard):
    def __init__(self):
        pass

    async def adopt(self, *arguments):
        Shard.__init__(self, *arguments)


class PooledCoordinator(Coordinator):
    def __init__(self):
        self._free = True

    async def adopt(self, shards, shared_name, spec, target):
        adopted = [shard.adopt.remote(spec, i, len(shards)) for i, shard in enumerate(shards)]
        await asyncio.gather(*[answer(call) for call in adopted])
        coordinator.make_shards = lambda *_: shards
        Coordinator.__init__(self, shared_name, spec, target)
        self._free = False

    async def _kill(self):
        self.life.stop()
        self._free = True

    async def free(self):
        return self._free


async def answer(call):
    return await call


class Pool:
    """Stands in for the names of Ray's namespace while a test uses it."""

    def __init__(self, ray):
        self._ray = ray
        self._classes = {kind: ray.remote(kind) for kind in (PooledCoordinator, PooledShard)}
        self._shards = {}
        self._by_name = {}

    def _actor(self, kind):
        # A round that is over leaves calls that are pending.
        return self._classes[kind].options(num_cpus=0, max_concurrency=cluster._MAX_CONCURRENCY).remote()

    def find(self, shared_name):
        actor = self._by_name.get(shared_name)
        if actor is not None and self._ray.get(actor.free.remote()):
            del self._by_name[shared_name]
            return None
        return actor

    def make(self, shared_name, spec, target, num_shards=None):
        for name in list(self._by_name):
            self.find(name)
        taken = self._by_name.values()
        actor = next((actor for actor in self._shards if actor not in taken), None) or self._actor(PooledCoordinator)
        shards = self._shards.setdefault(actor, [])
        num_shards = num_shards or target.num_shards
        shards += [self._actor(PooledShard) for _ in range(num_shards - len(shards))]
        self._ray.get(actor.adopt.remote(shards[:num_shards], shared_name, spec, target))
        self._by_name[shared_name] = actor
        return actor

    @contextlib.contextmanager
    def used(self, num_shards=None):
        """Make rounds on actors of the pool, on so many shards, or on as many as a target asks for."""
        before = client.find_coordinator, client.make_coordinator
        client.find_coordinator = self.find
        client.make_coordinator = lambda *arguments: self.make(*arguments, num_shards)
        try:
            yield
        finally:
            client.find_coordinator, client.make_coordinator = before
