"""The library's own threads: some that merge for futures and coroutines, one that watches their deadlines.

They are daemons, started on first use. A forked child starts its own.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["Background", "Timer", "background"]

_MAX_THREADS = 32
_MAX_IDLE = 2
_MAX_CANCELLED = 64


class Timer:
    """A call that will be made at a moment, unless cancelled before."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call: Callable[[], Any] | None = call
        """None once cancelled. Guarded by the lock of `Background`."""


class Background:
    """Runs jobs and timers. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin afresh, with no threads."""
        self.jobs: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        """`put` is one C call: it may be made under a lock and no signal comes between."""
        self._lock = threading.RLock()  # a signal handler may come in between
        self._num_threads = 0
        """Guarded by _lock, like all that follows."""
        self._num_idle = 0
        self._watching = False
        """Whether the thread for the timers runs."""
        self._timers: list[tuple[float, int, Timer]] = []
        """A heap."""
        self._num_cancelled = 0
        """Timers in the heap whose call was cancelled."""
        self._earlier = threading.Condition(self._lock)
        """A timer was added that comes first."""
        self._serial = itertools.count()

    def start(self) -> None:
        """Start the threads unless they run.

        They count themselves when they run: a start that fails or is interrupted leaves nothing behind.
        """
        self._add_thread()
        if not self._watching:
            threading.Thread(target=self._run_timers, name="gradquorum-timers", daemon=True).start()

    def _add_thread(self) -> None:
        """Keep a thread idle, as far as that goes: a job may run callbacks of the user's that wait."""
        if self._num_idle == 0 and self._num_threads < _MAX_THREADS:
            threading.Thread(target=self._run_jobs, name="gradquorum-merge", daemon=True).start()

    def call_at(self, moment: float, call: Callable[[], Any]) -> Timer:
        """Make a call, in a thread of ours, at a moment of the monotonic clock."""
        timer = Timer(call)
        with self._lock:
            heapq.heappush(self._timers, (moment, next(self._serial), timer))
            self._earlier.notify()
        return timer

    def cancel(self, timer: Timer) -> None:
        """Cancel a call; one that is about to be made may still be made."""
        with self._lock:
            if timer.call is None:
                return
            timer.call = None
            self._num_cancelled += 1
            if self._num_cancelled > _MAX_CANCELLED and 2 * self._num_cancelled > len(self._timers):
                self._timers = [entry for entry in self._timers if entry[2].call is not None]
                heapq.heapify(self._timers)
                self._num_cancelled = 0

    def _run_jobs(self) -> None:
        with self._lock:
            self._num_threads += 1
        while True:
            with self._lock:
                if self._num_idle >= _MAX_IDLE:
                    self._num_threads -= 1
                    return
                self._num_idle += 1
            job: Callable[[], Any] | None = self.jobs.get()
            with self._lock:
                self._num_idle -= 1
            with contextlib.suppress(RuntimeError):  # no more threads to be had: the others must do
                self._add_thread()
            _run(job)
            job = None  # keep nothing alive while waiting

    def _run_timers(self) -> None:
        with self._lock:
            if self._watching:
                return
            self._watching = True
        while True:
            with self._lock:
                while not self._timers or self._timers[0][0] > time.monotonic():
                    ahead = self._timers[0][0] - time.monotonic() if self._timers else threading.TIMEOUT_MAX
                    self._earlier.wait(min(max(ahead, 0.0), threading.TIMEOUT_MAX))
                timer = heapq.heappop(self._timers)[2]
                call, timer.call = timer.call, None
                if call is None:
                    self._num_cancelled = max(0, self._num_cancelled - 1)
            _run(call)  # ours, and quick
            del call, timer


def _run(call: Callable[[], Any] | None) -> None:
    """Make a call; whatever comes of it, the thread lives on."""
    try:
        if call is not None:
            call()
    except BaseException:  # a call reports its own errors
        with contextlib.suppress(Exception):
            logging.getLogger("gradquorum").exception("a background call failed")


background = Background()

os.register_at_fork(after_in_child=background.reset)  # the parent's threads are not here
