"""Lets a transformation of optax's step on some rows of a table, with the same rows of its own state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from gradquorum.errors import InvalidArgumentError
from gradquorum.jax.gradients import id_dtype

__all__ = ["Leaf", "apply_updates", "find_owners", "step_rows"]


class Leaf(NamedTuple):
    """What the gradient of one parameter looks like."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    sparse: bool


def find_owners(inner: Any, layout: list[Leaf], structure: Any, params: Any) -> dict[int, int]:
    """Find the leaves of the inner state that have a row for each row of an embedding: they grow with it.

    Args:
        inner: the transformation.
        layout: the gradients.
        structure: the tree that they are the leaves of.
        params: the parameters' shapes and dtypes.

    Returns:
        For each such leaf of the inner state, which of the gradients it belongs to.

    Raises:
        InvalidArgumentError: the gradients do not belong to the parameters, or a leaf grows in another way.
    """
    try:
        shapes = structure.flatten_up_to(params)
    except ValueError as error:
        raise InvalidArgumentError(f"updates: expected a tree like that of the parameters: {error}") from error
    for leaf, param in zip(layout, shapes, strict=True):
        if getattr(param, "shape", None) != leaf.shape:
            raise InvalidArgumentError(f"{leaf.name}: expected a gradient of the shape of {param}, got {leaf.shape}")

    def state_leaves(of: list[Any]) -> list[Any]:
        return list(jax.tree.leaves(jax.eval_shape(inner.init, structure.unflatten(of))))

    owners: dict[int, int] = {}
    before = state_leaves(shapes)
    for i, leaf in enumerate(layout):
        if not leaf.sparse:
            continue
        num_rows, *row = leaf.shape
        for rows in (num_rows + 1, 1):  # one row more, and few: a state may be factored from some size on
            others = [*shapes[:i], jax.ShapeDtypeStruct((rows, *row), shapes[i].dtype), *shapes[i + 1 :]]
            for k, (one, other) in enumerate(zip(before, state_leaves(others), strict=True)):
                if one.shape == other.shape and owners.get(k) != i:
                    continue
                if one.shape[:1] != (num_rows,) or other.shape != (rows, *one.shape[1:]):
                    raise InvalidArgumentError(
                        f"{leaf.name}: expected an inner transformation whose state has a row for each row of the "
                        f"parameter, or does not depend on it; got a state of shape {one.shape}, and of {other.shape} "
                        f"for {rows} rows. Adafactor's, for one, is factored: give it min_dim_size_to_factor above "
                        "the table's size"
                    )
                owners[k] = i
    return owners


def step_rows(
    inner: Any, form: Any, merged: list[Any], structure: Any, inner_state: Any, params: Any, extra: Any
) -> tuple[list[Any], Any]:
    """Step with rows in place of tables: of gradients, of parameters and of the inner state.

    Args:
        inner: the transformation.
        form: has the `layout` of the gradients, and the `owners` of leaves of the inner state.
        merged: `(ids, rows)` for each sparse gradient, arrays for the others.
        structure: the tree that they are the leaves of.
        inner_state: the whole state.
        params: the whole parameters, or None.
        extra: further arguments of the transformation.

    Returns:
        What is to be added to those rows and arrays, and the whole new state.
    """
    ids = [each[0] if leaf.sparse else None for leaf, each in zip(form.layout, merged, strict=True)]
    values = [each[1] if leaf.sparse else each for leaf, each in zip(form.layout, merged, strict=True)]
    if params is not None:
        leaves = structure.flatten_up_to(params)
        params = structure.unflatten([_rows(leaf, at) for leaf, at in zip(leaves, ids, strict=True)])
    tables, state_structure = jax.tree.flatten(inner_state)
    at_of = [ids[form.owners[k]] if k in form.owners else None for k in range(len(tables))]
    rows = [_rows(table, at) for table, at in zip(tables, at_of, strict=True)]
    updates, new_state = inner.update(structure.unflatten(values), state_structure.unflatten(rows), params, **extra)
    changes = structure.flatten_up_to(updates)
    for leaf, value, change in zip(form.layout, values, changes, strict=True):
        if change.shape != value.shape:
            raise InvalidArgumentError(
                f"{leaf.name}: expected an inner transformation that returns the shape it gets, {value.shape}, "
                f"got {change.shape}"
            )
    tables = [
        each if at is None else jnp.asarray(table).at[at].set(each, mode="drop")
        for table, at, each in zip(tables, at_of, state_structure.flatten_up_to(new_state), strict=True)
    ]
    return changes, state_structure.unflatten(tables)


def _rows(table: Any, ids: Any) -> Any:
    """Return the rows of some ids, those of padding as 0; without ids the table itself."""
    return table if ids is None else jnp.asarray(table).at[ids].get(mode="fill", fill_value=0)


def apply_updates(params: Any, updates: Any) -> Any:
    """Return the parameters with the updates added: rows of BCOO matrices to their rows, and arrays as optax does.

    Rows whose ids are outside of the table are left out, the negative ones too: they do not count from its end.

    Example:
        >>> import jax.numpy as jnp, gradquorum.jax as gqj
        >>> gqj.apply_updates(jnp.zeros((3, 1)), gqj.as_bcoo(jnp.array([1]), jnp.ones((1, 1)), 3)).ravel()
        Array([0., 1., 0.], dtype=float32)
    """

    def add(param: Any, update: Any) -> Any:
        if param is None:
            return None
        if isinstance(update, BCOO):
            param = jnp.asarray(param)
            ids = update.indices[:, 0].astype(id_dtype())
            ids = jnp.where(ids < 0, jnp.iinfo(ids.dtype).max, ids)  # JAX counts from the end otherwise
            return param.at[ids].add(update.data.astype(param.dtype), mode="drop")
        return jnp.asarray(param + update).astype(jnp.asarray(param).dtype)

    return jax.tree.map(add, params, updates, is_leaf=lambda leaf: leaf is None)
