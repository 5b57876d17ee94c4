"""The documented classes: they check the input and hand it to their target."""

from __future__ import annotations

import concurrent.futures
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradquorum.handle import AbstractAccumulator, make_options
from gradquorum.indexed_slices import IndexedSlices, SparseGradient
from gradquorum.receipts import ApplyReceipt
from gradquorum.slices import check_slices
from gradquorum.specs import DenseSpec, RoundSpec, SparseSpec
from gradquorum.staleness import Staleness
from gradquorum.targets import Merged
from gradquorum.terms import check_timeout
from gradquorum.validation import check_dense, check_sparse, check_step
from gradquorum.workers import AbstractWorker, DenseWorker, SparseWorker

__all__ = ["ConditionalAccumulator", "ConditionalAccumulatorBase", "SparseConditionalAccumulator"]

R = TypeVar("R")


class ConditionalAccumulatorBase(AbstractAccumulator[R], Generic[R]):
    """What the sparse and the dense accumulator share. Abstract.

    Source: `tf.compat.v1.ConditionalAccumulatorBase`. `accumulator_ref` is not offered: there is no graph.
    """

    def __init__(
        self, member: SparseSpec | DenseSpec, shared_name: str | None, name: str, arguments: dict[str, Any]
    ) -> None:
        spec = RoundSpec(type(self).__name__, {"": member}, make_options(arguments))
        super().__init__(spec, shared_name, name, arguments["target"])

    _member: Any

    @property
    def _only_member(self) -> SparseSpec | DenseSpec:
        return self._spec.members[""]

    @classmethod
    def _attached(cls, spec: RoundSpec, shared_name: str | None, name: str, target: object) -> Self:
        self = super()._attached(spec, shared_name, name, target)
        self._member = self._only_member
        return self

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the gradients and of what a take returns."""
        return self._only_member.dtype

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """The declared shape, unknown sizes as None; None without constraint."""
        return self._only_member.shape or None

    @property
    def reduction_type(self) -> str:
        """How the gradients of a round are reduced to one."""
        return self._only_member.reduction_type

    @abstractmethod
    def worker(self, name: int | str) -> AbstractWorker:
        """Return a handle that keeps a worker's identity, sequence and step, and count the worker as live.

        Raises:
            InvalidDTypeError: the name is neither an int nor a str.
            ClosedError: this handle is closed.
        """

    def take_grad(
        self, num_required: int, name: str | None = None, *, timeout: float | None = None, exact: bool = False
    ) -> R:
        """Wait until the round holds enough gradients, and return them reduced to one.

        Everything accumulated at the moment the quorum is reached is taken, the step advances by one, and the
        gradients of the old step that come later are stale.

        Args:
            num_required: gradients to wait for, 1 or more.
            name: ignored; TensorFlow's method has it.
            timeout: seconds, 0 (do not wait) or more; None waits without end.
            exact: take the first `num_required` accepted and leave the rest in the next round. Only with
                `compact=False`.

        Returns:
            A `SparseGradient` of indices `[r]`, values `[r, *row]` and shape, or for a dense accumulator an
            array of the gradients' shape; in the accumulator's dtype, owned by the caller.

        Raises:
            InvalidArgumentError: `num_required` or `exact` cannot be. Nothing has changed.
            DeadlineExceededError: the quorum was not reached in time. Nothing has changed.
            UnavailableError: the workers that are left cannot reach it. Nothing has changed.
            CancelledError: this handle was closed meanwhile. Nothing has changed.
            ClosedError: the handle is closed.
            ResourceExhaustedError: no memory for the result. The round is kept whole for the next take, as after
                any exception that cuts off a take once its quorum was reached.

        Threads:
            Blocks; waiting takes are served strictly in order. Ctrl-C interrupts it.

        Example:
            >>> import gradquorum as gq
            >>> with gq.SparseConditionalAccumulator("float32", (5, 1)) as acc:
            ...     _ = acc.apply_grad([3, 1], [[30.0], [10.0]])
            ...     _ = acc.apply_grad([1], [[1.0]])
            ...     indices, values, shape = acc.take_grad(2)
            >>> indices, values.ravel()
            (array([1, 3]), array([ 5.5, 30. ], dtype=float32))

        Source:
            TensorFlow's `SparseAccumulatorTakeGradient` and `AccumulatorTakeGradient`. Unlike there, ids come back
            ascending and unique whatever order they came in, and the one who completes the quorum decides.
        """
        number = self._check_take(num_required, exact)
        if timeout is not None:
            timeout = check_timeout(timeout)
        return self._target.take(number, timeout, exact, self._build)

    async def take_grad_async(
        self, num_required: int, name: str | None = None, *, timeout: float | None = None, exact: bool = False
    ) -> R:
        """Do what `take_grad` does without blocking the event loop.

        Arguments, result and errors are those of `take_grad`. A cancelled task leaves the take as any other
        cut-off one: nothing is lost.
        """
        return await self._take_async(num_required, timeout, exact)

    def submit_take(
        self, num_required: int, name: str | None = None, *, timeout: float | None = None, exact: bool = False
    ) -> concurrent.futures.Future[R]:
        """Queue a take and return a future of what `take_grad` returns.

        Arguments are those of `take_grad`. The future's `cancel()` works until the round is detached for it.
        The merge runs in a thread of the library.

        Raises:
            InvalidArgumentError: `num_required` or `exact` cannot be. Nothing has changed.
            ClosedError: the handle is closed.
        """
        return self._submit_take(num_required, timeout, exact)


class SparseConditionalAccumulator(ConditionalAccumulatorBase[SparseGradient]):
    """Gathers sparse gradients from many workers and hands back their mean once enough have come.

    A row of the result is the sum of the rows offered for its id, divided under ``"MEAN"`` by the number of
    gradients that touched that row, under ``"MEAN_BY_COUNT"`` by the number of gradients in the round, under
    ``"MEAN_BY_WEIGHT"`` by the sum of all their weights, and under ``"SUM"`` by nothing.

    Args:
        dtype: of the gradients: float16, bfloat16, float32, float64, complex64 or complex128, and with
            ``"SUM"`` int32 or int64; anything NumPy or a loaded framework calls so.
        shape: `[rows, *row]`; sizes may be None. None, `()` and `[]` mean no constraint. Rows are not allocated.
        shared_name: accumulators of one target with the same shared name and spec share one round.
        name: its last path component is `.name`.
        reduction_type: see above.
        target: where the round lives: ``"local"`` for this process; a server's address (`Server.address`, a path with a
            ``/`` in it); None for the server that `connect` named, without one for this process.
        order: ``"arrival"`` adds rows in order of acceptance; ``"worker"`` in order of (worker, sequence), with
            the same bits whatever the order of arrival. The latter keeps every gradient until the take.
        compact: False keeps every gradient until the take, as `exact` takes need.
        accumulate_dtype: of the sums; ``"float64"`` widens float16, bfloat16 and float32, ``"complex128"`` complex64.
        on_nonfinite: what to do with a gradient with a NaN or an infinity: ``"keep"``, ``"skip"`` or ``"raise"``.
        expected_workers: how many named workers there will be. With `max_per_worker`, a take that those
            which are left cannot satisfy ends at once.
        max_per_worker: gradients that one worker may have in a round; more are `REFUSED`.
        max_bytes: budget for what is accumulated and not delivered.
        on_full: ``"raise"``, or ``"block"`` to make an apply wait for memory.
        staleness: ``"strict"``: a gradient of an earlier step is dropped; or one of the policies `Window`, `Weighted`
            and `Defer`.
        num_threads: threads a merge may use; None for all cores of this process.
        engine: ``"native"`` or ``"reference"``; None for the best there is.

    Raises:
        InvalidArgumentError: an argument cannot be, or the round of that shared name has another spec.
        InvalidDTypeError: the dtype is not supported, or not with this reduction.

    Example:
        >>> import gradquorum as gq
        >>> acc = gq.SparseConditionalAccumulator("float32", shape=(10, 2))
        >>> acc.apply_grad([7, 7, 1], [[1, 1], [2, 2], [3, 3]])  # unsorted, with a repeat
        ApplyReceipt(ACCEPTED, step=0, num_accumulated=1)
        >>> acc.take_grad(1).values
        array([[3., 3.],
               [3., 3.]], dtype=float32)
        >>> acc.close()
        0

    Source:
        `tf.compat.v1.SparseConditionalAccumulator` of TensorFlow 2.21, of whose results it keeps every bit for
        ids that ascend without repeats (float32, float64; subnormals, which TensorFlow flushes, apart).
    """

    def __init__(
        self,
        dtype: Any,
        shape: Any = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: Literal["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"] = "MEAN",
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
        self._member = SparseSpec(dtype, shape, reduction_type)
        super().__init__(self._member, shared_name, name, locals())

    def apply_grad(
        self,
        grad_indices: Any,
        grad_values: Any,
        grad_shape: Any = None,
        local_step: int | None = 0,
        name: str | None = None,
        *,
        worker: int | str | None = None,
        sequence: int | None = None,
        weight: float = 1.0,
        copy: bool = True,
        timeout: float | None = None,
    ) -> ApplyReceipt:
        """Offer one gradient. It counts once, for the round and for each row it touches.

        Ids may come in any order and repeatedly: rows of one id are summed. The arrays may be reused as soon
        as this returns.

        Args:
            grad_indices: ids `[n]`, integers of any width.
            grad_values: `[n, *row]`: an array of the accumulator's dtype, or a list that is converted. For zero
                ids, values of shape `[0]` are an empty gradient of any row shape.
            grad_shape: the shape of the whole table, -1 or None where unknown; checked against what is known.
            local_step: step of the parameters the gradient was computed on (`published_step`). Below
                the round's step it is stale and dropped; equal and future steps are accepted. None is the
                current step.
            name: ignored; TensorFlow's method has it.
            worker: who offers it, an int or a str.
            sequence: the worker's number for it, 0 or more. A pair of worker and sequence is judged once.
            weight: under ``"MEAN_BY_WEIGHT"``, a finite number above 0.
            copy: False lends the values, if their ids ascend without repeats: they must not be written to
                until the receipt says `released`.
            timeout: seconds to wait for memory under ``on_full="block"``; None waits without end.

        Returns:
            What became of it. Its truth value is whether it was accepted.

        Raises:
            InvalidArgumentError: the gradient cannot be right. Nothing has changed.
            InvalidDTypeError: an array has the wrong dtype. Nothing has changed.
            ResourceExhaustedError: no memory, or `max_bytes` are held already. Nothing has changed.
            DeadlineExceededError: there was no room in time. Nothing has changed.
            CancelledError: this handle was closed while waiting for room. Nothing has changed.
            ClosedError: the handle is closed.

        Threads:
            Never waits for another apply's or a take's arithmetic.

        Example:
            >>> import gradquorum as gq
            >>> acc = gq.SparseConditionalAccumulator("float32", shape=(5, 1))
            >>> acc.set_global_step(3)
            >>> acc.apply_grad([0], [[1.0]], local_step=2)
            ApplyReceipt(STALE, step=3, num_accumulated=0, lag=1)

        Source:
            TensorFlow's `SparseAccumulatorApplyGradient`, which drops stale gradients without a word.
        """
        if grad_shape is None:
            receipt = self._apply_plain(grad_indices, grad_values, local_step, worker, sequence, weight, copy, timeout)
            if receipt is not None:
                return receipt
        gradient, step = check_sparse(self._member, "", grad_indices, grad_values, grad_shape, local_step)
        return self._apply((gradient,), step, worker, sequence, weight, copy, timeout)

    def apply_indexed_slices_grad(
        self,
        grad: Any,
        local_step: int | None = 0,
        name: str | None = None,
        *,
        worker: int | str | None = None,
        sequence: int | None = None,
        weight: float = 1.0,
        copy: bool = True,
        timeout: float | None = None,
    ) -> ApplyReceipt:
        """Offer one gradient given as slices, or as a list of parts that are summed and count once.

        Args:
            grad: `IndexedSlices` or anything with `values` `[n, *row]`, `indices` `[n]` and `dense_shape`; a tuple
                `(indices, values[, shape])`; a torch sparse COO tensor; or a list of these.
            local_step: as for `apply_grad`, like all that follows.
            name: ignored; TensorFlow's method has it.
            worker: who offers it.
            sequence: the worker's number for it.
            weight: under ``"MEAN_BY_WEIGHT"``, a finite number above 0.
            copy: False lends the values; several parts are always copied.
            timeout: seconds to wait for memory.

        Returns:
            What became of it.

        Raises:
            InvalidArgumentError: as for `apply_grad`, like all other errors. Nothing has changed.

        Example:
            >>> import gradquorum as gq
            >>> acc = gq.SparseConditionalAccumulator("float32", reduction_type="SUM")
            >>> first = gq.IndexedSlices([[1.0], [1.0]], [1, 2])
            >>> second = gq.IndexedSlices([[1.0], [1.0]], [2, 3])
            >>> acc.apply_indexed_slices_grad([first, second]).num_accumulated
            1
            >>> acc.take_grad(1).values.ravel()
            array([1., 2., 1.], dtype=float32)
        """
        gradient, step = check_slices(self._member, "", grad, local_step)
        return self._apply((gradient,), step, worker, sequence, weight, copy, timeout)

    def take_indexed_slices_grad(
        self, num_required: int, name: str | None = None, *, timeout: float | None = None, exact: bool = False
    ) -> IndexedSlices:
        """Do what `take_grad` does and return `IndexedSlices(values, indices, dense_shape)`.

        Arguments and errors are those of `take_grad`.
        """
        number = self._check_take(num_required, exact)
        return self._target.take(number, check_timeout(timeout), exact, self._build_slices)

    def rounds(self, num_required: int, *, timeout: float | None = None) -> Iterator[SparseGradient]:
        """Take round after round; publish the step when the loop body has ended.

        What is published is the step of the parameters that the body has updated: one more than the gradient's. It
        only ever raises the published step, so that a body which sets the step can publish it itself. Ends when this
        handle is closed. A loop left by `break` or an exception publishes nothing for its last round.

        Args:
            num_required: gradients to wait for in each round.
            timeout: seconds for each wait; None waits without end.

        Raises:
            InvalidArgumentError: `num_required` cannot be.
            DeadlineExceededError: a quorum was not reached in time.

        Example:
            >>> import gradquorum as gq
            >>> acc = gq.SparseConditionalAccumulator("float32")
            >>> _ = acc.apply_grad([2], [[1.0]])
            >>> for gradient in acc.rounds(1):
            ...     print(gradient.indices, acc.published_step)
            ...     _ = acc.close()
            [2] 0
        """
        return self._rounds(num_required, timeout)

    def worker(self, name: int | str) -> SparseWorker:
        """Return a handle that keeps a worker's identity, sequence and step, and count the worker as live.

        Raises:
            InvalidDTypeError: the name is neither an int nor a str.
            ClosedError: this handle is closed.

        Example:
            >>> import gradquorum as gq
            >>> acc = gq.SparseConditionalAccumulator("float32")
            >>> with acc.worker("a") as worker:
            ...     step = worker.begin()
            ...     receipt = worker.apply_grad([2], [[1.0]])
            >>> receipt
            ApplyReceipt(ACCEPTED, step=0, num_accumulated=1)
        """
        return SparseWorker(self, name)

    def _build(self, merged: Merged) -> SparseGradient:
        return build_sparse(self._member, merged.members[0], merged)

    def _build_slices(self, merged: Merged) -> IndexedSlices:
        return self._build(merged).as_indexed_slices()


class ConditionalAccumulator(ConditionalAccumulatorBase[NDArray[Any]]):
    """Gathers dense gradients from many workers and hands back their mean once enough have come.

    Arguments, options and errors are those of `SparseConditionalAccumulator`; `shape` is that of the whole
    gradient. ``"MEAN"`` divides by the number of gradients. One running sum is kept, unless ``order="worker"``
    or ``compact=False``.

    Example:
        >>> import gradquorum as gq
        >>> with gq.ConditionalAccumulator("float32", shape=(2,)) as acc:
        ...     _ = acc.apply_grad([1.0, 2.0])
        ...     _ = acc.apply_grad([3.0, 4.0])
        ...     acc.take_grad(2)
        array([2., 3.], dtype=float32)

    Source:
        `tf.compat.v1.ConditionalAccumulator` of TensorFlow 2.21.
    """

    def __init__(
        self,
        dtype: Any,
        shape: Any = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
        reduction_type: Literal["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"] = "MEAN",
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
        self._member = DenseSpec(dtype, shape, reduction_type)
        super().__init__(self._member, shared_name, name, locals())

    def apply_grad(
        self,
        grad: Any,
        local_step: int | None = 0,
        name: str | None = None,
        *,
        worker: int | str | None = None,
        sequence: int | None = None,
        weight: float = 1.0,
        copy: bool = True,
        timeout: float | None = None,
    ) -> ApplyReceipt:
        """Offer one gradient, converted to the accumulator's dtype.

        Args:
            grad: an array, a list or a scalar, of the declared shape.
            local_step: as for `SparseConditionalAccumulator.apply_grad`, like all that follows.
            name: ignored; TensorFlow's method has it.
            worker: who offers it.
            sequence: the worker's number for it.
            weight: under ``"MEAN_BY_WEIGHT"``, a finite number above 0.
            copy: False lends the array, if it is C-contiguous and of the dtype.
            timeout: seconds to wait for memory.

        Returns:
            What became of it.

        Raises:
            InvalidArgumentError: its shape is not that of the accumulator or of the round. Nothing has changed.
            InvalidDTypeError: converting it would lose what kind of number it is. Nothing has changed.
        """
        step = check_step(local_step, "for (indices, values) make a SparseConditionalAccumulator")
        gradient = check_dense(self._member, "", grad)
        return self._apply((gradient,), step, worker, sequence, weight, copy, timeout)

    def rounds(self, num_required: int, *, timeout: float | None = None) -> Iterator[NDArray[Any]]:
        """Take round after round; publish the step when the loop body has ended.

        As for `SparseConditionalAccumulator.rounds`.
        """
        return self._rounds(num_required, timeout)

    def worker(self, name: int | str) -> DenseWorker:
        """Return a handle that keeps a worker's identity, sequence and step, and count the worker as live.

        Raises:
            InvalidDTypeError: the name is neither an int nor a str.
            ClosedError: this handle is closed.
        """
        return DenseWorker(self, name)

    def _build(self, merged: Merged) -> NDArray[Any]:
        array: NDArray[Any] = merged.members[0]
        return array


def build_sparse(spec: SparseSpec, member: Any, merged: Merged) -> SparseGradient:
    """Return the sparse gradient of one member of a merged round."""
    indices, values, counts = member
    rows = spec.shape[0] if spec.shape else None
    shape = -1 if rows is None else rows, values.shape
    return SparseGradient(indices, values, shape, merged.num_gradients, merged.step, counts, merged.workers)
