"""The terms on which a gradient is offered or awaited, checked at the door."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradquorum.arrays import as_integer
from gradquorum.dtypes import round_weight
from gradquorum.errors import InvalidArgumentError, InvalidDTypeError

__all__ = ["check_sequence", "check_timeout", "check_weight", "check_worker"]


def check_worker(worker: Any) -> int | str:
    """Return a worker's identity as an int or a str."""
    if isinstance(worker, str):
        return str(worker)
    if type(worker) is int:
        return worker
    try:
        return as_integer("worker", worker)
    except InvalidArgumentError:
        raise InvalidDTypeError(f"worker: expected an int or a str, got {worker!r}") from None


def check_sequence(worker: int | str | None, sequence: Any) -> int:
    """Return a worker's number for a gradient."""
    number = as_integer("sequence", sequence)
    if worker is None:
        raise InvalidArgumentError(f"sequence: expected worker= beside it, got sequence={number} alone")
    if number < 0:
        raise InvalidArgumentError(f"sequence: expected 0 or more, got {number}")
    return number


def check_weight(weight: Any, dtypes: Sequence[Any]) -> float:
    """Return a gradient's weight, which each of the dtypes must be able to hold; without any it must be 1."""
    if isinstance(weight, (bool, np.bool_)) or not isinstance(weight, (int, float, np.integer, np.floating)):
        raise InvalidDTypeError(f"weight: expected a number, got {weight!r}")
    if not dtypes:
        if weight == 1:
            return 1.0
        raise InvalidArgumentError(f"weight: expected none unless reduction_type is 'MEAN_BY_WEIGHT', got {weight}")
    try:
        number = float(weight)
    except OverflowError:
        number = math.inf
    for dtype in dtypes:
        rounded = round_weight(number, dtype)
        if not (math.isfinite(rounded) and rounded > 0):
            raise InvalidArgumentError(f"weight: expected a finite number above 0 in {dtype.name}, got {weight}")
    return number


def check_timeout(timeout: Any) -> float | None:
    """Return seconds; None, as for infinity, is without end."""
    if timeout is None:
        return None
    if isinstance(timeout, (bool, np.bool_)) or not isinstance(timeout, numbers.Real):
        raise InvalidArgumentError(f"timeout: expected seconds or None, got {timeout!r}")
    try:
        seconds = float(timeout)
    except OverflowError:
        seconds = math.inf if timeout > 0 else -math.inf  # type: ignore[operator]
    if not seconds >= 0:
        raise InvalidArgumentError(f"timeout: expected 0 or more seconds, or None; got {timeout!r}")
    return None if seconds == math.inf else seconds
