"""Rounds on a Ray cluster: ``target="ray"``, or `Target` to say more. Needs the extra ``ray``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from gradquorum.arrays import as_integer
from gradquorum.errors import InvalidArgumentError
from gradquorum.handle import AbstractAccumulator
from gradquorum.membership import Worker
from gradquorum.terms import check_timeout, check_worker

__all__ = ["Pipeline", "ShardedGradient", "Target", "take_shards", "watch"]


class Target:
    """Where on a Ray cluster a round lives, for the one that makes it. Immutable; pickles.

    The first accumulator of a `shared_name` makes a *coordinator* actor, which has the round, and `num_shards` *shard*
    actors, which have the gradients. Others of that name in the same Ray namespace attach to what is there, whatever
    target they give.

    Args:
        num_shards: over how many actors the ids are spread.
        resources: what each shard asks of its node, as `ray.remote` takes it: ``{"num_cpus": 1, "memory": 2**30}``;
            further names are custom resources. None asks for nothing.
        lifetime: None ends the round when no process that used it is left; ``"detached"`` keeps it until
            ``close(for_all=True)``.
        durability: None lets a round be void when an actor of it dies. With ``"checkpoint"`` none ever is: a call that
            changes the round is answered when the whole round is in a file, which costs as much as it holds.
        folder: for the files of ``"checkpoint"``, the same one on all nodes. Needs the extra ``checkpoint``.
        bounds: None spreads ids by their hash. Ascending ids, one fewer than shards, let each shard hold a range:
            shard i those from ``bounds[i - 1]`` to below ``bounds[i]``.

    Raises:
        InvalidArgumentError: an argument cannot be.
    """

    __slots__ = ("bounds", "durability", "folder", "lifetime", "num_shards", "resources")

    def __init__(
        self,
        num_shards: int = 1,
        resources: Mapping[str, Any] | None = None,
        lifetime: str | None = None,
        durability: str | None = None,
        *,
        bounds: Sequence[int] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.num_shards = as_integer("num_shards", num_shards)
        if self.num_shards < 1:
            raise InvalidArgumentError(f"num_shards: expected 1 or more, got {num_shards}")
        if lifetime not in (None, "detached"):
            raise InvalidArgumentError(f"lifetime: expected None or 'detached', got {lifetime!r}")
        if durability not in (None, "checkpoint"):
            raise InvalidArgumentError(f"durability: expected None or 'checkpoint', got {durability!r}")
        if (folder is None) is not (durability is None):
            raise InvalidArgumentError(f"folder: expected one exactly with durability='checkpoint', got {folder!r}")
        self.durability = durability
        self.folder = None if folder is None else os.path.abspath(os.fspath(folder))
        if resources is not None and not isinstance(resources, Mapping):
            raise InvalidArgumentError(f"resources: expected a mapping or None, got {resources!r}")
        self.resources = dict(resources or {})
        self.lifetime = lifetime
        self.bounds = None if bounds is None else tuple([as_integer("bounds", bound) for bound in bounds])
        wanted = None if self.bounds is None else sorted(set(self.bounds))
        if wanted is not None and (list(self.bounds or ()) != wanted or len(wanted) != self.num_shards - 1):
            raise InvalidArgumentError(
                f"bounds: expected {self.num_shards - 1} ascending ids for {self.num_shards} shards, got {bounds!r}"
            )

    def __repr__(self) -> str:
        return f"Target({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__slots__)})"


class Pipeline:
    """Applies without waiting for the receipts: calls overlap, and what gathers meanwhile travels together.

    Gradients of one pipeline may be judged in another order than they were submitted; with a worker and sequences each
    still counts once. `with` waits for all receipts.

    Args:
        accumulator: an accumulator or group on Ray.
        max_in_flight: gradients without a receipt, 1 to 64; one more waits. The window of sequences is 64 wide.

    Raises:
        InvalidArgumentError: an argument cannot be.

    Threads:
        Any number may submit. One thread of the pipeline's own sends.
    """

    def __init__(self, accumulator: AbstractAccumulator[Any], max_in_flight: int = 16) -> None:
        number = as_integer("max_in_flight", max_in_flight)
        if not 1 <= number <= 64:
            raise InvalidArgumentError(f"max_in_flight: expected 1 to 64, got {number}")
        target = _on_ray(accumulator)
        from gradquorum.targets.ray.pipeline import SubmittingTarget, submitting

        self._handle = target  # it closes when nobody refers to it
        self._target = SubmittingTarget(target._sender, target._client, number)
        self._accumulator = submitting(accumulator, self._target)

    def submit_apply(self, *gradient: Any, **terms: Any) -> Any:
        """Offer a gradient and return a `concurrent.futures.Future` of its receipt.

        Arguments are those of the accumulator's `apply_grad`, or of the group's `apply`; what they raise at once is
        raised here, all else by the future. Arrays may be written to as soon as this returns, unless ``copy=False``:
        then when the future is done.

        Raises:
            InvalidArgumentError: the gradient cannot be right. Nothing has changed.
            ResourceExhaustedError: there is no memory for a copy of it. Nothing has changed.
            ClosedError: the pipeline has been closed.
        """
        accumulator = self._accumulator
        apply = accumulator.apply if hasattr(accumulator, "apply") else accumulator.apply_grad
        return apply(*gradient, **terms)

    def close(self) -> None:
        """Wait for the receipts of all that was submitted; closing again does nothing."""
        self._target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ShardedGradient(NamedTuple):
    """A round that was taken and left in parts."""

    parts: list[Any]
    """For each shard an `ObjectRef` of a list with one entry for each member: `(indices [r], values [r, *row],
    counts [r])`, ascending, or for a dense member its array on one shard and None on all others. Read only."""
    num_gradients: int
    step: int
    workers: tuple[Worker, ...]


def take_shards(
    accumulator: AbstractAccumulator[Any], num_required: int, *, timeout: float | None = None
) -> ShardedGradient:
    """Take a round as `take_grad` does, but leave each part on the node of its shard, for a sharded optimizer.

    The round is delivered when this returns: a part is lost with its node, as any object of Ray's.

    Args:
        accumulator: an accumulator or group on Ray.
        num_required: as for `take_grad`, like the timeout and the errors.
        timeout: seconds, 0 or more; None waits without end.
    """
    target = _on_ray(accumulator)
    number = accumulator._check_take(num_required, exact=False)
    parts, detached = target._taker.take_shards(number, check_timeout(timeout))
    return ShardedGradient(parts, detached.num_gradients, detached.step, detached.workers)


def watch(accumulator: AbstractAccumulator[Any], calls: Mapping[Worker, Any]) -> None:
    """Count workers as live as long as calls are pending.

    When a call ends its worker leaves. If it failed, the `UnavailableError` of a take that cannot be satisfied any
    more says so: "left: 3 raised ValueError: ...". For a task that is its own reference; for an actor that of any
    pending call.

    Args:
        accumulator: an accumulator or group on Ray, made with `expected_workers` and `max_per_worker`.
        calls: an `ObjectRef` for each worker.

    Raises:
        InvalidArgumentError: something is no `ObjectRef`. Nobody has joined.
        ClosedError: the handle is closed.
    """
    from ray import ObjectRef

    target = _on_ray(accumulator)
    checked = [(check_worker(worker), call) for worker, call in calls.items()]
    for worker, call in checked:
        if not isinstance(call, ObjectRef):
            raise InvalidArgumentError(f"calls[{worker!r}]: expected a ray.ObjectRef, got {call!r}")
    for worker, call in checked:
        target._ask("watch_worker", worker, [call])


def _on_ray(accumulator: AbstractAccumulator[Any]) -> Any:
    """Return the target of an accumulator on Ray."""
    from gradquorum.targets.ray.target import RayTarget

    target = accumulator._target
    if not isinstance(target, RayTarget):
        raise InvalidArgumentError(f"accumulator: expected one on Ray, got {accumulator!r}")
    return target
