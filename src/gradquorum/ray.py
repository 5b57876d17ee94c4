"""Rounds on a Ray cluster: ``target="ray"``, or `Target` to say more. Needs the extra ``ray``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradquorum.arrays import as_integer
from gradquorum.errors import InvalidArgumentError

__all__ = ["Target"]


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
        durability: None. ``"checkpoint"`` is not offered yet.
        bounds: None spreads ids by their hash. Ascending ids, one fewer than shards, let each shard hold a range:
            shard i those from ``bounds[i - 1]`` to below ``bounds[i]``.

    Raises:
        InvalidArgumentError: an argument cannot be.
    """

    __slots__ = ("bounds", "lifetime", "num_shards", "resources")

    def __init__(
        self,
        num_shards: int = 1,
        resources: Mapping[str, Any] | None = None,
        lifetime: str | None = None,
        durability: str | None = None,
        *,
        bounds: Sequence[int] | None = None,
    ) -> None:
        self.num_shards = as_integer("num_shards", num_shards)
        if self.num_shards < 1:
            raise InvalidArgumentError(f"num_shards: expected 1 or more, got {num_shards}")
        if lifetime not in (None, "detached"):
            raise InvalidArgumentError(f"lifetime: expected None or 'detached', got {lifetime!r}")
        if durability is not None:
            raise InvalidArgumentError(f"durability: expected None, got {durability!r}")
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
