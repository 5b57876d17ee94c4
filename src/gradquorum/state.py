"""A round as arrays by name, and back: what a checkpoint holds.

``"header"`` is JSON in uint8 (see `gradquorum.state_header`): the format's version, the spec in words, steps, counts,
marks, and who offered each gradient. ``"log.3.0.rows"`` and the like are the content of the block of the fourth
contribution of the open round for the first member (see `gradquorum.engine.parts`); in the same way there are
``"deferred.0.0."``, and ``"undelivered.1.0.0."`` for the first contribution of the second undelivered round. Everything
is plain NumPy, so any format for arrays can hold it.

What is decoded may come from anywhere: all of it is checked before anything is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.engine.parts import DenseParts, SparseParts
from gradquorum.errors import InvalidArgumentError
from gradquorum.marks import Marks, check_marks
from gradquorum.records import Batch, Contribution, Forms, Snapshot, WeighedContribution, conflict, either
from gradquorum.specs import MAX_BYTES, RoundSpec, SparseSpec
from gradquorum.state_checks import (
    by_name,
    check_accepted,
    check_deferred,
    check_offer,
    check_workers,
    num_gradients_of,
)

if TYPE_CHECKING:
    from gradquorum.state_header import ContributionHeader, Header

__all__ = ["decode", "encode"]

_HEADER = "header"

Worker = int | str


def encode(snapshot: Snapshot, spec: RoundSpec, reducers: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """Return a snapshot as arrays by name, all of them copies.

    Raises:
        InvalidArgumentError: a worker's name cannot be written.
        MemoryError: there is no room.
    """
    from gradquorum.state_header import BatchHeader, ContributionHeader, Header, MarksHeader, to_json

    def headers(log: Sequence[Contribution]) -> list[ContributionHeader]:
        return [ContributionHeader(c.forms, c.num_gradients, c.worker, c.sequence, c.lag) for c in log]

    header = Header(
        spec=spec.describe(),
        step=snapshot.step,
        published_step=snapshot.published_step,
        num_stale=snapshot.num_stale,
        log=headers(snapshot.log),
        accepted=list(snapshot.accepted.items()),
        deferred=headers(snapshot.deferred),
        undelivered=[
            BatchHeader(batch.step, tuple(batch.workers), headers(batch.contributions))
            for batch in snapshot.undelivered
        ],
        marks=[MarksHeader(worker, marks.highest, marks.window) for worker, marks in snapshot.marks.items()],
        members=list(snapshot.members.items()),
    )
    arrays = {_HEADER: np.frombuffer(to_json(header), np.uint8).copy()}
    undelivered = [batch.contributions for batch in snapshot.undelivered]
    for prefix, log in _logs(snapshot.log, snapshot.deferred, undelivered):
        for i, contribution in enumerate(log):
            for member, (reducer, block) in enumerate(zip(reducers, contribution.blocks, strict=True)):
                for part, array in reducer.export_block(block).to_arrays().items():
                    arrays[f"{prefix}.{i}.{member}.{part}"] = array
    return arrays


def decode(state: Mapping[str, Any], spec: RoundSpec, reducers: Sequence[Any]) -> Snapshot:
    """Check a state and return the snapshot that it is of, with blocks of these reducers.

    Raises:
        InvalidArgumentError: it is no state, or one of another spec.
        MemoryError: there is no room.
    """
    header = _header(state)
    if header.spec != spec.describe():
        raise InvalidArgumentError(f"state: expected one of {spec.describe()}, got one of {header.spec}")
    by_block = _grouped(state)
    undelivered = [batch.log for batch in header.undelivered]
    logs: dict[str, list[Contribution]] = {}
    for prefix, log in _logs(header.log, header.deferred, undelivered):
        logs[prefix] = [_contribution(f"{prefix}.{i}", one, by_block, spec, reducers) for i, one in enumerate(log)]
    if by_block:
        raise InvalidArgumentError(f"state: expected no arrays beside its gradients', got {next(iter(by_block))!r}")
    log, deferred = logs["log"], tuple(logs["deferred"])
    check_deferred(deferred, spec)
    _forms(deferred, spec)
    accepted = by_name("accepted", header.accepted)
    check_accepted(accepted, log, spec)
    return Snapshot(
        header.step,
        header.published_step,
        header.num_stale,
        log,
        num_gradients_of(log),
        _forms(log, spec),
        accepted,
        deferred,
        [
            _batch(batch.step, batch.workers, logs[f"undelivered.{i}"], spec)
            for i, batch in enumerate(header.undelivered)
        ],
        by_name("marks", [(marks.worker, check_marks(Marks(marks.highest, marks.window))) for marks in header.marks]),
        by_name("members", header.members),
    )


def _logs(log: Any, deferred: Any, undelivered: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each list of contributions with the prefix of its arrays' names."""
    yield "log", log
    yield "deferred", deferred
    for i, batch in enumerate(undelivered):
        yield f"undelivered.{i}", batch


def _header(state: Mapping[str, Any]) -> Header:
    from gradquorum.state_header import from_json

    array = state.get(_HEADER) if isinstance(state, Mapping) else None
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
        raise InvalidArgumentError(f"state: expected a mapping with {_HEADER!r} in uint8, as state_dict() returns it")
    return from_json(array.tobytes())


def _grouped(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the arrays by block and then by the name of the part."""
    grouped: dict[str, dict[str, Any]] = {}
    for name, array in state.items():
        if name == _HEADER:
            continue
        words = name.split(".") if isinstance(name, str) else []
        length = 4 if words and words[0] == "undelivered" else 3
        grouped.setdefault(".".join(words[:length]), {})[".".join(words[length:])] = array
    return grouped


def _contribution(
    where: str,
    header: ContributionHeader,
    by_block: dict[str, dict[str, Any]],
    spec: RoundSpec,
    reducers: Sequence[Any],
) -> Contribution:
    """Return a contribution, and take its arrays out of the mapping."""
    if len(header.forms) != len(spec.members):
        raise InvalidArgumentError(f"state: {where}: expected {len(spec.members)} members, got {len(header.forms)}")
    check_offer(where, header, spec)
    blocks = []
    for i, (member, reducer_spec) in enumerate(zip(spec.members.values(), spec.reducer_specs(), strict=True)):
        arrays, form = by_block.pop(f"{where}.{i}", {}), header.forms[i]
        kind = SparseParts if isinstance(member, SparseSpec) else DenseParts
        try:
            size = None if form is None else _num_elements(form, reducer_spec.dtype.itemsize)
            parts = kind.from_arrays(arrays, reducer_spec, size, header.num_gradients)
            if isinstance(parts, SparseParts):
                _check_rows(member.shape, parts)
            blocks.append(reducers[i].import_block(parts, header.num_gradients))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"state: {where}.{i}: {error}") from error
    kind_of = WeighedContribution if spec.policy.weighs else Contribution
    made = kind_of(
        tuple(blocks),
        header.forms,
        sum(block.num_bytes for block in blocks),
        header.worker,
        header.sequence,
        num_gradients=header.num_gradients,
    )
    if isinstance(made, WeighedContribution):
        made.lag, made.vanishes = header.lag, False
    return made


def _num_elements(form: tuple[int, ...], item_bytes: int) -> int:
    size = math.prod(form)
    if size * max(item_bytes, 8) > MAX_BYTES:
        raise InvalidArgumentError(f"expected rows of less than 2**63 bytes, got {form}")
    return size


def _check_rows(declared: tuple[int | None, ...], parts: SparseParts) -> None:
    rows = declared[0] if declared else None
    if rows is not None and len(parts.indices) and parts.indices[-1] >= rows:
        raise InvalidArgumentError(f"indices: expected ids below {rows}, got {parts.indices[-1]}")


def _batch(step: int, workers: tuple[Worker, ...], log: list[Contribution], spec: RoundSpec) -> Batch:
    if not log:
        raise InvalidArgumentError("state: expected gradients in an undelivered round")
    check_workers(workers, log, spec)
    num_bytes = sum(contribution.num_bytes for contribution in log)
    return Batch(log, _forms(log, spec), num_gradients_of(log), num_bytes, step, 0, workers, {})


def _forms(log: Sequence[Contribution], spec: RoundSpec) -> Forms:
    """Return the row shapes of a log, which agree with each other and with what was declared."""
    forms: Forms = (None,) * len(spec.members)
    for contribution in log:
        if conflict(forms, contribution.forms) is not None:
            raise InvalidArgumentError("state: expected gradients of one row shape")
        forms = either(forms, contribution.forms)
    for form, member in zip(forms, spec.members.values(), strict=True):
        declared = member.shape[1:] if isinstance(member, SparseSpec) else member.shape
        if form is None or not member.shape:
            continue
        known = form[: len(declared)]
        if len(form) < len(declared) or any(d not in (None, f) for d, f in zip(declared, known, strict=True)):
            raise InvalidArgumentError(f"state: expected rows of the declared shape {declared}, got {form}")
    return forms
