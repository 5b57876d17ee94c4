"""Receipts as messages, and back."""

from __future__ import annotations

from gradquorum.receipts import ApplyReceipt, ApplyStatus
from gradquorum.targets.process.messages import Judged

__all__ = ["to_judged", "to_receipt"]

_STATUSES = tuple(ApplyStatus)


def to_judged(receipt: ApplyReceipt, freed: tuple[int, ...], reclaimed: tuple[int, ...]) -> Judged:
    """Return a receipt as it travels, with what the client is to know of its blocks."""
    first = None if receipt.first_status is None else _STATUSES.index(receipt.first_status)
    status = _STATUSES.index(receipt.status)
    return Judged(status, receipt.step, receipt.lag, receipt.num_accumulated, first, freed, reclaimed)


def to_receipt(judged: Judged) -> ApplyReceipt:
    """Return a receipt that has travelled."""
    first = None if judged.first_status is None else _STATUSES[judged.first_status]
    return ApplyReceipt(_STATUSES[judged.status], judged.step, judged.lag, judged.num_accumulated, first_status=first)
