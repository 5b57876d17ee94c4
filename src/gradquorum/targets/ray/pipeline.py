"""Applies that nobody waits for: a thread sends what has gathered, while calls before it are still on their way."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections import deque
from typing import Any, NamedTuple

from gradquorum.errors import ClosedError, UnavailableError
from gradquorum.receipts import ApplyReceipt
from gradquorum.targets.interface import Terms
from gradquorum.targets.ray.records import Void
from gradquorum.targets.ray.sending import Prepared, Sender
from gradquorum.targets.ray.wire import unpack_judged
from gradquorum.validation import CheckedGradient

__all__ = ["PendingApply", "SubmittingTarget", "submitting"]

_MAX_CALLS = 2
"""On their way at the same time: one is judged while the next is put together."""


class PendingApply(concurrent.futures.Future[ApplyReceipt]):
    """The receipt of an apply that is on its way."""

    status = None
    """Not known yet."""


class _Submitted(NamedTuple):
    prepared: Prepared
    thread: int
    future: PendingApply


class SubmittingTarget:
    """What an accumulator's `apply` hands its gradients to, instead of its target, when nobody is to wait.

    Guarded by ``_changed``: all that is assigned outside `__init__`, and the deques.
    """

    def __init__(self, sender: Sender, client: Any, max_in_flight: int) -> None:
        self._sender = sender
        self._client = client
        self._max_in_flight = max_in_flight
        self._changed = threading.Condition()
        self._waiting: deque[_Submitted] = deque()
        self._num_in_flight = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gradquorum-submit", daemon=True)
        self._thread.start()

    def apply_plain(self, indices: Any, values: Any, terms: Terms) -> None:
        """Leave the checks to the accumulator."""

    def apply(self, gradients: CheckedGradient, terms: Terms) -> PendingApply:
        """Queue a gradient; wait only while there are too many."""
        prepared = self._sender.prepare(gradients, terms, keep=not terms.lend)  # in the time of who submits
        future = PendingApply()
        future.set_running_or_notify_cancel()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._num_in_flight < self._max_in_flight)
            if self._closed:
                raise ClosedError("this pipeline has been closed; make a new one to go on")
            self._num_in_flight += 1
            self._waiting.append(_Submitted(prepared, threading.get_ident(), future))
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """Wait until all that was submitted has its answer, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        sent: deque[tuple[list[_Submitted], int, Any]] = deque()
        while True:
            with self._changed:
                if not sent:
                    self._changed.wait_for(lambda: self._closed or bool(self._waiting))
                batch = list(self._waiting) if len(sent) < _MAX_CALLS else []
                if batch:
                    self._waiting.clear()
                if not batch and not sent:
                    return
            if batch:
                sent.append(self._send(batch))
            if sent and (len(sent) == _MAX_CALLS or not self._waiting):
                self._finish(*sent.popleft())

    def _send(self, batch: list[_Submitted]) -> tuple[list[_Submitted], int, Any]:
        """Send gradients in one call; None in its place if that could not be done."""
        seen, call = self._client.incarnation, None
        workers = [one.prepared.offer.terms.worker for one in batch]
        if any(self._client.losses.owes(worker) for worker in workers):
            return batch, seen, None  # one after the other, they hear what is lost before anything newer counts
        with contextlib.suppress(Exception):  # one after the other they will be told apart
            for worker in workers:
                if worker is not None:
                    self._client.join(worker)
            call = self._sender.send(seen, [one.prepared for one in batch])
        return batch, seen, call

    def _finish(self, batch: list[_Submitted], seen: int, call: Any) -> None:
        """Wait for the answers. Without any, each gradient is offered by itself, and hears what there is to hear."""
        answers: Any = None
        if call is not None:
            with contextlib.suppress(Exception):
                answers = self._client.get(call)
                answers = unpack_judged(answers) if type(answers) is bytes else answers
        for i, one in enumerate(batch):
            terms = one.prepared.offer.terms
            try:
                if answers is None and terms.sequence is None and call is not None:
                    self._client.resume(seen)
                    raise _unknown()
                if answers is None or type(answers) is Void:
                    receipt = self._sender.insist(self._sender.renewed(one.prepared), one.thread)
                else:
                    receipt = self._sender.receipt(terms, answers[i], one.thread, seen)
            except BaseException as error:
                self._end(one.future.set_exception, error)
            else:
                self._end(one.future.set_result, receipt)

    def _end(self, end: Any, outcome: Any) -> None:
        with self._changed:
            self._num_in_flight -= 1
            self._changed.notify_all()
        end(outcome)


def _unknown() -> UnavailableError:
    return UnavailableError("a call was lost; whether the gradient counted is not known", outcome_known=False)


def submitting(accumulator: Any, target: SubmittingTarget) -> Any:
    """Return an accumulator that applies without waiting; all else is the same."""
    twin = object.__new__(type(accumulator))  # a copy would be another handle: it attaches to the round
    twin.__dict__.update(accumulator.__dict__, _target=target)
    return twin
