"""How gradients, offers and their answers travel: as flat tuples and buffers, pickled in one go.

Ray would pickle each of their records by itself, through Python, which costs more than to judge a gradient.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from gradquorum.marks import Marks
from gradquorum.receipts import ApplyReceipt, ApplyStatus
from gradquorum.targets.interface import Terms
from gradquorum.targets.ray.records import Failure, Judged, Key, Offer, OfferedContent, OfferedPart, Rows

__all__ = ["pack_judged", "pack_offers", "pack_rows", "unpack_judged", "unpack_offers", "unpack_rows"]

_STATUSES = tuple(ApplyStatus)
_CODES = {status: code for code, status in enumerate(_STATUSES)}


def pack_offers(offers: Sequence[Offer]) -> bytes:
    """Return offers of one session as bytes."""
    return pickle.dumps(
        [
            (
                offer.key[1],
                offer.shards,
                _plain(offer.terms),
                [
                    (part.content.shards, part.content.num_bytes, part.content.finite, part.late_error, part.row_shape)
                    for part in offer.parts
                ],
            )
            for offer in offers
        ],
        pickle.HIGHEST_PROTOCOL,
    )


def _plain(terms: Terms) -> tuple[Any, ...]:
    return terms.local_step, terms.worker, terms.sequence, terms.weight, terms.lend, terms.timeout


def unpack_offers(session: bytes, data: bytes) -> list[Offer]:
    """Return the offers that a session has packed."""
    offers = []
    for number, shards, terms, told in pickle.loads(data):
        key, terms = (session, number), Terms(*terms)
        offered: tuple[tuple[int | str, int], ...] = ()
        if terms.worker is not None and terms.sequence is not None:
            offered = ((terms.worker, terms.sequence),)
        parts = []
        for where, num_bytes, finite, late_error, row_shape in told:
            content = OfferedContent(key, where, num_bytes, finite, row_shape, offered)
            parts.append(OfferedPart(content, False, late_error, row_shape))
        offers.append(Offer(key, shards, tuple(parts), terms))
    return offers


def pack_judged(answers: Sequence[Judged | Failure]) -> bytes:
    """Return what became of offers as bytes."""
    packed: list[tuple[Any, ...]] = []
    for answer in answers:
        if isinstance(answer, Failure):
            packed.append((answer.error,))
            continue
        receipt, serial, settled, marks = answer
        first = None if receipt.first_status is None else _CODES[receipt.first_status]
        judged = _CODES[receipt.status], receipt.step, receipt.lag, receipt.num_accumulated, first
        packed.append((*judged, serial, settled, None if marks is None else tuple(marks)))
    return pickle.dumps(packed, pickle.HIGHEST_PROTOCOL)


def unpack_judged(data: bytes) -> list[Judged | Failure]:
    """Return the answers that a coordinator has packed."""
    answers: list[Judged | Failure] = []
    for packed in pickle.loads(data):
        if len(packed) == 1:
            answers.append(Failure(packed[0]))
            continue
        code, step, lag, num_accumulated, first, serial, settled, marks = packed
        first_status = None if first is None else _STATUSES[first]
        receipt = ApplyReceipt(_STATUSES[code], step, lag, num_accumulated, first_status)
        answers.append(Judged(receipt, serial, settled, None if marks is None else Marks(*marks)))
    return answers


def pack_rows(items: Sequence[tuple[Key, dict[int, Rows]]]) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return rows as bytes and, apart from them and not copied, the buffers of their arrays."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(items, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append), buffers


def unpack_rows(data: bytes, buffers: Sequence[Any]) -> list[tuple[Key, dict[int, Rows]]]:
    """Return the rows that were packed: their arrays lie in the buffers."""
    items: list[tuple[Key, dict[int, Rows]]] = pickle.loads(data, buffers=buffers)
    return items
