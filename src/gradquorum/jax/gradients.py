"""Gradients between JAX and accumulators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.sparse import BCOO

from gradquorum.arrays import as_integer
from gradquorum.errors import InvalidArgumentError, InvalidDTypeError
from gradquorum.groups import AccumulatorGroup
from gradquorum.handle import AbstractAccumulator
from gradquorum.indexed_slices import SparseGradient
from gradquorum.jax.tracing import is_tracing
from gradquorum.specs import DenseSpec, SparseSpec
from gradquorum.terms import check_timeout
from gradquorum.workers import GroupWorker

__all__ = ["apply_grad", "as_bcoo", "id_dtype", "narrowed", "pad_rows", "padding_id", "take_bcoo", "take_grad"]


def as_bcoo(ids: Any, rows: Any, num_rows: int) -> Any:
    """Return ids `[n]` and rows `[n, *row]` as a BCOO matrix of `[num_rows, *row]`, as a gradient of a whole table.

    Raises:
        InvalidArgumentError: they are not as many rows as ids, or an id is no integer.

    Example:
        >>> import jax.numpy as jnp, gradquorum.jax as gqj
        >>> gqj.as_bcoo(jnp.array([7, 1]), jnp.ones((2, 3)), 10)
        BCOO(float32[10, 3], nse=2, n_dense=1)
    """
    ids, rows = jnp.asarray(ids), jnp.asarray(rows)
    if ids.ndim != 1 or rows.shape[:1] != ids.shape:
        raise InvalidArgumentError(
            f"ids and rows: expected a vector and a row for each id, got shapes {ids.shape} and {rows.shape}"
        )
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        if ids.size:
            raise InvalidDTypeError(f"ids: expected integers, got {ids.dtype}")
        ids = jnp.zeros(0, id_dtype())  # of an empty list, which is float32
    return BCOO((rows, ids[:, None]), shape=(num_rows, *rows.shape[1:]))


def apply_grad(accumulator: Any, grad: Any, **options: Any) -> Any:
    """Offer a gradient to an accumulator, a group or a worker of one; also in a function that JAX traces.

    There it becomes an ordered `io_callback`: each run of the function offers its gradient, in the program's order.

    Args:
        accumulator: a `SparseConditionalAccumulator`, a `ConditionalAccumulator`, or what its `worker(name)` returned;
            for a mapping, an `AccumulatorGroup` or a worker of one.
        grad: `(ids, rows)` of `[n]` and `[n, *row]`, or a BCOO matrix with one sparse dimension, in which rows right
            behind the last one are padding; for a dense accumulator an array. For a group: a mapping by member.
        **options: as for the accumulator's own method: `local_step`, `worker`, `sequence`, `weight`, `copy`, `timeout`;
            numbers among them may be traced.

    Returns:
        An `ApplyReceipt`; in a traced function a bool array `[]`: whether it was accepted.

    Raises:
        InvalidArgumentError: it cannot be right, as for the accumulator's own method. Nothing has changed. Where the
            function was traced, JAX raises `jax.errors.JaxRuntimeError` with that text, once the result is awaited.

    Threads:
        Any number. JAX does not order the callbacks of different threads among each other, nor run them under `vmap`
        or `grad`; in a `shard_map` each device offers its part.

    Example:
        >>> import jax, jax.numpy as jnp, gradquorum as gq, gradquorum.jax as gqj
        >>> acc = gq.SparseConditionalAccumulator("float32", (10, 2))
        >>> @jax.jit
        ... def step(table, ids):
        ...     rows = jax.grad(lambda rows: (rows**2).sum())(table[ids])
        ...     return gqj.apply_grad(acc, (ids, rows), local_step=None)
        >>> bool(step(jnp.ones((10, 2)), jnp.array([7, 1])))
        True
        >>> ids, rows = gqj.take_grad(acc, 1)
        >>> ids, rows
        (Array([1, 7], dtype=int32), Array([[2., 2.],
               [2., 2.]], dtype=float32))
    """
    if not is_tracing((grad, options)):
        return _offer(accumulator, grad, options)
    if isinstance(options.get("copy"), jax.core.Tracer) or not options.get("copy", True):
        raise InvalidArgumentError(
            f"copy={options['copy']}: expected True in a traced function, whose memory is JAX's own"
        )
    traced = {name: value for name, value in options.items() if isinstance(value, jax.core.Tracer)}

    def offer(grad: Any, numbers: Mapping[str, Any]) -> np.bool_:
        known = {name: np.asarray(number).item() for name, number in numbers.items()}
        return np.bool_(_offer(accumulator, grad, {**options, **known}))

    return io_callback(offer, jax.ShapeDtypeStruct((), np.bool_), grad, traced, ordered=True)


def _offer(accumulator: Any, grad: Any, options: Mapping[str, Any]) -> Any:
    if isinstance(grad, Mapping):
        if not isinstance(accumulator, AccumulatorGroup | GroupWorker):
            raise InvalidArgumentError(
                f"accumulator: expected a group, or a worker of one, for a mapping, got {type(accumulator).__name__}; "
                "give the gradient itself"
            )
        return accumulator.apply(grad, **options)
    member = getattr(accumulator, "_member", None)
    if isinstance(member, DenseSpec):
        return accumulator.apply_grad(grad, **options)
    if member is None:
        raise InvalidArgumentError(
            f"accumulator: expected one, or a worker of one, got {type(accumulator).__name__}; "
            "a group takes a mapping of gradients by member"
        )
    return accumulator.apply_indexed_slices_grad(grad, **options)


def take_grad(
    accumulator: Any, num_required: int, *, size: Any = None, timeout: Any = None, exact: bool = False
) -> Any:
    """Wait until the round holds enough gradients, and return them reduced to one, as arrays of JAX.

    Args:
        accumulator: a `SparseConditionalAccumulator`, `ConditionalAccumulator` or `AccumulatorGroup`.
        num_required: gradients to wait for, 1 or more.
        size: how many rows to return, needed in functions that JAX traces, as it must know all shapes: at least as many
            as the round has. What is left over is padding. None for as many as the round has. For a group: a
            mapping by sparse member, or one number for all.
        timeout: seconds, 0 (do not wait) or more; None waits without end.
        exact: take the first `num_required` accepted and leave the rest. Only with `compact=False`.

    Returns:
        ids `[r]` or `[size]`, ascending, and rows `[r, *row]` or `[size, *row]` in the accumulator's dtype. The ids of
        padding lie behind the table, where `table.at[ids].add(rows, mode="drop")` leaves them out, and its rows are 0.
        A dense accumulator gives an array; a group a dict of these.

    Raises:
        InvalidArgumentError: an argument cannot be, or the round has more rows than `size`, or an id beyond what JAX's
            integers hold. Nothing is lost: the round is kept whole for the next take.
        InvalidDTypeError: JAX has no such dtype without `jax_enable_x64`. Nothing has changed.
        DeadlineExceededError: as for the accumulator's own method, like all other errors. In a traced function, JAX
            raises `jax.errors.JaxRuntimeError` with the text.

    Threads:
        Blocks, as the accumulator's own method does; in a traced function with `size`, an ordered `io_callback` blocks.
        A jitted function may still run when its call has returned: call `jax.effects_barrier()` before a take with
        ``timeout=0`` that is to find what it applies.

    Example:
        >>> import gradquorum as gq, gradquorum.jax as gqj
        >>> acc = gq.SparseConditionalAccumulator("float32", (10, 1))
        >>> _ = acc.apply_grad([7, 1], [[1.0], [2.0]])
        >>> ids, rows = gqj.take_grad(acc, 1, size=3)
        >>> ids, rows.ravel()
        (Array([ 1,  7, 10], dtype=int32), Array([2., 1., 0.], dtype=float32))
    """
    return _take(accumulator, num_required, size, timeout, exact)


def take_bcoo(
    accumulator: Any, num_required: int, *, size: Any = None, timeout: Any = None, exact: bool = False
) -> Any:
    """Do what `take_grad` does, and return BCOO matrices, whose ids are marked as sorted and unique.

    Arguments and errors are those of `take_grad`. The accumulator's shape must say how many rows there are.

    Example:
        >>> import gradquorum as gq, gradquorum.jax as gqj
        >>> acc = gq.SparseConditionalAccumulator("float32", (10, 1))
        >>> _ = acc.apply_grad([7, 1], [[1.0], [2.0]])
        >>> gqj.take_bcoo(acc, 1)
        BCOO(float32[10, 1], nse=2, n_dense=1)
    """
    specs = _specs(accumulator)
    for name, spec in specs.items():
        if isinstance(spec, SparseSpec) and (not spec.shape or spec.shape[0] is None):
            raise InvalidArgumentError(f"{name or 'shape'}: expected one with a number of rows, got {spec.describe()}")
    taken = _take(accumulator, num_required, size, timeout, exact)
    if "" in specs:
        return _as_matrix(specs[""], taken)
    return {name: _as_matrix(specs[name], each) for name, each in taken.items()}


def _as_matrix(spec: SparseSpec | DenseSpec, taken: Any) -> Any:
    if isinstance(spec, DenseSpec):
        return taken
    ids, rows = taken
    shape = (spec.shape[0], *rows.shape[1:])
    return BCOO((rows, ids[:, None]), shape=shape, indices_sorted=True, unique_indices=True)


def _specs(accumulator: Any) -> Mapping[str, SparseSpec | DenseSpec]:
    """Return the spec of each member; the one of an accumulator is called ""."""
    if not isinstance(accumulator, AbstractAccumulator):
        raise InvalidArgumentError(f"accumulator: expected one, or a group, got {type(accumulator).__name__}")
    return accumulator._spec.members


def _take(accumulator: Any, num_required: Any, size: Any, timeout: Any, exact: bool) -> Any:
    specs = _specs(accumulator)
    for name, spec in specs.items():
        if jax.dtypes.canonicalize_dtype(spec.dtype) != spec.dtype:
            raise InvalidDTypeError(
                f"{name or 'dtype'}: expected a dtype that JAX has now, got {spec.dtype.name}; "
                'set jax.config.update("jax_enable_x64", True), or make the accumulator for a narrower one'
            )
    number, seconds = accumulator._check_take(num_required, exact), check_timeout(timeout)
    sizes = _sizes(specs, size)

    def build(merged: Any) -> Any:
        # An error that is raised here leaves the round as it is: it is not delivered yet.
        built = accumulator._build(merged)
        taken = {"": built} if "" in specs else built
        return {name: narrowed(name, specs[name], taken[name], sizes.get(name)) for name in specs}

    def take() -> Any:
        return accumulator._target.take(number, seconds, exact, build)

    if size is None:
        if is_tracing():
            raise InvalidArgumentError("size: expected a number of rows in a traced function, got None")
        taken = jax.tree.map(jax.device_put, take())  # on a CPU that is the same memory, which nobody else has
    else:
        taken = io_callback(
            take, {name: _result_of(name, specs[name], sizes.get(name)) for name in specs}, ordered=True
        )
    return taken[""] if "" in specs else taken


def _sizes(specs: Mapping[str, SparseSpec | DenseSpec], size: Any) -> dict[str, int]:
    if size is None:
        return {}
    sparse = [name for name, spec in specs.items() if isinstance(spec, SparseSpec)]
    wanted = size if isinstance(size, Mapping) else dict.fromkeys(sparse, size)
    if set(wanted) != set(sparse):
        raise InvalidArgumentError(f"size: expected a number for each of {sparse}, got {list(wanted)}")
    sizes = {name: as_integer("size", wanted[name]) for name in sparse}
    if any(number < 0 for number in sizes.values()):
        raise InvalidArgumentError(f"size: expected 0 or more, got {size!r}")
    return sizes


def _result_of(name: str, spec: SparseSpec | DenseSpec, size: int | None) -> Any:
    """Return what a traced function gets: it must be known before anything is taken."""
    dims = spec.shape if isinstance(spec, DenseSpec) else spec.shape[1:]
    if not spec.shape or any(dim is None for dim in dims):
        raise InvalidArgumentError(
            f"{name or 'shape'}: expected an accumulator that knows the shape of what it returns, got {spec.describe()}"
        )
    if isinstance(spec, DenseSpec):
        return jax.ShapeDtypeStruct(dims, spec.dtype)
    assert size is not None
    return jax.ShapeDtypeStruct((size,), id_dtype()), jax.ShapeDtypeStruct((size, *dims), spec.dtype)


def narrowed(name: str, spec: SparseSpec | DenseSpec, gradient: Any, size: int | None) -> Any:
    """Return a reduced gradient with ids that JAX's integers hold, padded to a size if there is one."""
    if not isinstance(gradient, SparseGradient):
        return gradient
    indices, values, _ = gradient
    most = np.iinfo(id_dtype()).max
    if len(indices) and indices[-1] > most:
        raise InvalidArgumentError(
            f"{name or 'ids'}: expected ids up to {most}, got {indices[-1]}; "
            'set jax.config.update("jax_enable_x64", True). The round is kept for the next take'
        )
    if size is None:
        return indices.astype(id_dtype(), copy=False), values
    if len(indices) > size:
        raise InvalidArgumentError(
            f"{name or 'size'}: expected a size of {len(indices)} or more, as the round has so many rows, got {size}. "
            "The round is kept for the next take"
        )
    return pad_rows(indices, values, size, padding_id(spec.shape[0] if spec.shape else None))


def id_dtype() -> np.dtype[Any]:
    """Return the widest integer that JAX has now."""
    found: np.dtype[Any] = np.dtype(jax.dtypes.canonicalize_dtype(np.int64))
    return found


def padding_id(num_rows: int | None) -> int:
    """Return the id of padding: right behind the table, as in a BCOO matrix."""
    most = int(np.iinfo(id_dtype()).max)
    return most if num_rows is None else min(num_rows, most)


def pad_rows(indices: Any, values: Any, size: int, padding: int) -> tuple[Any, Any]:
    """Return ids and rows filled up to a size."""
    ids = np.full(size, padding, id_dtype())
    rows = np.zeros((size, *values.shape[1:]), values.dtype)
    ids[: len(indices)], rows[: len(indices)] = indices, values
    return ids, rows
