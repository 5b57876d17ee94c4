"""What a chief does with a merged gradient: a function, a torch optimizer, or an optax transformation.

Frameworks are recognised without importing them: torch by its class, if it has been loaded, and optax by the two
functions of a `GradientTransformation`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.dtypes import as_dtype, is_bfloat16
from gradquorum.errors import InvalidArgumentError
from gradquorum.groups import AccumulatorGroup, GroupGradient
from gradquorum.handle import AbstractAccumulator
from gradquorum.indexed_slices import SparseGradient
from gradquorum.specs import DenseSpec, SparseSpec

__all__ = ["AbstractUpdate", "make_update"]

_ONLY = ""
"""The name of an accumulator's one member."""


class AbstractUpdate(ABC):
    """One way to change the parameters by a merged gradient."""

    params: Any = None
    """The parameters as they are now, where this changes them."""

    @abstractmethod
    def __call__(self, gradient: Any, step: int) -> None:
        """Change the parameters by the gradient of a step."""


def make_update(group: AbstractAccumulator[Any], update: Any, params: Any) -> AbstractUpdate:
    """Return what to do with the merged gradients of a group or an accumulator.

    Raises:
        InvalidArgumentError: `update` is nothing that we know, or `params` do not fit.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(update, torch.optim.Optimizer):
        return _TorchUpdate(torch, group, update, params)
    if isinstance(update, tuple) and callable(getattr(update, "init", None)) and hasattr(update, "update"):
        return _OptaxUpdate(group, update, params)
    if not callable(update):
        raise InvalidArgumentError(
            f"update: expected a function of the gradient, a torch optimizer or an optax transformation, got {update!r}"
        )
    if params is not None:
        raise InvalidArgumentError("params: expected None with a function as update: it knows its parameters")
    return _FunctionUpdate(update)


class _FunctionUpdate(AbstractUpdate):
    """A function of the gradient, and of the step if it asks for one."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self._wants_step = _wants_step(function)

    def __call__(self, gradient: Any, step: int) -> None:
        if self._wants_step:
            self._function(gradient, step)
        else:
            self._function(gradient)


def _wants_step(function: Callable[..., object]) -> bool:
    """Tell whether a function's second argument is the step: it has no default, or that name."""
    import inspect  # not at import: it costs more than all of us

    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some written in C have none
        return False
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    required = [one for one in positional if one.default is one.empty]
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if not (positional or takes_any) or len(required) > 2:
        raise InvalidArgumentError(
            f"update: expected a function of the gradient, or of the gradient and the step; got {function!r} with "
            f"{len(required)} required arguments"
        )
    return len(required) == 2 or (len(positional) > 1 and positional[1].name == "step")


class _TorchUpdate(AbstractUpdate):
    """Gradients into ``.grad`` of the parameters of the members' names, then `step` and `zero_grad`."""

    def __init__(self, torch: Any, group: AbstractAccumulator[Any], optimizer: Any, params: Any) -> None:
        self._torch = torch
        self._optimizer = optimizer
        self._params = _members_of(group, _torch_params(group, optimizer) if params is None else params)
        self.params = _as_given(group, self._params)

    def __call__(self, gradient: Any, step: int) -> None:
        for name, parameter in self._params.items():
            parameter.grad = self._tensor(_member(gradient, name), parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _tensor(self, member: Any, parameter: Any) -> Any:
        torch = self._torch
        if not isinstance(member, SparseGradient):
            return self._from_numpy(member).to(parameter.device)
        _check_rows(member, parameter)
        indices = torch.from_numpy(member.indices)[None].to(parameter.device)
        values = self._from_numpy(member.values).to(parameter.device)
        # A take's ids ascend without repeats, and are in the table: that is all that torch would check.
        return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)

    def _from_numpy(self, array: NDArray[Any]) -> Any:
        if is_bfloat16(array.dtype):
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)


def _torch_params(group: AbstractAccumulator[Any], optimizer: Any) -> Any:
    """Return an optimizer's parameters by the names it was given, or its only one for an accumulator."""
    param_groups = optimizer.param_groups
    if not isinstance(group, AccumulatorGroup):
        found = [parameter for one in param_groups for parameter in one["params"]]
        if len(found) == 1:
            return found[0]
        raise InvalidArgumentError(
            f"update: expected an optimizer of one parameter for an accumulator, got one of {len(found)}; use an "
            "AccumulatorGroup, or say which by params="
        )
    if not all("param_names" in one for one in param_groups):
        raise InvalidArgumentError(
            "update: expected an optimizer that knows the names of its parameters, as one made with "
            "model.named_parameters() does; or give params= as a mapping of members to parameters"
        )
    return {
        name: parameter
        for one in param_groups
        for name, parameter in zip(one["param_names"], one["params"], strict=True)
    }


class _OptaxUpdate(AbstractUpdate):
    """Dense gradients through the transformation, then its updates onto the parameters.

    NumPy arrays are changed in place, where workers read them; others are replaced, all at once.
    """

    def __init__(self, group: AbstractAccumulator[Any], transformation: Any, params: Any) -> None:
        if params is None:
            raise InvalidArgumentError("params: expected the parameters that the optax transformation is to change")
        self._group = group
        self._transformation = transformation
        self._params = _members_of(group, params)
        self.params = _as_given(group, self._params)
        self._state = transformation.init(self._snapshot())

    def __call__(self, gradient: Any, step: int) -> None:
        dense = {name: _dense(_member(gradient, name), old) for name, old in self._params.items()}
        updates, self._state = self._transformation.update(_as_given(self._group, dense), self._state, self._snapshot())
        changed = {}
        for name, old in self._params.items():
            change = updates[name] if isinstance(self._group, AccumulatorGroup) else updates
            if isinstance(old, np.ndarray):
                old += np.asarray(change).astype(old.dtype, copy=False)
                changed[name] = old
            else:
                changed[name] = (old + change).astype(old.dtype)
        self._params = changed
        self.params = _as_given(self._group, changed)

    def _snapshot(self) -> Any:
        """Return the parameters as they stay: JAX may read a NumPy array in place, and later than we write to it."""
        copies = {name: np.array(old) if isinstance(old, np.ndarray) else old for name, old in self._params.items()}
        return _as_given(self._group, copies)


def _dense(member: Any, parameter: Any) -> NDArray[Any]:
    if not isinstance(member, SparseGradient):
        return np.asarray(member)
    _check_rows(member, parameter)
    dense = np.zeros(parameter.shape, member.values.dtype)
    dense[member.indices] = member.values
    return dense


def _check_rows(member: SparseGradient, parameter: Any) -> None:
    """Refuse ids beyond the parameter, which an accumulator made without its number of rows lets through."""
    if len(member.indices) and member.indices[-1] >= parameter.shape[0]:
        raise InvalidArgumentError(
            f"update: expected ids below {parameter.shape[0]}, the rows of the parameter, got {member.indices[-1]}; "
            "declare the shape of the table, so that the apply is refused"
        )


def _member(gradient: Any, name: str) -> Any:
    return gradient[name] if isinstance(gradient, GroupGradient) else gradient


def _as_given(group: AbstractAccumulator[Any], params: dict[str, Any]) -> Any:
    """Return parameters in the form in which a user has them: by member for a group, else the only one."""
    return dict(params) if isinstance(group, AccumulatorGroup) else params[_ONLY]


def _members_of(group: AbstractAccumulator[Any], params: Any) -> dict[str, Any]:
    """Return the parameter of each member, and refuse what its gradients would not fit."""
    if not isinstance(group, AccumulatorGroup):
        params = {_ONLY: params}
    elif not isinstance(params, Mapping):
        raise InvalidArgumentError(f"params: expected a mapping of members to parameters, got {type(params).__name__}")
    found = {}
    for name, spec in group._spec.members.items():
        if name not in params:
            raise InvalidArgumentError(
                f"params: expected a parameter named {name!r}, a member of the group; got {sorted(map(str, params))}"
            )
        _check_fits(f"params[{name!r}]" if name else "params", spec, params[name])
        found[name] = params[name]
    return found


def _check_fits(what: str, spec: SparseSpec | DenseSpec, parameter: Any) -> None:
    shape, dtype = getattr(parameter, "shape", None), getattr(parameter, "dtype", None)
    if shape is None or dtype is None:
        raise InvalidArgumentError(f"{what}: expected an array or a tensor, got {type(parameter).__name__}")
    sizes = tuple(shape)
    known = spec.shape or (None,) * len(sizes)
    fits = len(known) == len(sizes) and all(a is None or a == b for a, b in zip(known, sizes, strict=False))
    if not fits or as_dtype(dtype) != spec.dtype:
        raise InvalidArgumentError(
            f"{what}: expected what fits {spec.describe()}, got shape {sizes} of {as_dtype(dtype).name}"
        )
