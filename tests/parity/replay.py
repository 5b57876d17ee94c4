"""Runs programs on TensorFlow and on this library, and compares what came of them, bit for bit.

A trace has one entry for every step of a program: a dict of `count` (gradients accumulated afterwards) and,
where there is one, `error` (the message) or the result of a take (`ids`, `values`, `shape`; of a dense one
`values` only). On this library it says besides `status`, the round's `step`, and the `kind` of an error.
"""

import re

import numpy as np

import gradquorum as gq
from tests.parity.programs import from_plain, to_plain


def run(program, adapter):
    """Return the trace of `program` on `adapter`."""
    trace = []
    for step in program.steps:
        entry = getattr(adapter, step["op"])(step)
        trace.append({**entry, "count": adapter.count()})
    return trace


def _ids(step):
    return np.array(step["ids"], np.int64)


class TensorFlowGraphs:
    """One graph of placeholders for each configuration: building one takes longer than running a program."""

    def __init__(self, tensorflow, classes=None):
        self._tf = tensorflow
        self._classes = classes or tensorflow.compat.v1
        self._graphs = {}

    def adapter(self, program):
        """Return an adapter to a fresh accumulator: each session has its own."""
        if program.config not in self._graphs:
            self._graphs[program.config] = self._build(program)
        graph, ops = self._graphs[program.config]
        return TensorFlowAdapter(self._tf, program, graph, ops)

    def _build(self, program):
        v1 = self._tf.compat.v1
        classes = self._classes
        kind = classes.SparseConditionalAccumulator if program.kind == "sparse" else classes.ConditionalAccumulator
        with v1.Graph().as_default() as graph:
            acc = kind(program.dtype, shape=program.shape, reduction_type=program.reduction)
            ids, grad_shape, local_step, new_step = (v1.placeholder("int64") for _ in range(4))
            values, num_required = v1.placeholder(program.dtype), v1.placeholder("int32")
            ops = {
                "take": (acc.take_grad(num_required), [num_required]),
                "set_step": (acc.set_global_step(new_step), [new_step]),
                "count": (acc.num_accumulated(), []),
            }
            if program.kind == "dense":
                ops["apply"] = acc.apply_grad(values, local_step=local_step), [values, local_step]
            else:
                apply = acc.apply_grad(ids, values, local_step=local_step)
                apply_shaped = acc.apply_grad(ids, values, grad_shape, local_step=local_step)
                ops["apply"] = apply, [ids, values, local_step]
                ops["apply_shaped"] = apply_shaped, [ids, values, grad_shape, local_step]
        return graph, ops


class TensorFlowAdapter:
    """One accumulator of TensorFlow, in a session of its own."""

    def __init__(self, tensorflow, program, graph, ops):
        self._errors = tensorflow.errors
        self._program = program
        self._ops = ops
        # A take that waits is a mistake of the generator: an error then, not a hang.
        config = tensorflow.compat.v1.ConfigProto(operation_timeout_in_ms=20_000)
        config.intra_op_parallelism_threads = config.inter_op_parallelism_threads = 1
        self._session = tensorflow.compat.v1.Session(graph=graph, config=config)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._session.close()

    def _run(self, name, *arguments):
        op, places = self._ops[name]
        return self._session.run(op, dict(zip(places, arguments, strict=True)))

    def _try(self, name, *arguments):
        """Return (result, error message or None)."""
        try:
            return self._run(name, *arguments), None
        except self._errors.InvalidArgumentError as error:
            return None, _message(error)

    def apply(self, step):
        values = from_plain(self._program.dtype, step["values"])
        local_step = np.array(step["local_step"], np.int64)
        if self._program.kind == "dense":
            _, error = self._try("apply", values, local_step)
        elif step["grad_shape"] is None:
            _, error = self._try("apply", _ids(step), values, local_step)
        else:
            grad_shape = np.array(step["grad_shape"], np.int64)
            _, error = self._try("apply_shaped", _ids(step), values, grad_shape, local_step)
        return {"error": error} if error else {}

    def take(self, step):
        result, error = self._try("take", step["num_required"])
        if error:
            return {"error": error}
        if self._program.kind == "dense":
            return {"values": to_plain(result)}
        ids, values, shape = result
        return {"ids": ids.tolist(), "values": to_plain(values), "shape": shape.tolist()}

    def set_step(self, step):
        self._run("set_step", step["step"])
        return {}

    def count(self):
        return int(self._run("count"))


def _message(error):
    """Return what the op itself said: TensorFlow wraps it in the places where the graph was built."""
    found = re.search(r"^(?:Node: '[^']*'\n)(.*?)\n\t \[\[\{\{node", error.message, re.DOTALL | re.MULTILINE)
    return (found.group(1) if found else error.message).strip()


class GradQuorumAdapter:
    """One accumulator of this library. `make` is the fixture of that name, which chooses the engine."""

    def __init__(self, make, program):
        self._program = program
        build = make.sparse if program.kind == "sparse" else make.dense
        self._acc = build(program.dtype, program.shape, reduction_type=program.reduction)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._acc.close()

    def _try(self, call, *arguments, **options):
        """Return (result, entry): what was returned, and what is known whatever the call."""
        try:
            result, entry = call(*arguments, **options), {}
        except Exception as error:
            result, entry = None, {"error": str(error), "kind": type(error)}
        return result, {**entry, "step": self._acc.global_step}

    def apply(self, step):
        values = from_plain(self._program.dtype, step["values"])
        local_step = step["local_step"]
        if isinstance(local_step, list):
            local_step = np.array(local_step, np.int64)
        arguments = [values] if self._program.kind == "dense" else [_ids(step), values, step["grad_shape"]]
        receipt, entry = self._try(self._acc.apply_grad, *arguments, local_step=local_step)
        return entry if receipt is None else {**entry, "status": receipt.status.value}

    def take(self, step):
        result, entry = self._try(self._acc.take_grad, step["num_required"], timeout=0)
        if result is None:
            return entry
        if self._program.kind == "dense":
            return {**entry, "values": to_plain(result)}
        ids, values, shape = result
        assert ids.dtype == np.int64
        assert shape.dtype == np.int64
        return {**entry, "ids": ids.tolist(), "values": to_plain(values), "shape": shape.tolist()}

    def set_step(self, step):
        return self._try(self._acc.set_global_step, step["step"])[1]

    def count(self):
        return self._acc.num_accumulated()


WORDS = [
    ("local_step must be scalar", r"Argument (local_step must be scalar), but had bad shape"),
    ("indices", r"(Input indices should be vector but received shape:)"),
    ("num_required", r"Argument (num_required must be positive, but was -?\d+)$"),
    ("message", r"(.*)"),
]
"""Which part of TensorFlow's message must be in ours, where SEMANTICS 2 and 4 ask for less than all of it."""


def words(message):
    """Return the words of TensorFlow's message that ours must contain."""
    return next(found.group(1) for _, pattern in WORDS if (found := re.match(pattern, message, re.DOTALL)))


def comparable(dtype, plain):
    """Return values as integers of their width, with one pattern for every NaN: payloads do not count."""
    values = from_plain(dtype, plain)
    bits = values.view(f"u{values.dtype.itemsize}").copy()
    bits[np.isnan(values)] = np.array(np.nan, values.dtype).view(bits.dtype)
    return bits


def differences(program, expected, actual):
    """Yield what differs between TensorFlow's trace and ours, one line each.

    Judgements and steps, which TensorFlow does not tell, are compared with what the generator knows of them.
    """
    for number, (step, theirs, ours) in enumerate(zip(program.steps, expected, actual, strict=True)):
        place = f"program {program.number}, {program.config}, step {number} ({step['op']}, {step['outcome']})"
        yield from (f"{place}: {line}" for line in _differences_of_step(program, step, theirs, ours))


def _differences_of_step(program, step, theirs, ours):
    if ours["count"] != theirs["count"]:
        yield f"num_accumulated: expected {theirs['count']}, got {ours['count']}"
    if ours["step"] != step["step"]:
        yield f"global_step: expected {step['step']}, got {ours['step']}"
    if "error" in theirs or "error" in ours:
        yield from _differences_of_error(theirs, ours)
        return
    if step["op"] == "apply" and ours["status"] != step["outcome"]:
        yield f"receipt: expected {step['outcome']}, got {ours['status']}"
    if step["op"] != "take":
        return
    for field in ("ids", "shape"):
        if theirs.get(field) != ours.get(field):
            yield f"{field}: expected {theirs.get(field)}, got {ours.get(field)}"
    if theirs["values"]["shape"] != ours["values"]["shape"]:
        yield f"shape of values: expected {theirs['values']['shape']}, got {ours['values']['shape']}"
        return
    wanted, got = (comparable(program.dtype, side["values"]) for side in (theirs, ours))
    for place in np.argwhere(wanted != got):
        at = tuple(int(i) for i in place)
        yield f"bits of values{list(at)}: expected {wanted[at]:#x}, got {got[at]:#x}"


def _differences_of_error(theirs, ours):
    if "error" not in ours:
        yield f"expected an error with {theirs['error']!r}, got none"
    elif "error" not in theirs:
        yield f"expected no error, got {ours['kind'].__name__}: {ours['error']}"
    else:
        if not issubclass(ours["kind"], gq.InvalidArgumentError):
            yield f"expected InvalidArgumentError, got {ours['kind'].__name__}"
        if words(theirs["error"]) not in ours["error"]:
            yield f"expected a message with {words(theirs['error'])!r}, got {ours['error']!r}"
