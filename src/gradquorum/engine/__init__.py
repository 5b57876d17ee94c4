"""The engines, and the choice between them."""

from __future__ import annotations

from gradquorum.engine.interface import AbstractEngine, ReducerSpec
from gradquorum.engine.reference import ReferenceEngine
from gradquorum.errors import InvalidArgumentError

__all__ = ["AbstractEngine", "ReducerSpec", "available_engines", "engine_name", "get_engine"]

_engines: dict[str, AbstractEngine] = {"reference": ReferenceEngine()}

engine_name = next(iter(_engines))
"""The engine used by default."""


def available_engines() -> tuple[str, ...]:
    """Return the names of the engines of this installation, the default one first."""
    return tuple(_engines)


def get_engine(name: str | None = None) -> AbstractEngine:
    """Return the engine of that name, or the default one.

    Raises:
        InvalidArgumentError: there is no such engine in this installation.
    """
    if name is None:
        return next(iter(_engines.values()))
    if name not in _engines:
        raise InvalidArgumentError(f"engine: expected one of {available_engines()}, got {name!r}")
    return _engines[name]
