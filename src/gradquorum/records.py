"""What passes through a round: contributions in, batches out, verdicts back. All opaque about values."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

__all__ = ["Batch", "Contribution", "Figures", "FormConflict", "Forms", "Prefix", "either"]

Forms = tuple[tuple[int, ...] | None, ...]
"""For each member the shape of a row (dense: of the array), None where it is not known."""


def either(first: Forms, second: Forms) -> Forms:
    """Return for each member the shape that is known."""
    return tuple(b if a is None else a for a, b in zip(first, second, strict=True))


class FormConflict(Exception):
    """A gradient's row shape differs from that of the gradients in the round. Never leaves the package."""

    def __init__(self, member: int, expected: tuple[int, ...]) -> None:
        super().__init__(member, expected)
        self.member = member
        self.expected = expected


class Contribution:
    """One accepted gradient, or the merged prefix of a log: one block for each member.

    Receipts watch it by weak reference: once it is gone, nothing reads a lent array any more.

    Attributes:
        blocks: one for each member of the round.
        forms: the row shape of each member's block.
        num_bytes: memory that the blocks keep alive.
        finite: whether all that was looked at is neither NaN nor infinite.
        lent: whether a block reads an array of the caller's.
        num_gradients: 1, or the length of the prefix.
        worker: who offered it; None if it gave no name.
        sequence: the worker's number for it, or None.
    """

    __slots__ = (
        "__weakref__",
        "blocks",
        "finite",
        "forms",
        "lent",
        "num_bytes",
        "num_gradients",
        "sequence",
        "worker",
    )

    def __init__(
        self,
        blocks: tuple[Any, ...],
        forms: Forms,
        num_bytes: int,
        worker: int | str | None = None,
        sequence: int | None = None,
        *,
        finite: bool = True,
        lent: bool = False,
        num_gradients: int = 1,
    ) -> None:
        self.blocks = blocks
        self.forms = forms
        self.num_bytes = num_bytes
        self.finite = finite
        self.lent = lent
        self.worker = worker
        self.sequence = sequence
        self.num_gradients = num_gradients


class Batch(NamedTuple):
    """A detached round: what one take delivers."""

    contributions: list[Contribution]
    """In order of acceptance."""
    forms: Forms
    num_gradients: int
    num_bytes: int
    step: int
    """The round's step before it was detached."""
    serial: int
    """Counts the rounds detached: older ones are delivered first."""
    workers: Collection[int | str]
    """The named workers whose gradients are in it, each once."""


class Prefix:
    """The part of a log that one thread is compacting. The work is given up when this object dies."""

    __slots__ = ("__weakref__", "contributions", "serial")

    def __init__(self, contributions: list[Contribution], serial: int) -> None:
        self.contributions = contributions
        self.serial = serial


class Figures(NamedTuple):
    """What a message about a wait says."""

    have: int
    step: int
    num_stale: int
