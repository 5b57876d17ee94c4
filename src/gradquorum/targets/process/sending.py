"""The client's side of an apply: repeats are merged, then the gradient is written once, to where the server reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.engine import TENSOR_MEMORY, ReducerSpec, get_engine
from gradquorum.errors import no_memory
from gradquorum.receipts import ApplyReceipt
from gradquorum.specs import RoundSpec, SparseSpec
from gradquorum.targets.host import plainest
from gradquorum.targets.interface import Terms
from gradquorum.targets.process import messages as m
from gradquorum.targets.process.channel import BrokenChannel
from gradquorum.targets.process.client import Client
from gradquorum.targets.process.connection import Connection
from gradquorum.targets.process.failures import to_error
from gradquorum.targets.process.parts import gradient_parts, is_lent, write
from gradquorum.targets.process.receipts import to_receipt
from gradquorum.validation import CheckedDense, CheckedGradient, CheckedSparse, plain_sparse

__all__ = ["Sender"]

INLINE_BYTES = 1 << 12
"""Up to here a gradient travels within the message."""


class Sender:
    """Sends the gradients of one handle. Nothing here changes after `__init__`."""

    def __init__(self, client: Client, handle: int, spec: RoundSpec) -> None:
        self._client = client
        self._handle = handle
        engine = get_engine(spec.options.engine)
        self._reducers = [
            engine.sparse_reducer(ReducerSpec(reducer.dtype, reducer.dtype, "SUM", reducer.num_threads))
            # What is added up in a wider dtype must not be rounded on its way: the server merges its repeats.
            if isinstance(member, SparseSpec) and reducer.dtype == reducer.accumulate_dtype
            else None
            for member, reducer in zip(spec.members.values(), spec.reducer_specs(), strict=True)
        ]
        self._members = tuple(spec.members.values())
        only = self._members[0]
        self._only = only if len(self._members) == 1 and isinstance(only, SparseSpec) else None
        self._plain_block: Callable[..., Any] | None = None
        if self._only is not None and self._reducers[0] is not None:
            self._plain_block, self._row_shape, self._num_table_rows = plainest(spec, self._reducers[0])
            self._pack = self._reducers[0].pack

    def apply(self, gradients: CheckedGradient, terms: Terms) -> ApplyReceipt:
        """Offer a gradient. Nothing is lent: the caller may write to its arrays at once.

        Raises:
            GradQuorumError: what a local apply raises.
            UnavailableError: the server is gone.
        """
        copied = not is_lent(self._members, gradient_parts(gradients)[0])
        try:
            gradients = [_merged(*one, copied) for one in zip(self._reducers, gradients, strict=True)]
        except MemoryError as error:
            raise no_memory(error) from error
        return self._send_arrays(gradients, terms)

    def apply_plain(self, indices: Any, values: Any, terms: Terms) -> ApplyReceipt | None:
        """Check and apply in one go; None, and nothing has happened, unless it is the plainest of gradients."""
        if self._only is None:
            return None
        if self._plain_block is None:
            gradient = plain_sparse(self._only, indices, values)
            return None if gradient is None else self._send_arrays((gradient,), terms)
        row_shape = self._row_shape
        if type(values) is not np.ndarray:
            if not isinstance(values, TENSOR_MEMORY):
                return None
            indices, values = np.asarray(indices), np.asarray(values)
        if row_shape is None:
            row_shape = values.shape[1:]
        try:
            # Where the ids ascend, this checks them in one pass and copies nothing else; others are ordered and merged.
            block = self._plain_block(indices, values, row_shape, self._num_table_rows, 1.0, True, False)
        except MemoryError as error:
            raise no_memory(error) from error
        if block is None:
            return None
        parts = (m.Part(len(block), row_shape),)
        return self._send(parts, block.packed_bytes, lambda memory: self._pack(block, memory), terms)

    def _send_arrays(self, gradients: CheckedGradient, terms: Terms) -> ApplyReceipt:
        parts, arrays, num_bytes = gradient_parts(gradients)
        return self._send(parts, num_bytes, lambda memory: write(memory, arrays), terms)

    def _send(
        self, parts: tuple[m.Part, ...], num_bytes: int, write_to: Callable[[Any], None], terms: Terms
    ) -> ApplyReceipt:
        connection = self._client.check_out()
        try:
            reply = self._exchange(connection, terms, parts, num_bytes, write_to)
        except BaseException as error:
            connection.channel.close()
            if isinstance(error, BrokenChannel):
                self._client.fail(error)
            raise
        self._client.check_in(connection)
        if type(reply) is m.Failure:
            raise to_error(reply)
        return to_receipt(reply)

    def _exchange(
        self,
        connection: Connection,
        terms: Terms,
        parts: tuple[m.Part, ...],
        num_bytes: int,
        write_to: Callable[[Any], None],
    ) -> Any:
        block: int | None = None
        inline: bytearray | None = None
        if num_bytes > INLINE_BYTES:
            block = self.block(connection, num_bytes, terms.timeout)
            if isinstance(block, m.Failure):
                return block
            write_to(connection.free[block])
            connection.lent[block] = connection.free.pop(block)
        elif num_bytes:
            inline = bytearray(num_bytes)
            write_to(inline)
        worker = None if terms.worker is None else m.to_worker(terms.worker)
        message = m.Apply(
            self._handle,
            block,
            None if inline is None else bytes(inline),
            parts,
            terms.local_step,
            worker,
            terms.sequence,
            terms.weight,
            terms.timeout,
        )
        reply = self._client.exchange(connection, message, outcome_known=False, ahead=True)
        if type(reply) is m.Judged:
            connection.give_back(reply.freed, reply.reclaimed)
        return reply

    def block(self, connection: Connection, num_bytes: int, timeout: float | None) -> Any:
        """Return the smallest free block that is large enough, or a new one, or the server's refusal."""
        free = connection.free
        best: int | None = None
        for number, memory in free.items():
            if num_bytes <= len(memory) and (best is None or len(memory) < len(free[best])):
                best = number
        if best is not None:
            return best
        # Blocks that are too small are given back: the gradients of a worker are of about one size.
        spare = tuple(list(free)[: m.MAX_IDS])
        reply = self._client.exchange(connection, m.Lend(self._handle, _rounded(num_bytes), timeout, spare))
        for number in spare:
            del free[number]
        if type(reply) is m.Failure:
            return reply
        return connection.add_block(reply)


def _merged(reducer: Any, gradient: CheckedSparse | CheckedDense, copied: bool) -> CheckedSparse | CheckedDense:
    """Return a gradient whose ids are there once each and ascend, so that the server can lend it to the round.

    Args:
        reducer: None for a gradient that must stay as it is.
        gradient: sparse or dense.
        copied: whether the server will not lend it; it orders what it copies, so only repeats are merged.
    """
    if reducer is None or gradient.row_shape is None or not isinstance(gradient, CheckedSparse):
        return gradient
    indices, values = gradient.indices, gradient.values
    if len(indices) < 2 or _ascend(indices) or (copied and _ascend(np.sort(indices))):
        return gradient
    block = reducer.block(indices, values)
    indices, values, _ = reducer.merge([block], gradient.row_shape, 1)
    return gradient._replace(indices=indices, values=values)


def _ascend(ids: NDArray[np.int64]) -> bool:
    """Return whether ids ascend without repeats."""
    return bool((ids[1:] > ids[:-1]).all())


def _rounded(num_bytes: int) -> int:
    """Return a size with some room, so that gradients of about one size share blocks."""
    return -(-num_bytes * 9 // (8 * 4096)) * 4096
