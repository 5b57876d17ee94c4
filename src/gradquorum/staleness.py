"""What becomes of a late gradient, one computed on parameters of a step before the round's: the policies.

With ``lag = global_step - local_step``, where `local_step` is the step of the gradient:

=====================  =====================================================================================
``"strict"``           lag 0 counts; all others are dropped (`STALE`). TensorFlow's rule.
`Window` ``(k)``       lag up to k counts in full; beyond that it is dropped.
`Weighted` ``(w)``     counts `w(lag)` times, in the sum and in the denominator of a mean.
`Defer` ``()``         is kept and counts in full in the next round (`DEFERRED`).
=====================  =====================================================================================

``docs/staleness.md`` has the formulas with their denominators.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gradquorum.arrays import as_integer
from gradquorum.errors import InvalidArgumentError

__all__ = [
    "STRICT",
    "AbstractStaleness",
    "Defer",
    "Staleness",
    "Weighted",
    "Window",
    "as_policy",
    "from_words",
    "to_words",
]


class AbstractStaleness:
    """A policy for late gradients. Immutable; equal if all it says is.

    Attributes:
        max_lag: late gradients of at most this lag count in the round; infinite without bound.
        weighs: whether a late gradient is weighted by its lag.
        defers: whether a gradient beyond `max_lag` waits for the next round instead of being dropped.
    """

    __slots__ = ("_words", "max_lag")

    weighs = False
    defers = False
    max_lag: float
    _words: tuple[Any, ...]

    def weight(self, lag: int) -> float:
        """Return how much a gradient of that lag counts: in full, unless the policy weighs."""
        return 1.0

    def _set(self, words: tuple[Any, ...], **attributes: Any) -> None:
        object.__setattr__(self, "_words", words)
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name}: a {type(self).__name__} does not change; make another one")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._words == other._words

    def __hash__(self) -> int:
        return hash((type(self), self._words))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._words

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._words))})"


class _Strict(AbstractStaleness):
    __slots__ = ()

    def __init__(self) -> None:
        self._set((), max_lag=0)


STRICT = _Strict()
"""What ``staleness="strict"`` says."""


class Window(AbstractStaleness):
    """Accept gradients of up to `max_lag` steps ago as they are; drop older ones.

    Args:
        max_lag: 0 or more; 0 is ``"strict"``.

    Raises:
        InvalidArgumentError: it is no such number.

    Example:
        >>> import gradquorum as gq
        >>> acc = gq.SparseConditionalAccumulator("float32", staleness=gq.Window(1))
        >>> acc.set_global_step(5)
        >>> acc.apply_grad([0], [[1.0]], local_step=4)
        ApplyReceipt(ACCEPTED, step=5, num_accumulated=1, lag=1)
        >>> acc.apply_grad([0], [[1.0]], local_step=3)
        ApplyReceipt(STALE, step=5, num_accumulated=1, lag=2)

    Source:
        The bound is that of stale synchronous parallel training (Ho et al., "More Effective Distributed ML via a
        Stale Synchronous Parallel Parameter Server", NIPS 2013). There the fast worker waits until nobody is more
        than k clocks behind; here nobody waits, and what is further behind is dropped.
    """

    __slots__ = ()

    def __init__(self, max_lag: int) -> None:
        number = _as_lag(max_lag)
        self._set((number,), max_lag=number)


class Weighted(AbstractStaleness):
    """Count a late gradient by a weight of its lag, w(lag) in (0, 1]; one in time has weight 1.

    The weight is in the denominator of a mean as well, so that the rows of the result remain averages: under
    ``"MEAN"`` row i is ``sum(w * g[i]) / sum(w)`` over the gradients that touched it, under ``"MEAN_BY_COUNT"`` the
    denominator is the sum of w over all gradients of the round, under ``"MEAN_BY_WEIGHT"`` each gradient's own weight
    is multiplied by w first, and under ``"SUM"`` there is no denominator. As long as nobody is late, the bits are
    those of ``"strict"``. Integers cannot be weighted.

    Args:
        weight: ``"inverse"``: 1 / (1 + lag); ``"exponential"``: ``decay ** lag``; or a function of the lag, an int from
            1 to `max_lag`, that returns a number above 0 and at most 1. It is called in the thread that applies,
            outside all locks. Two functions count as the same policy if module and qualified name are the same.
        decay: of ``"exponential"``, between 0 and 1.
        max_lag: what is later than this is dropped; None for no bound. A gradient whose weight, times its own, rounds
            to 0 in the accumulate dtype is dropped as well.

    Raises:
        InvalidArgumentError: an argument cannot be. An apply raises it when the function returns no such number;
            then nothing has changed.

    Example:
        >>> import gradquorum as gq
        >>> acc = gq.SparseConditionalAccumulator("float32", staleness=gq.Weighted("inverse"))
        >>> acc.set_global_step(1)
        >>> _ = acc.apply_grad([0], [[4.0]], local_step=1)
        >>> _ = acc.apply_grad([0], [[1.0]], local_step=0)  # weight 1/2
        >>> acc.take_grad(2).values  # (4 + 0.5) / 1.5
        array([[3.]], dtype=float32)

    Source:
        Dividing by the staleness: Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD for Distributed Deep
        Learning", IJCAI 2016, which divides the learning rate by it; 1 / (1 + lag) is the polynomial weight with
        exponent 1 of Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", 2019. Both scale the *step*; here
        the weight is relative to the other gradients of the round: under a mean, a row that only late gradients
        touched is their average.
    """

    __slots__ = ("_function",)

    weighs = True
    _function: Callable[[int], float]

    def __init__(
        self,
        weight: str | Callable[[int], float] = "inverse",
        *,
        decay: float = 0.5,
        max_lag: int | None = None,
    ) -> None:
        if isinstance(decay, bool) or not isinstance(decay, numbers.Real) or not 0 < decay < 1:
            raise InvalidArgumentError(f"decay: expected a number between 0 and 1, got {decay!r}")
        base = float(decay)
        if isinstance(weight, str):
            weight = str(weight)  # NumPy's print otherwise
        if weight == "inverse":
            function: Callable[[int], float] = _inverse
        elif weight == "exponential":
            function = base.__pow__
        elif callable(weight):
            function = weight
        else:
            raise InvalidArgumentError(f"weight: expected 'inverse', 'exponential' or a function, got {weight!r}")
        number = None if max_lag is None else _as_lag(max_lag)
        self._set((weight, base, number), max_lag=math.inf if number is None else number, _function=function)

    def weight(self, lag: int) -> float:
        """Return the weight of a gradient of that lag.

        Raises:
            InvalidArgumentError: the function returned something else than a number above 0 and at most 1.
        """
        if lag == 0:
            return 1.0
        weight = self._function(lag)
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not 0 <= weight <= 1:
            raise InvalidArgumentError(
                f"staleness: expected a weight above 0 and at most 1 for lag {lag}, got {weight!r}"
            )
        if weight == 0 and self._function is self._words[0]:
            raise InvalidArgumentError(f"staleness: expected a weight above 0 for lag {lag}, got {weight!r}")
        return float(weight)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __reduce__(self) -> tuple[object, ...]:
        return _weighted, self._words

    def __repr__(self) -> str:
        weight, decay, max_lag = self._words
        parts = [repr(weight) if isinstance(weight, str) else _name_of(weight)]
        if isinstance(weight, str) and weight == "exponential":
            parts.append(f"decay={decay}")
        if max_lag is not None:
            parts.append(f"max_lag={max_lag}")
        return f"Weighted({', '.join(parts)})"


class Defer(AbstractStaleness):
    """Keep a late gradient for the next round, in which it counts in full.

    It joins the next round at the moment the open one is detached (`take_grad`), in order of arrival, and its receipt
    says `DEFERRED`. It counts towards `max_per_worker` of the round that it joins. `num_deferred` says how many wait;
    `discard` and `close` report them with the others.

    Example:
        >>> import gradquorum as gq
        >>> acc = gq.SparseConditionalAccumulator("float32", staleness=gq.Defer())
        >>> acc.set_global_step(1)
        >>> acc.apply_grad([0], [[1.0]], local_step=0)
        ApplyReceipt(DEFERRED, step=1, num_accumulated=0, lag=1)
        >>> _ = acc.apply_grad([0], [[5.0]], local_step=1)
        >>> acc.take_grad(1).values, acc.take_grad(1).values
        (array([[5.]], dtype=float32), array([[1.]], dtype=float32))

    Source:
        Applying every gradient, some of them with a delay, is delayed stochastic gradient descent (Langford, Smola
        and Zinkevich, "Slow Learners are Fast", NIPS 2009).
    """

    __slots__ = ()

    defers = True

    def __init__(self) -> None:
        self._set((), max_lag=0)


Staleness = str | AbstractStaleness
"""What the option `staleness` takes."""


def as_policy(staleness: Any) -> AbstractStaleness:
    """Return the policy that an option names.

    Raises:
        InvalidArgumentError: there is no such policy.
    """
    if isinstance(staleness, AbstractStaleness):
        return staleness
    if isinstance(staleness, str) and staleness == "strict":
        return STRICT
    raise InvalidArgumentError(f"staleness: expected 'strict', Window(k), Weighted(...) or Defer(), got {staleness!r}")


def to_words(staleness: Staleness) -> tuple[str | float | None, ...]:
    """Return a policy as plain values that can be sent to another process.

    Raises:
        InvalidArgumentError: it weighs by a function of the user's, which does not travel.
    """
    policy = as_policy(staleness)
    if any(callable(word) for word in policy._words):
        raise InvalidArgumentError(
            f"staleness: expected a policy that can be sent to another process, got {policy!r}; "
            "use 'inverse' or 'exponential', or a local accumulator"
        )
    return type(policy).__name__, *policy._words


def from_words(words: Sequence[Any]) -> Staleness:
    """Return the policy of which `to_words` returned these.

    Raises:
        InvalidArgumentError: there is no such policy.
    """
    kinds = {"_Strict": _strict, "Window": Window, "Weighted": _weighted, "Defer": Defer}
    try:
        policy: Staleness = kinds[words[0]](*words[1:])  # type: ignore[operator]
        return policy
    except (KeyError, IndexError, TypeError) as error:
        raise InvalidArgumentError(f"staleness: expected the words of a policy, got {words!r}") from error


def _strict() -> str:
    return "strict"


def _as_lag(max_lag: Any) -> int:
    number = as_integer("max_lag", max_lag)
    if number < 0:
        raise InvalidArgumentError(f"max_lag: expected 0 or more, got {number}")
    return number


def _inverse(lag: int) -> float:
    return 1.0 / (1 + lag)


def _weighted(weight: Any, decay: float, max_lag: int | None) -> Weighted:
    return Weighted(weight, decay=decay, max_lag=max_lag)


def _name_of(function: Any) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}.{name}" if name else repr(function)
