"""A round together with the engine that does its arithmetic. Every target hosts its rounds in this class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy import ndarray
from numpy.typing import NDArray

from gradquorum.arrays import MAX_INT64
from gradquorum.dtypes import real_dtype, round_weight
from gradquorum.engine import AbstractEngine, ReducerSpec, get_engine, trim_memory
from gradquorum.engine.weighing import weighing_dense_reducer, weighing_sparse_reducer
from gradquorum.errors import InvalidArgumentError, ResourceExhaustedError, no_memory
from gradquorum.membership import sort_workers, worker_key
from gradquorum.receipts import ApplyReceipt
from gradquorum.records import Batch, Contribution, FormConflict, LagConflict, Prefix, WeighedContribution
from gradquorum.round import Round
from gradquorum.specs import DenseSpec, RoundSpec, SparseSpec
from gradquorum.state import decode, encode
from gradquorum.targets.interface import Merged, Terms
from gradquorum.validation import CheckedGradient, CheckedSparse, check_row_shape
from gradquorum.waiters import Deadline, Handle

__all__ = ["RoundHost", "make_reducers", "plainest"]

_COMPACT_FROM_BYTES = 1 << 20
_SPARSE_GROWTH = 2.5
"""A log is merged when it is that many times as large as its distinct rows."""
_WORTHWHILE_GROWTH = 1.25
"""As for `_SPARSE_GROWTH`, where it is merged to make room."""
_LARGE_BYTES = 1 << 22
"""Freed memory from here on is not kept where memory counts more than time: as huge pages it is cheap to get again."""


class RoundHost:
    """Makes blocks of gradients, offers them to its round, compacts its log and merges what is detached.

    Nothing here is guarded: it does not change after `__init__`, but for `hold_little`. The round has the lock.
    """

    def __init__(
        self, spec: RoundSpec, reducers: Sequence[Any] | None = None, *, compaction_threads: int | None = None
    ) -> None:
        """Make a round.

        Args:
            spec: what it does.
            reducers: what does the arithmetic of each member, if that is not an engine in this process.
            compaction_threads: that a compaction may use where the spec does not say how many a merge may; None for
                all cores.
        """
        options = spec.options
        self.spec = spec
        self.engine_name = get_engine(options.engine).name
        self._names = tuple(spec.members)
        self._specs = tuple(spec.members.values())
        self._policy = spec.policy
        self._reducer_specs = spec.reducer_specs()
        self._reducers: list[Any] = list(reducers) if reducers is not None else make_reducers(spec)
        self._compactors = self._reducers
        if compaction_threads is not None:
            self._compactors = make_reducers(spec, num_threads=compaction_threads)
        self._weight_dtypes = spec.weight_dtypes()
        self._has_weight = [dtype is not None for dtype in self._weight_dtypes]
        if self._policy.weighs:
            self._weight_dtypes = [real_dtype(reducer.accumulate_dtype) for reducer in self._reducer_specs]
        only_dense = all(isinstance(member, DenseSpec) for member in self._specs)
        self._growth = 1.0 if only_dense else _SPARSE_GROWTH  # dense members keep one running sum
        """The log is merged when it is so many times as large as its distinct rows."""
        self._holds_little = False
        self._by_worker = options.order == "worker"
        self._compacts = options.compacts
        self._check_finite = options.on_nonfinite != "keep"
        self._refuses_nonfinite = options.on_nonfinite == "raise"
        self._plain_block, self._row_shape, self._num_table_rows = plainest(spec, self._reducers[0])
        self._packed_block: Any = None if self._plain_block is None else self._reducers[0].packed_block
        self.coroutines: set[Any] = set()
        """The takes that coroutines wait for, in case their event loop is closed under them."""
        self.round = Round(
            len(self._specs),
            expected_workers=options.expected_workers,
            max_per_worker=options.max_per_worker,
            max_bytes=options.max_bytes,
            block_when_full=options.on_full == "block",
            compact_from_bytes=0 if only_dense else _COMPACT_FROM_BYTES,
            staleness=self._policy,
        )

    def hold_little(self, growth: float) -> None:
        """Merge the log when it is so many times as large as its distinct rows, and let memory count more than time.

        Large pieces of freed memory are not kept for reuse, and a take consumes the blocks of its round. To be called
        before any apply, by whoever alone has the round, in one thread at a time, and never asks for its state.
        """
        self._growth, self._holds_little = growth, True

    def make_room(self) -> None:
        """Merge the log now if that frees much of it, so that what comes has its memory."""
        self._compact(_WORTHWHILE_GROWTH, _COMPACT_FROM_BYTES)

    # Applies

    def apply(
        self,
        handle: Handle,
        gradients: CheckedGradient,
        terms: Terms,
        deadline: Deadline | None = None,
    ) -> ApplyReceipt:
        """Put a gradient in order, copy it, and have it judged. The deadline is by default that of the terms."""
        self._raise_late_error(gradients, terms.local_step)
        deadline = deadline or (None if terms.timeout is None else Deadline(terms.timeout))
        lag = self.round.lag_of(terms.local_step) if self._policy.weighs else 0
        while True:
            try:
                contribution = self._contribution(gradients, terms, lag)
            except MemoryError as error:
                raise no_memory(error) from error
            if not contribution.finite and self._refuses_nonfinite:
                names = [self._where(i) or "grad: " for i, block in enumerate(contribution.blocks) if not block.finite]
                raise InvalidArgumentError(f"{''.join(names)}expected finite values, got NaN or infinity")
            try:
                receipt = self._offer(handle, contribution, terms, deadline)
                break
            except LagConflict as conflict:  # the step has changed meanwhile
                lag = conflict.lag
            except FormConflict as conflict:
                self._raise_conflict(gradients, conflict.member, conflict.expected)
                raise  # cannot happen: the forms do differ
        del contribution  # from here on only the log keeps it
        if self.is_large:
            self._compact_large()
        return receipt

    def apply_plain(
        self,
        handle: Handle,
        indices: Any,
        values: Any,
        terms: Terms,
        packed_shape: tuple[int, ...] | None = None,
    ) -> ApplyReceipt | None:
        """Check and apply in one go; None, and nothing has happened, unless it is the plainest of gradients.

        That is what `AbstractSparseReducer.plain_block` takes, for the one sparse member of a round.

        Args:
            handle: on the round.
            indices: of the gradient, or the memory in which it lies, as `AbstractSparseReducer.pack` writes it,
            values: of the gradient, or how many rows lie there,
            terms: of the gradient,
            packed_shape: None, or the shape of those rows.
        """
        make, row_shape = self._plain_block, self._row_shape
        if make is None:
            return None
        if packed_shape is not None:
            if row_shape is not None and row_shape != packed_shape:
                return None
            make, row_shape = self._packed_block, packed_shape
        elif row_shape is None:
            if type(values) is not ndarray:
                return None
            row_shape = values.shape[1:]
        weight = terms.weight
        if self._weight_dtypes[0] is not None:
            weight = round_weight(weight, self._weight_dtypes[0])
        rows, check = self._num_table_rows, self._check_finite
        try:
            block = make(indices, values, row_shape, rows, weight, terms.lend, check)
        except MemoryError as error:
            raise no_memory(error) from error
        if block is None or (self._refuses_nonfinite and not block.finite):
            return None
        contribution = Contribution(
            (block,),
            (row_shape,),
            block.num_bytes,
            terms.worker,
            terms.sequence,
            not check or block.finite,
            terms.lend and block.lent,
        )
        try:
            receipt = self.round.offer(handle, contribution, terms.local_step)
            if receipt is None:
                receipt = self._offer(handle, contribution, terms)
        except FormConflict:
            return None
        del block, contribution
        if self._compacts and self.round.budget.log_bytes > self.round.compact_above_bytes:
            self._compact_large()
        return receipt

    def _offer(
        self, handle: Handle, contribution: Contribution, terms: Terms, deadline: Deadline | None = None
    ) -> ApplyReceipt:
        """Have a contribution judged, when there is room for it."""
        while True:
            receipt = self.round.offer(handle, contribution, terms.local_step)
            if receipt is not None:
                return receipt
            deadline = deadline or Deadline(terms.timeout)
            if not self._compact(1.1, 0):
                self.round.wait_for_room(handle, contribution.num_bytes, deadline)

    def _contribution(self, gradients: CheckedGradient, terms: Terms, lag: int = 0) -> Contribution:
        lateness = self._lateness(terms, lag) if lag else 1.0
        blocks: list[Any] = []
        num_bytes, finite, lent, vanishes = 0, True, False, False
        for i, (reducer, gradient) in enumerate(zip(self._reducers, gradients, strict=True)):
            weight, weight_dtype = 1.0, self._weight_dtypes[i]
            if weight_dtype is not None:
                weight = round_weight(lateness * (terms.weight if self._has_weight[i] else 1.0), weight_dtype)
                vanishes = vanishes or weight == 0
            lend = terms.lend or not gradient.borrowed  # what was converted for us need not be copied again
            values = gradient[:2] if isinstance(gradient, CheckedSparse) else gradient[:1]
            block = reducer.block(*values, weight=weight, lend=lend, check_finite=self._check_finite)
            blocks.append(block)
            num_bytes += block.num_bytes
            finite = finite and block.finite
            lent = lent or (block.lent and gradient.borrowed)
        forms = tuple([gradient.row_shape for gradient in gradients])
        kind = WeighedContribution if self._policy.weighs else Contribution
        contribution = kind(tuple(blocks), forms, num_bytes, terms.worker, terms.sequence, finite=finite, lent=lent)
        if isinstance(contribution, WeighedContribution):
            contribution.lag, contribution.vanishes = lag, vanishes
        return contribution

    def _lateness(self, terms: Terms, lag: int) -> float:
        """Return the weight of a late gradient; any number for one that will be dropped, as it has none."""
        if lag > self._policy.max_lag:
            return 1.0
        try:
            return self._policy.weight(lag)
        except Exception:
            if not self.round.was_judged(terms.worker, terms.sequence):
                raise
            return 1.0

    def _raise_late_error(self, gradients: CheckedGradient, local_step: int | None) -> None:
        for member, gradient in enumerate(gradients):
            if gradient.late_error is not None:
                expected = self.round.forms_for(local_step)[member]
                if expected is not None:
                    self._raise_conflict(gradients, member, expected)
                raise InvalidArgumentError(gradient.late_error)

    def _raise_conflict(self, gradients: CheckedGradient, member: int, expected: tuple[int, ...]) -> None:
        got = gradients[member].row_shape
        if got is not None:
            check_row_shape(self._where(member), self._specs[member], expected, got)

    def _where(self, member: int) -> str:
        return f"{self._names[member]}: " if self._names[member] else ""

    # Compaction

    @property
    def is_large(self) -> bool:
        """Whether the log is so large that a compaction is worth a look."""
        return self._compacts and self.round.budget.log_bytes > self.round.compact_above_bytes

    def _compact_large(self) -> None:
        """Compact a large log, in the applier's own time."""
        self._compact()

    def _compact(self, growth: float | None = None, above_bytes: int | None = None) -> bool:
        """Merge the log's prefix while it is too large for its distinct rows; True if that freed memory.

        Args:
            growth: what is too large; None for what it usually is, like the next one.
            above_bytes: size of the log from which that is worth a look.
        """
        if not self._compacts:
            return False
        freed = False
        while True:
            above = self.round.compact_above_bytes if above_bytes is None else above_bytes
            prefix = self.round.begin_compaction(above_bytes=above)
            if prefix is None:
                return freed
            if self._holds_little:
                trim_memory(_LARGE_BYTES)  # such as the last result
            merged, line = None, 0.0
            try:
                merged, line = self._merged_prefix(prefix, self._growth if growth is None else growth)
            except MemoryError:
                line = 2.0 * self.round.budget.log_bytes  # the log still holds everything; try again later
            finally:
                self.round.end_compaction(prefix, merged, int(line))
            if merged is None:
                return freed
            freed = True
            if self._holds_little:
                del prefix, merged
                trim_memory(_LARGE_BYTES)

    def _merged_prefix(self, prefix: Prefix, growth: float) -> tuple[Contribution | None, float]:
        contributions = prefix.contributions
        logs = [[contribution.blocks[i] for contribution in contributions] for i in range(len(self._reducers))]
        num_bytes = sum(contribution.num_bytes for contribution in contributions)
        blocks, distinct = self._compacted(logs, num_bytes, growth)
        line = self._growth * distinct
        if blocks is None:
            return None, line
        forms = tuple(
            next((c.forms[i] for c in contributions if c.forms[i] is not None), None)
            for i in range(len(self._reducers))
        )
        merged = Contribution(
            blocks,
            forms,
            sum(block.num_bytes for block in blocks),
            num_gradients=sum(contribution.num_gradients for contribution in contributions),
        )
        return merged, line

    def _compacted(
        self, logs: Sequence[list[Any]], num_bytes: int, growth: float
    ) -> tuple[tuple[Any, ...] | None, int]:
        """Return for each member a block that can stand in the place of its log, and the bytes of all distinct rows.

        No blocks if the logs, of so many bytes together, are not so many times as large as those.
        """
        distinct = sum(reducer.distinct_bytes(log) for reducer, log in zip(self._reducers, logs, strict=True))
        if num_bytes <= growth * distinct:
            return None, distinct
        return tuple(compactor.compact(log) for compactor, log in zip(self._compactors, logs, strict=True)), distinct

    # Checkpoints

    def state(self, handle: Handle) -> dict[str, NDArray[Any]]:
        """Return all that the round holds at one moment, as arrays by name that nobody else has.

        Raises:
            ClosedError: the handle is closed.
            ResourceExhaustedError: there is no memory for the copies.
        """
        snapshot = self.round.snapshot(handle)
        try:
            return encode(snapshot, self.spec, self._reducers)
        except MemoryError as error:
            raise ResourceExhaustedError(f"no memory for the state: {error or 'allocation failed'}") from error

    def load_state(self, handle: Handle, state: Mapping[str, Any], *, rejoin: bool = False) -> None:
        """Put what `state` returned in the place of what the round holds, which must be no gradient.

        With `rejoin` the workers that were live have not joined: nobody knows whether they are still there.

        Raises:
            InvalidArgumentError: it is no such state, one of another spec, or the round holds gradients. Nothing has
                changed.
            ClosedError: the handle is closed.
            ResourceExhaustedError: there is no memory for the copies. Nothing has changed.
        """
        try:
            snapshot = decode(state, self.spec, self._reducers)
        except MemoryError as error:
            raise ResourceExhaustedError(f"no memory for the state: {error or 'allocation failed'}") from error
        if rejoin:
            left = {worker: False for worker, live in snapshot.members.items() if not live}
            snapshot = snapshot._replace(members=left)
        self.round.restore(handle, snapshot)

    # Takes

    def merge(self, batch: Batch) -> Merged:
        """Merge a detached round. The batch stays whole, whatever happens.

        Raises:
            ResourceExhaustedError: there is no memory for the result.
        """
        contributions = batch.contributions
        if self._by_worker:
            contributions = sorted(contributions, key=_worker_order)
        if self._holds_little:
            trim_memory(_LARGE_BYTES)
        try:
            members = []
            for i, form in enumerate(batch.forms):
                blocks = [contribution.blocks[i] for contribution in contributions]
                shape = _empty_shape(self._specs[i]) if form is None else form
                if self._holds_little and isinstance(self._specs[i], SparseSpec):
                    batch.kept = batch.kept or {}
                    kept = batch.kept.setdefault(i, [])
                    members.append(self._reducers[i].consume(blocks, shape, batch.num_gradients, kept))
                else:
                    members.append(self._reducers[i].merge(blocks, shape, batch.num_gradients))
        except MemoryError as error:
            raise ResourceExhaustedError(
                f"no memory for the result: {error or 'allocation failed'}; the round is kept whole for the next take"
            ) from error
        workers = sort_workers(batch.workers) if batch.workers else ()
        return Merged(members, batch.num_gradients, batch.step, workers)


def make_reducers(spec: RoundSpec, *, num_threads: int | None = None) -> list[Any]:
    """Return what does the arithmetic of each member in this process, on so many threads if the spec does not say."""
    engine, weighs = get_engine(spec.options.engine), spec.policy.weighs
    reducers = spec.reducer_specs()
    if spec.options.num_threads is None and num_threads is not None:
        reducers = [reducer._replace(num_threads=num_threads) for reducer in reducers]
    return [
        _reducer(engine, member, reducer, weighs=weighs)
        for member, reducer in zip(spec.members.values(), reducers, strict=True)
    ]


def _reducer(engine: AbstractEngine, member: SparseSpec | DenseSpec, spec: ReducerSpec, *, weighs: bool) -> Any:
    """Return what does the arithmetic of a member."""
    if isinstance(member, SparseSpec):
        return weighing_sparse_reducer(engine, spec) if weighs else engine.sparse_reducer(spec)
    return weighing_dense_reducer(engine, spec) if weighs else engine.dense_reducer(spec)


def plainest(spec: RoundSpec, reducer: Any) -> tuple[Callable[..., Any] | None, tuple[int, ...] | None, int]:
    """Return what a shortcut for the plainest gradients needs, the reducer being that of the first member.

    That is how to make a block (None if the round is not of the kind), the row shape (None for any), and the rows of
    the table.
    """
    member, *others = spec.members.values()
    rows, *row_shape = member.shape or (None,)
    if others or isinstance(member, DenseSpec) or (member.shape and None in row_shape):
        return None, None, 0
    if spec.policy.weighs:  # what a block weighs depends on the step
        return None, None, 0
    known = tuple(size for size in row_shape if size is not None)
    return reducer.plain_block, known if member.shape else None, MAX_INT64 if rows is None else rows


def _worker_order(contribution: Contribution) -> tuple[tuple[bool, int, str], bool, int]:
    """Order by worker, then sequence; what has no sequence comes last, in order of acceptance."""
    worker, sequence = contribution.worker, contribution.sequence
    assert worker is not None
    return worker_key(worker), sequence is None, sequence or 0


def _empty_shape(spec: SparseSpec | DenseSpec) -> tuple[int, ...]:
    """Return the row shape (dense: the shape) of a round in which nobody said which."""
    dims = spec.shape[1:] if isinstance(spec, SparseSpec) else spec.shape
    return tuple(0 if size is None else size for size in dims)
