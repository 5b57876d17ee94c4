"""Specs of rounds as messages and as text, and back."""

from __future__ import annotations

import msgspec
import numpy as np

from gradquorum.engine import available_engines
from gradquorum.errors import InvalidArgumentError
from gradquorum.specs import DenseSpec, Options, RoundSpec, SparseSpec
from gradquorum.staleness import from_words, to_words
from gradquorum.targets.process.messages import MemberSpec, Spec, from_text, to_text

__all__ = ["from_json", "from_spec", "to_json", "to_spec"]


def to_spec(spec: RoundSpec) -> Spec:
    """Return the spec of a round as it travels.

    Raises:
        InvalidArgumentError: it weighs late gradients by a function of the user's.
    """
    members = tuple(
        MemberSpec(
            to_text(name),
            isinstance(member, SparseSpec),
            to_text(member.dtype.name),
            member.shape,
            to_text(member.reduction_type),
        )
        for name, member in spec.members.items()
    )
    options = spec.options._asdict()
    staleness = to_words(options.pop("staleness"))
    words = {name: value.name if isinstance(value, np.dtype) else value for name, value in options.items()}
    return Spec(to_text(spec.kind), members, words, staleness)


def from_spec(spec: Spec) -> RoundSpec:
    """Return the spec of a round that has travelled, checked as that of a local one is.

    Raises:
        InvalidArgumentError: there can be no such round.
    """
    unknown = set(spec.options) - (set(Options._fields) - {"staleness"})
    if unknown:
        raise InvalidArgumentError(f"options: expected those of this release, got {sorted(unknown)}")
    if not spec.members:
        raise InvalidArgumentError("members: expected at least one")
    members: dict[str, SparseSpec | DenseSpec] = {}
    for member in spec.members:
        kind = SparseSpec if member.sparse else DenseSpec
        reduction = from_text(member.reduction_type)
        members[from_text(member.name)] = kind(from_text(member.dtype), member.shape, reduction)
    return RoundSpec(from_text(spec.kind), members, Options(staleness=from_words(spec.staleness), **spec.options))


def to_json(spec: RoundSpec) -> str | None:
    """Return the spec of a round as text for a file; None if it weighs late gradients by a function of the user's."""
    try:
        return msgspec.json.encode(to_spec(spec)).decode()
    except InvalidArgumentError:
        return None


def from_json(text: str) -> RoundSpec:
    """Return the spec that `to_json` has written; an engine that is not here, which gave the same bits, is left out.

    Raises:
        InvalidArgumentError: it is none, or there can be no such round.
    """
    try:
        spec = msgspec.json.decode(text, type=Spec)
        if spec.options.get("engine") not in available_engines():
            spec.options.pop("engine", None)
        return from_spec(spec)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidArgumentError(f"spec: expected that of a round: {error}") from error
