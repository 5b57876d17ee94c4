"""Errors as messages, and back. Both sides know the errors of this library, and no others."""

from __future__ import annotations

from typing import Any

from gradquorum import errors
from gradquorum.errors import GradQuorumError, ResourceExhaustedError
from gradquorum.targets.process.messages import MAX_TEXT_BYTES, Failure, from_text, from_worker, to_text, to_worker

__all__ = ["to_error", "to_failure"]

_MAX_CHARACTERS = MAX_TEXT_BYTES // 4

_ERRORS: dict[str, type[GradQuorumError]] = {
    name: found
    for name in errors.__all__
    if isinstance(found := getattr(errors, name), type) and issubclass(found, GradQuorumError)
}


def to_failure(error: BaseException) -> Failure:
    """Return an error as it travels."""
    if isinstance(error, MemoryError) and not isinstance(error, GradQuorumError):
        error = ResourceExhaustedError(f"the server has no memory: {error or 'allocation failed'}")
    name = next((cls.__name__ for cls in type(error).__mro__ if _ERRORS.get(cls.__name__) is cls), None)
    if name is None or not isinstance(error, GradQuorumError):
        name, text = "GradQuorumError", f"the server failed: {type(error).__name__}: {error}"
        error = GradQuorumError(text)
    numbers = {what: getattr(error, what) for what in error._numbers if what != "left"}
    left = tuple(to_worker(worker) for worker in getattr(error, "left", ()))
    return Failure(name, to_text(str(error)[:_MAX_CHARACTERS]), numbers, left)


def to_error(failure: Failure) -> GradQuorumError:
    """Return an error that has travelled, as it was."""
    cls = _ERRORS.get(failure.error, GradQuorumError)
    numbers: dict[str, Any] = {name: failure.numbers.get(name) for name in cls._numbers if name != "left"}
    if "left" in cls._numbers:
        numbers["left"] = tuple(from_worker(worker) for worker in failure.left)
    return cls(from_text(failure.message), **numbers)
