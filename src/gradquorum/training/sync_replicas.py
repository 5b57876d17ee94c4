"""`SyncReplicas`: M workers, of which N are waited for; a chief that takes, updates and publishes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from gradquorum.arrays import as_integer
from gradquorum.errors import (
    CancelledError,
    ClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    UnavailableError,
)
from gradquorum.handle import AbstractAccumulator
from gradquorum.terms import check_timeout
from gradquorum.training.requirement import check_membership, check_requirement
from gradquorum.training.updates import AbstractUpdate, make_update
from gradquorum.training.worker import ReplicaWorker
from gradquorum.waiters import Deadline

__all__ = ["SyncReplicas"]

_LOOK_SECONDS = 0.1
"""How long a chief waits before it looks again who is there, and whether a worker has failed."""
_FIRST_LOG_SECONDS = 60.0
_NEXT_LOG_SECONDS = 600.0

_logger = logging.getLogger("gradquorum")


class _Closed(Exception):
    """The training was closed while the chief was in a call of the group: the end, and no error."""


@contextmanager
def _until_closed() -> Iterator[None]:
    try:
        yield
    except (CancelledError, ClosedError):
        raise _Closed from None


class SyncReplicas:
    """Trains with M workers of which N are waited for: the rest are backups, whose late gradients are dropped.

    In each round the chief, `run`, takes as soon as what is required has come, updates the parameters, and publishes
    the next step. Each worker, `worker`, begins when parameters are out, computes, and applies. Who is late for a round
    begins at once with the next one; who leaves, in order or by an exception, is no longer waited for; no order of
    events leaves a worker without a next step.

    The same code serves threads and processes. A `SyncReplicas` on a server's group pickles: what arrives in the other
    process has `worker`, and no `run`. A process that got the group by `attach` makes its own with ``update=None``.

    Args:
        group: an `AccumulatorGroup` or an accumulator, made with ``expected_workers=num_workers`` and this
            `max_per_worker`, so that the round itself knows who is still to come, wherever it lives.
        num_required: a number, N, of gradients that a round waits for; or ``"all"``, one of every worker that is there
            (those that have not joined yet included); or ``"all-b"``, b fewer than that, and at least 1. The latter two
            follow the workers as they leave and come back.
        num_workers: M. Workers are numbered from 0 to M - 1.
        update: what to do with a merged gradient:

            * a function ``update(gradient)`` or ``update(gradient, step)``. The gradient is what a take of `group`
              returns, and the step is that of the parameters on which it was computed.
            * a torch optimizer. Sparse members become coalesced sparse tensors in ``.grad`` of the parameters
              of the members' names, dense ones tensors; then come ``step()`` and ``zero_grad()``.
              Use an optimizer that takes sparse gradients (SGD, Adagrad, SparseAdam), made with
              ``model.named_parameters()``.
            * an optax transformation, with `params`. It is given dense gradients, as all of optax works on dense
              trees, so a step costs as much as the table is large. NumPy arrays in `params` are changed in place;
              others are replaced in `SyncReplicas.params`.
            * None, in a process that only has workers.
        max_per_worker: gradients of one worker that may count in one round.
        params: by member, or for an accumulator the one array: required by optax; for torch in place of names.

    Raises:
        InvalidArgumentError: an argument cannot be, or does not fit the group. Nothing has changed.

    Threads:
        `run` may be called by one thread at a time, `worker` and `close` by any. It starts no thread.

    Example:
        >>> import threading
        >>> import numpy as np
        >>> import gradquorum as gq
        >>> table = np.ones((4, 1), np.float32)
        >>> def update(gradient):
        ...     table[gradient.indices] -= 0.5 * gradient.values
        >>> def work(sync, index):
        ...     with sync.worker(index) as worker:
        ...         for step in worker:  # waits for parameters; ends when the training is closed
        ...             worker.apply(([index], table[[index]]))
        >>> acc = gq.SparseConditionalAccumulator("float32", (4, 1), expected_workers=3, max_per_worker=1)
        >>> with gq.SyncReplicas(acc, "all", num_workers=3, update=update) as sync:
        ...     threads = [threading.Thread(target=work, args=(sync, index)) for index in range(3)]
        ...     for thread in threads:
        ...         thread.start()
        ...     sync.run(2, timeout=60)
        2
        >>> for thread in threads:
        ...     thread.join()
        >>> table.ravel()
        array([0.25, 0.25, 0.25, 1.  ], dtype=float32)

    Source:
        `tf.compat.v1.train.SyncReplicasOptimizer` (``replicas_to_aggregate`` = N, ``total_num_replicas`` = M) and
        Chen et al., "Revisiting Distributed Synchronous SGD", 2016. There tables move one by one, one worker may use
        another's token and count several times, and a retry counts twice. `docs/training.md` compares point by point.
    """

    def __init__(
        self,
        group: Any,
        num_required: int | str,
        *,
        num_workers: int,
        update: Any,
        max_per_worker: int = 1,
        params: Any = None,
    ) -> None:
        if not isinstance(group, AbstractAccumulator):
            raise InvalidArgumentError(f"group: expected an AccumulatorGroup or an accumulator, got {group!r}")
        self._num_workers = as_integer("num_workers", num_workers)
        self._max_per_worker = as_integer("max_per_worker", max_per_worker)
        for name, number in (("num_workers", self._num_workers), ("max_per_worker", self._max_per_worker)):
            if number < 1:
                raise InvalidArgumentError(f"{name}: expected 1 or more, got {number}")
        self._declared = num_required
        self._requirement = check_requirement(num_required, self._num_workers, self._max_per_worker)
        check_membership(group, self._num_workers, self._max_per_worker)
        self._group: AbstractAccumulator[Any] = group
        self._update: AbstractUpdate | None = None if update is None else make_update(group, update, params)
        self._running = threading.Lock()
        self._failures: list[tuple[int, Exception]] = []
        """Of workers in this process, the first first. Appended to by any thread."""
        self._heard: list[int] = []
        """For each worker the last sequence judged before `_heard_step` was published. Guarded by _running."""
        self._heard_step = 0
        if self._update is not None:
            self._heard, self._heard_step = self._last_sequences(), group.global_step

    # Workers

    def worker(self, worker: int) -> ReplicaWorker:
        """Return a handle for one worker, which from now on is waited for.

        Use it in a ``with`` block: `for step in worker:` compute a gradient and `worker.apply(gradient)`.

        Args:
            worker: 0 to `num_workers` - 1. A worker that left or died comes back under its number.

        Raises:
            InvalidArgumentError: there is no such number.
            ClosedError: the training is closed.
        """
        number = as_integer("worker", worker)
        if not 0 <= number < self._num_workers:
            raise InvalidArgumentError(f"worker: expected 0 to {self._num_workers - 1}, got {number}")
        return ReplicaWorker(self._group, number, self._max_per_worker, self._on_failure)

    def _on_failure(self, worker: int, error: Exception) -> None:
        self._failures.append((worker, error))

    # The chief

    def run(self, rounds: int | None, *, timeout: float | None = None) -> int:
        """Make rounds: wait for what is required, update, publish the next step.

        First, the current step is published if it has not been: the parameters as they are now are its parameters. So
        it is where the step was lowered, or an older state loaded, since the last run: workers go on from there.
        It does not close the training: workers wait for a next `run` until `close`, or the end of the ``with`` block.

        Args:
            rounds: how many; None for as many as there are workers for: until the rest cannot make another one.
            timeout: seconds to wait for each round, 0 or more; None waits without end. Who has waited for 60 seconds
                logs who is missing, and again every 10 minutes.

        Returns:
            The rounds made: fewer than asked only if the training was closed meanwhile.

        Raises:
            DeadlineExceededError: what is required did not come in time. It says who has not been heard from, `have`,
                `need`, and how many came too late. Nothing has changed, and `run` can be called again.
            UnavailableError: the workers that are left cannot do it, and it says who has left; or the server is gone.
                With `rounds` None only the latter. Nothing has changed.
            Exception: what a worker in this process failed with, when the round at hand has ended or within a tenth of
                a second (who ends by `SystemExit` or `KeyboardInterrupt` has not failed, but left); or what `update`
                raised: the round was its, and the next step has not been published.
            InvalidArgumentError: an argument cannot be, another `run` is at work, or there is no `update`.
            ClosedError: the training is closed.

        Threads:
            Blocks; Ctrl-C interrupts it.
        """
        if self._update is None:
            raise InvalidArgumentError("run: expected to be called where update= was given: the chief's process")
        if rounds is not None:
            rounds = as_integer("rounds", rounds)
            if rounds < 0:
                raise InvalidArgumentError(f"rounds: expected 0 or more, or None; got {rounds}")
        timeout = check_timeout(timeout)
        if self.closed:
            raise ClosedError("the training has been closed; make a new group and a new SyncReplicas")
        with self._one_at_a_time():
            made = 0
            self._publish_current()
            try:
                while rounds is None or made < rounds:
                    gradient, step = self._wait(timeout)
                    self._update(gradient, step)
                    made += 1
                    del gradient  # its memory is the next one's
                    with _until_closed():
                        self._heard, self._heard_step = self._last_sequences(), step + 1
                        self._group.publish(step + 1)
            except _Closed:
                pass
            except UnavailableError as error:
                if rounds is not None or error.live is None:  # no workers are missing, but the server
                    raise
                _logger.info("run: ended after %d rounds: %s", made, error)
            self._raise_failure()
            return made

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise InvalidArgumentError("run: expected one at a time, and another one is at work")
        try:
            yield
        finally:
            self._running.release()

    def _publish_current(self) -> None:
        """Publish the step of the parameters as they are, unless a round is still to be applied to them."""
        step = self._group.global_step
        if self._group.published_step != step and not self._group.num_undelivered:
            self._group.publish(step)

    def _wait(self, timeout: float | None) -> tuple[Any, int]:
        """Wait for what is required, following who is there; return it merged, and its step."""
        deadline, start = Deadline(timeout), time.monotonic()
        log_after = _FIRST_LOG_SECONDS
        while True:
            self._raise_failure()
            try:
                with _until_closed():
                    left = deadline.left(_LOOK_SECONDS)
                    return self._requirement.take(self._group, self._group._take_with_step, left)
            except DeadlineExceededError as error:
                if deadline.passed:
                    raise self._late(error, f"after {timeout} s") from None
                waited = time.monotonic() - start
                if waited >= log_after:
                    _logger.warning("%s", self._late(error, f"for {waited:.0f} s now"))
                    log_after += _NEXT_LOG_SECONDS
            except UnavailableError:
                self._raise_failure()  # the reason why somebody left comes before that somebody has
                raise

    def _late(self, error: DeadlineExceededError, how_long: str) -> DeadlineExceededError:
        """Return an error that says whom the chief waits for."""
        with _until_closed():
            now = self._last_sequences()
            before = self._heard if error.step == self._heard_step else now  # the step may have been set
            here = [self._group._target.num_accepted(worker) for worker in range(self._num_workers)]
        missing = tuple(w for w in range(self._num_workers) if not here[w] and now[w] <= before[w])
        names = ", ".join(map(str, missing)) or "nobody"
        return DeadlineExceededError(
            f"run: have {error.have}, need {error.need} ({self._declared!r} of {self._num_workers}) at step "
            f"{error.step} {how_long}; {self._group.num_workers} workers live, not heard from since that step was "
            f"published: {names}; {error.num_stale} dropped as stale since the round began",
            have=error.have,
            need=error.need,
            step=error.step,
            num_stale=error.num_stale,
            missing=missing,
        )

    def _last_sequences(self) -> list[int]:
        return [self._group.last_sequence(worker) for worker in range(self._num_workers)]

    def _raise_failure(self) -> None:
        """Raise what the first worker failed with, once."""
        if self._failures:
            worker, error = self._failures.pop(0)
            error.add_note(f"raised by worker {worker} of SyncReplicas")
            raise error

    # State

    @property
    def group(self) -> Any:
        """The group or accumulator."""
        return self._group

    @property
    def params(self) -> Any:
        """The parameters as they are now, as `params` was given; None with a function as `update`.

        A new mapping comes with each step; with NumPy arrays and torch, its arrays stay the same ones.
        """
        return None if self._update is None else self._update.params

    @property
    def closed(self) -> bool:
        """Whether the training is closed."""
        return self._group.closed

    def close(self) -> int:
        """End the training: `run` returns, and the workers' loops end, in all processes. Closing again does nothing.

        The chief closes the group, with all its handles. A process that only has workers closes its own handle.

        Returns:
            How many accepted gradients that discarded.
        """
        return self._group.close(for_all=self._update is not None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self._group, self._declared, self._num_workers, self._max_per_worker)

    def __repr__(self) -> str:
        return f"<SyncReplicas {self._declared!r} of {self._num_workers} on {self._group!r}>"


def _rebuild(group: Any, num_required: int | str, num_workers: int, max_per_worker: int) -> SyncReplicas:
    return SyncReplicas(group, num_required, num_workers=num_workers, max_per_worker=max_per_worker, update=None)
