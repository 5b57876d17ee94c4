"""The facade in each of its modes, driven as TensorFlow's own class is in `tests.parity.replay`."""

import functools
import types

import numpy as np

import gradquorum as gq
from tests.parity.programs import from_plain, to_plain
from tests.parity.replay import TensorFlowAdapter, TensorFlowGraphs


def entry_of(program, result):
    """Return a take's result in plain data."""
    arrays = [np.asarray(array) for array in (result if program.kind == "sparse" else [result])]
    if program.kind == "dense":
        return {"values": to_plain(arrays[0])}
    return {"ids": arrays[0].tolist(), "values": to_plain(arrays[1]), "shape": arrays[2].tolist()}


def arguments_of(program, step):
    """Return the arguments of an apply without its step."""
    values = from_plain(program.dtype, step["values"])
    if program.kind == "dense":
        return [values]
    shape = step["grad_shape"]
    return [np.array(step["ids"], np.int64), values, None if shape is None else np.array(shape, np.int64)]


class _Facade:
    """What all modes share: no receipts, so a gradient was accepted if it has been counted."""

    _before = 0

    def apply(self, step):
        self._before = self.count()
        entry = self._entry(step, lambda: self._apply(step))
        if "error" not in entry:
            entry["status"] = "accepted" if self.count() == self._before + 1 else "stale"
        return entry

    def take(self, step):
        result = []
        entry = self._entry(step, lambda: result.append(self._take(step)))
        return {**entry, **(entry_of(self._program, result[0]) if result else {})}

    def set_step(self, step):
        return self._entry(step, lambda: self._set_step(step))

    def _entry(self, step, call):
        entry = {}
        try:
            call()
        except self._errors as error:
            entry = {"error": str(error), "kind": gq.InvalidArgumentError}
        return {**entry, "step": self.global_step(step)}


class EagerFacade(_Facade):
    def __init__(self, tf, gqtf, program, target=None):
        self._program = program
        self._errors = tf.errors.InvalidArgumentError
        self._tf = tf
        name = "SparseConditionalAccumulator" if program.kind == "sparse" else "ConditionalAccumulator"
        arguments = {"shape": program.shape, "reduction_type": program.reduction}
        self.acc = getattr(gqtf, name)(program.dtype, **arguments, target=target)
        self._static = getattr(tf.compat.v1, name)(program.dtype, **arguments) if program.kind == "dense" else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.acc.accumulator_ref.close()

    def global_step(self, _):
        return self.acc.accumulator_ref.global_step

    def count(self):
        return int(self.acc.num_accumulated())

    def _apply(self, step):
        arguments, local_step = arguments_of(self._program, step), np.array(step["local_step"], np.int64)
        try:
            return self.acc.apply_grad(*arguments, local_step=local_step)
        except self._errors:
            raise
        except ValueError as error:  # of the static shape, which is TensorFlow's eager way to say it
            try:
                self._static.apply_grad(*arguments, local_step=step["local_step"])
            except ValueError as theirs:
                assert str(error) == str(theirs)
                words = _words_of(lambda: self.acc.accumulator_ref.apply_grad(*arguments, local_step=local_step))
                raise self._errors(None, None, words) from error
            raise

    def _take(self, step):
        return self.acc.take_grad(step["num_required"])

    def _set_step(self, step):
        self.acc.set_global_step(step["step"])


def _words_of(call):
    try:
        call()
    except gq.InvalidArgumentError as error:
        return str(error)
    raise AssertionError("accepted")


class FunctionFacade(EagerFacade):
    """Each operation in a `tf.function` that knows no shape when it is traced."""

    def __init__(self, tf, gqtf, program, target=None):
        super().__init__(tf, gqtf, program, target)
        any_int, any_values = tf.TensorSpec(None, tf.int64), tf.TensorSpec(None, tf.as_dtype(program.dtype))
        acc = self.acc

        def apply(*arguments):
            acc.apply_grad(*arguments[:-1], local_step=arguments[-1])

        def set_step(step):
            acc.set_global_step(step)

        gradient = [any_values] if program.kind == "dense" else [any_int, any_values]
        self._function = tf.function(apply, input_signature=[*gradient, any_int])
        self._shaped = tf.function(apply, input_signature=[*gradient, any_int, any_int])
        self._taking = tf.function(acc.take_grad, input_signature=[tf.TensorSpec([], tf.int32)])
        self._setting = tf.function(set_step, input_signature=[tf.TensorSpec([], tf.int64)])
        self._counting = tf.function(acc.num_accumulated, input_signature=[])

    def count(self):
        return int(self._counting())

    def _apply(self, step):
        arguments = [argument for argument in arguments_of(self._program, step) if argument is not None]
        function = self._shaped if len(arguments) == 3 else self._function
        function(*arguments, np.array(step["local_step"], np.int64))

    def _take(self, step):
        return self._taking(np.int32(step["num_required"]))

    def _set_step(self, step):
        self._setting(np.int64(step["step"]))


class FacadeGraphs(TensorFlowGraphs):
    """One graph of the facade for each configuration."""

    def __init__(self, tf, gqtf):
        super().__init__(tf, gqtf)

    def adapter(self, program):
        theirs = super().adapter(program)
        return GraphFacade(self._tf, program, theirs)


class ServerGraphs(FacadeGraphs):
    """A graph for each program: what is on a server does not begin anew with a session."""

    def __init__(self, tf, gqtf, target):
        kinds = gqtf.SparseConditionalAccumulator, gqtf.ConditionalAccumulator
        classes = {kind.__name__: functools.partial(kind, target=target) for kind in kinds}
        super().__init__(tf, types.SimpleNamespace(**classes))

    def adapter(self, program):
        self._graphs.clear()
        return super().adapter(program)


class GraphFacade(_Facade):
    """The facade in a session. It cannot be asked for its step."""

    def __init__(self, tf, program, driver: TensorFlowAdapter):
        self._program = program
        self._driver = driver
        self._errors = tf.errors.InvalidArgumentError

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._driver.__exit__()

    def global_step(self, step):
        return step["step"]

    def count(self):
        return self._driver.count()

    def _apply(self, step):
        arguments = [argument for argument in arguments_of(self._program, step) if argument is not None]
        name = "apply_shaped" if len(arguments) == 3 else "apply"
        self._driver._run(name, *arguments, np.array(step["local_step"], np.int64))

    def _take(self, step):
        return self._driver._run("take", step["num_required"])

    def _set_step(self, step):
        self._driver._run("set_step", step["step"])
