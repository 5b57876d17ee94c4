"""The form of the JSON header of a saved round. Loaded on first use, because of msgspec."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gradquorum.errors import InvalidArgumentError

__all__ = [
    "VERSION",
    "BatchHeader",
    "ContributionHeader",
    "Header",
    "MarksHeader",
    "check_worker_can_be_saved",
    "from_json",
    "to_json",
]

VERSION = 1
"""Raised when what is saved changes so that an older release would misread it."""

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Worker = int | str
Form = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)] | None


class ContributionHeader(msgspec.Struct, forbid_unknown_fields=True):
    """One gradient, or a merged prefix of a log."""

    forms: tuple[Form, ...]
    num_gradients: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] = 1
    worker: Worker | None = None
    sequence: Count | None = None
    lag: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Between two steps of int64: below 2**64."""


class BatchHeader(msgspec.Struct, forbid_unknown_fields=True):
    """A detached round."""

    step: Int64
    workers: tuple[Worker, ...]
    log: list[ContributionHeader]


class MarksHeader(msgspec.Struct, forbid_unknown_fields=True):
    """What is known of a worker's sequences."""

    worker: Worker
    highest: Count
    window: bytes


class Header(msgspec.Struct, forbid_unknown_fields=True):
    """All of a round but the content of its blocks."""

    spec: str
    step: Int64
    published_step: Int64
    num_stale: Count
    log: list[ContributionHeader]
    accepted: list[tuple[Worker, Count]]
    deferred: list[ContributionHeader]
    undelivered: list[BatchHeader]
    marks: list[MarksHeader]
    members: list[tuple[Worker, bool]]
    version: int = VERSION


def check_worker_can_be_saved(worker: Worker) -> None:
    """Check that a header can hold the identity of a worker.

    Raises:
        InvalidArgumentError: it cannot.
    """
    try:
        msgspec.json.encode(worker)
    except ValueError as error:
        raise InvalidArgumentError(
            f"worker: expected one that JSON can hold, as this server keeps checkpoints: {error}"
        ) from error


class _Version(msgspec.Struct):
    version: int


def to_json(header: Header) -> bytes:
    """Return the header as JSON.

    Raises:
        InvalidArgumentError: a worker's name cannot be written.
    """
    try:
        return msgspec.json.encode(header)
    except ValueError as error:
        raise InvalidArgumentError(f"state: expected workers that JSON can hold: {error}") from error


def from_json(text: bytes) -> Header:
    """Return the header that JSON holds.

    Raises:
        InvalidArgumentError: it is no header, or one of another version.
    """
    try:
        version = msgspec.json.decode(text, type=_Version).version
        if version != VERSION:
            raise InvalidArgumentError(f"state: expected version {VERSION}, got {version}: it is of another release")
        return msgspec.json.decode(text, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"state: expected the header of a saved round: {error}") from error
