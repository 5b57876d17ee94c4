"""What accumulators and groups share: everything that does not depend on the members of the round."""

from __future__ import annotations

import logging
import warnings
from typing import Any, Self, TypeVar

from gradquorum.arrays import MAX_INT64, as_integer
from gradquorum.errors import (
    ClosedError,
    InvalidArgumentError,
    StaleGradientWarning,
    UnavailableError,
)
from gradquorum.keeping import Keeping
from gradquorum.receipts import ApplyReceipt, ApplyStatus
from gradquorum.specs import Options, RoundSpec
from gradquorum.taking import Taking
from gradquorum.targets import AbstractTarget, Terms, open_target
from gradquorum.terms import check_sequence, check_timeout, check_weight, check_worker
from gradquorum.validation import CheckedGradient

__all__ = ["AbstractAccumulator", "make_options"]

R = TypeVar("R")

_logger = logging.getLogger("gradquorum")


class AbstractAccumulator(Taking[R], Keeping):
    """One handle on a round whose takes return an `R`.

    Threads: all methods may be called from any number of threads. A handle on a local round belongs to its
    process: it does not pickle, and in a forked child its methods raise `ClosedError`. One on a server's round
    pickles, and attaches again where it is unpickled; in a forked child its methods raise `ClosedError` as well.
    """

    def __init__(self, spec: RoundSpec, shared_name: str | None, name: str, target: object) -> None:
        for what, value in (("name", name), ("shared_name", shared_name)):
            if not isinstance(value, str) and not (what == "shared_name" and value is None):
                raise InvalidArgumentError(f"{what}: expected a string, got {value!r}")
        self._spec = spec
        self._name = name.rsplit("/", 1)[-1]
        self._target: AbstractTarget = open_target(spec, shared_name, target)
        self._warned_stale = False
        options = spec.options
        self._needs_worker = options.order == "worker" or options.max_per_worker is not None
        self._weight_dtypes = [dtype for dtype in spec.weight_dtypes() if dtype is not None]

    # What subclasses build on

    def _apply(
        self,
        gradients: CheckedGradient,
        local_step: int | None,
        worker: int | str | None,
        sequence: int | None,
        weight: float,
        copy: bool,
        timeout: float | None,
        *,
        warn_stale: bool = True,
    ) -> ApplyReceipt:
        terms = self._check_terms(local_step, worker, sequence, weight, copy, timeout)
        receipt = self._target.apply(gradients, terms)
        if receipt.status is ApplyStatus.STALE and local_step == 0 and warn_stale:
            self._warn_stale(receipt)
        return receipt

    def _apply_plain(
        self,
        indices: Any,
        values: Any,
        local_step: Any,
        worker: Any,
        sequence: Any,
        weight: Any,
        copy: bool,
        timeout: Any,
        warn_stale: bool = True,
    ) -> ApplyReceipt | None:
        """Do what checking and `_apply` do, faster; None, and nothing has happened, if that needs a closer look.

        Args:
            indices: as the caller gave them, like all that follows.
            values: of the gradient.
            local_step: of the gradient.
            worker: as for `_apply`, like all that follows.
            sequence: of the worker.
            weight: of the gradient.
            copy: or lend.
            timeout: seconds to wait for room.
            warn_stale: whether to warn of a gradient dropped with step 0.
        """
        if local_step is not None and (type(local_step) is not int or not -MAX_INT64 <= local_step <= MAX_INT64):
            return None
        try:
            terms = self._check_terms(local_step, worker, sequence, weight, copy, timeout)
        except InvalidArgumentError:
            return None  # the gradient is looked at before its terms
        receipt = self._target.apply_plain(indices, values, terms)
        if local_step == 0 and warn_stale and receipt is not None and receipt.status is ApplyStatus.STALE:
            self._warn_stale(receipt)
        return receipt

    def _check_terms(
        self, local_step: int | None, worker: Any, sequence: Any, weight: Any, copy: bool, timeout: Any
    ) -> Terms:
        if worker is not None:
            worker = check_worker(worker)
        elif self._needs_worker:
            raise InvalidArgumentError("worker: expected a name, as order='worker' or max_per_worker is set; got None")
        if sequence is not None:
            sequence = check_sequence(worker, sequence)
        if type(weight) is not float or weight != 1.0:
            weight = check_weight(weight, self._weight_dtypes)
        if timeout is not None:
            timeout = check_timeout(timeout)
        return Terms(local_step, worker, sequence, weight, not copy, timeout)

    def _warn_stale(self, receipt: ApplyReceipt) -> None:
        if self._warned_stale:
            return
        self._warned_stale = True
        warnings.warn(
            f"a gradient with local_step=0 was dropped as stale: the round is at step {receipt.step}. Give the "
            "step of the parameters it was computed on (published_step), or local_step=None for the current "
            "step. This is said once for each accumulator.",
            StaleGradientWarning,
            stacklevel=4,
        )

    # Public

    @property
    def name(self) -> str:
        """The last component of the name it was made with."""
        return self._name

    @property
    def engine(self) -> str:
        """The engine that does the arithmetic: ``"native"`` or ``"reference"``."""
        return self._target.engine_name

    @property
    def closed(self) -> bool:
        """Whether this handle is closed."""
        return self._target.closed

    def num_accumulated(self, name: str | None = None) -> int:
        """Return how many gradients the open round holds.

        Args:
            name: ignored; TensorFlow's methods have it.

        Raises:
            ClosedError: the handle is closed.
        """
        return self._target.num_accumulated()

    @property
    def global_step(self) -> int:
        """The round's step. It runs ahead of the parameters while a taker updates: see `published_step`."""
        return self._target.global_step

    def set_global_step(self, new_global_step: int, name: str | None = None) -> None:
        """Set the round's step. What is accumulated stays; nothing is published.

        Lowering it is done, and logged as a warning, as TensorFlow documents.

        Args:
            new_global_step: any int64.
            name: ignored; TensorFlow's methods have it.

        Raises:
            InvalidArgumentError: it is no int64. Nothing has changed.
            ClosedError: the handle is closed.
        """
        step = as_integer("new_global_step", new_global_step)
        before = self._target.set_global_step(step)
        if step < before:
            _logger.warning("%s: global_step was lowered from %d to %d", self._name, before, step)

    @property
    def published_step(self) -> int:
        """The step whose parameters are out: what a worker gives as `local_step`. 0 at first."""
        return self._target.published_step

    def publish(self, step: int | None = None) -> int:
        """Announce that the parameters of a step are out, wake who waits for them, and return the step.

        Args:
            step: None for the current step.

        Raises:
            InvalidArgumentError: it is no int64. Nothing has changed.
            ClosedError: the handle is closed.
        """
        return self._target.publish(None if step is None else as_integer("step", step))

    def wait_published(self, step: int, *, timeout: float | None = None) -> int:
        """Wait until the published step is at least `step`, and return the published one.

        Args:
            step: what to wait for.
            timeout: seconds, 0 or more; None waits without end.

        Raises:
            DeadlineExceededError: it was not published in time.
            CancelledError: this handle was closed meanwhile.
            ClosedError: the handle is closed.
        """
        return self._target.wait_published(as_integer("step", step), check_timeout(timeout))

    @property
    def num_workers(self) -> int:
        """The named workers that have joined and not left."""
        return self._target.num_workers

    @property
    def num_undelivered(self) -> int:
        """The detached rounds whose take was cut off: each is what a next take will get."""
        return self._target.num_undelivered

    @property
    def num_deferred(self) -> int:
        """The late gradients that wait for the next round, under ``staleness=Defer()``."""
        return self._target.num_deferred

    def last_sequence(self, worker: int | str) -> int:
        """Return the highest sequence of a worker that has been judged, -1 if there is none.

        A restarted worker goes on from there plus one.

        Raises:
            InvalidDTypeError: `worker` is neither an int nor a str.
            ClosedError: the handle is closed.
        """
        return self._target.last_sequence(check_worker(worker))

    def discard(self) -> int:
        """Empty the open round, and what is deferred to the next, and return how many gradients that were.

        Step and marks stay.

        Raises:
            ClosedError: the handle is closed.
        """
        return self._target.discard()

    def close(self, for_all: bool = False) -> int:
        """Close this handle: its waits end with `CancelledError`, its later calls with `ClosedError`.

        The round closes with its last handle. Closing a closed handle does nothing.

        Args:
            for_all: close all handles of the round.

        Returns:
            How many accepted, not delivered gradients that discarded; 0 while other handles keep the round.
        """
        return self._target.close(for_all)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @classmethod
    def _attached(cls, spec: RoundSpec, shared_name: str | None, name: str, target: object) -> Self:
        """Return a handle made from a spec that has been checked."""
        self = cls.__new__(cls)
        AbstractAccumulator.__init__(self, spec, shared_name, name, target)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        address = getattr(self._target, "address", None)
        if address is None:
            raise TypeError(
                f"a local {type(self).__name__} lives in its process and does not pickle; use one with a remote "
                "target= to share it with other processes"
            )
        from gradquorum.processes import reattach, spawning_key

        shared_name = self._target.shared_name  # type: ignore[attr-defined]
        return reattach, (type(self), self._spec, shared_name, self._name, address, spawning_key(address))

    def __repr__(self) -> str:
        try:
            state = f"step {self.global_step}, {self.num_accumulated()} accumulated"
        except ClosedError:
            state = "closed" if self.closed else "of another process"
        except UnavailableError:
            state = "its server is gone"
        return f"<{self._name} {self._spec.summary()}: {state}>"


def make_options(arguments: dict[str, Any]) -> Options:
    """Return the checked options among a constructor's arguments."""
    return Options(**{name: arguments[name] for name in Options._fields})
