"""Several tables whose gradients move together: one round, several members."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from gradquorum import norms
from gradquorum.accumulators import build_sparse
from gradquorum.errors import InvalidArgumentError
from gradquorum.handle import AbstractAccumulator, make_options
from gradquorum.indexed_slices import SparseGradient
from gradquorum.receipts import ApplyReceipt
from gradquorum.slices import check_slices
from gradquorum.specs import DenseSpec, RoundSpec, SparseSpec
from gradquorum.staleness import Staleness
from gradquorum.targets import Merged
from gradquorum.validation import CheckedDense, CheckedSparse, check_dense, check_step, empty_sparse
from gradquorum.workers import GroupWorker

__all__ = ["AccumulatorGroup", "GroupGradient"]


class GroupGradient(Mapping[str, Any]):
    """The reduced gradients of a round, by member: `SparseGradient` for sparse ones, arrays for dense ones.

    Attributes:
        num_gradients: gradients in the round, the same for all members.
        step: the round's step before the take advanced it.
        workers: the named workers whose gradients are in it, numbers first, sorted.
    """

    __slots__ = ("_members", "num_gradients", "step", "workers")

    def __init__(self, members: dict[str, Any], num_gradients: int, step: int, workers: tuple[int | str, ...]) -> None:
        self._members = members
        self.num_gradients = num_gradients
        self.step = step
        self.workers = workers

    def __getitem__(self, member: str) -> Any:
        return self._members[member]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def norm(self) -> float:
        """Return the global norm: the Euclidean norm of the values of all members together.

        It is computed as `SparseGradient.norm` is.

        Example:
            >>> import gradquorum as gq
            >>> group = gq.AccumulatorGroup(
            ...     {"emb": gq.SparseSpec("float32", (10, 1)), "bias": gq.DenseSpec("float32", (2,))}
            ... )
            >>> _ = group.apply({"emb": ([7], [[3.0]]), "bias": [0.0, 4.0]})
            >>> gradients = group.take(1)
            >>> gradients.norm()
            5.0
            >>> clipped = gradients.clip_by_norm(1.0)
            >>> clipped["emb"].values, clipped["bias"]
            (array([[0.6]], dtype=float32), array([0. , 0.8], dtype=float32))

        Source:
            `tf.linalg.global_norm`.
        """
        return float(self._norm())

    def is_finite(self) -> bool:
        """Tell whether no value of any member is a NaN or an infinity."""
        return all(norms.is_finite(values) for values in self._values())

    def clip_by_norm(self, max_norm: float) -> GroupGradient:
        """Return gradients scaled down by one factor, so that their global norm is at most `max_norm`.

        If a value of any member is not finite, all values of the result are NaN.

        Args:
            max_norm: 0 or more; infinity never clips.

        Returns:
            New gradients, with arrays of their own; these are as they were.

        Raises:
            InvalidArgumentError: `max_norm` is negative or NaN.
            InvalidDTypeError: `max_norm` is no number, or the values of a member are integers.

        Source:
            `tf.clip_by_global_norm`.
        """
        bound = norms.check_max_norm(max_norm, *(values.dtype for values in self._values()))
        factor = self._norm().factor(bound)
        members = {
            name: member._with_values(norms.scale(member.values, factor))
            if isinstance(member, SparseGradient)
            else norms.scale(member, factor)
            for name, member in self._members.items()
        }
        return GroupGradient(members, self.num_gradients, self.step, self.workers)

    def _norm(self) -> norms.Norm:
        return norms.Norm.of(norms.norm_of(values) for values in self._values())

    def _values(self) -> list[Any]:
        """Return the values of each member."""
        return [member.values if isinstance(member, SparseGradient) else member for member in self._members.values()]

    def __repr__(self) -> str:
        return f"GroupGradient({list(self._members)}; num_gradients={self.num_gradients}, step={self.step})"


class AccumulatorGroup(AbstractAccumulator[GroupGradient]):
    """Gathers gradients of several tables in one round: every take holds the same set of gradients of each.

    Two accumulators side by side drift apart, as a gradient can be in time for one and late for the other.
    A group has one count, one step and one queue, so that cannot happen.

    Args:
        members: `SparseSpec` or `DenseSpec` by name.
        shared_name: groups of one target with the same shared name and specs share one round.
        name: its last path component is `.name`.
        target: as for `SparseConditionalAccumulator`, like all the options that follow.
        order: the order of addition.
        compact: whether to merge what has accumulated when it grows.
        accumulate_dtype: of the sums of all members.
        on_nonfinite: what to do with a gradient with a NaN or an infinity in any member.
        expected_workers: how many named workers there will be.
        max_per_worker: gradients that one worker may have in a round.
        max_bytes: budget for what is accumulated and not delivered.
        on_full: ``"raise"`` or ``"block"``.
        staleness: ``"strict"``, or `Window`, `Weighted` or `Defer`.
        num_threads: threads a merge may use.
        engine: ``"native"`` or ``"reference"``.

    Raises:
        InvalidArgumentError: an argument cannot be, or the round of that shared name has other specs.

    Example:
        >>> import gradquorum as gq
        >>> group = gq.AccumulatorGroup(
        ...     {"emb": gq.SparseSpec("float32", (10, 1)), "bias": gq.DenseSpec("float32", (2,))}
        ... )
        >>> group.apply({"emb": ([7, 7], [[1.0], [2.0]]), "bias": [1.0, 0.0]})
        ApplyReceipt(ACCEPTED, step=0, num_accumulated=1)
        >>> group.apply({"bias": [3.0, 0.0]}).num_accumulated
        2
        >>> gradients = group.take(2)
        >>> gradients["emb"].values, gradients["bias"], gradients.num_gradients
        (array([[3.]], dtype=float32), array([2., 0.], dtype=float32), 2)
    """

    def __init__(
        self,
        members: Mapping[str, SparseSpec | DenseSpec],
        shared_name: str | None = None,
        name: str = "accumulator_group",
        *,
        target: Any = None,
        order: Literal["arrival", "worker"] = "arrival",
        compact: bool = True,
        accumulate_dtype: Any = None,
        on_nonfinite: Literal["keep", "skip", "raise"] = "keep",
        expected_workers: int | None = None,
        max_per_worker: int | None = None,
        max_bytes: int | None = None,
        on_full: Literal["raise", "block"] = "raise",
        staleness: Staleness = "strict",
        num_threads: int | None = None,
        engine: Literal["native", "reference"] | None = None,
    ) -> None:
        options = make_options(locals())
        specs = _check_members(members)
        super().__init__(RoundSpec(type(self).__name__, specs, options), shared_name, name, target)

    @property
    def members(self) -> Mapping[str, SparseSpec | DenseSpec]:
        """The specs by name."""
        return dict(self._spec.members)

    def apply(
        self,
        gradients: Mapping[str, Any],
        local_step: int | None = 0,
        *,
        worker: int | str | None = None,
        sequence: int | None = None,
        weight: float = 1.0,
        copy: bool = True,
        timeout: float | None = None,
    ) -> ApplyReceipt:
        """Offer one gradient, a part for each member. It is accepted or dropped as a whole and counts once.

        Args:
            gradients: by member. Sparse: what `SparseConditionalAccumulator.apply_indexed_slices_grad` takes;
                dense: an array. A member that is left out gets an empty contribution: it adds nothing, and
                the ``"MEAN"`` of a dense member is over the gradients that carried it.
            local_step: as for `SparseConditionalAccumulator.apply_grad`, like all that follows.
            worker: who offers it.
            sequence: the worker's number for it.
            weight: for the members reduced by ``"MEAN_BY_WEIGHT"``, a finite number above 0.
            copy: False lends the arrays.
            timeout: seconds to wait for memory.

        Returns:
            What became of it.

        Raises:
            InvalidArgumentError: a member is unknown or its gradient cannot be right; the text begins with its
                name. Nothing has changed, for no member.
        """
        step = check_step(local_step)
        return self._apply(self._check(gradients), step, worker, sequence, weight, copy, timeout)

    def _check(self, gradients: Mapping[str, Any]) -> list[CheckedSparse | CheckedDense]:
        if not isinstance(gradients, Mapping):
            raise InvalidArgumentError(f"gradients: expected a mapping, got {type(gradients).__name__}")
        unknown = [member for member in gradients if member not in self._spec.members]
        if unknown:
            raise InvalidArgumentError(f"gradients: expected members {list(self._spec.members)}, got {unknown[0]!r}")
        checked: list[CheckedSparse | CheckedDense] = []
        for member, spec in self._spec.members.items():
            where = f"{member}: "
            if member not in gradients:
                checked.append(CheckedDense(None) if isinstance(spec, DenseSpec) else empty_sparse(spec))
            elif isinstance(spec, DenseSpec):
                checked.append(check_dense(spec, where, gradients[member]))
            else:
                checked.append(check_slices(spec, where, gradients[member], None)[0])
        return checked

    def take(self, num_required: int, *, timeout: float | None = None, exact: bool = False) -> GroupGradient:
        """Wait until the round holds enough gradients, and return them reduced to one, by member.

        Arguments, errors and threads are those of `SparseConditionalAccumulator.take_grad`.

        Returns:
            A mapping with a `SparseGradient` for each sparse member and an array for each dense one.
        """
        return self._take(num_required, timeout, exact)

    async def take_async(
        self, num_required: int, *, timeout: float | None = None, exact: bool = False
    ) -> GroupGradient:
        """Do what `take` does without blocking the event loop."""
        return await self._take_async(num_required, timeout, exact)

    def submit_take(
        self, num_required: int, *, timeout: float | None = None, exact: bool = False
    ) -> concurrent.futures.Future[GroupGradient]:
        """Queue a take and return a future of what `take` returns.

        As for `SparseConditionalAccumulator.submit_take`.
        """
        return self._submit_take(num_required, timeout, exact)

    def rounds(self, num_required: int, *, timeout: float | None = None) -> Iterator[GroupGradient]:
        """Take round after round; publish the step when the loop body has ended.

        As for `SparseConditionalAccumulator.rounds`.
        """
        return self._rounds(num_required, timeout)

    def worker(self, name: int | str) -> GroupWorker:
        """Return a handle that keeps a worker's identity, sequence and step, and count the worker as live.

        Raises:
            InvalidDTypeError: the name is neither an int nor a str.
            ClosedError: this handle is closed.
        """
        return GroupWorker(self, name)

    def _build(self, merged: Merged) -> GroupGradient:
        members = {
            name: build_sparse(spec, member, merged) if isinstance(spec, SparseSpec) else member
            for (name, spec), member in zip(self._spec.members.items(), merged.members, strict=True)
        }
        return GroupGradient(members, merged.num_gradients, merged.step, merged.workers)


def _check_members(members: Any) -> dict[str, SparseSpec | DenseSpec]:
    if not isinstance(members, Mapping) or not members:
        raise InvalidArgumentError(f"members: expected a mapping of one or more specs, got {members!r}")
    for name, spec in members.items():
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"members: expected names, got {name!r}")
        if not isinstance(spec, SparseSpec | DenseSpec):
            raise InvalidArgumentError(f"members[{name!r}]: expected SparseSpec or DenseSpec, got {spec!r}")
    return dict(members)
