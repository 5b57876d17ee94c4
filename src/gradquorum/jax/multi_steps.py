"""Micro-batches in the manner of optax: a transformation that passes on one gradient for several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from gradquorum.arrays import as_integer
from gradquorum.errors import InvalidArgumentError
from gradquorum.groups import AccumulatorGroup
from gradquorum.jax.gradients import narrowed
from gradquorum.jax.row_steps import Leaf, find_owners, step_rows
from gradquorum.jax.tracing import is_tracing
from gradquorum.jax.windows import Form, Window, as_matrix, check_layout, is_sparse, leaf_of, nothing
from gradquorum.specs import DenseSpec, SparseSpec

__all__ = ["MultiSteps", "MultiStepsState"]

T = TypeVar("T")


class MultiStepsState(NamedTuple):
    """The state of `MultiSteps`.

    Attributes:
        mini_step: int32 `[]`, the gradients that are held now.
        gradient_step: int32 `[]`, how often they have been merged.
        num_skipped: int32 `[]`, the gradients dropped for a NaN or an infinity.
        inner_state: of the transformation inside.
        window: where the gradients are held. A state is used once: what it held has moved on into the next one.

    Example:
        >>> import jax.numpy as jnp, optax, gradquorum.jax as gqj
        >>> state = gqj.MultiSteps(optax.sgd(0.1), steps=4).init(jnp.ones((10, 2)))
        >>> int(state.mini_step), int(state.gradient_step)
        (0, 0)
    """

    mini_step: Any
    gradient_step: Any
    num_skipped: Any
    inner_state: Any
    window: Any


class MultiSteps:
    """Passes on the mean of every `steps` gradients, in the manner of `optax.MultiSteps`.

    Gradients of embeddings are BCOO matrices (`as_bcoo`): what is held is proportional to their distinct rows, and
    nowhere is there a dense gradient of the table. The transformation inside sees the merged rows of an embedding, the
    same rows of the parameters, and of its own state those rows too: what it does to each row is done to the touched
    rows only, as `torch.optim.SparseAdam` does it.

    Args:
        inner: what steps with the merged gradients: an `optax.GradientTransformation`, or anything with its two
            functions.
        steps: gradients to merge, 1 or more.
        reduction: ``"MEAN_BY_COUNT"`` divides by the number of gradients, ``"MEAN"`` a row by the number of gradients
            that touched it, ``"SUM"`` by nothing.
        on_nonfinite: ``"skip"`` drops a gradient with a NaN or an infinity: it is counted in the state's `num_skipped`
            and not among the `steps`. ``"raise"`` refuses it, ``"keep"`` carries it.
        size: for functions that JAX traces, the most rows that a merged gradient of one embedding may have.

    Raises:
        InvalidArgumentError: an argument cannot be.

    Threads:
        A state belongs to one thread at a time, and its gradients live in this process: neither is saved with it.

    Example:
        >>> import jax.numpy as jnp, optax, gradquorum.jax as gqj
        >>> params = {"table": jnp.ones((10, 1)), "bias": jnp.zeros(2)}
        >>> tx = gqj.MultiSteps(optax.sgd(0.5), steps=2)
        >>> state = tx.init(params)
        >>> for ids in ([7, 1], [1, 1]):
        ...     grads = {"table": gqj.as_bcoo(jnp.array(ids), jnp.ones((2, 1)), 10), "bias": jnp.ones(2)}
        ...     updates, state = tx.update(grads, state, params)
        ...     params = gqj.apply_updates(params, updates)
        >>> params["table"][jnp.array([0, 1, 7]), 0], params["bias"]
        (Array([1.  , 0.25, 0.75], dtype=float32), Array([-0.5, -0.5], dtype=float32))

    Source:
        `optax.MultiSteps`, which holds dense sums.
    """

    def __init__(
        self,
        inner: Any,
        steps: int,
        *,
        reduction: Literal["MEAN", "SUM", "MEAN_BY_COUNT"] = "MEAN_BY_COUNT",
        on_nonfinite: Literal["keep", "skip", "raise"] = "skip",
        size: int | None = None,
    ) -> None:
        self._inner = inner
        self._steps = as_integer("steps", steps)
        if self._steps < 1:
            raise InvalidArgumentError(f"steps: expected 1 or more, got {self._steps}")
        self._size = None if size is None else as_integer("size", size)
        if self._size is not None and self._size < 0:
            raise InvalidArgumentError(f"size: expected 0 or more, or None; got {self._size}")
        if reduction not in ("MEAN", "SUM", "MEAN_BY_COUNT"):
            raise InvalidArgumentError(f"reduction: expected MEAN, SUM or MEAN_BY_COUNT, got {reduction!r}")
        self._reduction = reduction
        self._on_nonfinite = on_nonfinite
        self._make_group([Leaf("", (1,), np.dtype(np.float32), sparse=False)]).close()  # refuses what cannot be

    def init(self, params: Any) -> MultiStepsState:
        """Return the state before the first gradient. Not in a traced function, whose runs would share one window.

        Raises:
            InvalidArgumentError: JAX traces the call.
        """
        if is_tracing(params):
            raise InvalidArgumentError(
                "init: expected a call outside of traced functions, whose runs would share one window; "
                "call it before, and give the function the state"
            )
        one, two, three = (jnp.zeros((), jnp.int32) for _ in range(3))  # an array each: the state may be donated
        return MultiStepsState(one, two, three, self._inner.init(params), Window(params))

    def update(
        self, updates: Any, state: MultiStepsState, params: Any = None, **extra: Any
    ) -> tuple[Any, MultiStepsState]:
        """Hold a gradient; after the `steps`-th let the transformation inside step with the merged one.

        Args:
            updates: the gradients, a tree like the parameters with BCOO matrices in place of embeddings.
            state: what `init` or the last `update` returned.
            params: the parameters, if the transformation inside needs them, or keeps a state of each row.
            **extra: for the transformation inside.

        Returns:
            The updates, with a BCOO matrix wherever there was one (give them to `apply_updates`), and the new state.
            In between, they change nothing: zeros, and matrices of padding.

        Raises:
            InvalidArgumentError: the gradients differ in form from those before, or in a traced function there are
                sparse ones and no `size`. Nothing has changed. What is wrong with the numbers themselves (an id out of
                range, more rows than `size`) is a `jax.errors.JaxRuntimeError` there. What the transformation inside
                raises outside of traced functions loses nothing: the gradient is held, and the next update, or
                `flush`, steps with all that was merged.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_sparse)
        layout = [leaf_of(path, leaf) for path, leaf in leaves]
        form = self._form_of(state.window, layout, structure)
        gradients = [leaf for _, leaf in leaves]
        if is_tracing(gradients):
            accepted, held, due, merged = self._exchange(state.window, form, gradients)
            state = state._replace(mini_step=held, num_skipped=state.num_skipped + jnp.where(accepted, 0, 1))
            return self._advance(due, merged, form, structure, state, params, extra)
        jax.block_until_ready(state.mini_step)  # a jitted update may still be on its way to the window
        accepted, due = self._hold(state.window, form, gradients)
        state = state._replace(num_skipped=state.num_skipped + (0 if accepted else 1))
        if due:
            return self._step(structure, state, params, extra)
        state = state._replace(mini_step=jnp.asarray(state.window.num_held, jnp.int32))
        return self._advance(False, [nothing(leaf, 0) for leaf in layout], form, structure, state, params, extra)

    def flush(self, state: MultiStepsState, params: Any = None, **extra: Any) -> tuple[Any, MultiStepsState]:
        """Let the transformation inside step with what is held, divided by its own count. Not in a traced function.

        It waits until the program that returned the state has run.

        Returns:
            What `update` returns.

        Raises:
            InvalidArgumentError: nothing is held.
        """
        window = state.window
        if is_tracing():
            raise InvalidArgumentError("flush: expected a call outside of traced functions")
        jax.block_until_ready(state.mini_step)  # a jitted update may still be on its way to the window
        if window.form is None or not (window.num_held or window.form.group.num_undelivered):
            raise InvalidArgumentError("flush: expected gradients that are held, got none")
        return self._step(jax.tree.structure(window.params), state, params, extra)

    def _make_group(self, layout: list[Leaf]) -> AccumulatorGroup:
        members: dict[str, SparseSpec | DenseSpec] = {}
        for leaf in layout:
            kind = SparseSpec if leaf.sparse else DenseSpec
            members[leaf.name or "grad"] = kind(leaf.dtype, leaf.shape, self._reduction)
        return AccumulatorGroup(members, name="multi_steps", target="local", on_nonfinite=self._on_nonfinite)

    def _form_of(self, window: Window, layout: list[Leaf], structure: Any) -> Form:
        """Return the form of gradients: that of those before, or a new one that is known when one has been held."""
        if window.form is not None:
            check_layout(window.form.layout, layout)
            return window.form
        owners = find_owners(self._inner, layout, structure, window.params)
        return Form(layout, owners, self._make_group(layout))

    def _hold(self, window: Window, form: Form, gradients: list[Any]) -> tuple[bool, bool]:
        """Hold a gradient. Return whether it counts, and whether merged ones are due."""
        accepted = window.hold(form, gradients)
        assert window.form is not None
        return accepted, window.num_held >= self._steps or window.form.group.num_undelivered > 0

    def _exchange(self, window: Window, form: Form, gradients: list[Any]) -> tuple[Any, Any, Any, list[Any]]:
        """Hold a gradient of a traced function.

        Return whether it counts, how many are held, and whether these are merged ones: which.
        """
        size = self._size
        if size is None and any(leaf.sparse for leaf in form.layout):
            raise InvalidArgumentError("size: expected MultiSteps(..., size=...) in a traced function, got None")
        none = [nothing(leaf, size or 0) for leaf in form.layout]

        def exchange(gradients: list[Any]) -> tuple[Any, Any, Any, list[Any]]:
            accepted, due = self._hold(window, form, gradients)
            merged = self._take(window, lambda merged: merged, size) if due else none
            return np.bool_(accepted), np.int32(window.num_held), np.bool_(due), merged

        results = (np.bool_(0), np.int32(0), np.bool_(0), none)
        accepted, held, due, merged = io_callback(exchange, results, gradients, ordered=True)
        return accepted, held, due, merged

    def _take(self, window: Window, use: Callable[[list[Any]], T], size: int | None = None) -> T:
        """Take the merged gradients, and return what is made of them.

        They are `(ids, rows)` of embeddings, padded to a size if there is one; else arrays.
        """
        assert window.form is not None
        group = window.form.group

        def build(merged: Any) -> T:
            # An error that is raised here leaves the round as it is: it is not delivered yet.
            built = group._build(merged)
            return use([narrowed(name, spec, built[name], size) for name, spec in group.members.items()])

        return group._target.take(1, 0.0, False, build)

    def _step(self, structure: Any, state: MultiStepsState, params: Any, extra: Any) -> tuple[Any, MultiStepsState]:
        """Let the transformation inside step with what is held. If it fails, that is held still."""
        form = state.window.form
        assert form is not None

        def use(merged: list[Any]) -> tuple[Any, MultiStepsState]:
            return self._advance(True, jax.tree.map(jax.device_put, merged), form, structure, state, params, extra)

        updates, state = self._take(state.window, use)
        return updates, state._replace(mini_step=jnp.asarray(state.window.num_held, jnp.int32))

    def _advance(
        self, due: Any, merged: list[Any], form: Form, structure: Any, state: MultiStepsState, params: Any, extra: Any
    ) -> tuple[Any, MultiStepsState]:
        """Let the transformation inside step with the merged gradients, if there are any."""

        def step(merged: list[Any], inner_state: Any) -> tuple[list[Any], Any]:
            return step_rows(self._inner, form, merged, structure, inner_state, params, extra)

        def rest(merged: list[Any], inner_state: Any) -> tuple[list[Any], Any]:
            changes, _ = jax.eval_shape(step, merged, inner_state)
            return [jnp.zeros(change.shape, change.dtype) for change in changes], inner_state

        if isinstance(due, bool):
            changes, inner_state = (step if due else rest)(merged, state.inner_state)
        else:
            changes, inner_state = jax.lax.cond(due, step, rest, merged, state.inner_state)
        updates = [
            as_matrix(leaf, each[0], change) if leaf.sparse else change
            for leaf, each, change in zip(form.layout, merged, changes, strict=True)
        ]
        state = state._replace(gradient_step=state.gradient_step + jnp.where(due, 1, 0), inner_state=inner_state)
        return structure.unflatten(updates), state
