"""Whether JAX traces a function now."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

__all__ = ["is_tracing"]

_outside: Any = None
"""JAX's state when it traces nothing, once it has been seen."""


def is_tracing(tree: Any = None) -> bool:
    """Tell whether JAX traces a function now: there is a tracer in the tree, or what `jax.numpy` makes is one."""
    global _outside
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
        return True
    state = get_opaque_trace_state()
    if state == _outside:
        return False
    tracing = isinstance(jnp.zeros(()), jax.core.Tracer)  # an array costs too much to be made each time
    if not tracing:
        _outside = state
    return tracing
