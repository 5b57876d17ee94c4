"""The values of gradients that were offered in graphs, until a gate says which of them were accepted.

A *gate* is a small accumulator of TensorFlow, one in each session. It judges, counts, waits and is cancelled. A
gradient passes it as one *ticket*, a row id that no other gradient has, and what a take of the gate returns are the
tickets of exactly those gradients that are in the round. The blocks behind them lie here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradquorum.engine import get_engine
from gradquorum.errors import InvalidArgumentError
from gradquorum.specs import Options, RoundSpec, SparseSpec
from gradquorum.tensorflow.gates import Gate, Held, Round
from gradquorum.tensorflow.lifelines import lifeline
from gradquorum.tensorflow.sessions import AbstractSessionObserver, observe_sessions
from gradquorum.validation import check_row_shape, check_sparse

__all__ = ["TicketStore", "open_store"]

_tickets = itertools.count()
_take_numbers = itertools.count()
_stores: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[tuple[str, str], TicketStore]]
_stores = weakref.WeakKeyDictionary()
"""Those with a shared name, by graph, container and name."""
_stores_lock = threading.Lock()


class Offered(NamedTuple):
    """What `TicketStore.offer` returns."""

    ticket: int
    row: NDArray[np.float16]
    line: NDArray[np.int64]
    """Its lifeline until it arrives."""


class BegunTake(NamedTuple):
    """What `TicketStore.begin_take` returns."""

    number: int
    has_round: bool
    """It gets one that was taken before and not delivered. Else it is to wait at its gate."""
    line: NDArray[np.int64]
    """Its lifeline, to be marked when its round is on the way to the caller: from then on it is delivered."""


class TicketStore(AbstractSessionObserver):
    """Holds blocks by ticket, for the gates of one accumulator, by the number of their session.

    Runs of a session may end between any two operations. Lifelines tell, in any thread and at any moment, so all that
    they do is append to ``_cuts``: the next call settles them, or they themselves if there is none.

    Guarded by ``_lock``: ``_gates`` and all that is in them. ``_cuts`` may be appended to without it.
    """

    def __init__(self, spec: SparseSpec) -> None:
        round_spec = RoundSpec("SparseConditionalAccumulator", {"": spec}, Options())
        self.spec = spec
        self._reducer = get_engine().sparse_reducer(round_spec.reducer_specs()[0])
        self._lock = threading.Lock()
        self._gates: defaultdict[int, Gate] = defaultdict(Gate)
        self._cuts: deque[Callable[[], object]] = deque()
        observe_sessions(self)

    @property
    def num_held(self) -> int:
        """The gradients whose fate is not known yet."""
        with self._locked():
            return sum(len(gate.held) for gate in self._gates.values())

    @property
    def num_waiting(self) -> int:
        """The takes that have begun and of which no decision is known."""
        with self._locked():
            return sum(len(gate.waiting) for gate in self._gates.values())

    # Applies

    def offer(self, gate: int, indices: Any, values: Any, shape: Any, local_step: Any) -> Offered:
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
        line = self._lifeline(TicketStore._cut_apply, gate, ticket)
        with self._locked():
            state = self._gates[gate]
            state.held[ticket] = Held(block, row_shape, state)
        return Offered(ticket, np.zeros((1, *seen), np.float16), line)

    def arrive(self, gate: int, ticket: int, *, seems_counted: bool) -> None:
        """Note that the gate has let a ticket pass: it has counted it, or dropped it as stale.

        Args:
            gate: at which that was.
            ticket: of the gradient.
            seems_counted: whether the gate's count was higher afterwards. Other gradients may have raised it, and
                takes lowered it: only if there was none meanwhile is it certain that this gradient was dropped.
        """
        with self._locked():
            state = self._gates[gate]
            held = state.held.get(ticket)
            if held is None or held.has_arrived:
                return
            if not seems_counted and held.is_quiet and held.begun == state.begun:
                del state.held[ticket]
                return
            held.has_arrived, held.seems_counted, held.begun = True, seems_counted, state.begun

    def _cut_apply(self, gate: int, ticket: int, _is_marked: bool) -> None:
        state = self._gates.get(gate)
        held = state and state.held.get(ticket)
        if state and held and not held.has_arrived:  # refused by the gate, or cut off behind it
            held.has_arrived, held.begun = True, state.begun

    # Takes

    def begin_take(self, gate: int, num_required: int) -> BegunTake:
        """Begin a take.

        Args:
            gate: of the session.
            num_required: of the take. One that the gate is to refuse gets no round.
        """
        with self._locked():
            state = self._gates[gate]
            number = next(_take_numbers)
            line = self._lifeline(TicketStore._cut_take, gate, number)
            state.begun = number + 1
            has_round = bool(state.undelivered) and num_required >= 1
            state.rounds[number] = state.undelivered.pop(0) if has_round else None
            if not has_round:
                state.waiting.add(number)
        return BegunTake(number, has_round, line)

    def merge_take(self, gate: int, number: int, tickets: NDArray[Any]) -> list[NDArray[Any]]:
        """Merge the round of a take, that of its tickets unless it has one, and return indices, values, shape.

        Raises:
            MemoryError: there is no memory for the result. The round is kept for the next take.
        """
        with self._locked():
            state = self._gates[gate]
            round_ = state.rounds[number]
            if round_ is None:
                held = [state.held.pop(int(ticket), None) for ticket in tickets]
                state.end_wait(number, is_served=True)
                present = [each for each in held if each is not None]
                if len(present) < len(held):
                    raise RuntimeError(
                        f"take_grad: {len(held) - len(present)} of {len(held)} gradients of the round are not here; "
                        "the session must run in the process that built the graph"
                    )
                state.keep(Round(present))
                round_ = state.rounds[number] = state.undelivered.pop(0)
        if round_.merged is None:
            round_.merged = self._merge(round_.held)
        return round_.merged

    def _cut_take(self, gate: int, number: int, is_delivered: bool) -> None:
        state = self._gates.get(gate)
        if state is not None and number in state.rounds:
            round_ = state.rounds.pop(number)
            state.end_wait(number, is_served=False)
            if round_ is not None and not is_delivered:
                state.keep(round_)

    def _merge(self, round_: list[Held]) -> list[NDArray[Any]]:
        known = (held.row_shape for held in round_ if held.row_shape is not None)
        dims = tuple(size or 0 for size in self.spec.shape[1:])
        indices, values, _ = self._reducer.merge([held.block for held in round_], next(known, dims), len(round_))
        rows = self.spec.shape[0] if self.spec.shape else None
        return [indices, values, np.array((-1 if rows is None else rows, *values.shape[1:]), np.int64)]

    # Ends

    def session_gone(self, number: int) -> None:
        self._cut(lambda: self._gates.pop(number, None))

    def _lifeline(
        self, cut: Callable[[TicketStore, int, int, bool], None], gate: int, number: int
    ) -> NDArray[np.int64]:
        reference = weakref.ref(self)

        def on_cut(is_marked: bool) -> None:
            store = reference()
            if store is not None:
                store._cut(functools.partial(cut, store, gate, number, is_marked))

        return lifeline(on_cut).line

    def _cut(self, cut: Callable[[], object]) -> None:
        self._cuts.append(cut)
        self._settle()

    def _settle(self) -> None:
        """Do what lifelines have noted, unless another thread, or this one further up, is about to do it."""
        while self._cuts and self._lock.acquire(blocking=False):
            try:
                self._do_cuts()
            finally:
                self._lock.release()

    def _do_cuts(self) -> None:
        while self._cuts:
            self._cuts.popleft()()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                self._do_cuts()
                yield
        finally:
            self._settle()

    def _row_shape_of_round(self, gate: int) -> tuple[int, ...] | None:
        """Return what rows must be like in the open round, as far as can be known before the gate has spoken."""
        with self._locked():
            shapes = [held.row_shape for held in self._gates[gate].held.values() if held.seems_counted]
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
