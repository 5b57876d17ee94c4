"""Arguments of all kinds: right ones in every form, wrong ones, and such as are made to do harm."""

import array
import ctypes
import decimal
import fractions
import warnings

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PAIRS = [
    (np.dtype(dtype), np.dtype(accumulate))
    for dtype, accumulate in [
        ("float16", "float32"), ("float16", "float64"), (BFLOAT16, "float32"), (BFLOAT16, "float64"),
        ("float32", "float32"), ("float32", "float64"), ("float64", "float64"), ("complex64", "complex64"),
        ("complex64", "complex128"), ("complex128", "complex128"), ("int32", "int64"), ("int64", "int64"),
    ]
]  # fmt: skip
MEANS = ("MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT")
ROWS = [(), (1,), (2,), (3,), (4,), (2, 3), (16,), (37,), (0,), (1, 1, 1), (65,)]
HUGE = 2**46
"""More elements than any machine has memory for, whatever its system promises."""


class HostileError(Exception):
    """Raised by hostile arguments; whoever gives one must expect it back."""


class Hostile:
    """Fails whatever is asked of it."""

    def _fail(self, *args, **kwargs):
        raise HostileError

    __index__ = __int__ = __float__ = __bool__ = __len__ = __iter__ = __getitem__ = __array__ = __hash__ = _fail
    __eq__ = __lt__ = __str__ = __format__ = _fail

    def __repr__(self):
        return "Hostile()"


class Index:
    """An integer only by `__index__`."""

    def __init__(self, number):
        self.number = number

    def __index__(self):
        return self.number


class ArrayLike:
    """An array only by `__array__`."""

    def __init__(self, answer):
        self.answer = answer

    def __array__(self, dtype=None, copy=None):
        return self.answer


class Exporter:
    """An array only by DLPack, or not even that."""

    def __init__(self, export):
        self.export = export

    def __dlpack__(self, **options):
        return self.export()

    def __dlpack_device__(self):
        return 1, 0


def _used_capsule():
    capsule = np.arange(2).__dlpack__()
    np.from_dlpack(Exporter(lambda: capsule))
    return capsule


class Endless:
    """A sequence that says it is long and has nothing."""

    def __len__(self):
        return 1000

    def __getitem__(self, i):
        raise IndexError(i)


def pick(rng, options):
    return options[int(rng.integers(len(options)))]


def one_in(rng, n):
    return int(rng.integers(n)) == 0


def anything(rng):
    """Return an object that hardly anybody expects."""
    return pick(rng, ANYTHING)()


ANYTHING = [
    lambda: None, lambda: 0, lambda: 1, lambda: -1, lambda: 3, lambda: 2**31, lambda: 2**63 - 1, lambda: 2**63,
    lambda: -(2**63), lambda: 2**64, lambda: -(2**200), lambda: 0.0, lambda: 1.5, lambda: -1.0, lambda: float("nan"),
    lambda: float("inf"), lambda: 1e308, lambda: 5e-324, lambda: 1j, lambda: True, lambda: False, lambda: "",
    lambda: "float32", lambda: "\udc80", lambda: "x" * 10_000, lambda: "MEAN", lambda: b"float32", list, tuple, dict,
    set, object, lambda: Hostile(), lambda: Index(2), lambda: Index("no"), lambda: Endless(), lambda: int,
    lambda: len, lambda: ..., lambda: range(3), lambda: iter([1, 2]), lambda: (i for i in range(2)), lambda: slice(3),
    lambda: [None], lambda: [[]], lambda: [1, [2]], lambda: (-1,), lambda: (1.5,), lambda: (2**70,),
    lambda: (2**40, 2**40), lambda: (1,) * 70, lambda: [Hostile()], lambda: np.int64(3), lambda: np.float32(0.5),
    lambda: np.bool_(True), lambda: np.array(3), lambda: np.array([]), lambda: np.zeros((2, 2)),
    lambda: np.array([1, 2]), lambda: np.array(["a"]), lambda: np.array([None], object), lambda: np.zeros(2, "M8[s]"),
    lambda: np.zeros(2, [("a", "i4")]), lambda: np.dtype("f4"), lambda: memoryview(b"1234"), lambda: bytearray(8),
    lambda: array.array("q", [1, 2]), lambda: (ctypes.c_int64 * 2)(1, 2), lambda: decimal.Decimal("1.5"),
    lambda: fractions.Fraction(1, 3), lambda: ArrayLike(np.array([1])), lambda: ArrayLike(7), lambda: Exporter(int),
    lambda: Exporter(np.arange(2).__dlpack__),
    lambda: Exporter(_used_capsule), lambda: Exporter(Hostile),
    lambda: np.ma.masked_array([1, 2], [0, 1]),
]  # fmt: skip


def real(dtype):
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-7, 6e-8, 65519.0, 65520.0, 1e-40, 3e38, 5e-324, 1.7e308])


def numbers(rng, dtype, shape):
    """Return values of the dtype, some of them special ones."""
    if dtype.kind == "i":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    parts = rng.normal(size=(2, *shape)) * 10.0 ** rng.integers(-3, 4, (2, *shape))
    special = rng.random((2, *shape)) < 0.03
    parts[special] = rng.choice(SPECIAL, special.sum())
    with np.errstate(all="ignore"):
        return np.asarray(parts[0] + 1j * parts[1] if dtype.kind == "c" else parts[0]).astype(dtype)


def ids(rng, n, limit=2**63 - 1):
    """Return int64 ids below `limit`, as any worker may have them."""
    match rng.integers(5):
        case 0:
            return rng.integers(0, limit, n)
        case 1:
            return np.sort(rng.integers(0, min(3 * n + 1, limit), n))
        case 2:
            return rng.integers(0, min(n // 2 + 1, limit), n)
        case 3:
            return rng.integers(max(limit - 9, 0), limit, n)
    return np.unique(rng.integers(0, min(3 * n + 1, limit), n))


def layout(rng, values):
    """Return the same numbers in some memory layout; native byte order."""
    match rng.integers(8):
        case 0:
            return np.asfortranarray(values)
        case 1 if values.ndim:
            return np.repeat(values, 2, axis=0)[::2]
        case 2 if values.ndim:
            return values[::-1].copy()[::-1]
        case 3:
            raw = np.empty(values.nbytes + 1, np.uint8)[1:]
            raw[:] = np.frombuffer(values.tobytes(), np.uint8)
            return raw.view(values.dtype).reshape(values.shape)
        case 4:
            values = values.copy()
            values.flags.writeable = False
        case 5 if values.ndim and len(values):
            return np.broadcast_to(values[:1], values.shape)
        case 6 if values.ndim > 1:
            return np.ascontiguousarray(np.moveaxis(values, 0, -1)).transpose(-1, *range(values.ndim - 1))
    return values


def _cast(values, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return values.astype(dtype)


def ids_given(rng, right):
    """Return ids as a caller may give them: mostly in some form of the right ones."""
    match rng.integers(24):
        case 0:
            return anything(rng)
        case 1:
            return _cast(right, pick(rng, ["f4", "f8", "c8", "?", "O", "S8", "m8[s]", "f2"]))
        case 2:
            return right.reshape(1, -1)
        case 3:
            return np.broadcast_to(np.int64(3), (HUGE,))
        case 4:
            return -right - 1
        case 5:
            return right.astype("u8") + np.uint64(2**63)
        case 6:
            return right[:-1]
        case 7:
            return right.astype(">i8")
        case 8:
            return right.astype("u8")
        case 9:
            return (right % 100).astype(pick(rng, ["i1", "u1", "i2", ">u4"]))
        case 10:
            return right.tolist()
        case 11:
            return tuple(right.tolist())
        case 12:
            return array.array("q", right.tolist())
        case 13:
            return memoryview(right)
        case 14:
            return ArrayLike(right)
        case 15:
            return [Index(int(i)) for i in right]
    return layout(rng, right)


def values_given(rng, right):
    """Return values as a caller may give them: mostly in some form of the right ones."""
    match rng.integers(24):
        case 0:
            return anything(rng)
        case 1:
            return _cast(right, pick(rng, ["f4", "f8", "c8", "O", "i2", "u8", "g"]))
        case 2:
            return right.reshape(-1)
        case 3:
            return np.broadcast_to(right.dtype.type(1), (len(right), HUGE) if right.ndim else (HUGE,))
        case 4:
            return right[1:] if right.ndim else np.stack([right, right])
        case 5:
            return right[..., None]
        case 6 if right.dtype != BFLOAT16:
            return right.astype(right.dtype.newbyteorder(">"))
        case 7:
            return right.tolist()
        case 8:
            return ArrayLike(right)
        case 9 if right.dtype != BFLOAT16:
            return memoryview(right)
        case 10:
            return right.view([("x", right.dtype)])
        case 11:
            return np.ma.masked_array(right)
    return layout(rng, right)


def same_bits(actual, expected):
    """Tell whether two arrays are the same bit for bit, NaN payloads apart."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    a, b = (np.ascontiguousarray(x).reshape(-1).view(real(x.dtype)) for x in (actual, expected))
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    same = a.view(unsigned) == b.view(unsigned)
    if a.dtype.kind != "i":
        same |= np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
    return bool(same.all())
