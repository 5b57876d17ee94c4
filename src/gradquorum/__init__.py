"""Gather sparse gradients from many workers.

Workers offer gradients as (indices, values), stale ones are dropped, a taker blocks until enough have come
and gets their mean. Start with `SparseConditionalAccumulator`.
"""

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
from gradquorum.receipts import ApplyReceipt, ApplyStatus
from gradquorum.specs import DenseSpec, SparseSpec
from gradquorum.staleness import Defer, Weighted, Window
from gradquorum.training import SyncReplicas

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
    "SparseConditionalAccumulator",
    "SparseGradient",
    "SparseSpec",
    "StaleGradientWarning",
    "SyncReplicas",
    "UnavailableError",
    "Weighted",
    "Window",
    "__version__",
    "engine_name",
]
