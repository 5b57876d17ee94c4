"""What the server does for each request.

Nothing that a client says is trusted: sizes are compared with memory that the server made, ids are copied before they
are checked, and values, which may change at any moment, are only added.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gradquorum.arrivals import arrival_report
from gradquorum.dtypes import round_weight
from gradquorum.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError
from gradquorum.membership import Worker
from gradquorum.receipts import ApplyReceipt
from gradquorum.specs import SparseSpec
from gradquorum.state_header import check_worker_can_be_saved
from gradquorum.targets.host import RoundHost
from gradquorum.targets.interface import Terms
from gradquorum.targets.process import messages as m
from gradquorum.targets.process.channel import HEARTBEAT_SECONDS, BrokenChannel
from gradquorum.targets.process.hosted import HostedRound
from gradquorum.targets.process.parts import LEND_FROM_BYTES, arrays_of, is_lent, late_error_of
from gradquorum.targets.process.receipts import to_judged
from gradquorum.targets.process.specs import from_spec, to_spec
from gradquorum.targets.process.states import pack, unpack
from gradquorum.validation import CheckedDense, CheckedSparse, check_dense, check_sparse, empty_sparse, plain_sparse
from gradquorum.waiters import Deadline, Handle

if TYPE_CHECKING:
    from gradquorum.targets.process.link import Link

__all__ = ["ANSWERS"]

_MAX_LENT = 8
"""So many blocks of one connection may be lent to rounds; further gradients are copied."""
_LOOK_FOR_ROOM_SECONDS = 0.05
_SETTLE_SECONDS = 0.01


class _Slice(Deadline):
    """A deadline that comes early, so that a waiting thread can look after its connection, and tells the real one."""

    __slots__ = ("whole",)

    def __init__(self, whole: Deadline) -> None:
        super().__init__(whole.timeout)
        self.whole = whole
        self.at = min(whole.at, time.monotonic() + HEARTBEAT_SECONDS)


def _in_slices(link: Link, timeout: float | None, call: Callable[[Deadline], Any]) -> Any:
    """Make a call that waits, and end it when the client is gone."""
    deadline = Deadline(timeout)
    while True:
        try:
            return call(_Slice(deadline))
        except DeadlineExceededError:
            if deadline.passed:
                raise
        if link.channel.at_end:
            raise BrokenChannel("the client has given up")


# Handles


def _open(link: Link, message: m.Open) -> m.Opened:
    spec = None if message.spec is None else from_spec(message.spec)
    hosted, handle = link.server.rounds.open(m.from_text(message.shared_name), spec, create=message.create)
    number = link.session.add(hosted, handle)
    found = to_spec(hosted.spec) if spec is None else None
    return m.Opened(number, m.to_text(hosted.host.engine_name), found)


def _close(link: Link, message: m.Close) -> m.Number:
    hosted, handle = link.session.get(message.handle)
    return m.Number(link.server.rounds.close(hosted, handle, for_all=message.for_all))


def _release(link: Link, message: m.Release) -> None:
    for number in message.handles:
        link.session.release(number)


# Applies


def _lend(link: Link, message: m.Lend) -> tuple[m.Lent, int]:
    hosted, handle = link.session.get(message.handle)
    link.blocks.drop(message.spare)
    m.check(message.num_bytes > 0, "expected a block of at least one byte")
    _wait_for_room(link, hosted, handle, message.num_bytes, Deadline(message.timeout))
    mapping, descriptor = link.server.memory.make(message.num_bytes)
    return m.Lent(link.blocks.add(mapping), message.num_bytes, link.blocks.freed(), link.blocks.reclaimed()), descriptor


def _wait_for_room(link: Link, hosted: HostedRound, handle: Handle, num_bytes: int, deadline: Deadline) -> None:
    """Wait until the server may hold so much more, if the round's spec says that one waits."""
    most = link.server.max_bytes
    if most is None:
        return
    look_at = time.monotonic() + HEARTBEAT_SECONDS
    while link.server.held_bytes + num_bytes > most:
        link.server.reclaim()
        held = link.server.held_bytes
        if held + num_bytes <= most:
            return
        if link.server.is_settling:  # a round that has arrived, and may still be given back, frees memory soon
            link.server.wait(_SETTLE_SECONDS)
            continue
        why = None
        if hosted.spec.options.on_full != "block":
            why = "take the round first, or use on_full='block'"
        elif num_bytes > most:
            why = "no take can make room for it"
        elif not any(other.held_bytes for other in link.server.rounds.all()):
            why = "no take can free memory: nothing is accumulated"
        elif (stuck := hosted.round.why_stuck()) is not None:
            why = f"no take can free memory: {stuck}"
        figures = f"the server holds {held} of max_bytes={most} bytes and the gradient needs {num_bytes}"
        if why is not None:
            raise ResourceExhaustedError(
                f"no room for the gradient: {figures}; {why}", needed_bytes=num_bytes, held_bytes=held, max_bytes=most
            )
        if deadline.passed:
            raise DeadlineExceededError(
                f"apply: no room within {deadline.timeout} s: {figures}", have=held, need=num_bytes
            )
        hosted.round.num_accumulated(handle)  # raises when the handle is closed
        link.server.wait(deadline.left(_LOOK_FOR_ROOM_SECONDS))
        if time.monotonic() > look_at:
            look_at += HEARTBEAT_SECONDS
            if link.channel.at_end:
                raise BrokenChannel("the client has given up")


def _apply(link: Link, message: m.Apply) -> m.Judged:
    receipt = _judge(link, message)  # what it read has died by now, unless it is lent
    if receipt.lent and message.block is not None:
        link.blocks.mark_lent(message.block)
    return to_judged(receipt, link.blocks.freed(), link.blocks.reclaimed())


def _judge(link: Link, message: m.Apply) -> ApplyReceipt:
    hosted, handle = link.session.get(message.handle)
    worker: Worker | None = None
    if message.worker is not None:
        worker = _worker(hosted, message.worker)
    else:
        m.check(not hosted.needs_worker, "expected a worker")
        m.check(message.sequence is None, "expected a worker beside the sequence")
    for dtype in hosted.weight_dtypes:
        rounded = round_weight(message.weight, dtype)
        m.check(math.isfinite(rounded) and rounded > 0, "expected a finite weight above 0")
    if message.block is not None:
        memory = link.blocks.read(message.block)
    else:
        memory = np.frombuffer(message.inline or b"", np.uint8)
    lend = (
        message.block is not None
        and len(memory) >= LEND_FROM_BYTES
        and link.blocks.num_in_use <= _MAX_LENT
        and is_lent(hosted.members, message.parts)
    )
    terms = Terms(message.local_step, worker, message.sequence, message.weight, lend, message.timeout)
    if (
        hosted.is_plain
        and (lend or link.server.max_bytes is None)
        and (worker is None or link.session.has_joined(hosted, worker))
        and len(message.parts) == 1
    ):  # there is nothing to wait for: check and apply in one go
        part = message.parts[0]
        if part.num_rows is not None and part.shape is not None and part.late_error is None:
            plain: ApplyReceipt | None = hosted.host.apply_plain(handle, memory, part.num_rows, terms, part.shape)
            if plain is not None:
                return plain
    arrays = arrays_of(memory, hosted.members, message.parts)
    gradients = _gradients(hosted, arrays, message.parts)
    if not lend:
        _wait_for_room(link, hosted, handle, memory.nbytes, Deadline(message.timeout))
    if worker is not None:
        link.session.join(hosted, worker)
    host: RoundHost = hosted.host
    if hosted.spec.options.on_full != "block":
        return host.apply(handle, gradients, terms)
    receipt: ApplyReceipt = _in_slices(
        link, message.timeout, lambda deadline: host.apply(handle, gradients, terms, deadline)
    )
    return receipt


def _worker(hosted: HostedRound, identity: bytes) -> Worker:
    """Return a worker's identity; one that no checkpoint can hold is refused where there will be some."""
    worker = m.from_worker(identity)
    if hosted.file is not None:
        check_worker_can_be_saved(worker)
    return worker


def _gradients(hosted: HostedRound, views: list[Any], parts: tuple[m.Part, ...]) -> list[CheckedSparse | CheckedDense]:
    """Return a gradient, checked as if it had been offered in this process."""
    arrays = iter(views)
    gradients: list[CheckedSparse | CheckedDense] = []
    gradient: CheckedSparse | CheckedDense
    for name, spec, part in zip(hosted.names, hosted.members, parts, strict=True):
        where = f"{name}: " if name else ""
        late = late_error_of(part)
        if isinstance(spec, SparseSpec):
            if part.shape is None or late is not None:
                gradient = empty_sparse(spec)._replace(row_shape=part.shape, late_error=late)
            else:
                gradient = _sparse(spec, where, next(arrays), next(arrays))
        elif part.shape is None:
            gradient = CheckedDense(None)
        elif late is not None:
            gradient = CheckedDense(np.broadcast_to(spec.dtype.type(0), part.shape), False, late)
        else:
            gradient = check_dense(spec, where, next(arrays))
        gradients.append(gradient)
    return gradients


def _sparse(spec: SparseSpec, where: str, indices: Any, values: Any) -> CheckedSparse:
    """Check a sparse gradient. The client has done so; an honest one goes the short way."""
    ids = indices.copy()  # from here on the client cannot change them
    return plain_sparse(spec, ids, values) or check_sparse(spec, where, ids, values)[0]


# Takes


def _take(link: Link, message: m.Take) -> Any:
    hosted, handle = link.session.get(message.handle)
    m.check(message.num_required > 0, "num_required must be positive")
    m.check(not (message.exact and hosted.spec.options.compact), "exact=True: expected compact=False, got True")
    return link.taking.take(hosted, handle, message)


def _cancel(link: Link, message: m.Cancel) -> None:
    """Do nothing: the take has been answered already."""


def _acknowledge(link: Link, message: m.Acknowledge) -> m.Number | None:
    link.taking.acknowledge(final=message.final)
    return m.Number(0) if message.reply else None


def _retract(link: Link, message: m.Retract) -> None:
    link.taking.retract(message.number)


# All the rest is the round's own


_NUMBERS: dict[str, Callable[[HostedRound, Handle], int]] = {
    "num_accumulated": lambda hosted, handle: hosted.round.num_accumulated(handle),
    "global_step": lambda hosted, handle: hosted.round.step,
    "published_step": lambda hosted, handle: hosted.round.publication.step,
    "num_workers": lambda hosted, handle: hosted.round.num_workers,
    "num_undelivered": lambda hosted, handle: hosted.round.num_undelivered,
    "num_deferred": lambda hosted, handle: hosted.round.num_deferred,
    "discard": lambda hosted, handle: hosted.round.discard(handle),
    "closed": lambda hosted, handle: int(handle.closed),
}


def _ask(link: Link, message: m.Ask) -> Any:
    hosted, handle = link.session.get(message.handle)
    if message.what == "figures":
        return m.Figures(*hosted.round.figures())
    if message.what == "arrivals":
        report = arrival_report(hosted.round.arrival_times(handle))
        return m.Arrivals(report.num_rounds, tuple(m.Quorum(*figures) for figures in report.quorums))
    if message.what == "state":
        return pack(hosted.host.state(handle), link.server.memory)
    number = _NUMBERS.get(message.what)
    if number is None:
        raise InvalidArgumentError(f"expected one of {sorted(_NUMBERS)}, got {message.what!r}")
    return m.Number(number(hosted, handle))


def _set_step(link: Link, message: m.SetStep) -> m.Number:
    hosted, handle = link.session.get(message.handle)
    return m.Number(hosted.round.set_step(handle, message.step))


def _publish(link: Link, message: m.Publish) -> m.Number:
    hosted, handle = link.session.get(message.handle)
    return m.Number(hosted.round.publish(handle, message.step, only_raise=message.only_raise))


def _wait_published(link: Link, message: m.WaitPublished) -> m.Number:
    hosted, handle = link.session.get(message.handle)
    wait = hosted.round.publication.wait
    return m.Number(_in_slices(link, message.timeout, lambda deadline: wait(handle, message.step, deadline)))


def _member(link: Link, message: m.Member) -> m.Number:
    hosted, handle = link.session.get(message.handle)
    worker = _worker(hosted, message.worker)
    if message.what == "join":
        hosted.round.num_accumulated(handle)  # raises when the handle is closed
        link.session.join(hosted, worker)
        hosted.round.join(handle, worker)
        return m.Number(0)
    if message.what == "leave":
        link.session.leave(hosted, worker)
        return m.Number(0)
    if message.what == "num_accepted":
        return m.Number(hosted.round.num_accepted(handle, worker))
    m.check(message.what == "last_sequence", "expected 'join', 'leave', 'last_sequence' or 'num_accepted'")
    return m.Number(hosted.round.last_sequence(handle, worker))


def _observe(link: Link, message: m.Observe) -> m.Number:
    hosted, handle = link.session.get(message.handle)
    hosted.round.observe(handle, message.num_rounds)
    return m.Number(0)


def _load_state(link: Link, message: m.LoadState) -> m.Number:
    hosted, handle = link.session.get(message.handle)
    state = unpack(link.blocks.take_back(message.block), message.table_bytes)
    hosted.host.load_state(handle, state)
    return m.Number(0)


ANSWERS: dict[type, Callable[[Any, Any], Any]] = {
    m.Open: _open,
    m.Close: _close,
    m.Release: _release,
    m.Lend: _lend,
    m.Apply: _apply,
    m.Take: _take,
    m.Cancel: _cancel,
    m.Acknowledge: _acknowledge,
    m.Retract: _retract,
    m.Ask: _ask,
    m.SetStep: _set_step,
    m.Publish: _publish,
    m.WaitPublished: _wait_published,
    m.Member: _member,
    m.Observe: _observe,
    m.LoadState: _load_state,
}
"""A reply, a reply and a descriptor that follows it, or None. A second Hello has no answer: it ends the connection."""
