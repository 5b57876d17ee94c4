"""Where gradients are held between two steps, and what they look like there."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from gradquorum.errors import InvalidArgumentError
from gradquorum.groups import AccumulatorGroup
from gradquorum.jax.gradients import pad_rows, padding_id
from gradquorum.jax.row_steps import Leaf

__all__ = ["Form", "Window", "as_matrix", "is_sparse", "leaf_of", "nothing"]


class Form(NamedTuple):
    """What gradients look like, and where such gradients are held."""

    layout: list[Leaf]
    owners: dict[int, int]
    """For each leaf of the inner state that has a row for each row of an embedding, which of the gradients."""
    group: AccumulatorGroup


@jax.tree_util.register_static
class Window:
    """The gradients between two steps. Part of the state's structure, as no array can be."""

    def __init__(self, params: Any) -> None:
        self.params = jax.tree.map(lambda param: jax.ShapeDtypeStruct(jnp.shape(param), jnp.result_type(param)), params)
        """The parameters' shapes and dtypes."""
        self.form: Form | None = None
        """That of the first gradient that was not refused, which all others must have."""

    @property
    def num_held(self) -> int:
        """The gradients that are held."""
        return 0 if self.form is None else self.form.group.num_accumulated()

    def hold(self, form: Form, gradients: list[Any]) -> bool:
        """Hold a gradient, and return whether it counts.

        Raises:
            InvalidArgumentError: it differs in form from those before, or cannot be right. Nothing has changed.
        """
        known = self.form or form
        check_layout(known.layout, form.layout)
        receipt = known.group.apply(dict(zip(known.group.members, gradients, strict=True)), local_step=None)
        self.form = known
        return bool(receipt)


def check_layout(expected: list[Leaf], got: list[Leaf]) -> None:
    """Check that gradients have the form of those before."""
    if got != expected:
        raise InvalidArgumentError(f"updates: expected gradients as before, {expected}, got {got}")


def is_sparse(leaf: Any) -> bool:
    """Tell whether a gradient is one of an embedding."""
    return isinstance(leaf, BCOO)


def leaf_of(path: Any, leaf: Any) -> Leaf:
    """Return what a gradient at a path of the tree looks like."""
    return Leaf(jax.tree_util.keystr(path), tuple(leaf.shape), np.dtype(leaf.dtype), is_sparse(leaf))


def nothing(leaf: Leaf, size: int) -> Any:
    """Return a gradient that changes nothing."""
    if not leaf.sparse:
        return np.zeros(leaf.shape, leaf.dtype)
    empty = np.empty(0, np.int64), np.empty((0, *leaf.shape[1:]), leaf.dtype)
    return pad_rows(*empty, size, padding_id(leaf.shape[0]))


def as_matrix(leaf: Leaf, ids: Any, rows: Any) -> Any:
    """Return ids and rows as a BCOO matrix of the whole table."""
    return BCOO((rows, ids[:, None]), shape=leaf.shape, indices_sorted=True, unique_indices=True)
