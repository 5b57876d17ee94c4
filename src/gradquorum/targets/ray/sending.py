"""The worker's side of an apply: repeats are merged, rows go to their shards, and then the gradient is offered."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from gradquorum.engine import ReducerSpec, get_engine
from gradquorum.errors import UnavailableError, no_memory
from gradquorum.receipts import ApplyReceipt
from gradquorum.specs import RoundSpec, SparseSpec
from gradquorum.targets.host import make_reducers
from gradquorum.targets.interface import Terms
from gradquorum.targets.ray.client import Client
from gradquorum.targets.ray.records import Failure, Judged, Offer, OfferedContent, OfferedPart, Rows, Void
from gradquorum.targets.ray.splitting import dense_shard, split
from gradquorum.targets.ray.wire import pack_offers, pack_rows, unpack_judged
from gradquorum.validation import CheckedDense, CheckedGradient, CheckedSparse

__all__ = ["Sender"]

Parts = dict[int, dict[int, Rows]]
"""By shard and member."""


class Sender:
    """Sends the gradients of one handle. Nothing here changes after `__init__`."""

    def __init__(self, client: Client, number: int, spec: RoundSpec) -> None:
        self._client = client
        self._number = number
        self._members = tuple(spec.members.values())
        self._judges = make_reducers(spec) if spec.options.on_nonfinite != "keep" else None
        engine = get_engine(spec.options.engine)
        self._mergers = [
            engine.sparse_reducer(ReducerSpec(reducer.dtype, reducer.dtype, "SUM", reducer.num_threads))
            # What is added up in a wider dtype must not be rounded on its way: the shard merges its repeats.
            if isinstance(member, SparseSpec) and reducer.dtype == reducer.accumulate_dtype
            else None
            for member, reducer in zip(self._members, spec.reducer_specs(), strict=True)
        ]

    def apply(self, gradients: CheckedGradient, terms: Terms, thread: int | None = None) -> ApplyReceipt:
        """Offer a gradient. Nothing is lent: the caller may write to its arrays at once.

        Args:
            gradients: checked, one part for each member.
            terms: that go with it.
            thread: for which this is done; None for the one that calls.

        Raises:
            GradQuorumError: what a local apply raises.
            UnavailableError: the round was void: names what is lost of this worker, and this gradient has not counted,
                unless `outcome_known` is False.
        """
        from ray.exceptions import RayError

        client = self._client
        try:
            offer, parts = self.prepare(gradients, terms)
        except MemoryError as error:
            raise no_memory(error) from error
        thread = thread or threading.get_ident()
        while True:
            client.check()
            seen = client.incarnation  # before the look at losses: what its beginning cost must have been reported
            client.losses.report(client.reason, terms.worker)
            if terms.worker is not None:
                client.join(terms.worker)
            try:
                answer = client.get(self.send(seen, [(offer, parts)]))
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
            offer, parts = self.prepare(gradients, terms)  # a key is used once

    def receipt(self, terms: Terms, judged: Judged | Failure, thread: int, seen: int) -> ApplyReceipt:
        """Return what the answer to an offer of an incarnation says, or raise it."""
        if isinstance(judged, Failure):
            raise judged.error
        self._client.losses.note(terms, judged, thread, seen)
        return judged.receipt

    def send(self, seen: int, prepared: Sequence[tuple[Offer, Parts]]) -> Any:
        """Put the rows of gradients on their shards and offer them; return the call that brings the answers.

        Ray makes the offer when the shards have answered. What they are sent is copied before this returns.
        """
        client = self._client
        held = []
        for shard, actor in enumerate(client.shards):
            items = [(offer.key, parts[shard]) for offer, parts in prepared if shard in parts]
            if items:
                held.append(actor.put.remote(seen, client.token, *pack_rows(items)))
        offers = pack_offers([offer for offer, _ in prepared])
        return client.coordinator.offer.remote(client.token, seen, self._number, offers, *held)

    def prepare(self, gradients: CheckedGradient, terms: Terms) -> tuple[Offer, Parts]:
        """Return a gradient as it is offered, and the rows of each shard."""
        client = self._client
        key = (client.token, client.new_number())
        offered: tuple[tuple[int | str, int], ...] = ()
        if terms.worker is not None and terms.sequence is not None:
            offered = ((terms.worker, terms.sequence),)
        parts: Parts = {}
        told = []
        for member, gradient in enumerate(gradients):
            num_bytes, finite = 0, True
            rows: list[Rows | None] = []
            if gradient.late_error is None:
                finite = self._is_finite(member, gradient)
                rows = self._rows(member, gradient)
            for shard, part in enumerate(rows):
                if part is not None:
                    parts.setdefault(shard, {})[member] = part
                    num_bytes += part.values.nbytes + (0 if part.indices is None else part.indices.nbytes)
            where = tuple([shard for shard, part in enumerate(rows) if part is not None])
            content = OfferedContent(key, where, num_bytes, finite, gradient.row_shape, offered)
            told.append(OfferedPart(content, False, gradient.late_error, gradient.row_shape))
        return Offer(key, tuple(parts), tuple(told), terms), parts

    def _is_finite(self, member: int, gradient: CheckedSparse | CheckedDense) -> bool:
        """Judge a gradient as it is after its repeats are merged, in the wide type."""
        if self._judges is None:
            return True
        values = gradient[:2] if isinstance(gradient, CheckedSparse) else gradient[:1]
        finite: bool = self._judges[member].block(*values, lend=True, check_finite=True).finite
        return finite

    def _rows(self, member: int, gradient: CheckedSparse | CheckedDense) -> list[Rows | None]:
        """Return what each shard is to hold of a member; None where that is nothing."""
        num_shards = len(self._client.shards)
        if isinstance(gradient, CheckedSparse):
            indices, values = self._merged(member, gradient)
            return split(indices, values, num_shards, self._client.bounds)
        home = dense_shard(member, num_shards)
        there = Rows(None, gradient.value) if gradient.value is not None else None
        return [there if shard == home else None for shard in range(num_shards)]

    def _merged(self, member: int, gradient: CheckedSparse) -> tuple[Any, Any]:
        """Return ids and values with the ids ascending and each once, where that loses nothing."""
        indices, values, merger = gradient.indices, gradient.values, self._mergers[member]
        if merger is None or gradient.row_shape is None or len(indices) < 2 or (indices[1:] > indices[:-1]).all():
            return indices, values
        merged = merger.merge([merger.block(indices, values, lend=True)], gradient.row_shape, 1)
        return merged[:2]
