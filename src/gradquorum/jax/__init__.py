"""Gradients of JAX in and out, also in functions that `jax.jit` traces, and micro-batches of them for optax.

`import gradquorum.jax as gqj` loads JAX; `import gradquorum` does not.

The documented classes themselves take JAX's arrays and BCOO matrices wherever they take arrays; what is here works
while JAX traces, and gives JAX's arrays back.
"""

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError("gradquorum.jax needs JAX; install it with: pip install jax", name="jax") from error

from gradquorum.jax.gradients import apply_grad, as_bcoo, take_bcoo, take_grad
from gradquorum.jax.multi_steps import MultiSteps, MultiStepsState
from gradquorum.jax.row_steps import apply_updates

__all__ = ["MultiSteps", "MultiStepsState", "apply_grad", "apply_updates", "as_bcoo", "take_bcoo", "take_grad"]
