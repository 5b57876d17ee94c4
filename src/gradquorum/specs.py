"""What an accumulator or a group is made of: its members and its options, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np

from gradquorum.arrays import as_dims, as_integer
from gradquorum.dtypes import accumulate_dtype_of, as_dtype, real_dtype
from gradquorum.engine import ReducerSpec, get_engine
from gradquorum.errors import InvalidArgumentError, InvalidDTypeError
from gradquorum.staleness import AbstractStaleness, Staleness, as_policy

__all__ = ["DenseSpec", "Options", "RoundSpec", "SparseSpec"]

REDUCTIONS = ("MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT")
MAX_BYTES = 2**63 - 1
MAX_DIMS = 32
"""A NumPy array has no more in every release that we support."""


class _MemberSpec:
    """What sparse and dense members share. Immutable; equal if all it says is."""

    __slots__ = ("dtype", "reduction_type", "shape")

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    reduction_type: str

    def __init__(self, dtype: Any, shape: Any = None, reduction_type: str = "MEAN") -> None:
        found = as_dtype(dtype)
        if not isinstance(reduction_type, str) or reduction_type not in REDUCTIONS:
            raise InvalidArgumentError(f"reduction_type: expected one of {REDUCTIONS}, got {reduction_type!r}")
        if found.kind == "i" and reduction_type != "SUM":
            raise InvalidDTypeError(
                f"reduction_type: expected 'SUM' for {found.name}, got {reduction_type!r}: a mean is no integer"
            )
        sizes = () if shape is None else as_dims("shape", shape, unknown=(None,))
        self._check_size(sizes, found)
        object.__setattr__(self, "dtype", found)
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "reduction_type", reduction_type)

    def _check_size(self, sizes: tuple[int | None, ...], dtype: np.dtype[Any]) -> None:
        if len(sizes) > MAX_DIMS:
            raise InvalidArgumentError(f"shape: expected at most {MAX_DIMS} dims, got {len(sizes)}")
        known = [size for size in sizes[self._first_dim_of_values :] if size]  # NumPy, too, leaves zeros out
        if math.prod(known) * dtype.itemsize > MAX_BYTES:
            raise InvalidArgumentError(f"shape: expected rows of less than 2**63 bytes, got {sizes}")

    _first_dim_of_values = 0

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name}: a {type(self).__name__} does not change; make another one")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.dtype, self.shape, self.reduction_type)

    def __eq__(self, other: object) -> bool:
        return self.__reduce__() == other.__reduce__() if isinstance(other, _MemberSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.__reduce__())

    def describe(self) -> str:
        """Return the spec in words, for messages."""
        return f"{type(self).__name__}({self.dtype.name}, shape={self.shape or None}, {self.reduction_type})"


class SparseSpec(_MemberSpec):
    """What a sparse member takes.

    Args:
        dtype: of the gradients; anything NumPy or a loaded framework calls a dtype.
        shape: `[rows, *row]`; sizes may be None. None, `()` and `[]` mean no constraint.
        reduction_type: ``"MEAN"`` (each row divided by the number of gradients that touched it), ``"SUM"``,
            ``"MEAN_BY_COUNT"`` (by the gradients in the round) or ``"MEAN_BY_WEIGHT"`` (by their weights).

    Raises:
        InvalidArgumentError: one of them is not of that form.
        InvalidDTypeError: the dtype is not supported, or not with this reduction.

    Example:
        >>> import gradquorum as gq
        >>> gq.SparseSpec("float32", (None, 64))
        SparseSpec(float32, shape=(None, 64), MEAN)
    """

    __slots__ = ()

    _first_dim_of_values = 1

    def __repr__(self) -> str:
        return self.describe()


class DenseSpec(_MemberSpec):
    """What a dense member takes: as `SparseSpec`, with the shape of the whole array.

    Example:
        >>> import gradquorum as gq
        >>> gq.DenseSpec("float64", (3,), "SUM")
        DenseSpec(float64, shape=(3,), SUM)
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return self.describe()


class _Options(NamedTuple):
    order: str = "arrival"
    compact: bool = True
    accumulate_dtype: Any = None
    on_nonfinite: str = "keep"
    expected_workers: int | None = None
    max_per_worker: int | None = None
    max_bytes: int | None = None
    on_full: str = "raise"
    staleness: Staleness = "strict"
    num_threads: int | None = None
    engine: str | None = None


class Options(_Options):
    """The options that all accumulators and groups share, checked."""

    __slots__ = ()

    def __new__(cls, **options: Any) -> Self:
        """Check options given by name; those that are not have their defaults."""
        self = super().__new__(cls, **options)
        return self._replace(**self._checked())

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self._asdict()

    def _checked(self) -> dict[str, Any]:
        """Return the options that are to be written in another way."""
        changed: dict[str, Any] = {}
        allowed = {
            "order": ("arrival", "worker"),
            "compact": (True, False),
            "on_nonfinite": ("keep", "skip", "raise"),
            "on_full": ("raise", "block"),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if not any(value is one or (isinstance(value, str) and value == one) for one in values):
                raise InvalidArgumentError(f"{name}: expected one of {values}, got {value!r}")
        for name in ("expected_workers", "max_per_worker", "max_bytes", "num_threads"):
            value = getattr(self, name)
            if value is None:
                continue
            number = as_integer(name, value)
            if number < 1:
                raise InvalidArgumentError(f"{name}: expected 1 or more, or None; got {number}")
            changed[name] = number
        as_policy(self.staleness)  # refuses what is none
        if self.accumulate_dtype is not None:
            changed["accumulate_dtype"] = as_dtype(self.accumulate_dtype)
        if self.engine is not None:
            get_engine(self.engine)  # refuses one that is not here
        return changed

    @property
    def compacts(self) -> bool:
        """Whether gradients of the open round may be merged before a take."""
        return self.compact and self.order != "worker"

    def describe(self, *, changed_only: bool) -> list[str]:
        """Return the options that change results, in words. The engine and its threads change only the speed."""
        default = Options()
        return [
            f"{name}={_describe(getattr(self, name))}"
            for name in Options._fields
            if name not in ("engine", "num_threads")
            and not (changed_only and getattr(self, name) == getattr(default, name))
        ]


class _RoundSpec(NamedTuple):
    kind: str
    members: Mapping[str, SparseSpec | DenseSpec]
    options: Options


class RoundSpec(_RoundSpec):
    """All that fixes what a round does with what it is offered.

    Attributes:
        kind: the class of the accumulator or group, for comparing and for messages.
        members: by name.
        options: of the whole round.
    """

    __slots__ = ()

    def __new__(cls, kind: str, members: Mapping[str, SparseSpec | DenseSpec], options: Options) -> Self:
        """Refuse options that do not fit a member."""
        self = super().__new__(cls, kind, members, options)
        self.reducer_specs()
        for name, member in members.items():
            if self.policy.weighs and member.dtype.kind == "i":
                where = f"{name}: " if name else ""
                raise InvalidArgumentError(
                    f"{where}staleness: expected 'strict', Window(k) or Defer() for {member.dtype.name}, got "
                    f"{self.policy!r}: integers cannot be weighted"
                )
        return self

    @property
    def policy(self) -> AbstractStaleness:
        """What becomes of late gradients."""
        return as_policy(self.options.staleness)

    def reducer_specs(self) -> list[ReducerSpec]:
        """Return what the engine needs to know, for each member."""
        return [
            ReducerSpec(
                spec.dtype,
                accumulate_dtype_of(spec.dtype, self.options.accumulate_dtype),
                spec.reduction_type,
                self.options.num_threads,
            )
            for spec in self.members.values()
        ]

    def weight_dtypes(self) -> list[np.dtype[Any] | None]:
        """Return for each member the dtype to which a weight is rounded, None where weights do not count."""
        return [
            real_dtype(spec.accumulate_dtype) if spec.reduction_type == "MEAN_BY_WEIGHT" else None
            for spec in self.reducer_specs()
        ]

    def describe(self) -> str:
        """Return all that changes results, in words."""
        return self._words(self.options.describe(changed_only=False))

    def summary(self) -> str:
        """Return what is not the default, in words."""
        return self._words(self.options.describe(changed_only=True))

    def _words(self, options: list[str]) -> str:
        members = [f"{name}: {spec.describe()}" if name else spec.describe() for name, spec in self.members.items()]
        return f"{self.kind}({', '.join([*members, *options])})"


def _describe(option: object) -> str:
    """Return an option in words; a dtype under the one name that all its spellings share."""
    return option.name if isinstance(option, np.dtype) else repr(option)
