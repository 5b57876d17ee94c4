"""What passes through a round: contributions in, batches out, verdicts back. All opaque about values."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gradquorum.marks import Marks

__all__ = [
    "Batch",
    "Contribution",
    "Figures",
    "FormConflict",
    "Forms",
    "LagConflict",
    "Prefix",
    "Snapshot",
    "WeighedContribution",
    "check_forms",
    "conflict",
    "either",
]

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


def conflict(forms: Forms, offered: Forms) -> int | None:
    """Return the first member whose shapes are known and differ."""
    for member, (a, b) in enumerate(zip(forms, offered, strict=True)):
        if a is not None and b is not None and a != b:
            return member
    return None


def check_forms(forms: Forms, offered: Forms) -> None:
    """Check the row shapes of a gradient against those of a round.

    Raises:
        FormConflict: one differs.
    """
    member = conflict(forms, offered)
    if member is not None:
        expected = forms[member]
        assert expected is not None
        raise FormConflict(member, expected)


class LagConflict(Exception):
    """A gradient was weighed for another lag than it has by now. Never leaves the package."""

    def __init__(self, lag: int) -> None:
        super().__init__(lag)
        self.lag = lag


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

    lag = 0
    """The lag that its weights are for."""
    vanishes = False
    """Whether its weight has rounded to 0."""

    def __init__(
        self,
        blocks: tuple[Any, ...],
        forms: Forms,
        num_bytes: int,
        worker: int | str | None = None,
        sequence: int | None = None,
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


class WeighedContribution(Contribution):
    """A contribution whose weights depend on how late it is."""

    __slots__ = ("lag", "vanishes")

    lag: int
    vanishes: bool


class Batch:
    """A detached round: what one take delivers. Immutable, but for `kept`.

    Attributes:
        contributions: in order of acceptance.
        forms: the row shape of each member.
        num_gradients: in it.
        num_bytes: memory that it keeps alive.
        step: the round's step before it was detached.
        serial: counts the rounds detached: older ones are delivered first.
        workers: the named workers whose gradients are in it, each once.
        kept: what took the place of the blocks of members that were consumed: see `AbstractSparseReducer.consume`.
    """

    __slots__ = ("contributions", "forms", "kept", "num_bytes", "num_gradients", "serial", "step", "workers")

    def __init__(
        self,
        contributions: list[Contribution],
        forms: Forms,
        num_gradients: int,
        num_bytes: int,
        step: int,
        serial: int,
        workers: Collection[int | str],
    ) -> None:
        self.contributions = contributions
        self.forms = forms
        self.num_gradients = num_gradients
        self.num_bytes = num_bytes
        self.step = step
        self.serial = serial
        self.workers = workers
        self.kept: dict[int, list[Any]] | None = None

    def with_serial(self, serial: int) -> Batch:
        """Return the same round as one that was detached at another time."""
        contents = self.contributions, self.forms, self.num_gradients, self.num_bytes, self.step
        batch = Batch(*contents, serial, self.workers)
        batch.kept = self.kept
        return batch


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


class Snapshot(NamedTuple):
    """All that a round holds at one moment, but for those who wait."""

    step: int
    published_step: int
    num_stale: int
    log: list[Contribution]
    num_gradients: int
    """In the log."""
    forms: Forms
    accepted: dict[int | str, int]
    """Gradients of each named worker in the log."""
    deferred: tuple[Contribution, ...]
    undelivered: list[Batch]
    """Rounds that are detached and not delivered, oldest first."""
    marks: dict[int | str, Marks]
    members: dict[int | str, bool]
    """Each worker that ever joined, and whether it is live."""
