"""Moments nobody plans: signal handlers, finalizers, exits, closed loops, threads that cannot start."""

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import gradquorum as gq
from gradquorum import background as background_module
from gradquorum.records import Prefix
from gradquorum.targets import local
from tests.support import TIMEOUT, accept, available_engines, column, only_local, round_of, wait_until


def run_python(code, *arguments):
    """Run code in a process of its own and return what it printed; it must end well and without a word of complaint."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


SIGNALS = """
import signal, sys, time
import numpy as np, gradquorum as gq
acc = gq.SparseConditionalAccumulator("float64", (2, 1), reduction_type="SUM", engine=sys.argv[1])
row, nested = np.ones((1, 1)), 0
def handler(*_):
    global nested
    acc.num_accumulated(), acc.published_step, acc.publish()
    nested += bool(acc.apply_grad([1], row, local_step=None))
    signal.setitimer(signal.ITIMER_REAL, 2e-4)  # only now: one inside another would go ever deeper
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 2e-4)
accepted, taken, until = 0, [], time.monotonic() + 1.5
while time.monotonic() < until:
    accepted += bool(acc.apply_grad([0], row, local_step=None))
    taken.append(acc.take_grad(1))
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 0)
if acc.num_accumulated():
    taken.append(acc.take_grad(1))
total = sum(float(gradient.values.sum()) for gradient in taken)
print(nested > 20, total == accepted + nested)
"""


def test_methods_called_by_a_signal_handler_neither_block_nor_lose_anything(engine):
    assert run_python(SIGNALS, engine).split() == ["True", "True"]


@only_local("only there a call can hold the lock of the round")
def test_wait_in_a_signal_handler_that_interrupted_a_call_is_refused(make):
    acc = make.sparse("float32", (2, 1))
    with acc._target._round._lock, pytest.raises(gq.GradQuorumError, match="signal handler"):
        acc.take_grad(1)
    assert acc.apply_grad([0], column(1))


def test_methods_called_by_a_finalizer_under_the_lock_do_not_block(make):
    acc = make.sparse("float32", (2, 1), expected_workers=2, max_per_worker=1000)

    class Leaver:
        def __init__(self):
            self.circle, self.worker = self, acc.worker("gone")

        def __del__(self):
            self.worker.leave()

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            Leaver()
            accept(acc, [0], [1.0], worker="here")
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert acc.num_accumulated() == 50


EXIT = """
import sys, threading
import numpy as np, gradquorum as gq
acc = gq.SparseConditionalAccumulator("float32", (100_000, 64), engine=sys.argv[1])
ids, rows = np.arange(2000), np.ones((2000, 64), np.float32)
going = threading.Semaphore(0)
def work():
    while True:
        acc.apply_grad(ids, rows, local_step=None)
        going.release()
def take():
    while True:
        acc.take_grad(3)
for target in (work, work, take):
    threading.Thread(target=target, daemon=True).start()
waiting = acc.submit_take(10**6)
for _ in range(20):
    going.acquire()
"""


# Before Python 3.14 a daemon thread that NumPy's own C++ has let loose aborts the exit; that is not ours to mend.
@pytest.mark.parametrize("engine", [name for name in available_engines() if name != "reference"])
def test_exit_while_daemon_threads_are_in_the_engine_is_a_clean_one(engine):
    for _ in range(3):
        assert run_python(EXIT, engine) == ""


def test_coroutine_whose_loop_was_closed_leaves_its_round_to_the_next_take(make):
    acc = make.sparse("float32", (2, 1))
    loop = asyncio.new_event_loop()
    task = loop.create_task(acc.take_grad_async(1))
    loop.run_until_complete(asyncio.sleep(0))
    merged = threading.Event()
    call_soon = loop.call_soon_threadsafe

    def drop(*arguments):
        call_soon(*arguments)
        merged.set()

    loop.call_soon_threadsafe = drop
    accept(acc, [0], [1.0])
    assert merged.wait(TIMEOUT)
    loop.close()
    assert acc.num_undelivered == 1
    assert acc.take_grad(1, timeout=0).values[0, 0] == 1
    task._log_destroy_pending = False


@only_local("the client of a server has no host")
def test_take_that_timed_out_keeps_nothing_alive(make):
    gc.collect()
    gc.disable()
    try:
        acc = make.sparse("float32", (2, 1), shared_name=make.shared_name())
        host = weakref.ref(acc._target._host)
        with pytest.raises(gq.DeadlineExceededError):
            acc.take_grad(1, timeout=0)
        with pytest.raises(gq.InvalidArgumentError):
            acc.apply_grad([0], np.ones((1, 2), np.float32))
        del acc
        assert host() is None
    finally:
        gc.enable()


def test_result_of_a_dropped_future_is_freed_at_once(make):
    acc = make.sparse("float32", (2, 1))
    accept(acc, [0], [1.0])
    gc.collect()
    gc.disable()
    try:
        future = acc.submit_take(1)
        gradient = weakref.ref(future.result(TIMEOUT).values)
        del future
        for _ in range(1000):
            if gradient() is None:
                break
            threading.Event().wait(0.001)  # the thread that merged lets go of it
        assert gradient() is None
    finally:
        gc.enable()


@only_local("only there a take has a timer")
@pytest.mark.parametrize("timeout", [None, 1e6])
def test_take_that_ends_before_its_deadline_is_watched_leaves_no_timer(make, monkeypatch, timeout):
    timers = []

    class Late:
        """Sets timers when the take has ended."""

        def __getattr__(self, name):
            return getattr(background_module.background, name)

        def call_at(self, moment, call):
            wait_until(lambda: not round_of(acc).num_in_flight, "the end of the take")
            timers.append(background_module.background.call_at(moment, call))
            return timers[-1]

    monkeypatch.setattr(local, "background", Late())
    acc = make.sparse("float32", (2, 1))
    accept(acc, [0], [1.0])
    assert acc.submit_take(1, timeout=timeout).result(TIMEOUT).num_gradients == 1
    assert [timer.call for timer in timers] == [None]


def test_thread_that_cannot_start_spoils_no_later_future(make, monkeypatch):
    acc = make.sparse("float32", (2, 1))
    fresh = background_module.Background()
    monkeypatch.setattr(local, "background", fresh)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            acc.submit_take(1)
    future = acc.submit_take(1)
    accept(acc, [0], [1.0])
    assert future.result(TIMEOUT).num_gradients == 1
    with pytest.raises(gq.DeadlineExceededError):
        acc.submit_take(1, timeout=0.01).result(TIMEOUT)


def test_callbacks_that_wait_hold_up_no_other_future(make):
    acc, other = make.sparse("float32", (2, 1)), make.sparse("float32", (2, 1))
    release, waiting = threading.Event(), threading.Semaphore(0)

    def wait(_):
        waiting.release()
        release.wait(TIMEOUT)

    futures = [acc.submit_take(1) for _ in range(4)]
    for future in futures:
        future.add_done_callback(wait)
    try:
        for _ in futures:
            accept(acc, [0], [1.0])
            assert waiting.acquire(timeout=TIMEOUT)
        with pytest.raises(gq.DeadlineExceededError):
            other.submit_take(1, timeout=0.01).result(TIMEOUT)
        accept(other, [0], [1.0])
        assert other.submit_take(1).result(TIMEOUT).num_gradients == 1
    finally:
        release.set()


class Failing(logging.Handler):
    def emit(self, record):
        raise OSError("the log is full")


def test_log_handler_that_fails_ends_neither_takes_nor_timers(make, monkeypatch):
    monkeypatch.setattr(local, "FIRST_LOG_SECONDS", 0.01)
    logger, handler = logging.getLogger("gradquorum"), Failing()
    logger.addHandler(handler)
    try:
        acc = make.sparse("float32", (2, 1))
        with pytest.raises(gq.DeadlineExceededError):
            acc.take_grad(1, timeout=0.05)
        with pytest.raises(gq.DeadlineExceededError):
            acc.submit_take(1, timeout=0.05).result(TIMEOUT)
        with pytest.raises(gq.DeadlineExceededError):
            acc.submit_take(1, timeout=0.01).result(TIMEOUT)
    finally:
        logger.removeHandler(handler)


@only_local("only there a signal handler interrupts a compaction: a server runs them in threads of its own")
def test_compaction_within_a_compaction_loses_no_gradient(make):
    # The profiler's hook stands for a signal handler at the worst of moments: the prefix is chosen, but not yet marked.
    acc = make.sparse("int64", (5000, 1), reduction_type="SUM")
    ids, ones = np.arange(5000), np.ones((5000, 1), np.int64)
    nested = 0

    def interrupt(frame, event, _):
        nonlocal nested
        if event == "return" and frame.f_code is Prefix.__init__.__code__:
            sys.setprofile(None)
            nested = sum(bool(acc.apply_grad(ids, ones, local_step=None)) for _ in range(20))

    sys.setprofile(interrupt)
    try:
        accepted = sum(bool(acc.apply_grad(ids, ones, local_step=None)) for _ in range(20))
    finally:
        sys.setprofile(None)
    taken = acc.take_grad(1)
    assert nested == 20
    assert taken.num_gradients == accepted + nested
    assert (taken.values == accepted + nested).all()
    assert (taken.counts == accepted + nested).all()
