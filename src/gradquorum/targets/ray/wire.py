"""How gradients, offers and their answers travel: as flat tuples and buffers, pickled in one go.

Ray would pickle each of their records by itself, through Python, which costs more than to judge a gradient.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.engine.splitting import values_at
from gradquorum.marks import Marks
from gradquorum.receipts import ApplyReceipt, ApplyStatus
from gradquorum.targets.interface import Terms
from gradquorum.targets.ray.records import (
    Entry,
    Failure,
    Judged,
    Key,
    Offer,
    OfferedContent,
    OfferedPart,
    Part,
    Plan,
    Rows,
)

__all__ = [
    "pack_judged",
    "pack_offers",
    "pack_plans",
    "pack_rows",
    "unpack_judged",
    "unpack_offers",
    "unpack_plans",
    "unpack_rows",
]

_INT64 = np.dtype(np.int64)
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


def pack_plans(plans: Sequence[Plan]) -> bytes:
    """Return plans as bytes."""
    told = [(member, [tuple(entry) for entry in entries], *rest) for member, entries, *rest in plans]
    return pickle.dumps(told, pickle.HIGHEST_PROTOCOL)


def unpack_plans(data: bytes) -> list[Plan]:
    """Return the plans that were packed."""
    return [Plan(member, tuple([Entry(*one) for one in told]), *rest) for member, told, *rest in pickle.loads(data)]


def pack_rows(items: Sequence[tuple[Key, Mapping[int, Part]]]) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return rows of one session as bytes and, apart from them and not copied, the buffers that they lie in."""
    told, buffers = [], []
    for (_, number), parts in items:
        of_gradient = [(member, part.num_rows, part.shape, len(part.buffers)) for member, part in parts.items()]
        told.append((number, of_gradient))
        buffers += [pickle.PickleBuffer(buffer) for part in parts.values() for buffer in part.buffers]
    return pickle.dumps(told, pickle.HIGHEST_PROTOCOL), buffers


def unpack_rows(
    session: bytes, data: bytes, buffers: Sequence[Any], dtypes: Sequence[np.dtype[Any]]
) -> dict[Key, dict[int, Rows]]:
    """Return the rows that a session has packed, by key and member: their arrays lie in the buffers.

    `dtypes` are those of the members.
    """
    unpacked, rest = {}, iter(buffers)
    for number, of_gradient in pickle.loads(data):
        unpacked[session, number] = {
            member: _rows(num_rows, shape, [next(rest) for _ in range(num_buffers)], dtypes[member])
            for member, num_rows, shape, num_buffers in of_gradient
        }
    return unpacked


def _rows(num_rows: int | None, shape: tuple[int, ...], buffers: Sequence[Any], dtype: np.dtype[Any]) -> Rows:
    if num_rows is None:
        return Rows(None, _array(shape, dtype, *buffers))
    indices = _array((num_rows,), _INT64, buffers[0])
    begin = values_at(num_rows) if len(buffers) == 1 else 0
    return Rows(indices, _array((num_rows, *shape), dtype, buffers[-1], begin))


def _array(shape: tuple[int, ...], dtype: np.dtype[Any], buffer: Any = None, begin: int = 0) -> NDArray[Any]:
    """Return an array that lies in a buffer, from so many bytes on; one of no elements lies nowhere."""
    return np.empty(shape, dtype) if 0 in shape else np.ndarray(shape, dtype, buffer, begin)
