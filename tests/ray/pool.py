"""Actors that are used again: to start one takes a second, and the contract suite asks for thousands.

What a test gets is the real coordinator and real shards in processes of their own, made anew by `adopt`.
"""

import asyncio

from gradquorum.targets.ray import client, cluster, coordinator
from gradquorum.targets.ray.coordinator import Coordinator
from gradquorum.targets.ray.shard import Shard

NUM_SHARDS = 2


class PooledShard(Shard):
    def __init__(self):
        pass

    async def adopt(self, *arguments):
        Shard.__init__(self, *arguments)


class PooledCoordinator(Coordinator):
    def __init__(self, shards):
        self._pooled = shards
        self._free = True
        coordinator.make_shards = lambda *_: self._pooled

    async def adopt(self, shared_name, spec, target):
        adopted = [shard.adopt.remote(spec, i, len(self._pooled)) for i, shard in enumerate(self._pooled)]
        await asyncio.gather(*[answer(call) for call in adopted])
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
    """Stands in for the names of Ray's namespace, while entered."""

    def __init__(self, ray):
        self._ray = ray
        self._all = []
        self._by_name = {}

    def _make(self):
        options = {"num_cpus": 0, "max_concurrency": cluster._MAX_CONCURRENCY}  # a round leaves calls that are pending
        shards = [self._ray.remote(PooledShard).options(**options).remote() for _ in range(NUM_SHARDS)]
        self._all.append(self._ray.remote(PooledCoordinator).options(**options).remote(shards))
        return self._all[-1]

    def find(self, shared_name):
        actor = self._by_name.get(shared_name)
        if actor is not None and self._ray.get(actor.free.remote()):
            del self._by_name[shared_name]
            return None
        return actor

    def make(self, shared_name, spec, target):
        taken = self._by_name.values()
        for name in list(self._by_name):
            self.find(name)
        actor = next((actor for actor in self._all if actor not in taken), None) or self._make()
        self._ray.get(actor.adopt.remote(shared_name, spec, target))
        self._by_name[shared_name] = actor
        return actor

    def __enter__(self):
        self._before = client.find_coordinator, client.make_coordinator
        client.find_coordinator, client.make_coordinator = self.find, self.make
        return self

    def __exit__(self, *exception):
        client.find_coordinator, client.make_coordinator = self._before
