"""The arguments of a `MicroBatchAccumulator`, checked."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradquorum.errors import InvalidArgumentError

__all__ = ["check_max_norm", "check_parameters"]


def check_parameters(params: Any) -> list[Any]:
    """Return the parameters as a list, each of which can have a gradient."""
    if isinstance(params, (torch.Tensor, Mapping)) or not isinstance(params, Iterable):
        raise InvalidArgumentError(f"params: expected an iterable of parameters, got {type(params).__name__}")
    parameters = list(params)
    for i, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor):
            raise InvalidArgumentError(f"params[{i}]: expected a parameter, got {type(parameter).__name__}")
        if not parameter.is_leaf:
            raise InvalidArgumentError(
                f"params[{i}]: expected a leaf, which has a .grad, got the result of an operation"
            )
    if not parameters:
        raise InvalidArgumentError("params: expected one parameter or more, got none")
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise InvalidArgumentError("params: expected each parameter once, got one twice")
    return parameters


def check_max_norm(max_norm: Any) -> float | None:
    """Return the bound of a norm as a float, None for no bound."""
    if max_norm is None:
        return None
    if isinstance(max_norm, numbers.Real) and not isinstance(max_norm, bool):
        number = float(max_norm)
        if 0 < number < math.inf:
            return number
    raise InvalidArgumentError(f"max_norm: expected a finite number above 0, or None; got {max_norm!r}")
