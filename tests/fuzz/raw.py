"""The native module itself, past all checks that are made in Python."""

import contextlib
import math

import numpy as np

from gradquorum import _native
from gradquorum.engine.interface import ReducerSpec
from gradquorum.engine.reference import ReferenceEngine
from tests.fuzz.boundary import check
from tests.fuzz.hostile import (
    BFLOAT16,
    MEANS,
    PAIRS,
    ROWS,
    anything,
    ids,
    ids_given,
    numbers,
    one_in,
    pick,
    real,
    same_bits,
    values_given,
)

REFERENCE = ReferenceEngine()


class Made:
    """A reducer of the native module, its reference twin, and blocks of both."""

    def __init__(self, rng, kind):
        self.dtype, self.accumulate = pick(rng, PAIRS)
        self.reduction = "SUM" if self.dtype.kind == "i" else pick(rng, MEANS)
        names = self.dtype.name, self.accumulate.name, self.reduction
        native = {"sparse": _native.SparseReducer, "dense": _native.DenseReducer}[kind]
        self.native = native(*names, int(rng.integers(0, 5)))
        spec = ReducerSpec(self.dtype, self.accumulate, self.reduction)
        self.reference = getattr(REFERENCE, f"{kind}_reducer")(spec)
        self.blocks = []

    def weight(self, rng):
        if self.reduction != "MEAN_BY_WEIGHT":
            return 1.0
        return float(real(self.accumulate).type(rng.random() * 10.0 ** rng.integers(-20, 20) + 1e-30))

    def crossing(self, values):
        """Return values as they cross the border: bfloat16 as its bits."""
        return values.view(np.uint16) if getattr(values, "dtype", None) == BFLOAT16 else values

    @property
    def wire(self):
        """The dtype in which values cross the border."""
        return np.dtype(np.uint16) if self.dtype == BFLOAT16 else self.dtype

    def back(self, values):
        return values.view(BFLOAT16) if self.dtype == BFLOAT16 else values

    def fits(self, values):
        """Tell whether these values must be taken."""
        if type(values) is not np.ndarray or not values.flags.c_contiguous or not values.flags.aligned:
            return False
        return values.dtype == self.wire and values.dtype.isnative


def spoil(rng, arguments):
    """Replace an argument by anything, leave one out or add one."""
    match rng.integers(8):
        case 0:
            arguments.pop()
        case 1:
            arguments.append(anything(rng))
        case _:
            arguments[int(rng.integers(len(arguments)))] = anything(rng)
    return arguments


def _sparse_block(fuzz, rng, made, row):
    right = ids(rng, int(rng.integers(0, 40)))
    values = numbers(rng, made.dtype, (len(right), *row))
    given = made.crossing(values_given(rng, values)) if one_in(rng, 3) else made.crossing(values)
    named = ids_given(rng, right) if one_in(rng, 3) else right
    weight, lend, finite = made.weight(rng), one_in(rng, 2), one_in(rng, 2)
    right_ids = type(named) is np.ndarray and named.dtype == np.int64 and named.dtype.isnative
    right_ids = right_ids and named.ndim == 1 and named.flags.c_contiguous and named.flags.aligned
    fits = right_ids and made.fits(given) and given.ndim > 0 and len(given) == len(named)
    if one_in(rng, 3):
        limit = pick(rng, [1, 40, 2**63 - 1])
        block, error = fuzz.inside(made.native.plain_block, named, given, row, limit, weight, lend, finite)
        plain = fits and len(named) > 0 and named.min() >= 0 and named.max() < limit and given.shape[1:] == row
        check(error is not None or (block is not None) == plain, "plain: what was taken, what is right", block, plain)
        if block is None:
            return
    else:
        block, error = fuzz.inside(made.native.block, named, given, weight, lend, finite)
    if error is not None:
        check(not fits, "a right block was refused", named, given, error)
        return
    got_ids, got = np.asarray(named), np.asarray(given)
    check(got_ids.dtype == np.int64 and got_ids.dtype.isnative, "wrong ids were taken", got_ids.dtype)
    check(got.dtype == made.wire and len(got) == len(got_ids), "wrong values were taken", got.dtype, got.shape)
    twin = made.reference.block(got_ids.copy(), made.back(got.copy()), weight=weight, check_finite=finite)
    check(block.finite == twin.finite, "finite")
    check(len(block) == len(twin.indices) and block.num_bytes >= 8 * len(block), "len")
    check(not block.lent or lend, "lent")
    made.blocks.append((block, twin, got.shape[1:]))


def _filled(sources):
    """Return the shapes of the blocks that have values."""
    return [
        shape for _, twin, shape in sources if (twin.total is not None if hasattr(twin, "total") else len(twin.indices))
    ]


def _fit(sources, *shapes):
    """Tell whether blocks have rows of the same width, that of the shapes."""
    return len({math.prod(shape) for shape in (*_filled(sources), *shapes)}) < 2


def _well_formed(indices, values, counts, row):
    check(indices.dtype == np.int64 and indices.ndim == 1 and bool((indices[1:] > indices[:-1]).all()), "ids")
    check(counts.dtype == np.int64 and counts.shape == indices.shape and bool((counts > 0).all()), "counts")
    check(values.shape == (len(indices), *row), "shape: got, want", values.shape, (len(indices), *row))
    for result in (indices, values, counts):
        result[...] = 1  # ours to write
        with contextlib.suppress(ValueError):  # and to resize, if NumPy knows how
            result.resize(2 * result.size + 1, refcheck=False)


def _merged_sparse(fuzz, rng, made, foreign):
    sources = [pick(rng, made.blocks) for _ in range(rng.integers(0, 8))] if made.blocks else []
    blocks = [native for native, _, _ in sources]
    row = pick(rng, ROWS) if one_in(rng, 8) else next(iter(_filled(sources)), ())
    num_gradients = pick(rng, [len(blocks), 1, 2**40, -1, 0, 2**63 - 1])
    container = pick(rng, [list, tuple, iter, lambda x: (block for block in x)])
    if one_in(rng, 10) and foreign:
        blocks.insert(int(rng.integers(len(blocks) + 1)), pick(rng, foreign))
        merged, error = fuzz.inside(made.native.merge, container(blocks), row, num_gradients)
        if error is None:
            _well_formed(*merged, row)
        return
    if one_in(rng, 10):
        merged, error = fuzz.inside(made.native.merge, *spoil(rng, [container(blocks), row, num_gradients]))
        return
    merged, error = fuzz.inside(made.native.merge, container(blocks), row, num_gradients)
    fits = _fit(sources, row)
    if error is not None:
        check(not fits, "a right merge was refused: blocks, row, error", len(blocks), row, error)
        return
    check(fits, "rows of different widths were merged")
    if sources:
        expected = made.reference.merge([twin for _, twin, _ in sources], row, num_gradients)
        for got, want in zip((merged[0], made.back(merged[1]), merged[2]), expected, strict=True):
            check(same_bits(got, want), "merge: got, want", got, want)
    _well_formed(*merged, row)


def _compacted(fuzz, rng, made, foreign):
    sources = [pick(rng, made.blocks) for _ in range(rng.integers(1, 5))]
    blocks = [source[0] for source in sources]
    if one_in(rng, 4):
        wrong = [[*blocks, anything(rng)], anything(rng), [*blocks, *foreign[:1]], [None]]
        fuzz.inside(made.native.compact, pick(rng, wrong))
        fuzz.inside(made.native.distinct_bytes, pick(rng, wrong))
        return
    size, error = fuzz.inside(made.native.distinct_bytes, blocks)
    check(error is None and size >= 0, "distinct_bytes", error)
    block, error = fuzz.inside(made.native.compact, blocks)
    if error is not None:
        check(not _fit(sources), "compact", error)
        return
    check(_fit(sources), "rows of different widths were compacted")
    twin = made.reference.compact([twin for _, twin, _ in sources])
    made.blocks.append((block, twin, next(iter(_filled(sources)), ())))


def sparse(fuzz, rng):
    """Blocks, compactions and merges of one reducer, with blocks of others among them."""
    made, other = Made(rng, "sparse"), Made(rng, "sparse")
    row = pick(rng, ROWS)
    _sparse_block(fuzz, rng, other, row)
    foreign = [block for block, _, _ in other.blocks] + [anything(rng), made.native, other.native]
    _native._allow_wide_kernels(one_in(rng, 2))
    for _ in range(12):
        match rng.integers(4):
            case 0 | 1:
                _sparse_block(fuzz, rng, made, pick(rng, ROWS) if one_in(rng, 8) else row)
            case 2:
                _merged_sparse(fuzz, rng, made, foreign)
            case 3 if made.blocks:
                _compacted(fuzz, rng, made, foreign)
    _native._allow_wide_kernels(True)


def dense(fuzz, rng):
    """The same for dense members."""
    made, shape = Made(rng, "dense"), pick(rng, ROWS)
    foreign = [anything(rng), made.native, Made(rng, "dense").native.block(None, 1.0, False, False)]
    for _ in range(10):
        match rng.integers(4):
            case 0 | 1:
                right = None if one_in(rng, 8) else numbers(rng, made.dtype, shape)
                given = made.crossing(values_given(rng, right) if right is not None and one_in(rng, 3) else right)
                weight, lend = made.weight(rng), one_in(rng, 2)
                block, error = fuzz.inside(made.native.block, given, weight, lend, one_in(rng, 2))
                if error is not None:
                    check(given is not None and not made.fits(given), "dense block", error)
                    continue
                got = None if given is None else made.back(np.array(given))
                check(got is None or got.dtype == made.dtype, "wrong values were taken", got)
                made.blocks.append(
                    (block, made.reference.block(got, weight=weight), None if got is None else got.shape)
                )
            case 2:
                _merged_dense(fuzz, rng, made, shape, foreign)
            case 3 if made.blocks:
                _compacted(fuzz, rng, made, foreign)


def _merged_dense(fuzz, rng, made, shape, foreign):
    sources = [pick(rng, made.blocks) for _ in range(rng.integers(0, 6))] if made.blocks else []
    shape = next(iter(_filled(sources)), shape)
    arguments = [[native for native, _, _ in sources], shape, pick(rng, [1, len(sources), 0, -1, 2**62])]
    if one_in(rng, 6):
        fuzz.inside(made.native.merge, *spoil(rng, arguments))
        return
    if one_in(rng, 6):
        arguments[0].append(pick(rng, foreign))
    merged, error = fuzz.inside(made.native.merge, *arguments)
    if error is not None:
        check(len(arguments[0]) > len(sources) or not _fit(sources), "dense merge", error)
        return
    check(len(merged) == math.prod(shape) * made.wire.itemsize, "size")
    merged = np.ndarray(shape, made.wire, merged)
    if len(arguments[0]) == len(sources) and sources:
        expected = made.reference.merge([twin for _, twin, _ in sources], shape, arguments[2])
        check(same_bits(made.back(merged), expected), "dense merge: got, want", merged, expected)
    merged[...] = 1
