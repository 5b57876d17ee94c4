"""`consume` gives what `merge` gives, gives memory back on the way, and loses nothing when it fails."""

import sys

import numpy as np
import pytest

from gradquorum.engine.interface import ReducerSpec
from gradquorum.engine.reference import ReferenceEngine

native_module = pytest.importorskip("gradquorum.engine.native", exc_type=ImportError)
_native = native_module._native
NATIVE = native_module.NativeEngine()
SPEC = ReducerSpec(np.dtype("f4"), np.dtype("f4"), "MEAN", 2)
RANGE_ROWS = 2 * 8192
"""About as many rows are merged, and given back, together."""


def blocks_of(reducer, num_rows=20_000, width=64, lend=False):
    rng = np.random.default_rng(5)
    blocks = []
    for _ in range(4):
        ids = np.sort(rng.choice(2 * num_rows, num_rows, replace=False))
        blocks.append(reducer.block(ids, rng.standard_normal((num_rows, width), "f4"), lend=lend))
    return blocks


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("width", [0, 1, 4, 64])
@pytest.mark.parametrize("num_rows", [1, 20_000])
@pytest.mark.parametrize("compacted", [0, 3])
def test_consumed_when_merged_before_expect_the_same(width, num_rows, compacted):
    reducer = NATIVE.sparse_reducer(SPEC)
    blocks, kept = blocks_of(reducer, num_rows, width), []
    if compacted:
        blocks = [reducer.compact(blocks[:compacted]), *blocks[compacted:]]
    want = reducer.merge(blocks, (width,), 4)
    assert_same(reducer.consume(blocks, (width,), 4, kept), want)
    assert_same(reducer.consume(blocks, (width,), 4, kept), want)  # as when the first was cut off


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the memory stays until the blocks are gone")
def test_consumed_expect_the_blocks_to_have_given_back_what_the_result_takes():
    reducer = NATIVE.sparse_reducer(SPEC)
    blocks = blocks_of(reducer)
    assert all((reducer.export_block(block).rows != 0).mean() > 0.99 for block in blocks)
    indices, *_ = reducer.consume(blocks, (64,), 4, [])
    given_back = sum(int((reducer.export_block(block).rows == 0).all(axis=1).sum()) for block in blocks)
    assert 0.7 * len(indices) < given_back < len(indices) + RANGE_ROWS


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the memory stays until the blocks are gone")
def test_consumed_when_some_were_merged_before_expect_only_those_to_have_given_back_theirs():
    reducer = NATIVE.sparse_reducer(SPEC)
    blocks = blocks_of(reducer)
    blocks = [reducer.compact(blocks[:3]), blocks[3]]
    last = reducer.export_block(blocks[1]).rows
    reducer.consume(blocks, (64,), 4, [])
    assert (reducer.export_block(blocks[0]).rows == 0).all(axis=1).mean() > 0.9
    np.testing.assert_array_equal(reducer.export_block(blocks[1]).rows, last)


def test_consumed_when_values_are_lent_expect_them_untouched():
    reducer = NATIVE.sparse_reducer(SPEC)
    blocks = blocks_of(reducer, lend=True)
    want = reducer.merge(blocks, (64,), 4)
    reducer.consume(blocks, (64,), 4, [])
    assert_same(reducer.merge(blocks, (64,), 4), want)


def test_consumed_by_the_reference_engine_expect_a_merge():
    reducer, kept = ReferenceEngine().sparse_reducer(SPEC), []
    blocks = blocks_of(reducer, 100)
    assert_same(reducer.consume(blocks, (64,), 4, kept), reducer.merge(blocks, (64,), 4))
    assert kept == []


def test_consuming_when_an_allocation_fails_expect_nothing_lost():
    reducer = NATIVE.sparse_reducer(SPEC)
    blocks, kept = blocks_of(reducer), []
    want = reducer.merge(blocks, (64,), 4)
    failures = 0
    for k in range(100):
        _native._fail_allocation_after(k)
        try:
            got = reducer.consume(blocks, (64,), 4, kept)
        except MemoryError:
            failures += 1
            assert kept == []
            continue
        finally:
            _native._fail_allocation_after(-1)
        break
    assert failures > 5
    assert_same(got, want)


def test_consuming_what_is_no_log_expect_an_error_and_nothing_kept():
    reducer, kept = NATIVE.sparse_reducer(SPEC), []
    blocks = blocks_of(reducer, 10)
    with pytest.raises(ValueError, match="different widths"):
        reducer.consume([*blocks, *blocks_of(reducer, 10, 3)], (64,), 5, kept)
    assert kept == []
