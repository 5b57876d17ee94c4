"""The engines, and the choice between them."""

from __future__ import annotations

import importlib.util
import warnings

from gradquorum.engine.interface import AbstractEngine, ReducerSpec
from gradquorum.engine.reference import ReferenceEngine
from gradquorum.errors import InvalidArgumentError

__all__ = [
    "TENSOR_MEMORY",
    "AbstractEngine",
    "ReducerSpec",
    "available_engines",
    "coo_memory",
    "coo_tensors",
    "engine_name",
    "get_engine",
    "trim_memory",
]


def _engines_here() -> dict[str, AbstractEngine]:
    """Return the engines of this installation, the default one first."""
    engines: dict[str, AbstractEngine] = {}
    if importlib.util.find_spec("gradquorum._native") is not None:  # a broken one must not pass for a missing one
        from gradquorum.engine.native import NativeEngine

        engines["native"] = NativeEngine()
    engines["reference"] = ReferenceEngine()
    return engines


_engines = _engines_here()
_warned = False

engine_name: str = next(iter(_engines))
"""The engine used by default."""

coo_memory = _engines[engine_name].coo_memory
"""See `AbstractEngine.coo_memory`."""

coo_tensors = _engines[engine_name].coo_tensors
"""See `AbstractEngine.coo_tensors`."""

TENSOR_MEMORY: tuple[type, ...] = _engines[engine_name].tensor_memory
"""The types of what it returns."""


def available_engines() -> tuple[str, ...]:
    """Return the names of the engines of this installation, the default one first."""
    return tuple(_engines)


def get_engine(name: str | None = None) -> AbstractEngine:
    """Return the engine of that name, or the default one.

    Raises:
        InvalidArgumentError: there is no such engine in this installation.
    """
    if name is None:
        _warn_if_slow()
        return _engines[engine_name]
    if not isinstance(name, str) or name not in _engines:
        raise InvalidArgumentError(f"engine: expected one of {available_engines()} in this installation, got {name!r}")
    return _engines[name]


def trim_memory(from_bytes: int = 0) -> int:
    """Give the memory that engines keep for reuse back to the system, in pieces from that size on.

    Returns:
        How many bytes that were.
    """
    return sum(engine.trim_memory(from_bytes) for engine in _engines.values())


def _warn_if_slow() -> None:
    """Say once that the default engine is the reference engine, for want of a better one."""
    global _warned
    if engine_name == "native" or _warned:
        return
    _warned = True
    warnings.warn(
        "gradquorum was installed without its native engine, because there was no C++ compiler: it uses the reference "
        "engine, which gives the same results far more slowly. Install it again with a compiler, or ask for "
        "engine='reference' to silence this.",
        RuntimeWarning,
        stacklevel=2,
    )
