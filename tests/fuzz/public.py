"""The public classes: the native and the reference engine are given the same, and must answer the same."""

import numpy as np

import gradquorum as gq
from tests.fuzz.boundary import Wrong, check
from tests.fuzz.hostile import (
    MEANS,
    PAIRS,
    ROWS,
    Hostile,
    anything,
    ids,
    ids_given,
    numbers,
    one_in,
    pick,
    same_bits,
    values_given,
)

ENGINES = ("native", "reference")


class Both:
    """An accumulator or group on each engine."""

    def __init__(self, fuzz, build):
        self._fuzz = fuzz
        self.made = [build(engine) for engine in ENGINES]

    def call(self, method, *args, **kwargs):
        """Call both with the same; return what both answer, or None if both refuse."""
        args = [list(one) if hasattr(one, "__next__") else one for one in args]  # an iterator would serve one of them
        kwargs = {name: list(one) if hasattr(one, "__next__") else one for name, one in kwargs.items()}
        answers = [self._fuzz.call(getattr(made, method), *args, **kwargs) for made in self.made]
        (native, error), (reference, expected) = answers
        if type(error) is not type(expected) or _text(error) != _text(expected):
            raise Wrong(f"{method}: native {native!r} {error!r}, reference {reference!r} {expected!r}")
        if isinstance(error, MemoryError):
            check(isinstance(error, gq.ResourceExhaustedError), "a bare MemoryError", method, error)
        if error is None:
            _compare(method, native, reference)
        return native

    def same_state(self):
        for name in ("global_step", "num_undelivered", "num_workers", "published_step", "closed"):
            native, reference = (getattr(made, name) for made in self.made)
            check(native == reference, "native, reference", name, native, reference)
        if not self.made[0].closed:
            self.call("num_accumulated")

    def close(self):
        for made in self.made:
            made.close()


def _text(error):
    # Where memory ran out, and of how much, is an engine's own affair.
    return "" if error is None or isinstance(error, MemoryError) else str(error)


def _compare(method, native, reference):
    if isinstance(native, gq.ApplyReceipt):
        for name in ("status", "step", "lag", "num_accumulated", "first_status"):
            check(getattr(native, name) == getattr(reference, name), "native, reference", native, reference)
    elif isinstance(native, gq.SparseGradient):
        for name in ("indices", "values", "counts", "shape"):
            _arrays(name, getattr(native, name), getattr(reference, name))
        check(native.workers == reference.workers and native.step == reference.step, "workers or step")
        check(native.num_gradients == reference.num_gradients, "num_gradients")
        native.values[...] = 0
        native.indices[...] = -1
        native.counts[...] = -1
    elif isinstance(native, gq.IndexedSlices):
        _arrays("values", native.values, reference.values)
        _arrays("indices", native.indices, reference.indices)
    elif isinstance(native, gq.GroupGradient):
        check(list(native) == list(reference), "members")
        for name in native:
            _compare(method, native[name], reference[name])
    elif isinstance(native, np.ndarray):
        _arrays(method, native, reference)
        native[...] = 0


def _arrays(name, native, reference):
    native, reference = np.asarray(native), np.asarray(reference)
    check(same_bits(native, reference), "native, reference", name, native, reference)


def _options(rng, dtype, accumulate):
    options = {"num_threads": pick(rng, [None, 1, 2, 7])}
    if one_in(rng, 2):
        options["accumulate_dtype"] = accumulate
    if one_in(rng, 2):
        options["compact"] = False
    if one_in(rng, 4):
        options["on_nonfinite"] = pick(rng, ["skip", "raise"])
    if one_in(rng, 6):
        options["order"] = "worker"
    if one_in(rng, 8):
        options["max_per_worker"] = 2
    return options


def _extras(rng, reduction, needs_worker):
    """Return keyword arguments of an apply, some of them no good."""
    extras = {"local_step": None}
    if needs_worker or one_in(rng, 3):
        extras["worker"] = pick(rng, ["a", "b", 3, -1, 2**70, "\udc80", np.int64(3)])
        if one_in(rng, 2):
            extras["sequence"] = int(rng.integers(0, 6))
    if one_in(rng, 3):
        extras["copy"] = False
    if one_in(rng, 6):
        extras["local_step"] = pick(rng, [0, 1, 2**63 - 1, -5, np.int32(1), np.array(0)])
    if reduction == "MEAN_BY_WEIGHT" and one_in(rng, 2):
        weights = [0.5, 1e-45, 3e38, 1e300, 5e-324, 2, np.float32(7), 0, -1.0, float("nan"), float("inf"), 65504.0]
        extras["weight"] = pick(rng, weights)
    if one_in(rng, 12):
        extras[pick(rng, ["worker", "sequence", "weight", "local_step", "copy", "timeout", "name"])] = anything(rng)
    return extras


# A take must not wait for what nobody will bring.
_TIMEOUTS = [0, 0, 0, 0.0, 1e-9, -1, "0", float("nan"), [], False, np.float32(0), 1j, -(10**400)]


def _other_call(rng, both):
    match rng.integers(8):
        case 0:
            both.call("take_grad" if hasattr(both.made[0], "take_grad") else "take", anything(rng), timeout=0)
        case 1:
            both.call("set_global_step", pick(rng, [0, 5, 2**63 - 1, -(2**63), 2**63, 1.0, anything(rng)]))
            both.call("set_global_step", int(rng.integers(0, 5)))
        case 2:
            both.call("publish", pick(rng, [None, 3, anything(rng)]))
        case 3:
            both.call("last_sequence", pick(rng, ["a", 3, anything(rng)]))
        case 4:
            both.call("discard")
        case 5:
            both.call("wait_published", pick(rng, [-1, anything(rng)]), timeout=0)
        case 6:
            both.call("num_accumulated", anything(rng))
        case 7 if one_in(rng, 4):
            both.call("close")
    both.same_state()


def _sparse_arguments(rng, dtype, row, rows):
    right = ids(rng, int(rng.integers(0, 30)), rows or 2**63 - 1)
    values = numbers(rng, dtype, (len(right), *row))
    named = ids_given(rng, right) if one_in(rng, 3) else right
    given = values_given(rng, values) if one_in(rng, 3) else values
    return named, given


def sparse(fuzz, rng):
    """Applies and takes of a sparse accumulator."""
    dtype, accumulate = pick(rng, PAIRS)
    reduction = "SUM" if dtype.kind == "i" else pick(rng, MEANS)
    row, rows = pick(rng, ROWS), pick(rng, [None, 50, 2**40])
    shape = pick(rng, [None, (rows, *row), (rows,), (None, *row)])
    rows = shape[0] if shape else None
    options = _options(rng, dtype, accumulate)
    both = Both(
        fuzz,
        lambda engine: gq.SparseConditionalAccumulator(
            dtype, shape, reduction_type=reduction, engine=engine, **options
        ),
    )
    keep = []
    for _ in range(8):
        match rng.integers(6):
            case 0 | 1 | 2:
                other = pick(rng, ROWS) if one_in(rng, 8) else row
                named, given = _sparse_arguments(rng, dtype, other, rows)
                grad_shape = pick(rng, [None] * 6 + [(rows, *row), [], (-1,), (2**63 - 1,), anything(rng)])
                receipt = both.call(
                    "apply_grad", named, given, grad_shape, **_extras(rng, reduction, "order" in options)
                )
                keep.append((receipt, given if one_in(rng, 2) else None))  # a lent array may lose its owner
            case 3:
                parts = [
                    gq.IndexedSlices(*_sparse_arguments(rng, dtype, row, rows)[::-1]) for _ in range(rng.integers(0, 4))
                ]
                slices = pick(rng, [parts, parts[0] if parts else None, [*parts, anything(rng)], anything(rng)])
                both.call("apply_indexed_slices_grad", slices, **_extras(rng, reduction, "order" in options))
            case 4:
                method = pick(rng, ["take_grad", "take_indexed_slices_grad"])
                both.call(
                    method, pick(rng, [1, 1, 1, 2, 0, np.int8(1)]), timeout=pick(rng, _TIMEOUTS), exact=one_in(rng, 3)
                )
            case 5:
                _other_call(rng, both)
    both.call("take_grad", 1, timeout=0)
    both.close()


def dense(fuzz, rng):
    """Applies and takes of a dense accumulator."""
    dtype, accumulate = pick(rng, PAIRS)
    reduction = "SUM" if dtype.kind == "i" else pick(rng, MEANS)
    shape, options = pick(rng, ROWS), _options(rng, dtype, accumulate)
    declared = pick(rng, [None, shape, (None,) * len(shape)])
    both = Both(
        fuzz,
        lambda engine: gq.ConditionalAccumulator(dtype, declared, reduction_type=reduction, engine=engine, **options),
    )
    for _ in range(8):
        match rng.integers(4):
            case 0 | 1:
                right = numbers(rng, dtype, shape)
                given = values_given(rng, right) if one_in(rng, 3) else right
                both.call("apply_grad", given, **_extras(rng, reduction, "order" in options))
            case 2:
                both.call("take_grad", 1, timeout=pick(rng, _TIMEOUTS), exact=one_in(rng, 3))
            case 3:
                _other_call(rng, both)
    both.call("take_grad", 1, timeout=0)
    both.close()


def group(fuzz, rng):
    """Applies and takes of a group with members of all kinds."""
    members, rows = {}, {}
    for name in "abc"[: rng.integers(1, 4)]:
        dtype, _ = pick(rng, PAIRS)
        rows[name] = pick(rng, ROWS)
        kind = pick(rng, [gq.SparseSpec, gq.DenseSpec])
        shape = pick(rng, [None, rows[name] if kind is gq.DenseSpec else (None, *rows[name])])
        members[name] = kind(dtype, shape, "SUM" if dtype.kind == "i" else "MEAN")
    options = _options(rng, None, "float64") | {"accumulate_dtype": None}
    both = Both(fuzz, lambda engine: gq.AccumulatorGroup(members, engine=engine, **options))
    for _ in range(6):
        if one_in(rng, 4):
            _other_call(rng, both)
            continue
        gradients = {}
        for name, spec in members.items():
            if isinstance(spec, gq.SparseSpec):
                one = _sparse_arguments(rng, spec.dtype, rows[name], None)
                gradients[name] = pick(rng, [one, one, [one, one]])
            else:
                right = numbers(rng, spec.dtype, rows[name])
                gradients[name] = values_given(rng, right) if one_in(rng, 4) else right
        if one_in(rng, 6):
            gradients[pick(rng, ["a", "no such"])] = anything(rng)
        if one_in(rng, 6):
            gradients.popitem()
        both.call("apply", anything(rng) if one_in(rng, 10) else gradients, **_extras(rng, "MEAN", "order" in options))
        if one_in(rng, 3):
            both.call("take", 1, timeout=pick(rng, _TIMEOUTS))
    both.close()


def construction(fuzz, rng):
    """Constructors with arguments of all kinds."""
    options = ["reduction_type", "order", "compact", "accumulate_dtype", "on_nonfinite", "expected_workers", "target",
               "max_per_worker", "max_bytes", "on_full", "staleness", "num_threads", "shared_name", "name"]  # fmt: skip
    kind = pick(rng, [gq.SparseConditionalAccumulator, gq.ConditionalAccumulator])
    for _ in range(4):
        dtype = anything(rng) if one_in(rng, 3) else "float32"
        shape = anything(rng) if one_in(rng, 3) else None
        given = {pick(rng, options): anything(rng) for _ in range(rng.integers(0, 3))}
        made, error = fuzz.call(
            kind, dtype, shape, engine=pick(rng, ["native", "native", "reference", anything(rng)]), **given
        )
        if error is None:
            fuzz.call(repr, made)
            fuzz.call(made.take_grad, 1, timeout=0)
            fuzz.call(made.close)
    fuzz.call(pick(rng, [gq.SparseSpec, gq.DenseSpec]), anything(rng), anything(rng))
    fuzz.call(gq.AccumulatorGroup, pick(rng, [anything(rng), {"a": anything(rng)}, {Hostile: gq.DenseSpec("f4")}]))
    spec = gq.SparseSpec("f4", (None, 3))
    fuzz.call(gq.AccumulatorGroup, {pick(rng, ["a", 3, None, ""]): spec, "b": spec})
