"""What clients and server say to each other: a small set of typed messages with capped lengths.

Every message is a msgpack array that begins with its number. What cannot be decoded is no message: the connection
that it came over is closed. Texts travel as UTF-8 in which lone surrogates are let pass, as Python lets them pass.

`docs/processes.md` has the table of messages.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from gradquorum.errors import InvalidArgumentError

__all__ = [
    "FROM_CLIENT",
    "FROM_SERVER",
    "MAX_IDS",
    "MAX_MESSAGE_BYTES",
    "MAX_TEXT_BYTES",
    "VERSION",
    "check",
    "encode",
    "encode_request",
    "from_text",
    "from_worker",
    "to_text",
    "to_worker",
]

VERSION = 1
"""Of the protocol. Client and server of different versions part at once, and say so."""
MAX_MESSAGE_BYTES = 1 << 20
"""Nobody reads a longer one."""
MAX_TEXT_BYTES = 1 << 18
MAX_MEMBERS = 4096
MAX_IDS = 4096
"""So many handles or blocks are spoken of in one message."""

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Sizes = Annotated[tuple[Size, ...], Meta(max_length=64)]
Text = Annotated[bytes, Meta(max_length=MAX_TEXT_BYTES)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Seconds = Annotated[float, Meta(ge=0)] | None
Ids = Annotated[tuple[Size, ...], Meta(max_length=MAX_IDS)]
Word = Annotated[str, Meta(max_length=32)] | Int64 | float | None


class _Message(Struct, array_like=True, gc=False):
    pass


# What both sides say about arrays


class Part(_Message):
    """One member of a gradient or of a result. Where its arrays lie follows from this: see `parts.py`."""

    num_rows: Size | None
    """None for a dense member."""
    shape: Sizes | None
    """Of a row (dense: of the array); None if there is none."""
    late_error: Text | None = None


Parts = Annotated[tuple[Part, ...], Meta(max_length=MAX_MEMBERS)]


class MemberSpec(_Message):
    """One member of a round."""

    name: Text
    sparse: bool
    dtype: Annotated[bytes, Meta(max_length=32)]
    shape: Annotated[tuple[Size | None, ...], Meta(max_length=64)]
    reduction_type: Annotated[bytes, Meta(max_length=32)]


class Spec(_Message):
    """All that fixes what a round does."""

    kind: Text
    members: Annotated[tuple[MemberSpec, ...], Meta(max_length=MAX_MEMBERS)]
    options: Annotated[dict[str, str | int | bool | None], Meta(max_length=32)]
    """All but `staleness`."""
    staleness: Annotated[tuple[Word, ...], Meta(max_length=8)] = ("_Strict",)
    """The policy in words: no code ever travels."""


# What clients say


class Hello(_Message, tag=1):
    """Begin a session, or add a connection to one."""

    version: int
    session: Token | None


class Open(_Message, tag=2):
    """Create a round or attach to the one of that name."""

    shared_name: Text
    spec: Spec | None
    """None: attach to whatever it is."""
    create: bool
    """Whether the round is made if it is not there."""


class Close(_Message, tag=3):
    """Close a handle, or all handles of its round."""

    handle: Size
    for_all: bool


class Release(_Message, tag=4):
    """Forget handles that nobody can use any more. Has no reply."""

    handles: Ids


class Lend(_Message, tag=5):
    """Ask for a block of shared memory to write a gradient to."""

    handle: Size
    num_bytes: Size
    timeout: Seconds
    spare: Ids
    """Blocks that may be taken back for it."""


class Apply(_Message, tag=6):
    """Offer a gradient that lies in a block, or in the message."""

    handle: Size
    block: Size | None
    inline: bytes | None
    parts: Parts
    local_step: Int64 | None
    worker: Text | None
    sequence: Size | None
    weight: float
    timeout: Seconds


class Take(_Message, tag=7):
    """Wait for a round."""

    handle: Size
    number: Size
    """Of the take among those of this connection."""
    num_required: Int64
    timeout: Seconds
    exact: bool
    announce: bool
    """Whether to say `Queued` once it is in the queue, and `Detached` once it cannot be cancelled any more."""


class Cancel(_Message, tag=8):
    """End the take that this connection waits for, if it has not been decided. The take itself is answered."""


class Acknowledge(_Message, tag=9):
    """The result has arrived: the round is delivered."""

    reply: bool
    final: bool
    """Whether it cannot be lost any more: no `Retract` will follow."""


class Retract(_Message, tag=10):
    """The result was lost after all: the round is not delivered. Has no reply."""

    number: Size
    """Of the take. Another one's round stays delivered."""


class Ask(_Message, tag=11):
    """Ask for a number of the round, or for what a method without arguments returns: figures, arrivals, state."""

    handle: Size
    what: Annotated[str, Meta(max_length=32)]


class SetStep(_Message, tag=12):
    """Set the global step."""

    handle: Size
    step: Int64


class Publish(_Message, tag=13):
    """Publish a step."""

    handle: Size
    step: Int64 | None
    only_raise: bool


class WaitPublished(_Message, tag=14):
    """Wait until a step is published."""

    handle: Size
    step: Int64
    timeout: Seconds


class Member(_Message, tag=15):
    """A worker joins, leaves, or asks for its last sequence or how many of its gradients the open round holds."""

    handle: Size
    what: Annotated[str, Meta(max_length=32)]
    worker: Text


class Goodbye(_Message, tag=16):
    """The process ends in an orderly way: its handles are closed. Has no reply."""


class Observe(_Message, tag=17):
    """Record arrival times from now on."""

    handle: Size
    num_rounds: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None
    """None ends it."""


class LoadState(_Message, tag=18):
    """Put a state that lies in a block in the place of what the round holds. The block is no more afterwards."""

    handle: Size
    block: Size
    table_bytes: Size
    """At its beginning: see `states.py`."""


# What the server says


class Welcome(_Message, tag=32):
    """The connection belongs to this session."""

    version: int
    session: Token


class Opened(_Message, tag=33):
    """A handle on a round."""

    handle: Size
    engine_name: Text
    spec: Spec | None


class Lent(_Message, tag=34):
    """A block of shared memory; its descriptor follows."""

    block: Size
    num_bytes: Size
    freed: Ids
    reclaimed: Ids


class Judged(_Message, tag=35):
    """What became of a gradient."""

    status: Annotated[int, Meta(ge=0, le=15)]
    step: Int64
    lag: Annotated[int, Meta(ge=0)]
    """Between two steps of int64: below 2**64, as all that msgpack can say."""
    num_accumulated: Size
    first_status: Annotated[int, Meta(ge=0, le=15)] | None
    freed: Ids
    """Blocks that this connection may write to again."""
    reclaimed: Ids
    """Blocks that are no more."""


class Taken(_Message, tag=36):
    """A merged round, inline or in memory whose descriptor follows. It waits to be acknowledged."""

    parts: Parts
    num_bytes: Size
    inline: bytearray | None
    num_gradients: Size
    step: Int64
    workers: tuple[Text, ...]


class Withdrawn(_Message, tag=37):
    """The take was cancelled in time."""


class Number(_Message, tag=38):
    """The answer to most requests."""

    value: Int64


class Figures(_Message, tag=39):
    """What a message about a wait says."""

    have: Size
    step: Int64
    num_stale: Size


class Heartbeat(_Message, tag=40):
    """The reply is still to come."""


class Bye(_Message, tag=41):
    """The server has been closed in an orderly way."""


class Detached(_Message, tag=42):
    """The round is detached: its merge begins, and the result will come."""


class Queued(_Message, tag=43):
    """The take is in the queue."""


class Failure(_Message, tag=44):
    """An error, for the caller to raise."""

    error: Annotated[str, Meta(max_length=64)]
    message: Text
    numbers: dict[str, int | bool | None]
    left: tuple[Text, ...] = ()
    freed: Ids = ()


class Quorum(_Message):
    """What one quorum would have been like: see `arrivals.QuorumFigures`."""

    num_required: Size
    num_rounds: Size
    mean_wait: float
    longest_wait: float
    mean_dropped: float


class Arrivals(_Message, tag=45):
    """The report on arrival times."""

    num_rounds: Size
    quorums: Annotated[tuple[Quorum, ...], Meta(max_length=1024)]


class State(_Message, tag=46):
    """The state of a round, in memory whose descriptor follows."""

    num_bytes: Size
    table_bytes: Size


FROM_CLIENT = msgspec.msgpack.Decoder(
    Hello
    | Open
    | Close
    | Release
    | Lend
    | Apply
    | Take
    | Cancel
    | Acknowledge
    | Retract
    | Ask
    | SetStep
    | Publish
    | WaitPublished
    | Member
    | Goodbye
    | Observe
    | LoadState
)
FROM_SERVER = msgspec.msgpack.Decoder(
    Welcome
    | Opened
    | Lent
    | Judged
    | Taken
    | Withdrawn
    | Number
    | Figures
    | Heartbeat
    | Bye
    | Detached
    | Queued
    | Failure
    | Arrivals
    | State
)
encode = msgspec.msgpack.Encoder().encode
_ALWAYS_READ_BYTES = 1 << 14
"""Every request that is shorter keeps all caps: an inline gradient is, and no group of too many members."""


def encode_request(message: _Message) -> bytes:
    """Encode what a client says, if a server will read it: one that is sent what it will not ends the session.

    Raises:
        InvalidArgumentError: it is too long.
    """
    data = encode(message)
    if len(data) > _ALWAYS_READ_BYTES:
        try:
            if len(data) > MAX_MESSAGE_BYTES:
                raise msgspec.ValidationError(f"{len(data)} bytes")
            FROM_CLIENT.decode(data)
        except msgspec.ValidationError as error:
            raise InvalidArgumentError(
                f"{type(message).__name__}: expected names and workers of at most {MAX_TEXT_BYTES} bytes, at most "
                f"{MAX_MEMBERS} members, and at most {MAX_MESSAGE_BYTES} bytes in all, got more ({error}): nothing was "
                "sent to the server; take shorter names, or several groups"
            ) from None
    return data


def to_text(text: str) -> bytes:
    """Return a text as it travels."""
    return text.encode("utf-8", "surrogatepass")


def from_text(text: bytes) -> str:
    """Return a text that has travelled.

    Raises:
        UnicodeDecodeError: it is none (a ValueError).
    """
    return text.decode("utf-8", "surrogatepass")


def to_worker(worker: int | str) -> bytes:
    """Return a worker's identity as it travels: integers of any size, and apart from texts of digits."""
    return b"s" + to_text(worker) if isinstance(worker, str) else b"i%x" % worker


def from_worker(worker: bytes) -> int | str:
    """Return a worker's identity that has travelled.

    Raises:
        ValueError: it is none.
    """
    kind, rest = worker[:1], worker[1:]
    if kind == b"s":
        return from_text(rest)
    if kind != b"i":
        raise ValueError("a worker is an integer or a text")
    return int(rest, 16)


def check(condition: bool, words: str) -> None:
    """Refuse a message whose fields cannot be. Only a broken or hostile client sends one."""
    if not condition:
        raise InvalidArgumentError(f"message: {words}")
