"""What handles, coordinator and shards say to each other. Ray carries it; nobody else speaks it.

A gradient travels in two halves. Its rows go to the shards, as `Rows`, under a `Key`; once all of them are there, an
`Offer` goes to the coordinator, which judges it without ever seeing a value. What a take is to get comes back as a
`Plan` for each member, which the taker has the shards carry out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gradquorum.marks import Marks
from gradquorum.membership import Worker
from gradquorum.receipts import ApplyReceipt
from gradquorum.targets.interface import Terms

__all__ = [
    "Detached",
    "Entry",
    "Failure",
    "Judged",
    "Key",
    "Offer",
    "OfferedPart",
    "Opened",
    "Part",
    "Plan",
    "Recorded",
    "Resumed",
    "Rows",
    "Standing",
    "Void",
]

Key = tuple[bytes, int]
"""The session of who put it there, and a number that the session uses once."""


class Rows(NamedTuple):
    """What one shard holds of one gradient for one member."""

    indices: Any
    """int64 `[n]`; None for a dense member."""
    values: Any
    """`[n, *row]`; dense: the whole array."""


class Part(NamedTuple):
    """What one shard is sent of one gradient for one member."""

    num_rows: int | None
    """None for a dense member."""
    shape: tuple[int, ...]
    """Of a row; dense: of the array."""
    buffers: tuple[Any, ...]
    """All export bytes. Sparse: `PackedRows.memory`, or the ids and the values; dense: the values. None of nothing."""


class OfferedPart(NamedTuple):
    """What the coordinator hears of one member of a gradient. The first four are what `RoundHost` reads."""

    content: OfferedContent
    borrowed: bool
    late_error: str | None
    row_shape: tuple[int, ...] | None


class OfferedContent(NamedTuple):
    """Where the rows of one member of a gradient are."""

    key: Key
    shards: tuple[int, ...]
    """Those that hold some of it."""
    num_bytes: int
    finite: bool
    row_shape: tuple[int, ...] | None
    offered: tuple[tuple[Worker, int], ...]
    """Worker and sequence of the gradient, if it has them."""


class Offer(NamedTuple):
    """One gradient whose rows are on the shards."""

    key: Key
    shards: tuple[int, ...]
    """Those that hold any of it."""
    parts: tuple[OfferedPart, ...]
    terms: Terms


class Entry(NamedTuple):
    """One block of a plan."""

    key: Key
    weight: float
    shards: tuple[int, ...] | None
    """Those that hold some of it; None if all do, as they do of what was compacted."""


class Plan(NamedTuple):
    """What is to be merged for one member, in that order."""

    member: int
    entries: tuple[Entry, ...]
    shape: tuple[int, ...]
    num_gradients: int


class Detached(NamedTuple):
    """A round that was detached for a take."""

    plans: tuple[Plan, ...]
    num_gradients: int
    step: int
    workers: tuple[Worker, ...]


class Opened(NamedTuple):
    """What a new handle needs to know."""

    engine_name: str
    spec: Any
    incarnation: int
    shards: tuple[Any, ...]
    """Handles of the shard actors."""
    bounds: tuple[int, ...] | None
    """As for `parts_of`."""


class Judged(NamedTuple):
    """The answer to one offer."""

    receipt: ApplyReceipt
    serial: int
    """Counts the rounds: the one that the gradient was judged for."""
    settled: int
    """That of the oldest round which is not known to be delivered or discarded for good."""
    marks: Marks | None
    """What of its worker's has been delivered or discarded for good."""


class Standing(NamedTuple):
    """How far a worker has come, for whoever goes on as that worker."""

    sequence: int
    """The highest that was judged, -1 if there is none."""
    undelivered: Mapping[int, int]
    """What was accepted and is not known to be delivered for good: the serials of the rounds by sequence."""
    incarnation: int


class Recorded(NamedTuple):
    """What a round goes back to when it is void. Every shard has it, so that it outlives the coordinator."""

    incarnation: int
    version: int
    step: int
    published_step: int
    marks: Mapping[Worker, Marks]
    """Of what has been delivered or discarded."""
    members: Mapping[Worker, bool]
    delivered: tuple[tuple[bytes, int], ...]
    """The last takes that were delivered, by session and number."""
    settled: Mapping[int, int]
    """By incarnation the serial of its oldest round that was neither delivered nor discarded."""


class Resumed(NamedTuple):
    """What a handle needs to know of a round that was void."""

    incarnation: int
    reason: str
    marks: Mapping[Worker, Marks]
    """Of the workers asked about: what has been delivered or discarded, or is safe."""
    settled: int | None
    """The serial of the oldest round of the incarnation asked about that was neither; None if that is not known."""
    is_durable: bool
    """Whether nothing is ever lost."""


class Failure(NamedTuple):
    """An error as it travels: Ray would log and wrap one that is raised."""

    error: BaseException


class Void(NamedTuple):
    """The answer to whoever speaks to, or of, an incarnation that is over."""

    reason: str
    began: bool = False
    """Whether it is the answer to a take that had been waiting."""
