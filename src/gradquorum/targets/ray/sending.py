"""The worker's side of an apply: repeats are merged, rows go to their shards, and then the gradient is offered."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradquorum.engine import ReducerSpec, get_engine
from gradquorum.engine.splitting import PackedRows, values_at
from gradquorum.errors import UnavailableError, no_memory
from gradquorum.receipts import ApplyReceipt
from gradquorum.specs import RoundSpec, SparseSpec
from gradquorum.targets.host import make_reducers
from gradquorum.targets.interface import Terms
from gradquorum.targets.ray.client import Client
from gradquorum.targets.ray.records import Failure, Judged, Key, Offer, OfferedContent, OfferedPart, Part, Void
from gradquorum.targets.ray.splitting import dense_shard
from gradquorum.targets.ray.wire import pack_offers, pack_rows, unpack_judged
from gradquorum.validation import CheckedDense, CheckedGradient, CheckedSparse

__all__ = ["Prepared", "Sender"]

_MAX_PLAIN_COPY = 1 << 20
"""Bytes of a buffer that Ray copies as `memcpy` does (kMemcopyDefaultThreshold of its serialization)."""


class Prepared(NamedTuple):
    """One gradient, ready to be sent."""

    offer: Offer
    parts: Mapping[int, Mapping[int, Part]]
    """By shard and member."""


class Sender:
    """Sends the gradients of one handle. Nothing here changes after `__init__`."""

    def __init__(self, client: Client, number: int, spec: RoundSpec) -> None:
        self._client = client
        self._number = number
        self._members = tuple(spec.members.values())
        self._judges = make_reducers(spec) if spec.options.on_nonfinite != "keep" else None
        engine = get_engine(spec.options.engine)
        self._split = engine.split
        self._mergers = [
            engine.sparse_reducer(ReducerSpec(reducer.dtype, reducer.dtype, "SUM", reducer.num_threads))
            # What is added up in a wider dtype must not be rounded on its way: the shard merges its repeats.
            if isinstance(member, SparseSpec) and reducer.dtype == reducer.accumulate_dtype
            else None
            for member, reducer in zip(self._members, spec.reducer_specs(), strict=True)
        ]

    def apply(self, gradients: CheckedGradient, terms: Terms) -> ApplyReceipt:
        """Offer a gradient. Nothing is lent: the caller may write to its arrays at once.

        Args:
            gradients: checked, one part for each member.
            terms: that go with it.

        Raises:
            GradQuorumError: what a local apply raises.
            UnavailableError: the round was void: names what is lost of this worker, and this gradient has not counted,
                unless `outcome_known` is False.
        """
        return self.insist(self.prepare(gradients, terms), threading.get_ident())

    def insist(self, prepared: Prepared, thread: int) -> ApplyReceipt:
        """Offer a gradient that has not been offered yet, for a thread; raises like `apply`."""
        from ray.exceptions import RayError

        client, terms = self._client, prepared.offer.terms
        while True:
            client.check()
            seen = client.incarnation  # before the look at losses: what its beginning cost must have been reported
            client.losses.report(client.reason, terms.worker)
            if terms.worker is not None:
                client.join(terms.worker)
            try:
                answer = client.get(self.send(seen, [prepared]))
            except RayError as error:
                client.resume(seen, error)
                client.losses.report(client.reason, terms.worker, outcome_known=False)
                if terms.sequence is None:
                    raise UnavailableError(
                        f"a call was lost, as {client.reason or error}; whether the gradient counted is not known",
                        outcome_known=False,
                    ) from error
            else:
                if type(answer) is not Void:
                    return self.receipt(terms, unpack_judged(answer)[0], thread, seen)
                client.resume(seen)
            prepared = self.renewed(prepared)

    def receipt(self, terms: Terms, judged: Judged | Failure, thread: int, seen: int) -> ApplyReceipt:
        """Return what the answer to an offer of an incarnation says, or raise it."""
        if isinstance(judged, Failure):
            raise judged.error
        self._client.losses.note(terms, judged, thread, seen)
        return judged.receipt

    def send(self, seen: int, prepared: Sequence[Prepared]) -> Any:
        """Put the rows of gradients on their shards and offer them; return the call that brings the answers.

        Ray makes the offer when the shards have answered. What they are sent is copied before this returns.
        """
        client = self._client
        held = []
        for shard, actor in enumerate(client.shards):
            items = [(one.offer.key, one.parts[shard]) for one in prepared if shard in one.parts]
            if items:
                held.append(actor.put.remote(seen, client.token, *pack_rows(items)))
        offers = pack_offers([one.offer for one in prepared])
        return client.coordinator.offer.remote(client.token, seen, self._number, offers, *held)

    def prepare(self, gradients: CheckedGradient, terms: Terms, *, keep: bool = False) -> Prepared:
        """Return a gradient as it is offered and sent; with `keep` none of that is the caller's memory.

        Raises:
            ResourceExhaustedError: there is no memory for it. Nothing has changed.
        """
        try:
            return self._prepared(gradients, terms, keep)
        except MemoryError as error:
            raise no_memory(error) from error

    def renewed(self, prepared: Prepared) -> Prepared:
        """Return a gradient to be offered again: a key is used once."""
        offer, key = prepared.offer, self._new_key()
        told = tuple([part._replace(content=part.content._replace(key=key)) for part in offer.parts])
        return prepared._replace(offer=offer._replace(key=key, parts=told))

    def _new_key(self) -> Key:
        return self._client.token, self._client.new_number()

    def _prepared(self, gradients: CheckedGradient, terms: Terms, keep: bool) -> Prepared:
        key = self._new_key()
        offered: tuple[tuple[int | str, int], ...] = ()
        if terms.worker is not None and terms.sequence is not None:
            offered = ((terms.worker, terms.sequence),)
        parts: dict[int, dict[int, Part]] = {}
        told = []
        for member, gradient in enumerate(gradients):
            num_bytes, finite, where = 0, True, []
            if gradient.late_error is None:
                finite = self._is_finite(member, gradient)
                num_bytes, sent = self._parts(member, gradient, keep)
                where = [shard for shard, _ in sent]
                for shard, part in sent:
                    parts.setdefault(shard, {})[member] = part
            content = OfferedContent(key, tuple(where), num_bytes, finite, gradient.row_shape, offered)
            told.append(OfferedPart(content, False, gradient.late_error, gradient.row_shape))
        return Prepared(Offer(key, tuple(parts), tuple(told), terms), parts)

    def _is_finite(self, member: int, gradient: CheckedSparse | CheckedDense) -> bool:
        """Judge a gradient as it is after its repeats are merged, in the wide type."""
        if self._judges is None:
            return True
        values = gradient[:2] if isinstance(gradient, CheckedSparse) else gradient[:1]
        finite: bool = self._judges[member].block(*values, lend=True, check_finite=True).finite
        return finite

    def _parts(
        self, member: int, gradient: CheckedSparse | CheckedDense, keep: bool
    ) -> tuple[int, list[tuple[int, Part]]]:
        """Return the bytes of a member, and what is sent of it to the shards that hold any."""
        num_shards = len(self._client.shards)
        if not isinstance(gradient, CheckedSparse):
            value = gradient.value
            if value is None:
                return 0, []
            own = value.copy() if keep and gradient.borrowed else value
            return value.nbytes, [(dense_shard(member, num_shards), Part(None, value.shape, _buffers(own)))]
        indices, values = self._merged(member, gradient)
        num_bytes, shape = indices.nbytes + values.nbytes, values.shape[1:]
        values = np.ascontiguousarray(values)
        is_lent = values is gradient.values and gradient.borrowed
        if num_shards == 1 and len(values) and values.nbytes and not (keep and is_lent):
            return num_bytes, [(0, Part(len(indices), shape, (indices, *_buffers(values))))]
        split = self._split(indices, values, num_shards, self._client.bounds)
        packed = [(shard, Part(rows.num_rows, shape, _pieces(rows))) for shard, rows in enumerate(split)]
        return num_bytes, [(shard, part) for shard, part in packed if part.num_rows]

    def _merged(self, member: int, gradient: CheckedSparse) -> tuple[Any, Any]:
        """Return ids and values with the ids ascending and each once, where that loses nothing."""
        indices, values, merger = gradient.indices, gradient.values, self._mergers[member]
        if merger is None or gradient.row_shape is None or len(indices) < 2 or (indices[1:] > indices[:-1]).all():
            return indices, values
        merged = merger.merge([merger.block(indices, values, lend=True)], gradient.row_shape, 1)
        return merged[:2]


def _pieces(rows: PackedRows) -> tuple[Any, ...]:
    """Return ids and values apart if together they are of those buffers that Ray copies by starting six threads."""
    if len(rows.memory) <= _MAX_PLAIN_COPY:
        return (rows.memory,)
    memory = memoryview(rows.memory)
    return memory[: values_at(rows.num_rows)], memory[values_at(rows.num_rows) :]


def _buffers(values: NDArray[Any]) -> tuple[Any, ...]:
    """Return the bytes of an array, which need not be of a dtype that has a format; nothing of no elements."""
    return (np.ascontiguousarray(values).reshape(-1).view(np.uint8),) if values.size else ()
