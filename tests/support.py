"""Helpers of the tests: threads with deadlines, comparisons, and the few looks behind the public names."""

import contextlib
import importlib.util
import sys
import threading
import time

import numpy as np
import pytest

import gradquorum as gq
import gradquorum.engine
from gradquorum.engine import ReducerSpec, get_engine
from gradquorum.targets.local import LocalTarget

TARGETS = ["local", "process"] if sys.platform == "linux" else ["local"]
"""Where rounds can live; a further target adds its name here."""
if importlib.util.find_spec("ray") is not None:
    TARGETS.append("ray")

servers = {}
"""The servers of this process by address, for the looks behind the public names."""

TIMEOUT = 60.0
"""Seconds after which any wait in a test has failed."""


STRICT_PYTHON = [
    sys.executable,
    "-W",
    "error",
    "-W",
    "ignore:gradquorum was installed without its native engine:RuntimeWarning",
]
"""Runs Python such that each warning is an error, but the one that says that there was no compiler."""


def available_engines():
    """Names of the engines that can be made here, the reference first."""
    return sorted(gradquorum.engine.available_engines(), key="native".__eq__)


def only_local(reason):
    """Mark a test of what only the local target promises or shows, and say why."""
    assert reason
    return pytest.mark.parametrize("target", ["local"], indirect=True)


slow_beyond_local = pytest.mark.parametrize(
    "target",
    ["local", *(pytest.param(name, marks=pytest.mark.slow) for name in TARGETS[1:] if name != "ray")],
    indirect=True,
)
"""Marks a test of thousands of calls: to a server those are for `make test-all`, to actors they are too many."""


def times(number, target):
    """Return how often a test repeats itself: less often where each call goes to an actor."""
    return max(number // 20, 10) if target == "ray" else number


class Call:
    """A call in a thread of its own, started at once."""

    def __init__(self, function, *args, **kwargs):
        self._outcome = None
        self._thread = threading.Thread(target=self._run, args=(function, args, kwargs), daemon=True)
        self._thread.start()

    def _run(self, function, args, kwargs):
        try:
            self._outcome = (function(*args, **kwargs), None)
        except BaseException as error:  # handed to the thread that asks for the result
            self._outcome = (None, error)

    @property
    def running(self):
        return self._thread.is_alive()

    @property
    def waiting(self):
        """Whether the innermost Python function of the call is one named `wait`: it sleeps until it is woken."""
        frame = sys._current_frames().get(self._thread.ident)
        return frame is not None and frame.f_code.co_name == "wait"

    def join(self):
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive(), "the call is still blocked"

    def result(self):
        """Return what the call returned, or raise what it raised."""
        self.join()
        value, error = self._outcome
        if error is not None:
            raise error
        return value

    def error(self):
        """Return what the call raised, or None."""
        self.join()
        return self._outcome[1]


def wait_until(condition, what="the condition"):
    """Wait until `condition()` is true, within the deadline of the tests."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in {TIMEOUT} s"
        time.sleep(1e-4)  # it must not keep busy what it waits for


def round_of(acc):
    """Return the state machine of an accumulator (a look behind the public names)."""
    target = acc._target
    if isinstance(target, LocalTarget):
        return target._round
    return servers[target.address]._service.rounds._rounds[target.shared_name].round


def is_on_ray(acc):
    """Whether the round of an accumulator is in an actor."""
    return type(acc._target).__name__ == "RayTarget"


def num_waiting(acc):
    """Number of takes that wait in the queue of the accumulator (a look behind the public names)."""
    if is_on_ray(acc):
        return acc._target._ask("num_waiting")
    return len(round_of(acc)._queue)


def num_blocked(acc):
    """Number of applies that wait for memory (a look behind the public names)."""
    if is_on_ray(acc):
        return acc._target._ask("num_blocked")
    return len(round_of(acc).budget._line)


def wait_for_waiters(acc, count):
    wait_until(lambda: num_waiting(acc) >= count, f"{count} waiting take(s)")


def blocks_until(acc, blocking, trigger):
    """Run `blocking()` here; once it waits, run `trigger()` in a thread. Return the results of both.

    Fails if `blocking` did not wait for the trigger.
    """
    triggered = threading.Event()

    def when_waiting():
        wait_for_waiters(acc, 1)
        triggered.set()
        return trigger()

    call = Call(when_waiting)
    try:
        result = blocking()
    finally:
        seen = triggered.is_set()
        triggering = call.result()
    assert seen, "the call did not wait for its trigger"
    return result, triggering


def column(*values, dtype=np.float32):
    """Return rows of one value each: `[n, 1]`."""
    return np.array(values, dtype).reshape(-1, 1)


def apply(acc, indices, values, **options):
    """Apply `values`, a list for rows of one value or an array, with the current step unless one is given."""
    options.setdefault("local_step", None)
    if isinstance(values, list):
        values = column(*values, dtype=acc.dtype)
    return acc.apply_grad(np.asarray(indices, np.int64), values, **options)


def accept(acc, indices, values, **options):
    receipt = apply(acc, indices, values, **options)
    assert receipt.status is gq.ApplyStatus.ACCEPTED
    return receipt


def accept_many(acc, number, indices, values):
    """Have the same gradient accepted so many times. On Ray nobody waits for each receipt."""
    if not is_on_ray(acc):
        for _ in range(number):
            accept(acc, indices, values)
        return
    from gradquorum.ray import Pipeline

    with Pipeline(acc, 64) as pipeline:
        rows = column(*values, dtype=acc.dtype)
        futures = [pipeline.submit_apply(indices, rows, local_step=None) for _ in range(number)]
    assert {future.result(0).status for future in futures} == {gq.ApplyStatus.ACCEPTED}


def assert_rows(grad, indices, values):
    """Compare a SparseGradient of rows of one value with ids and values, exactly."""
    np.testing.assert_array_equal(grad.indices, np.array(indices, np.int64))
    assert grad.indices.dtype == np.int64
    np.testing.assert_array_equal(np.asarray(grad.values, np.float64).reshape(-1), np.array(values, np.float64))


def bits(array):
    """Return the array's bytes as unsigned integers, so that -0, NaN and 0 differ."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind == "c":
        array = array.view(np.float32 if array.dtype == np.complex64 else np.float64)
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(actual, expected):
    assert np.asarray(actual).dtype == np.asarray(expected).dtype
    assert np.asarray(actual).shape == np.asarray(expected).shape
    np.testing.assert_array_equal(bits(actual), bits(expected))


def state(acc):
    """Return all that a failed call must leave as it was."""
    return acc.num_accumulated(), acc.global_step, acc.published_step, acc.num_undelivered, acc.num_workers


@contextlib.contextmanager
def unchanged(acc):
    """Check that the block changes neither counts nor steps."""
    before = state(acc)
    yield
    assert state(acc) == before


def drain(acc):
    """Take everything that is left, undelivered rounds first; return the results."""
    results = []
    while acc.num_undelivered or acc.num_accumulated():
        results.append(acc.take_grad(1, timeout=0))
    return results


def reducer_class(engine, kind="sparse"):
    """Return the class whose `merge` the takes of this engine call (a look behind the public names)."""
    spec = ReducerSpec(np.dtype(np.float32), np.dtype(np.float32), "MEAN")
    return type(getattr(get_engine(engine), f"{kind}_reducer")(spec))


@contextlib.contextmanager
def _failing_joins(error, left):
    """Do the same to takes from Ray: they merge elsewhere, and only what that comes to is put together here."""
    taking = sys.modules.get("gradquorum.targets.ray.taking")
    if taking is None:
        yield
        return

    def failing(own):
        def fail(*args):
            if left[0]:
                left[0] -= 1
                raise error("injected")
            return own(*args)

        return fail

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taking, "join", failing(taking.join))
        patch.setattr(taking, "own", failing(taking.own))
        yield


@contextlib.contextmanager
def failing_merges(engine, error=MemoryError, times=1, kind="sparse"):
    """Let the next `times` merges raise `error`, and check at the end that they did."""
    owner = reducer_class(engine, kind)
    merge, left = owner.merge, [times]

    def failing(self, *args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise error("injected")
        return merge(self, *args, **kwargs)

    owner.merge = failing
    try:
        with _failing_joins(error, left):
            yield
    finally:
        owner.merge = merge
    assert not left[0], "no merge came to fail"


class GatedMerges:
    """While entered, merges say that they have begun, and wait for the gate to be opened."""

    def __init__(self, engine, kind="sparse"):
        self._owner = reducer_class(engine, kind)
        self._merge = self._owner.merge
        self.begun = threading.Event()
        self.gate = threading.Event()

    def __enter__(self):
        def gated(reducer, *args, **kwargs):
            self.begun.set()
            assert self.gate.wait(TIMEOUT), "nobody opened the gate"
            return self._merge(reducer, *args, **kwargs)

        self._owner.merge = gated
        return self

    def __exit__(self, *exception):
        self.gate.set()
        self._owner.merge = self._merge
