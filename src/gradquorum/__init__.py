"""Gather sparse gradients from many workers.

Workers offer gradients as (indices, values), stale ones are dropped, a taker blocks until enough have come
and gets their mean. Start with `SparseConditionalAccumulator`.
"""

from typing import TYPE_CHECKING, Any

from gradquorum._version import __version__
from gradquorum.accumulators import (
    ConditionalAccumulator,
    ConditionalAccumulatorBase,
    SparseConditionalAccumulator,
)
from gradquorum.engine import engine_name
from gradquorum.errors import (
    CancelledError,
    ClosedError,
    DeadlineExceededError,
    GradQuorumError,
    InvalidArgumentError,
    InvalidDTypeError,
    ResourceExhaustedError,
    StaleGradientWarning,
    UnavailableError,
)
from gradquorum.groups import AccumulatorGroup, GroupGradient
from gradquorum.indexed_slices import IndexedSlices, SparseGradient
from gradquorum.processes import attach, connect
from gradquorum.receipts import ApplyReceipt, ApplyStatus
from gradquorum.specs import DenseSpec, SparseSpec
from gradquorum.staleness import Defer, Weighted, Window
from gradquorum.training import SyncReplicas

_ADAPTERS = ("jax", "tensorflow", "torch")

if TYPE_CHECKING:
    from gradquorum.server import Server
    from gradquorum.tables import shared_table

__all__ = [
    "AccumulatorGroup",
    "ApplyReceipt",
    "ApplyStatus",
    "CancelledError",
    "ClosedError",
    "ConditionalAccumulator",
    "ConditionalAccumulatorBase",
    "DeadlineExceededError",
    "Defer",
    "DenseSpec",
    "GradQuorumError",
    "GroupGradient",
    "IndexedSlices",
    "InvalidArgumentError",
    "InvalidDTypeError",
    "ResourceExhaustedError",
    "Server",
    "SparseConditionalAccumulator",
    "SparseGradient",
    "SparseSpec",
    "StaleGradientWarning",
    "SyncReplicas",
    "UnavailableError",
    "Weighted",
    "Window",
    "__version__",
    "attach",
    "connect",
    "engine_name",
    "shared_table",
]


def __dir__() -> list[str]:
    """List the public names, also those that are loaded when they are first named."""
    return sorted({*__all__, *_ADAPTERS})


def __getattr__(name: str) -> Any:
    """Load what only some programs need when it is first named."""
    if name == "Server":
        from gradquorum.server import Server

        return Server
    if name == "shared_table":
        from gradquorum.tables import shared_table

        return shared_table
    if name in _ADAPTERS:
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
