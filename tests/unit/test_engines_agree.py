"""The native engine gives the bits of the reference engine: on everything, however it gets there."""

import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest

from gradquorum.engine.interface import ReducerSpec
from gradquorum.engine.reference import ReferenceEngine
from gradquorum.engine.splitting import parts_of, values_at

native_module = pytest.importorskip("gradquorum.engine.native", exc_type=ImportError)
_native = native_module._native
NATIVE = native_module.NativeEngine()
REFERENCE = ReferenceEngine()

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PAIRS = [
    (np.dtype(dtype), np.dtype(accumulate))
    for dtype, accumulate in [
        ("float16", "float32"),
        ("float16", "float64"),
        (BFLOAT16, "float32"),
        (BFLOAT16, "float64"),
        ("float32", "float32"),
        ("float32", "float64"),
        ("float64", "float64"),
        ("complex64", "complex64"),
        ("complex64", "complex128"),
        ("complex128", "complex128"),
        ("int32", "int64"),
        ("int64", "int64"),
    ]
]
MEANS = ["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"]
SPECS = [
    pytest.param(dtype, accumulate, reduction, id=f"{dtype.name}-{accumulate.name}-{reduction}")
    for dtype, accumulate in PAIRS
    for reduction in (["SUM"] if dtype.kind == "i" else MEANS)
]


@pytest.fixture(params=[True, False], ids=["wide", "baseline"])
def kernels(request):
    _native._allow_wide_kernels(request.param)
    yield
    _native._allow_wide_kernels(True)


def real(dtype):
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def assert_same_bits(actual, expected):
    """Compare bit for bit, NaN payloads apart."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    a, b = (np.ascontiguousarray(x).reshape(-1).view(real(x.dtype)) for x in (actual, expected))
    bits = np.dtype(f"u{a.dtype.itemsize}")
    same = a.view(bits) == b.view(bits)
    if a.dtype.kind != "i":
        same |= np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
    np.testing.assert_array_equal(same, True)


def random_values(rng, dtype, shape):
    if dtype.kind == "i":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    parts = rng.normal(size=(2, *shape)) * 10.0 ** rng.integers(-3, 4, (2, *shape))
    special = rng.random((2, *shape)) < 0.03
    parts[special] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-7, 6e-8, 65519.0, 1e-40, 3e38], special.sum())
    with np.errstate(all="ignore"):
        return (parts[0] + 1j * parts[1] if dtype.kind == "c" else parts[0]).astype(dtype)


def random_ids(rng, n, kind):
    if kind == "ascending":
        return np.unique(rng.integers(0, 3 * n + 1, n))
    if kind == "hashed":
        return rng.integers(0, 2**63 - 1, n)
    return rng.integers(0, {"repeats": n // 2 + 1, "few": 5}[kind], n)


def random_layout(rng, values):
    """Return the same values in some layout."""
    match rng.integers(5):
        case 0:
            return np.asfortranarray(values)
        case 1:
            return np.repeat(values, 2, axis=0)[::2]
        case 2:
            raw = np.empty(values.nbytes + 1, np.uint8)[1:]
            raw[:] = np.frombuffer(values.tobytes(), np.uint8)
            return raw.view(values.dtype).reshape(values.shape)
        case 3:
            values.flags.writeable = False
    return values


def make_blocks(reducer, gradients, rng, lend):
    return [
        reducer.block(ids.copy(), values, weight=weight, lend=lend and bool(rng.integers(2)))
        for ids, values, weight in gradients
    ]


@pytest.mark.parametrize(("dtype", "accumulate", "reduction"), SPECS)
def test_sparse_log_when_merged_any_way_expect_reference_bits(kernels, dtype, accumulate, reduction):
    for seed in range(12):
        rng = np.random.default_rng([seed, 7])
        spec = ReducerSpec(dtype, accumulate, reduction, num_threads=int(rng.integers(1, 4)))
        native, reference = NATIVE.sparse_reducer(spec), REFERENCE.sparse_reducer(spec)
        row = [(), (1,), (3,), (2, 4), (16,), (37,), (0,)][rng.integers(7)]
        gradients = []
        for _ in range(rng.integers(1, 12)):
            ids = random_ids(rng, int(rng.integers(0, 60)), rng.choice(["ascending", "hashed", "repeats", "few"]))
            values = random_layout(rng, random_values(rng, dtype, (len(ids), *row)))
            weight = float(real(accumulate).type(rng.random() + 0.1)) if reduction == "MEAN_BY_WEIGHT" else 1.0
            gradients.append((ids.astype(np.int64), values, weight))
        if seed % 4 == 0:
            gradients.append((np.empty(0, np.int64), np.empty(0, dtype), 1.0))
        expected = reference.merge(make_blocks(reference, gradients, rng, False), row, len(gradients))
        blocks = make_blocks(native, gradients, rng, lend=True)
        for _ in range(3):
            actual = native.merge(blocks, row, len(gradients))
            for got, want in zip(actual, expected, strict=True):
                assert_same_bits(got, want)
            prefix = int(rng.integers(1, len(blocks) + 1))
            blocks = [native.compact(blocks[:prefix]), *blocks[prefix:]]


@pytest.mark.parametrize(("dtype", "accumulate"), PAIRS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("width", [1, 2, 24])
def test_large_log_when_merged_with_threads_expect_reference_bits(dtype, accumulate, width):
    rng = np.random.default_rng(3)
    reduction = "SUM" if dtype.kind == "i" else "MEAN"
    gradients = []
    for kind in ("ascending", "ascending", "hashed", "ascending", "repeats"):
        ids = random_ids(rng, 12_000, kind)
        gradients.append((ids, random_values(rng, dtype, (len(ids), width)), 1.0))
    reference = REFERENCE.sparse_reducer(ReducerSpec(dtype, accumulate, reduction))
    expected = reference.merge(make_blocks(reference, gradients, rng, False), (width,), 5)
    for num_threads in (1, 2, 5, None):
        native = NATIVE.sparse_reducer(ReducerSpec(dtype, accumulate, reduction, num_threads))
        blocks = make_blocks(native, gradients, rng, lend=True)
        for got, want in zip(native.merge(blocks, (width,), 5), expected, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize(("dtype", "accumulate", "reduction"), SPECS)
def test_dense_log_when_merged_any_way_expect_reference_bits(kernels, dtype, accumulate, reduction):
    for seed in range(8):
        rng = np.random.default_rng([seed, 11])
        spec = ReducerSpec(dtype, accumulate, reduction, num_threads=int(rng.integers(1, 4)))
        native, reference = NATIVE.dense_reducer(spec), REFERENCE.dense_reducer(spec)
        shape = [(), (1,), (7, 5), (300, 300), (0, 3), (2, 3, 4)][rng.integers(6)]
        values = [
            None if rng.integers(4) == 0 else random_layout(rng, np.array(random_values(rng, dtype, shape)))
            for _ in range(rng.integers(1, 7))
        ]
        weights = [float(real(accumulate).type(rng.random() + 0.1)) for _ in values]
        if reduction != "MEAN_BY_WEIGHT":
            weights = [1.0] * len(values)
        pairs = list(zip(values, weights, strict=True))
        expected = reference.merge([reference.block(v, weight=w) for v, w in pairs], shape, len(values))
        blocks = [native.block(v, weight=w, lend=bool(rng.integers(2))) for v, w in pairs]
        for _ in range(3):
            assert_same_bits(native.merge(blocks, shape, len(values)), expected)
            prefix = int(rng.integers(1, len(blocks) + 1))
            blocks = [native.compact(blocks[:prefix]), *blocks[prefix:]]


@pytest.mark.parametrize(("dtype", "accumulate"), PAIRS, ids=lambda dtype: dtype.name)
def test_finite_when_asked_for_expect_what_the_reference_says(kernels, dtype, accumulate):
    spec = ReducerSpec(dtype, accumulate, "SUM")
    for seed in range(40):
        rng = np.random.default_rng(seed)
        ids = random_ids(rng, 6, rng.choice(["ascending", "repeats"]))
        values = random_values(rng, dtype, (len(ids), 5))
        for lend in (False, True):
            got, want = (
                engine.sparse_reducer(spec).block(ids.copy(), values, lend=lend, check_finite=True)
                for engine in (NATIVE, REFERENCE)
            )
            assert (got.finite, got.lent) == (want.finite, want.lent)
            got, want = (
                engine.dense_reducer(spec).block(values, lend=lend, check_finite=True) for engine in (NATIVE, REFERENCE)
            )
            assert (got.finite, got.lent) == (want.finite, want.lent)


def test_distinct_bytes_when_few_expect_exact_and_when_many_expect_close():
    spec = ReducerSpec(np.dtype("f4"), np.dtype("f4"), "MEAN")
    native, reference = NATIVE.sparse_reducer(spec), REFERENCE.sparse_reducer(spec)
    rng = np.random.default_rng(0)
    for n, error in ((500, 0.0), (200_000, 0.12)):
        gradients = [(rng.integers(0, n, n), np.ones((n, 2), "f4"), 1.0) for _ in range(3)]
        got = native.distinct_bytes(make_blocks(native, gradients, rng, False))
        want = reference.distinct_bytes(make_blocks(reference, gradients, rng, False))
        assert abs(got - want) <= error * want
    dense = NATIVE.dense_reducer(spec)
    assert dense.distinct_bytes([dense.block(None), dense.block(np.ones((3, 4), "f4"))]) == 48


class TestMemory:
    spec = ReducerSpec(np.dtype("f4"), np.dtype("f4"), "MEAN")

    def test_lent_values_when_the_block_dies_expect_released(self):
        class Lender(np.ndarray):  # plain arrays cannot be referred to weakly
            pass

        values = np.ones((3, 4), "f4").view(Lender)
        alive = weakref.ref(values)
        block = NATIVE.sparse_reducer(self.spec).block(np.arange(3), values, lend=True)
        assert block.lent
        del values
        gc.collect()
        assert alive() is not None
        del block
        gc.collect()
        assert alive() is None

    def test_blocks_when_referred_to_weakly_expect_it_to_work(self):
        block = NATIVE.sparse_reducer(self.spec).block(np.arange(3), np.ones((3, 4), "f4"))
        alive = weakref.ref(block)
        del block
        gc.collect()
        assert alive() is None

    def test_results_when_dropped_expect_memory_back_in_the_pool(self):
        reducer = NATIVE.sparse_reducer(self.spec)
        gc.collect()
        before = _native.memory_stats()["live_buffers"]
        result = reducer.merge([reducer.block(np.arange(3), np.ones((3, 4), "f4"))], (4,), 1)
        assert all(array.flags.writeable and array.flags.aligned for array in result)
        assert _native.memory_stats()["live_buffers"] == before + 3
        with pytest.raises(ValueError, match="own"):
            result[1].resize((100, 100))
        part = result[1][1:]
        del result
        gc.collect()
        assert _native.memory_stats()["live_buffers"] == before + 1
        del part
        gc.collect()
        assert _native.memory_stats()["live_buffers"] == before
        _native.trim_memory()
        assert _native.memory_stats()["kept_bytes"] == 0

    def test_allocation_when_it_fails_expect_memory_error_and_nothing_changed(self):
        reducer = NATIVE.sparse_reducer(self.spec)
        ids, values = np.array([3, 1, 3]), np.ones((3, 4), "f4")
        block = reducer.block(ids, values)
        expected = reducer.merge([block, block], (4,), 2)
        gc.collect()
        before = _native.memory_stats()["live_buffers"]
        failures = 0
        for call in (lambda: reducer.block(ids, values), lambda: reducer.merge([block, block], (4,), 2)):
            for k in range(50):
                _native._fail_allocation_after(k)
                try:
                    call()
                except MemoryError:
                    failures += 1
                else:
                    break
                finally:
                    _native._fail_allocation_after(-1)
                assert _native.memory_stats()["live_buffers"] == before
        assert failures > 5
        for got, want in zip(reducer.merge([block, block], (4,), 2), expected, strict=True):
            assert_same_bits(got, want)


class TestDoor:
    """What the core is handed by mistake is refused, by an exception."""

    def reducer(self, dtype="float32"):
        return _native.SparseReducer(dtype, "float32", "MEAN", 1)

    @pytest.mark.parametrize(
        ("ids", "values"),
        [
            (np.arange(3), np.ones((3, 2), "f8")),
            (np.arange(3), np.ones((3, 2), "u4")),
            (np.arange(3), np.ones((3, 2), "c8")),
            (np.arange(3), np.ones((3, 2), bool)),
            (np.arange(3), np.array([[None] * 2] * 3)),
            (np.arange(3), [[1.0, 2.0]] * 3),
            (np.arange(3), np.ones((3, 4), "f4")[:, ::2]),
            (np.arange(3), np.asfortranarray(np.ones((3, 2), "f4"))),
            (np.arange(3), np.ones((2, 2), "f4")),
            (np.arange(3), np.float32(1)),
            (np.arange(3), np.ones((3, 2), ">f4")),
            (np.arange(3), None),
            (np.arange(3.0), np.ones((3, 2), "f4")),
            (np.arange(3, dtype="i4"), np.ones((3, 2), "f4")),
            (np.arange(3, dtype="u8"), np.ones((3, 2), "f4")),
            (np.arange(6)[::2], np.ones((3, 2), "f4")),
            (np.arange(3).reshape(3, 1), np.ones((3, 2), "f4")),
            ([0, 1, 2], np.ones((3, 2), "f4")),
        ],
    )
    def test_arrays_when_wrong_expect_refusal(self, ids, values):
        with pytest.raises((TypeError, ValueError, BufferError)):
            self.reducer().block(ids, values, 1.0, False, False)

    def test_values_when_not_aligned_expect_refusal(self):
        raw = np.zeros(25, np.uint8)[1:].view("f4").reshape(3, 2)
        with pytest.raises((TypeError, ValueError)):
            self.reducer().block(np.arange(3), raw, 1.0, True, False)

    @pytest.mark.filterwarnings("ignore:nanobind")
    def test_blocks_when_wrong_expect_refusal(self):
        reducer = self.reducer()
        block = reducer.block(np.arange(3), np.ones((3, 2), "f4"), 1.0, False, False)
        dense = _native.DenseReducer("float32", "float32", "MEAN", 1).block(np.ones(3, "f4"), 1.0, False, False)
        unmade = _native.SparseBlock.__new__(_native.SparseBlock)
        for blocks in ([None], [1], [dense], [unmade], 5, None, {}.keys() | {3}):
            with pytest.raises(TypeError):
                reducer.merge(blocks, (2,), 1)
            with pytest.raises(TypeError):
                reducer.compact(blocks)
        for shape in ((3,), (), (2, 2), (-1,), (2**62, 2**62), ("a",), None, (1.5,)):
            with pytest.raises((TypeError, ValueError, MemoryError)):
                reducer.merge([block], shape, 1)
        doubles = _native.SparseReducer("float64", "float64", "MEAN", 1)
        with pytest.raises(ValueError, match="type"):
            doubles.merge([block], (2,), 1)

    @pytest.mark.parametrize(
        "arguments",
        [
            ("float31", "float32", "MEAN", 1),
            ("float32", "float16", "MEAN", 1),
            ("float64", "float32", "MEAN", 1),
            ("complex64", "float32", "MEAN", 1),
            ("int32", "int64", "MEAN", 1),
            ("int32", "int32", "SUM", 1),
            ("float32", "float32", "mean", 1),
            ("float32", "float32", "MEAN", -1),
        ],
    )
    def test_spec_when_wrong_expect_refusal(self, arguments):
        for kind in (_native.SparseReducer, _native.DenseReducer):
            with pytest.raises((TypeError, ValueError)):
                kind(*arguments)

    @pytest.mark.filterwarnings("ignore:nanobind")
    def test_reducer_when_not_made_expect_refusal(self):
        unmade = _native.SparseReducer.__new__(_native.SparseReducer)
        with pytest.raises(TypeError):
            unmade.merge([], (), 1)

    def test_memory_when_not_made_expect_refusal(self):
        with pytest.raises(BufferError, match="never made"):
            memoryview(_native.Memory.__new__(_native.Memory))


def test_log_when_used_by_many_threads_expect_the_same_bits():
    spec = ReducerSpec(np.dtype("f4"), np.dtype("f4"), "MEAN", 3)
    native = NATIVE.sparse_reducer(spec)
    rng = np.random.default_rng(1)
    gradients = [(rng.integers(0, 30_000, 20_000), rng.random((20_000, 8), "f4"), 1.0) for _ in range(4)]
    blocks = make_blocks(native, gradients, rng, False)
    expected = native.merge(blocks, (8,), 4)
    wrong = []

    def work():
        mine = list(blocks)
        for _ in range(5):
            own = make_blocks(native, gradients, np.random.default_rng(1), False)
            for log in (mine, own, [native.compact(mine[:2]), *own[2:]]):
                got = native.merge(log, (8,), 4)
                if any(a.tobytes() != b.tobytes() for a, b in zip(got, expected, strict=True)):
                    wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


@pytest.mark.parametrize("bounds", [None, (0, 40)], ids=["hash", "ranges"])
@pytest.mark.parametrize("row", [(), (0,), (3,), (2, 8)])
@pytest.mark.parametrize("dtype", ["float32", "complex128", BFLOAT16])
def test_split_expect_the_bytes_of_the_reference_and_every_row_where_its_id_belongs(bounds, row, dtype):
    rng = np.random.default_rng(7)
    for count in (0, 1, 57):
        ids = rng.integers(-10, 100, count)
        values = rng.integers(-9, 9, (count, *row)).astype(dtype)
        got, expected = (engine.split(ids, values, 3, bounds) for engine in (NATIVE, REFERENCE))
        assert [part.num_rows for part in got] == [part.num_rows for part in expected]
        assert [bytes(part.memory) for part in got] == [bytes(part.memory) for part in expected]
        owners = parts_of(ids, 3, bounds)
        for number, (num_rows, memory) in enumerate(got):
            at = ids[owners == number].tobytes()
            rows = values[owners == number].tobytes()
            begin = values_at(num_rows)
            assert (bytes(memory)[: len(at)], bytes(memory)[begin:]) == (at, rows)


def test_split_of_what_does_not_fit_together_is_refused():
    ids, values = np.arange(3), np.ones((3, 2))
    for wrong in (
        (ids[:2], values, 2, None),
        (ids, values, 0, None),
        (ids, values, 2, (1, 2)),
        (ids, values[:, ::2], 2, None),
        (ids.astype(float), values, 2, None),
    ):
        with pytest.raises((TypeError, ValueError)):
            NATIVE.split(*wrong)
