"""Tells a forgotten `zero_grad` from one that has zeroed in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["HandedOut"]


class HandedOut:
    """The merged gradients that have been put into `.grad`, until the next micro-batch.

    A backward pass adds to a `.grad` in place: afterwards nobody can tell what was in it before. So each parameter has
    a hook meanwhile, which looks right before that.
    """

    def __init__(self) -> None:
        self._gradients: dict[int, weakref.ref[Any]] = {}
        self._zeroed: set[int] = set()
        """Those that were 0 when a backward pass added to them."""
        self._hooks: list[Any] = []

    def add(self, i: int, parameter: Any, grad: Any) -> None:
        """Note the merged gradient of a parameter. Only a weak reference is kept."""
        reference = self._gradients[i] = weakref.ref(grad)
        if parameter.requires_grad:
            self._hooks.append(parameter.register_hook(_looking(i, reference, self._zeroed)))

    def still_in(self, i: int, grad: Any) -> bool:
        """Tell whether a parameter's `.grad` is the merged one, or that one added to, and was not zeroed."""
        reference = self._gradients.get(i)
        return reference is not None and reference() is grad and i not in self._zeroed and not _is_zero(grad)

    def is_zeroed(self, i: int, grad: Any) -> bool:
        """Tell whether a parameter's `.grad` is the merged one, zeroed, and nothing was added to it."""
        reference = self._gradients.get(i)
        return reference is not None and reference() is grad and _is_zero(grad)

    def clear(self) -> None:
        """Forget them."""
        for hook in self._hooks:
            hook.remove()
        self.__init__()  # type: ignore[misc]


def _looking(i: int, reference: weakref.ref[Any], zeroed: set[int]) -> Callable[[Any], None]:
    def look(_: Any) -> None:
        grad = reference()
        if grad is not None and _is_zero(grad):
            zeroed.add(i)

    return look


def _is_zero(grad: Any) -> bool:
    return not bool((grad._values() if grad.is_sparse else grad).any())
