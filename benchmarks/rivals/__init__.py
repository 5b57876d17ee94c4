"""The rivals: other ways to do the same job, one per file.

Each file has `prepare(gradients)`, which returns the timed job: from arrays at hand to ids `[r]`, ascending,
and `[r, dim]` sums divided by the number of gradients that touched the row. Whatever can be done once for all
rounds is done in `prepare`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from benchmarks.cases import Gradient

Job = Callable[[], tuple[Any, Any]]
Prepare = Callable[[list[Gradient]], Job]

TENSORFLOW = "TF op"
_MODULES = {
    TENSORFLOW: ("tensorflow", "tensorflow_op"),
    "torch add+coalesce": ("torch", "torch_coalesce"),
    "torch unique+index_add": ("torch", "torch_index_add"),
    "SciPy selector": ("scipy", "scipy_selector"),
    "NumPy sort+reduceat": ("numpy", "numpy_reduceat"),
}


def names() -> list[str]:
    return list(_MODULES)


def missing() -> list[str]:
    """Return a line about each rival that is not installed; loads none."""
    return [
        _left_out(name, package) for name, (package, _) in _MODULES.items() if importlib.util.find_spec(package) is None
    ]


def _left_out(name: str, package: str) -> str:
    return f"left out: {name} ({package} is not installed)"


def load() -> tuple[dict[str, Prepare], list[str]]:
    """Return the rivals that are installed, and a line about each that is not."""
    found, left_out = {}, []
    for name, (package, module) in _MODULES.items():
        try:
            found[name] = importlib.import_module(f"{__name__}.{module}").prepare
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != package:
                raise
            left_out.append(_left_out(name, package))
    return found, left_out
