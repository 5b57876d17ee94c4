"""The reducers of a coordinator: they do no arithmetic, they say which shard has to do which.

To `RoundHost` they are reducers like any others. A block is a note of where some rows are, and merging a log is making
a plan of it. What needs an answer from the shards is asked for through `Shards.call`, which waits.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradquorum.engine.parts import DenseParts, SparseParts
from gradquorum.engine.splitting import parts_of
from gradquorum.errors import UnavailableError
from gradquorum.membership import Worker
from gradquorum.specs import RoundSpec, SparseSpec
from gradquorum.targets.ray.records import Entry, Failure, Key, OfferedContent, Plan, Void
from gradquorum.targets.ray.splitting import dense_shard
from gradquorum.targets.ray.wire import pack_plans

__all__ = ["Lease", "RemoteBlock", "RemoteReducer", "Shards", "compacted"]


class Lease:
    """Keeps what the shards hold under a key: they are told to let go of it when nothing refers to this any more."""

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: Key, shards: tuple[int, ...], freed: deque[tuple[Key, tuple[int, ...]]]) -> None:
        self.key = key
        weakref.finalize(self, freed.append, (key, shards)).atexit = False


class RemoteBlock:
    """Where the rows of one member of one gradient are, or those of a merged prefix of a log."""

    __slots__ = ("entry", "finite", "lease", "num_bytes", "offered", "row_shape")

    lent = False

    def __init__(
        self,
        entry: Entry,
        num_bytes: int,
        lease: Lease | None,
        row_shape: tuple[int, ...] | None,
        offered: tuple[tuple[Worker, int], ...] = (),
        *,
        finite: bool = True,
    ) -> None:
        self.entry = entry
        self.num_bytes = num_bytes
        self.lease = lease
        self.row_shape = row_shape
        self.offered = offered
        """Worker and sequence of the gradients that have one."""
        self.finite = finite


class Shards:
    """The shard actors of a round, as the coordinator sees them in one incarnation."""

    def __init__(
        self,
        actors: Sequence[Any],
        incarnation: int,
        bounds: tuple[int, ...] | None,
        wait: Callable[[Sequence[Any]], list[Any]],
    ) -> None:
        """Note who the shards are; `wait` waits for calls to them and returns their answers."""
        self.actors = tuple(actors)
        self.incarnation = incarnation
        self.bounds = bounds
        self.freed: deque[tuple[Key, tuple[int, ...]]] = deque()
        """Keys that nobody refers to any more. Appended to by finalizers, in any thread."""
        self.leases: weakref.WeakValueDictionary[Key, Lease] = weakref.WeakValueDictionary()
        """Of all that has been offered and is referred to."""
        self._wait = wait
        self._numbers = itertools.count(incarnation)  # no number of an incarnation before

    def lease_of(self, key: Key) -> Lease | None:
        """Return what keeps that key, None if nothing is held under it."""
        return self.leases.get(key)

    def offered(self, key: Key, shards: tuple[int, ...]) -> Lease:
        """Return what keeps a key that has just been offered."""
        lease = self.leases[key] = Lease(key, shards, self.freed)
        return lease

    @property
    def everyone(self) -> tuple[int, ...]:
        """The indices of all shards."""
        return tuple(range(len(self.actors)))

    def new_key(self) -> Key:
        """Return a key of the coordinator's own."""
        return b"", next(self._numbers)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Make a call to all shards, with the incarnation before the arguments, and return their answers.

        Raises:
            UnavailableError: one has died, or has been restarted.
            GradQuorumError: what one of them answered.
        """
        return self.call_some(self.everyone, method, *arguments)

    def call_some(self, shards: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """Do the same with some shards, by index."""
        actors = [self.actors[shard] for shard in shards]
        return self.answers([getattr(actor, method).remote(self.incarnation, *arguments) for actor in actors])

    def answers(self, calls: Sequence[Any]) -> list[Any]:
        """Wait for calls to shards; raises like `call`."""
        from ray.exceptions import RayActorError

        try:
            answers = self._wait(calls)
        except RayActorError as error:
            raise UnavailableError(f"a shard has died: {error}") from error
        for answer in answers:
            if type(answer) is Failure:
                raise answer.error
            if type(answer) is Void:
                raise UnavailableError(answer.reason)
        return answers


class RemoteReducer:
    """Makes plans for one member."""

    plain_block = None

    def __init__(self, spec: RoundSpec, member: int, shards: Shards) -> None:
        self._member = member
        self._is_sparse = isinstance(list(spec.members.values())[member], SparseSpec)
        self._shards = shards
        self._home = dense_shard(member, len(shards.actors))

    def block(
        self, content: OfferedContent, *, weight: float = 1.0, lend: bool = False, check_finite: bool = False
    ) -> RemoteBlock:
        """Note where a member of a gradient is. Whoever put it there has looked at it."""
        return RemoteBlock(
            Entry(content.key, weight, content.shards),
            content.num_bytes,
            self._shards.lease_of(content.key),
            content.row_shape,
            content.offered,
            finite=content.finite,
        )

    def merge(self, blocks: Sequence[RemoteBlock], shape: tuple[int, ...], num_gradients: int) -> Plan:
        """Return what the shards have to merge, in order."""
        return Plan(self._member, tuple([block.entry for block in blocks]), shape, num_gradients)

    def log(self, blocks: Sequence[RemoteBlock]) -> Plan:
        """Return a plan for blocks whose row shape is theirs."""
        shape = next((block.row_shape for block in blocks if block.row_shape is not None), ())
        return self.merge(blocks, shape, len(blocks))

    def compacted(self, blocks: Sequence[RemoteBlock], lease: Lease, num_bytes: int) -> RemoteBlock:
        """Note where the shards hold what blocks come to, under the key of a lease."""
        offered = tuple(itertools.chain.from_iterable(block.offered for block in blocks))
        where = None if self._is_sparse else (self._home,)
        return RemoteBlock(Entry(lease.key, 1.0, where), num_bytes, lease, self.log(blocks).shape, offered)

    def export_block(self, block: RemoteBlock) -> SparseParts | DenseParts:
        """Fetch what a block holds. Waits."""
        parts = [part for (part,) in self._shards.call("export", self.log([block]))]
        found: SparseParts | DenseParts = _joined(parts) if self._is_sparse else parts[self._home]
        return found

    def import_block(self, parts: SparseParts | DenseParts, num_gradients: int) -> RemoteBlock:
        """Have the shards hold a block of that content. Waits."""
        shards, key = self._shards, self._shards.new_key()
        lease = Lease(key, shards.everyone, shards.freed)
        where = shards.everyone if isinstance(parts, SparseParts) else (self._home,)
        each = _split(parts, shards) if isinstance(parts, SparseParts) else [parts]
        answers = shards.answers(
            [
                shards.actors[shard].hold.remote(shards.incarnation, key, self._member, part, num_gradients)
                for shard, part in zip(where, each, strict=True)
            ]
        )
        num_bytes = sum(num_bytes for (num_bytes,) in answers)
        return RemoteBlock(Entry(key, parts.weight, where), num_bytes, lease, None)


def compacted(
    shards: Shards, reducers: Sequence[RemoteReducer], logs: Sequence[list[RemoteBlock]], num_bytes: int, growth: float
) -> tuple[tuple[RemoteBlock, ...] | None, int]:
    """Do what `RoundHost._compacted` does, in one call to all shards if they are of one mind. Waits."""
    key = shards.new_key()
    lease = Lease(key, shards.everyone, shards.freed)
    plans = pack_plans([reducer.log(log) for reducer, log in zip(reducers, logs, strict=True)])
    answers = dict(zip(shards.everyone, shards.call("compact", plans, key, growth), strict=True))
    distinct = sum(distinct for distinct, _ in answers.values())
    if num_bytes <= growth * distinct:
        return None, distinct  # what some may hold is freed with the lease
    others = [shard for shard, (_, sizes) in answers.items() if sizes is None]
    answers |= zip(others, shards.call_some(others, "compact", plans, key, None), strict=True)
    by_member = [sum(sizes) for sizes in zip(*[sizes for _, sizes in answers.values()], strict=True)]
    blocks = zip(reducers, logs, by_member, strict=True)
    return tuple([reducer.compacted(log, lease, size) for reducer, log, size in blocks]), distinct


def _split(parts: SparseParts, shards: Shards) -> list[SparseParts]:
    """Return for each shard its part of the content of a block."""
    owners = parts_of(parts.indices, len(shards.actors), shards.bounds)
    late = [None] * len(shards.actors) if parts.late is None else _split(parts.late, shards)
    each = []
    for shard in range(len(shards.actors)):
        at = np.flatnonzero(owners == shard)
        counts = None if parts.counts is None else parts.counts[at]
        each.append(parts._replace(indices=parts.indices[at], rows=parts.rows[at], counts=counts, late=late[shard]))
    return each


def _joined(each: Sequence[SparseParts]) -> SparseParts:
    """Return the content of a block of which each shard has a part."""
    order = np.argsort(np.concatenate([parts.indices for parts in each]), kind="stable")
    # Where nothing was added up rows are in the dtype, and a shard that has none may not know how wide they are.
    wide = max((parts.rows.dtype for parts in each), key=lambda dtype: dtype.itemsize)
    width = max(parts.rows.shape[1] for parts in each)
    rows = [parts.rows.astype(wide, copy=False).reshape(len(parts.indices), width) for parts in each]
    counts = [parts.counts for parts in each if parts.counts is not None]
    late = [parts.late for parts in each if parts.late is not None]
    return SparseParts(
        np.concatenate([parts.indices for parts in each])[order],
        np.concatenate(rows)[order],
        np.concatenate(counts)[order] if counts else None,
        each[0].weight,
        _joined(late) if late else None,
        each[0].is_late,
    )
