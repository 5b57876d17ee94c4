"""The values of gradients that were offered in graphs, until a gate says which of them were accepted.

A *gate* is a small accumulator of TensorFlow, one in each session. It judges, counts, waits and is cancelled. A
gradient passes it as one *ticket*, a row id that no other gradient has, and what a take of the gate returns are the
tickets of exactly those gradients that are in the round. The blocks behind them lie here.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.engine import get_engine
from gradquorum.engine.interface import Block
from gradquorum.errors import InvalidArgumentError
from gradquorum.specs import Options, RoundSpec, SparseSpec
from gradquorum.validation import check_row_shape, check_sparse

__all__ = ["TicketStore", "open_store"]

STALE_AFTER = 32
"""A gradient that passed its gate is stale when so many takes that began afterwards have ended without it.

One would be enough if no operation could be late: a take that the gate has served may still be on its way here.
"""
REFUSED_AFTER = 1024
"""The same for one that nobody has seen pass: its gate refused it, its session ended, or it is still on its way."""

_tickets = itertools.count()
_stores: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[tuple[str, str], TicketStore]]
_stores = weakref.WeakKeyDictionary()
"""Those with a shared name, by graph, container and name."""
_stores_lock = threading.Lock()


class _Held:
    """One gradient. `begun` is the number of takes of its gate that had begun when it was last heard of."""

    __slots__ = ("arrived", "begun", "block", "gate", "missed", "row_shape", "seems_counted")

    def __init__(self, gate: int, block: Block, row_shape: tuple[int, ...] | None, begun: int) -> None:
        self.gate = gate
        self.block = block
        self.row_shape = row_shape
        self.begun = begun
        self.arrived = self.seems_counted = False
        self.missed = 0


class TicketStore:
    """Holds blocks by ticket, for all gates of one accumulator.

    Guarded by ``_lock``: ``_held``, what is in it, and ``_begun``.
    """

    def __init__(self, spec: SparseSpec) -> None:
        round_spec = RoundSpec("SparseConditionalAccumulator", {"": spec}, Options())
        self.spec = spec
        self._reducer = get_engine().sparse_reducer(round_spec.reducer_specs()[0])
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._begun: dict[int, int] = {}
        """The takes that have begun, by gate."""

    @property
    def num_held(self) -> int:
        """The gradients whose fate is not known yet."""
        return len(self._held)

    def offer(self, gate: int, indices: Any, values: Any, shape: Any, local_step: Any) -> tuple[int, NDArray[Any]]:
        """Check a gradient, put it in order and keep it; return its ticket and the row that its gate is to see.

        That row is empty but for its shape, by which the gate compares the rows of a round.

        Raises:
            InvalidArgumentError: a check of SEMANTICS section 2 fails that needs no knowledge of the round.
            MemoryError: there is no room.
        """
        gradient, _ = check_sparse(self.spec, "", indices, values, shape, local_step)
        expected = self._row_shape_of_round(gate)
        if gradient.late_error is not None:
            assert gradient.row_shape is not None
            if expected is not None:
                check_row_shape("", self.spec, expected, gradient.row_shape)
            raise InvalidArgumentError(gradient.late_error)
        row_shape = gradient.row_shape
        seen = self._row_shape_of_empty(expected) if row_shape is None else row_shape
        block = self._reducer.block(gradient.indices, gradient.values, lend=not gradient.borrowed)
        ticket = next(_tickets)
        with self._lock:
            self._held[ticket] = _Held(gate, block, row_shape, self._begun.get(gate, 0))
        return ticket, np.zeros((1, *seen), np.float16)

    def arrive(self, ticket: int, *, seems_counted: bool) -> None:
        """Note that the gate has let a ticket pass: it has counted it, or dropped it as stale.

        Which of the two can only be guessed, as the gate's count may change meanwhile; only messages depend on it.
        """
        with self._lock:
            held = self._held.get(ticket)
            if held is not None:
                held.arrived, held.seems_counted = True, seems_counted
                held.begun, held.missed = self._begun.get(held.gate, 0), 0

    def begin_take(self, gate: int) -> int:
        """Note that a take is about to wait at its gate, and return its number there."""
        with self._lock:
            number = self._begun.get(gate, 0)
            self._begun[gate] = number + 1
        return number

    def finish_take(self, gate: int, number: int, tickets: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the merged gradient of the tickets, in order of offering: indices, values, shape.

        Raises:
            MemoryError: there is no memory for the result. The round is gone, as it would be in TensorFlow.
        """
        with self._lock:
            round_ = [self._held.pop(int(ticket), None) for ticket in tickets]
            self._forget_missed(gate, number)
        present = [held for held in round_ if held is not None]
        if len(present) < len(round_):
            raise RuntimeError(
                f"take_grad: {len(round_) - len(present)} of {len(round_)} gradients of the round are not here; the "
                "session must run in the process that built the graph, and no operation may be hours late"
            )
        known = (held.row_shape for held in present if held.row_shape is not None)
        dims = tuple(size or 0 for size in self.spec.shape[1:])
        indices, values, _ = self._reducer.merge([held.block for held in present], next(known, dims), len(present))
        rows = self.spec.shape[0] if self.spec.shape else None
        return [indices, values, np.array((-1 if rows is None else rows, *values.shape[1:]), np.int64)]

    def _row_shape_of_round(self, gate: int) -> tuple[int, ...] | None:
        """Return what rows must be like in the open round, as far as can be known before the gate has spoken."""
        with self._lock:
            shapes = [held.row_shape for held in self._held.values() if held.gate == gate and held.seems_counted]
        return next((shape for shape in reversed(shapes) if shape is not None), None)

    def _row_shape_of_empty(self, expected: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the row shape as which an empty gradient of any row shape passes the gate."""
        if expected is not None:
            return expected
        known = tuple(size for size in self.spec.shape[1:] if size is not None)
        if len(known) < len(self.spec.shape[1:]):
            raise InvalidArgumentError(
                f"Shape mismatch: expected values rank at least {len(self.spec.shape)}, got 1; "
                "in a graph, give an empty gradient the shape [0, *row]"
            )
        return known

    def _forget_missed(self, gate: int, number: int) -> None:
        """Drop what so many takes have passed by. Its gate has dropped it before."""
        stale = []
        for ticket, held in self._held.items():
            if held.gate == gate and held.begun <= number:
                held.missed += 1
                if held.missed >= (STALE_AFTER if held.arrived else REFUSED_AFTER):
                    stale.append(ticket)
        for ticket in stale:
            del self._held[ticket]


def open_store(spec: SparseSpec, graph: Any, container: str, shared_name: str | None) -> TicketStore:
    """Return a store of one's own, or the one of that shared name in that container of that graph.

    A session has one graph, so accumulators of two graphs never share a gate.

    Raises:
        InvalidArgumentError: the one of that name has another spec.
    """
    if not shared_name:
        return TicketStore(spec)
    with _stores_lock:
        stores = _stores.setdefault(graph, weakref.WeakValueDictionary())
        store = stores.get((container, shared_name))
        if store is None:
            store = stores[container, shared_name] = TicketStore(spec)
    if store.spec != spec:
        raise InvalidArgumentError(
            f"shared_name {shared_name!r}: there is {store.spec.describe()}, asked for was {spec.describe()}"
        )
    return store
