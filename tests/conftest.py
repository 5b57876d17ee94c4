"""Fixtures, options and profiles shared by all tests.

`engine` and `target` say where an accumulator lives; `make` builds accumulators and groups there. A second engine or a
further target adds one line here and every contract test runs over it. The process target's server is in this process,
so that tests can look into it, or cut off its merges; what others reach it by is all the same.
"""

import itertools
import signal
import sys
import warnings
import weakref

import pytest
from hypothesis import HealthCheck, Phase, settings

import gradquorum as gq
from tests.support import TARGETS, available_engines, servers

MARKERS = {
    "slow": "takes more than a few seconds; runs under --slow, --require-all or -m slow",
    "frameworks": "needs a framework such as torch",
    "ray": "runs on a Ray cluster that it starts",
}

settings.register_profile(
    "quick", max_examples=150, stateful_step_count=40, derandomize=True, deadline=None, print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=1000, derandomize=False)
settings.load_profile("quick")


class Maker:
    """Builds accumulators and groups on one engine and target, and closes them when the test ends."""

    _numbers = itertools.count()

    def __init__(self, engine, target):
        self.engine = engine
        self.target = target
        self._made = weakref.WeakSet()

    def _build(self, kind, *args, **options):
        made = kind(*args, **{"engine": self.engine, "target": self.target, **options})
        self._made.add(made)
        return made

    def sparse(self, dtype="float32", shape=None, **options):
        return self._build(gq.SparseConditionalAccumulator, dtype, shape, **options)

    def dense(self, dtype="float32", shape=None, **options):
        return self._build(gq.ConditionalAccumulator, dtype, shape, **options)

    def group(self, members, **options):
        return self._build(gq.AccumulatorGroup, members, **options)

    def shared_name(self):
        """Return a shared name that no other test uses."""
        return f"test-{next(self._numbers)}"

    def close_all(self):
        for made in list(self._made):
            made.close()


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--require-all", action="store_true", help="run slow tests, and count a skipped test as failed")


def pytest_configure(config):
    # A shell starts background jobs with SIGINT ignored; then neither we nor what we start would see Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    known = " ".join(config.getini("markers"))
    for name, meaning in MARKERS.items():
        if f"{name}:" not in known:
            config.addinivalue_line("markers", f"{name}: {meaning}")
    if not any(line.startswith("error") for line in config.getini("filterwarnings")):
        config.addinivalue_line("filterwarnings", "error")


def _param(item, name, default):
    """Return a parameter of a test, if it has that."""
    return item.callspec.params.get(name, default) if hasattr(item, "callspec") else default


def _is_twin(item):
    """Whether the test differs from another one only in the engine of a server."""
    default = available_engines()[-1]
    return _param(item, "target", "local") != "local" and _param(item, "engine", default) != default


IN_PROCESS = {"round_of", "GatedMerges", "reducer_class", "clock", "growth", "_fail_allocation_after"}
"""What looks into the process of a round, or stops its merges or its clock: there is no way to do that to an actor."""
LONG_SECONDS = 10.0
"""From here on a stress test does no more than repeat a shorter one."""


def _is_not_for_ray(item):
    """Whether a test is one of a round on Ray that cannot be, or that differs little from another one."""
    if _param(item, "target", "local") != "ray":
        return False
    if item.path.parent.name == "parity":
        return True  # thousands of calls of which the other targets show the same
    if _is_twin(item) or _param(item, "seconds", 0.0) > LONG_SECONDS:
        return True
    default = available_engines()[-1]
    if _param(item, "other", default) != default:
        return True  # between the engines there are files, which other targets have shown
    return bool(IN_PROCESS & {*item.function.__code__.co_names, *item.fixturenames})


def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if not _is_not_for_ray(item)]
    for item in items:
        if _param(item, "target", "local") == "ray":
            item.add_marker(pytest.mark.ray)
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.slow)
        if _is_twin(item):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("timeout") is None and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(300 if item.get_closest_marker("ray") else 600))
    wanted = config.getoption("--slow") or config.getoption("--require-all") or "slow" in config.option.markexpr
    if not wanted:
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)


def _skip_to_failure(config, report):
    if config.getoption("--require-all") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but --require-all is given: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    _skip_to_failure(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    _skip_to_failure(collector.config, report)
    return report


@pytest.fixture(params=available_engines())
def engine(request):
    return request.param


@pytest.fixture(scope="session")
def server():
    """One server for all tests, each of which makes rounds of its own there."""
    with gq.Server() as server:
        servers[server.address] = server
        yield server


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray cluster of this machine, for all tests of this run."""
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        # JAX's, where it is loaded. What Ray forks becomes another program at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ray.init(
            address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20
        )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def ray_pool(ray_cluster):
    """Actors that the tests take turns to use, so that each need not wait for its own to start."""
    from tests.ray import pool

    ray_cluster.cloudpickle.register_pickle_by_value(pool)  # what Ray starts does not know the tests
    return pool.Pool(ray_cluster)


@pytest.fixture(params=TARGETS)
def target(request):
    """What to give as `target=`."""
    if request.param == "ray":
        with request.getfixturevalue("ray_pool").used(num_shards=2):
            yield "ray"
    else:
        yield "local" if request.param == "local" else request.getfixturevalue("server").address


@pytest.fixture
def make(engine, target):
    maker = Maker(engine, target)
    yield maker
    maker.close_all()


@pytest.fixture
def switch_often():
    """Let threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def run_thread():
    """Start calls in threads; none may outlive the test."""
    from tests.support import Call

    calls = []

    def start(function, *args, **kwargs):
        calls.append(Call(function, *args, **kwargs))
        return calls[-1]

    yield start
    for call in calls:
        call.join()
