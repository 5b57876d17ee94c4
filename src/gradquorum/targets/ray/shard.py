"""A shard: an actor that holds what was offered of its ids, and merges it when it is told what and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from gradquorum.engine.parts import DenseParts, SparseParts
from gradquorum.errors import ClosedError, GradQuorumError, ResourceExhaustedError
from gradquorum.specs import RoundSpec, SparseSpec
from gradquorum.targets.host import make_reducers
from gradquorum.targets.ray.records import Entry, Failure, Key, Plan, Recorded, Rows, Void
from gradquorum.targets.ray.splitting import dense_shard
from gradquorum.targets.ray.wire import unpack_plans, unpack_rows

__all__ = ["Shard"]

R = TypeVar("R")


class Shard:
    """Holds rows by key and member. Ray calls its methods, all in one event loop; merges run in threads beside it.

    It believes the coordinator, which numbers the incarnations: what was put here in one does not survive into the
    next. Arrays stay where Ray put them, in shared memory, for as long as they are held.
    """

    def __init__(self, spec: RoundSpec, index: int, num_shards: int) -> None:
        self._specs = tuple(spec.members.values())
        self._index = index
        self._dtypes = [member.dtype for member in self._specs]
        self._reducers = make_reducers(spec)
        self._is_mine = [
            isinstance(member, SparseSpec) or dense_shard(i, num_shards) == index
            for i, member in enumerate(self._specs)
        ]
        self._incarnation = 0
        """That of the coordinator; 0 until it has told us."""
        self._recorded: Recorded | None = None
        self._held: dict[Key, dict[int, Any]] = {}
        """By key and member: `Rows`, or a block of this engine's that was compacted."""
        self._ended_sessions: set[bytes] = set()

    # The life of a round

    async def live(self) -> None:
        """Never return: who waits for this hears when the actor dies."""
        await asyncio.Event().wait()

    async def recall(self) -> Recorded | None:
        """Return what the coordinator recorded last."""
        return self._recorded

    async def begin(self, recorded: Recorded) -> None:
        """Begin an incarnation, with nothing held. One that is older comes too late."""
        if recorded.incarnation < self._incarnation:
            return
        self._incarnation = recorded.incarnation
        self._recorded = recorded
        self._held.clear()

    async def record(self, recorded: Recorded) -> Void | None:
        """Keep what a void round goes back to."""
        if recorded.incarnation != self._incarnation or self._recorded is None:
            return Void("the shard was restarted")
        if recorded.version > self._recorded.version:
            self._recorded = recorded
        return None

    # What is offered

    async def put(self, incarnation: int, session: bytes, rows: bytes, buffers: Sequence[Any]) -> Any:
        """Hold rows that may be offered from now on; they are as `pack_rows` has packed them."""
        if incarnation != self._incarnation:
            return Void("a shard was restarted")
        if session in self._ended_sessions:
            return Failure(ClosedError("the process that offers this has ended"))
        self._held.update(unpack_rows(session, rows, buffers, self._dtypes))
        return None

    async def num_held(self) -> int:
        """Return under how many keys something is held."""
        return len(self._held)

    async def free(self, keys: Sequence[Key]) -> None:
        """Let go of rows that nobody will ask for any more."""
        for key in keys:
            self._held.pop(key, None)

    async def end_session(self, session: bytes, kept: Sequence[Key]) -> None:
        """Let go of what a process that has ended had put here, but for what it had offered."""
        self._ended_sessions.add(session)
        keep = set(kept)
        for key in [key for key in self._held if key[0] == session and key not in keep]:
            del self._held[key]

    # Arithmetic

    async def merge(self, incarnation: int, plans: Sequence[Plan]) -> Any:
        """Return what the plans come to: for each member a result, None for one that is not here."""
        return await self._work(incarnation, plans, self._merge)

    async def merge_apart(self, incarnation: int, plans: Sequence[Plan]) -> tuple[Any, Any]:
        """Do the same in two returns: what went wrong, which is small, and the results, which may stay on this node."""
        results = await self.merge(incarnation, plans)
        return (None, results) if isinstance(results, list) else (results, None)

    async def compact(self, incarnation: int, plans: bytes, key: Key, growth: float | None) -> Any:
        """Hold under a new key what prefixes of the logs of all members come to, if that is worth it.

        Args:
            incarnation: of the coordinator.
            plans: one for each member, packed.
            key: new.
            growth: it is worth it if the prefixes are so many times as large as their distinct rows; None: in any case.

        Returns:
            The bytes of the distinct rows, and for each member those of what is held now; None if it was not worth it.
        """

        def compact(logs: Iterator[tuple[Plan, list[Any]]]) -> tuple[int, list[Any] | None]:
            here = [(self._reducers[plan.member], log if self._is_mine[plan.member] else []) for plan, log in logs]
            distinct = sum(reducer.distinct_bytes(log) for reducer, log in here if log)
            num_bytes = sum(block.num_bytes for _, log in here for block in log)
            if growth is not None and 0 < num_bytes <= growth * distinct:
                return distinct, None
            return distinct, [reducer.compact(log) if log else None for reducer, log in here]

        compacted = await self._work(incarnation, unpack_plans(plans), compact)
        if incarnation != self._incarnation:
            return Void("a shard was restarted")
        if isinstance(compacted, (Failure, Void)):
            return compacted
        distinct, blocks = compacted
        if blocks is None:
            return distinct, None
        self._held[key] = {member: block for member, block in enumerate(blocks) if block is not None}
        return distinct, [0 if block is None else block.num_bytes for block in blocks]

    async def export(self, incarnation: int, plan: Plan) -> Any:
        """Return the content of the one block of a plan, None if it is not here."""

        def export(logs: Iterator[tuple[Plan, list[Any]]]) -> list[SparseParts | DenseParts | None]:
            return [
                self._reducers[plan.member].export_block(block) if self._is_mine[plan.member] else None
                for plan, (block,) in logs
            ]

        return await self._work(incarnation, [plan], export)

    async def hold(
        self, incarnation: int, key: Key, member: int, parts: SparseParts | DenseParts, num_gradients: int
    ) -> Any:
        """Hold a block of that content under a key, and return the bytes that it takes."""
        if incarnation != self._incarnation:
            return Void("a shard was restarted")
        try:
            block = self._reducers[member].import_block(parts, num_gradients)
        except (GradQuorumError, MemoryError) as error:
            return _failure(error)
        self._held.setdefault(key, {})[member] = block
        return [block.num_bytes]

    async def _work(
        self, incarnation: int, plans: Sequence[Plan], do: Callable[[Iterator[tuple[Plan, list[Any]]]], R]
    ) -> R | Failure | Void:
        """Do something with the blocks of each plan in a thread: what they are made of is there until it is done."""
        if incarnation != self._incarnation:
            return Void("a shard was restarted")
        held = [[self._find(plan.member, entry) for entry in plan.entries] for plan in plans]

        def work() -> R | Failure:
            try:
                return do(
                    (plan, [self._block(plan, *one) for one in zip(plan.entries, found, strict=True)])
                    for plan, found in zip(plans, held, strict=True)
                )
            except (GradQuorumError, MemoryError) as error:
                return _failure(error)

        return await asyncio.get_running_loop().run_in_executor(None, work)

    def _find(self, member: int, entry: Entry) -> Any:
        """Return what is held of an entry, None if it has nothing here."""
        if not self._is_mine[member] or (entry.shards is not None and self._index not in entry.shards):
            return None
        return self._held[entry.key][member]  # a KeyError is a mistake of ours, and surfaces as one

    def _block(self, plan: Plan, entry: Entry, found: Any) -> Any:
        """Return a block of this engine's. What a gradient has elsewhere counts here as an empty one of its weight."""
        reducer, spec = self._reducers[plan.member], self._specs[plan.member]
        if not isinstance(spec, SparseSpec):
            if found is None or type(found) is Rows:
                return reducer.block(None if found is None else found.values, weight=entry.weight, lend=True)
            return found
        if found is None:
            nothing = np.empty(0, np.int64), np.empty((0, *plan.shape), spec.dtype)
            return reducer.block(*nothing, weight=entry.weight, lend=True)
        if type(found) is Rows:
            return reducer.block(found.indices, found.values, weight=entry.weight, lend=True)
        return found

    def _merge(self, logs: Iterator[tuple[Plan, list[Any]]]) -> list[Any]:
        return [
            self._reducers[plan.member].merge(blocks, plan.shape, plan.num_gradients)
            if self._is_mine[plan.member]
            else None
            for plan, blocks in logs
        ]


def _failure(error: BaseException) -> Failure:
    if isinstance(error, MemoryError) and not isinstance(error, GradQuorumError):
        error = ResourceExhaustedError(f"a shard has no memory: {error or 'allocation failed'}; nothing is lost")
    return Failure(error)
