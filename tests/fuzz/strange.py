"""Strange arguments for every function of the native module, and objects used as they are not meant to be."""

import copy
import pickle
import warnings

import numpy as np

from gradquorum import _native
from tests.fuzz.boundary import check
from tests.fuzz.hostile import ANYTHING, anything, one_in, pick
from tests.fuzz.raw import Made, spoil


def _bare(made):
    """Return an instance that nobody has initialised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made.__new__(made)


def every(fuzz):
    """Each argument of each function replaced by each strange object."""
    ids, rows = np.arange(3), np.ones((3, 2), np.float32)
    names = ["float32", "float32", "MEAN"]
    sparse, dense = _native.SparseReducer(*names, 1), _native.DenseReducer(*names, 1)
    row, value = sparse.block(ids, rows, 1.0, False, False), dense.block(rows, 1.0, False, False)
    calls = [
        (_native.SparseReducer, [*names, 1]), (_native.DenseReducer, [*names, 1]),
        (sparse.block, [ids, rows, 1.0, True, True]), (dense.block, [rows, 1.0, True, True]),
        (sparse.merge, [[row], (2,), 1]), (dense.merge, [[value], (3, 2), 1]),
        (sparse.compact, [[row]]), (dense.compact, [[value]]),
        (sparse.distinct_bytes, [[row]]), (dense.distinct_bytes, [[value]]),
        (sparse.merge, [[row, row], (2,), 1]),
    ]  # fmt: skip
    for function, right in calls:
        result, error = fuzz.inside(function, *right)
        check(error is None and result is not None, "a right call was refused", function, right, error)
        for position in range(len(right)):
            for strange in ANYTHING:
                fuzz.inside(function, *right[:position], strange(), *right[position + 1 :])
                if type(right[position]) is list:
                    fuzz.inside(function, [*right[position], strange()], *right[position + 1 :])
    for strange in ANYTHING:
        for function in (_native.set_memory_cap, _native._allow_wide_kernels, _native._fail_allocation_after):
            fuzz.inside(function, strange())
            _native._fail_allocation_after(-1)
    _native.set_memory_cap(512 << 20)
    _native._allow_wide_kernels(True)


def arguments(fuzz, rng):
    """Each argument of each function replaced by anything, and objects used as they are not meant to be."""
    made, kind = Made(rng, "sparse"), pick(rng, [_native.SparseReducer, _native.DenseReducer])
    for _ in range(6):
        fuzz.inside(kind, *spoil(rng, ["float32", "float32", "MEAN", 1]))
    block, _ = fuzz.inside(
        made.native.block, np.arange(3), made.crossing(np.ones((3, 2), made.dtype)), 1.0, False, True
    )
    check(block is not None, "block")
    right = {
        "block": [np.arange(3), made.crossing(np.ones((3, 2), made.dtype)), 1.0, False, False],
        "merge": [[block], (2,), 1],
        "compact": [[block]],
        "distinct_bytes": [[block]],
        "consume": [[block], (2,), 1, []],
    }
    for method, given in right.items():
        for _ in range(2):
            fuzz.inside(getattr(made.native, method), *spoil(rng, list(given)))
        fuzz.inside(getattr(made.native, method), *given, **{pick(rng, ["weight", "no_such", "blocks"]): anything(rng)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for strange in (_bare(type(block)), _bare(kind), _copied(fuzz, block), _copied(fuzz, made.native)):
            fuzz.inside(made.native.merge, [strange, block], (2,), 1)
            fuzz.inside(made.native.compact, [strange])
            fuzz.inside(lambda who=strange: (getattr(who, "num_bytes", 0), getattr(who, "lent", 0)))
            fuzz.inside(lambda who=strange: who.merge([block], (2,), 1) if hasattr(who, "merge") else None)
        memory = _bare(_native.TensorMemory)
        fuzz.inside(made.native.plain_block, memory, memory, (2,), 3, 1.0, False, False)
    fuzz.inside(_native.coo_memory, anything(rng), anything(rng), "f" if one_in(rng, 2) else anything(rng))
    fuzz.inside(_native.coo_tensors, np.ndarray if one_in(rng, 2) else anything(rng), anything(rng), anything(rng))
    fuzz.inside(pick(rng, [_native.set_memory_cap, _native.trim_memory]), anything(rng))
    fuzz.inside(_native.trim_memory)
    _native.set_memory_cap(pick(rng, [0, 100, 10_000, 512 << 20]))


def _copied(fuzz, original):
    for way in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        made, error = fuzz.inside(way, original)
        if error is None:
            return made
    return None
