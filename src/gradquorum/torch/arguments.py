"""The arguments of a `MicroBatchAccumulator`, checked."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradquorum.errors import InvalidArgumentError

__all__ = ["check_forms", "check_max_norm", "check_parameters", "form_of", "gradient_dtype"]

Form = tuple[tuple[int, ...], Any]
"""Shape and dtype."""


def gradient_dtype(parameter: Any) -> Any:
    """Return the dtype that the `.grad` of a parameter has: its own, unless it says another one."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def form_of(parameter: Any) -> Form:
    """Return what gradients of the parameter look like."""
    return tuple(parameter.shape), gradient_dtype(parameter)


def check_forms(parameters: list[Any], forms: list[Form]) -> None:
    """Check that gradients of the parameters still look as they did."""
    for i, (parameter, form) in enumerate(zip(parameters, forms, strict=True)):
        got = form_of(parameter)
        if got != form:
            raise InvalidArgumentError(
                f"params[{i}]: expected the shape {list(form[0])} and the dtype {form[1]} that it had, got "
                f"{list(got[0])} and {got[1]}; flush() before that, and make a new MicroBatchAccumulator after it"
            )


def check_parameters(params: Any) -> list[Any]:
    """Return the parameters as a list, each of which can have a gradient."""
    if isinstance(params, (torch.Tensor, Mapping)) or not isinstance(params, Iterable):
        raise InvalidArgumentError(f"params: expected an iterable of parameters, got {type(params).__name__}")
    parameters = list(params)
    for i, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor):
            raise InvalidArgumentError(f"params[{i}]: expected a parameter, got {type(parameter).__name__}")
        if torch.nn.parameter.is_lazy(parameter):
            raise InvalidArgumentError(
                f"params[{i}]: expected a parameter with a shape, got one of a lazy module that has none yet; run the "
                "model once first"
            )
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
