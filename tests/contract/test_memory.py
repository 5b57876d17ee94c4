"""SEMANTICS 3 and 8, CASES C2: memory between calls."""

import gc
import tracemalloc

import numpy as np
import pytest

import gradquorum as gq
from gradquorum.engine import trim_memory
from tests.support import accept, available_engines, only_local, servers, slow_beyond_local, wait_until

MIB = 1 << 20


class Growth:
    """Bytes that NumPy and the native engine's pool hold more than when this was made."""

    slack = MIB // 2

    def __init__(self):
        # A server keeps a round that has arrived for a moment longer, in which it may yet be given back.
        wait_until(lambda: not any(server._service.is_settling for server in servers.values()), "earlier takes' end")
        gc.collect()
        trim_memory()  # what is kept is taken for smaller pieces, too, and counts as what it is
        tracemalloc.start()
        self._before = pool_bytes()

    def bytes(self):
        return tracemalloc.get_traced_memory()[0] + pool_bytes() - self._before

    def close(self):
        tracemalloc.stop()


def pool_bytes():
    """Memory of the native engine that is in use: it takes it from a pool, which nobody traces."""
    if "native" not in available_engines():
        return 0
    from gradquorum import _native

    return _native.memory_stats()["live_bytes"]


@pytest.fixture(scope="module")
def warm():
    """What NumPy loads when it is first needed is no memory of a round."""
    for engine in available_engines():
        with gq.SparseConditionalAccumulator("float32", engine=engine) as acc:
            for ids in ([1, 0, 1], [0, 1]):
                accept(acc, ids, [1.0] * len(ids))
            acc.take_grad(2)


@pytest.fixture
def growth(warm):
    growth = Growth()
    yield growth
    growth.close()


def same_ids(acc, times, rows):
    ids = np.arange(len(rows)) * 7
    for _ in range(times):
        accept(acc, ids, rows)


@slow_beyond_local
def test_c2_memory_of_the_same_ids_10_000_times_is_constant(make, growth):
    acc = make.sparse("float32", (1000, 16))
    rows = np.ones((100, 16), np.float32)
    same_ids(acc, 1000, rows)
    before = growth.bytes()
    same_ids(acc, 9000, rows)
    assert growth.bytes() - before < 2 * MIB  # what came is 65 MB
    taken = acc.take_grad(10_000, timeout=0)
    np.testing.assert_array_equal(taken.values, rows)
    np.testing.assert_array_equal(taken.counts, np.full(100, 10_000))


def test_memory_of_the_same_ids_is_at_most_three_times_the_distinct_rows_and_1_mib(make, growth):
    acc = make.sparse("float32", (1000, 16))
    most = 0
    for _ in range(10):
        same_ids(acc, 100, np.ones((100, 16), np.float32))
        most = max(most, growth.bytes())
    assert most <= MIB + 3 * 100 * (16 * 4 + 8) + growth.slack
    assert acc.take_grad(1000, timeout=0).num_gradients == 1000


def test_memory_of_overlapping_rounds_is_at_most_three_times_the_distinct_rows_and_1_mib(make, growth):
    acc = make.sparse("float32", (8_000, 64))
    rng = np.random.default_rng(0)
    distinct = 8_000 * (64 * 4 + 8)
    rows, most = np.ones((2_000, 64), np.float32), 0
    for _ in range(60):  # 15 times the distinct rows
        accept(acc, np.sort(rng.choice(8_000, 2_000, replace=False)), rows)
        most = max(most, growth.bytes())
    assert most <= MIB + 3 * distinct + growth.slack
    assert acc.take_grad(60, timeout=0).num_gradients == 60


@only_local("blocks that come to a server are in shared memory, which is not counted here")
@pytest.mark.parametrize("options", [{"compact": False}, {"order": "worker"}])
def test_memory_without_compaction_keeps_every_block_until_the_take(make, growth, options):
    acc = make.sparse("float32", (1000, 64), **options)
    rows = np.ones((100, 64), np.float32)
    for _ in range(100):
        accept(acc, np.arange(100), rows, worker="w")
    assert growth.bytes() >= 90 * rows.nbytes
    assert acc.take_grad(100, timeout=0).num_gradients == 100
    assert growth.bytes() < 30 * rows.nbytes


@pytest.mark.parametrize("options", [{"compact": False}, {"order": "worker"}])
def test_memory_without_compaction_is_told_by_the_docs_and_repr(make, options):
    acc = make.sparse("float32", (5, 1), **options)
    ((name, value),) = options.items()
    assert f"{name}={value!r}" in repr(acc)
    assert "until the take" in " ".join(type(acc).__doc__.split())


def test_c3_memory_of_a_round_is_its_rows_not_the_table(make, growth):
    acc = make.sparse("float32", (793_471, 512))
    rows = np.ones((2_560, 512), np.float32)
    accept(acc, np.arange(2_560) * 300, rows)
    assert growth.bytes() < 3 * rows.nbytes + growth.slack


def test_memory_of_a_dense_round_is_one_running_sum(make, growth):
    acc = make.dense("float32", (100_000,))
    value, most = np.ones(100_000, np.float32), 0
    for _ in range(40):
        acc.apply_grad(value, local_step=None)
        most = max(most, growth.bytes())
    assert most <= 3 * value.nbytes + MIB + growth.slack
    np.testing.assert_array_equal(acc.take_grad(40, timeout=0), value)
