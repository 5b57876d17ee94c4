"""Blocks as arrays and back: the same content for both engines; the native one refuses what would hurt it."""

import ml_dtypes
import numpy as np
import pytest

from gradquorum.engine import ReducerSpec, get_engine
from gradquorum.engine.parts import DenseParts, SparseParts
from tests.support import assert_same_bits, available_engines

pytestmark = pytest.mark.skipif("native" not in available_engines(), reason="needs both engines")

PAIRS = [
    (np.dtype(dtype), np.dtype(accumulate))
    for dtype, accumulate in [
        ("float16", "float32"),
        (np.dtype(ml_dtypes.bfloat16), "float64"),
        ("float32", "float32"),
        ("float32", "float64"),
        ("complex64", "complex128"),
        ("int32", "int64"),
    ]
]


@pytest.fixture(params=PAIRS, ids=lambda pair: "-".join(dtype.name for dtype in pair))
def spec(request):
    dtype, accumulate = request.param
    return ReducerSpec(dtype, accumulate, "SUM" if dtype.kind == "i" else "MEAN_BY_WEIGHT", 1)


def values(rng, shape, dtype):
    made = rng.integers(-99, 99, shape) if dtype.kind == "i" else rng.standard_normal(shape)
    return made.astype(dtype)


def assert_same_parts(a, b):
    for name, x, y in zip(a._fields, a, b, strict=True):
        if isinstance(x, np.ndarray):
            assert_same_bits(x, y)
        else:
            assert x == y, name


@pytest.mark.parametrize("ids", [[1, 4, 9], [4, 1, 9], [4, 1, 4], []], ids=repr)
@pytest.mark.parametrize("merged", [False, True])
def test_sparse_block_has_the_same_parts_on_both_engines_and_comes_back_as_it_was(spec, ids, merged):
    exported = []
    for name in ("reference", "native"):
        rng = np.random.default_rng(1)
        reducer = get_engine(name).sparse_reducer(spec)
        blocks = [
            reducer.block(np.array(ids, np.int64), values(rng, (len(ids), 2), spec.dtype), weight=w) for w in (0.5, 2.0)
        ]
        block = reducer.compact(blocks) if merged else blocks[0]
        parts = reducer.export_block(block)
        number = 2 if merged else 1
        width = 2
        for other in ("reference", "native"):
            there = get_engine(other).sparse_reducer(spec)
            checked = SparseParts.from_arrays(parts.to_arrays(), spec, width if len(ids) else None, number)
            assert_same_parts(checked, parts)
            assert_same_parts(there.export_block(there.import_block(checked, number)), parts)
        exported.append(parts)
    if ids or not merged:  # of no rows an engine need not know the width
        assert_same_parts(*exported)


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("merged", [False, True])
def test_dense_block_has_the_same_parts_on_both_engines_and_comes_back_as_it_was(spec, absent, merged):
    exported = []
    for name in ("reference", "native"):
        rng = np.random.default_rng(1)
        reducer = get_engine(name).dense_reducer(spec)
        blocks = [reducer.block(None if absent else values(rng, (3,), spec.dtype), weight=w) for w in (0.5, 2.0)]
        parts = reducer.export_block(reducer.compact(blocks) if merged else blocks[0])
        number = 2 if merged else 1
        for other in ("reference", "native"):
            there = get_engine(other).dense_reducer(spec)
            checked = DenseParts.from_arrays(parts.to_arrays(), spec, 3, number)
            assert_same_parts(checked, parts)
            assert_same_parts(there.export_block(there.import_block(checked, number)), parts)
        exported.append(parts)
    assert_same_parts(*exported)


def test_counts_beyond_32_bits_come_back():
    spec = ReducerSpec(np.dtype("float32"), np.dtype("float32"), "MEAN", 1)
    parts = SparseParts(np.array([3]), np.ones((1, 1), np.float32), np.array([2**40]), 1.0)
    for name in ("reference", "native"):
        reducer = get_engine(name).sparse_reducer(spec)
        block = reducer.import_block(parts, 2**41)
        assert reducer.export_block(block).counts[0] == 2**40
        assert reducer.merge([block, block], (1,), 2**42)[2][0] == 2**41


GOOD = {
    "indices": np.array([1, 2]), "rows": np.ones((2, 3), np.float32), "summed": False, "counts": None, "weight": 1.0,
    "num_gradients": 1,
}  # fmt: skip
BAD = {
    "descending": {"indices": np.array([2, 1])},
    "repeated": {"indices": np.array([2, 2])},
    "negative": {"indices": np.array([-1, 2])},
    "more ids": {"indices": np.arange(3)},
    "ids of 32 bits": {"indices": np.arange(2, dtype=np.int32)},
    "vector of rows": {"rows": np.ones(2, np.float32)},
    "strided rows": {"rows": np.ones((4, 3), np.float32)[::2]},
    "float64 rows": {"rows": np.ones((2, 3))},
    "fewer counts": {"counts": np.ones(1, np.int64)},
    "float counts": {"counts": np.ones(2)},
    "a list": {"rows": [[1.0] * 3] * 2},
}


@pytest.mark.parametrize("name", BAD)
def test_native_import_refuses_what_would_make_a_broken_block(name):
    from gradquorum import _native

    reducer = _native.SparseReducer("float32", "float32", "MEAN", 1)
    reducer.import_block(**GOOD)
    with pytest.raises((ValueError, TypeError)):
        reducer.import_block(**{**GOOD, **BAD[name]})


@pytest.mark.parametrize(
    "bad", [{"count": 0}, {"count": -1}, {"total": None}, {"total": np.ones((1, 2), np.float32)}], ids=repr
)
def test_native_import_refuses_a_broken_dense_block(bad):
    from gradquorum import _native

    reducer = _native.DenseReducer("float32", "float32", "MEAN", 1)
    good = {"total": np.ones(2, np.float32), "summed": False, "weight": 1.0, "compacted": False, "count": 1}
    reducer.import_block(**good)
    with pytest.raises((ValueError, TypeError)):
        reducer.import_block(**{**good, **bad})


def test_native_export_refuses_the_block_of_another_kind():
    from gradquorum import _native

    sparse = _native.SparseReducer("float32", "float32", "MEAN", 1)
    dense = _native.DenseReducer("float32", "float32", "MEAN", 1)
    with pytest.raises(TypeError):
        dense.export_block(sparse.import_block(**GOOD))
    with pytest.raises(TypeError):
        sparse.export_block(None)
