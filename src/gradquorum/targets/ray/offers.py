"""How gradients are judged whose rows the shards hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gradquorum.errors import GradQuorumError
from gradquorum.targets.ray.incarnations import Incarnations
from gradquorum.targets.ray.leases import Leases
from gradquorum.targets.ray.records import Failure, Judged, Offer, Void
from gradquorum.targets.ray.sessions import Session
from gradquorum.targets.ray.wire import pack_judged, unpack_offers
from gradquorum.waiters import Handle

__all__ = ["Offers"]

_NOTICE_SECONDS = 2.0
"""How long after a call to a shard has failed we may hear that it has died."""


class Offers:
    """Judges what is offered. Nothing here changes after `__init__`. Only the coordinator's event loop calls this."""

    def __init__(self, life: Incarnations, leases: Leases, *, may_wait: bool) -> None:
        """Note who knows of the round and of its workers, and whether an offer may have to wait for room."""
        self._life = life
        self._leases = leases
        self._may_wait = may_wait

    async def judge(
        self, by: tuple[Session, Handle] | None, token: bytes, offers: bytes, held: Sequence[Any]
    ) -> bytes | Void:
        """Judge gradients, packed, of a handle.

        Args:
            by: whose they are; None if they were offered to an incarnation that is over.
            token: of the session.
            offers: as `pack_offers` has packed them.
            held: what the shards have answered that were sent the rows.

        Returns:
            What `unpack_judged` unpacks.

        Raises:
            GradQuorumError: a shard could not hold them, or the round could not be saved.
        """
        life, incarnation = self._life, self._life.incarnation
        for answer in held:
            if type(answer) is Void:
                if by is not None:
                    life.end(answer.reason)  # we should have heard of that before: the rows are nowhere
                return life.void()
            if type(answer) is Failure:
                raise answer.error
        if by is None:
            return life.void()
        answers: list[Judged | Failure] = []
        for offer in unpack_offers(token, offers):
            answer = await self._judge(*by, offer)
            if isinstance(answer, Void):
                return answer
            answers.append(answer)
        if not await self._saved(incarnation):
            return life.void()
        return pack_judged(answers)

    async def _saved(self, incarnation: int) -> bool:
        """Save what has changed, if the round is kept; False if the incarnation has ended meanwhile."""
        try:
            await self._life.save()
        except GradQuorumError:
            if incarnation == self._life.incarnation:
                await asyncio.sleep(_NOTICE_SECONDS)  # if a shard has died, we are about to hear of it
            if incarnation == self._life.incarnation:
                raise
        return incarnation == self._life.incarnation

    async def _judge(self, session: Session, handle: Handle, offer: Offer) -> Judged | Failure | Void:
        life, host, terms = self._life, self._life.host, offer.terms
        parts: Any = offer.parts  # to the host gradients like any others, to be put in order by our reducers
        lease = life.shards.offered(offer.key, offer.shards)
        serial = host.round.serial
        try:
            if terms.worker is not None:
                self._leases.join(session, terms.worker)
            if self._may_wait:
                receipt = await life.in_thread(host.apply, handle, parts, terms)
                if type(receipt) is Void:
                    return receipt
            else:
                receipt = host.apply(handle, parts, terms)
        except (GradQuorumError, MemoryError) as error:
            return Failure(error)
        finally:
            del lease
        marks = None if terms.worker is None else life.ground.known(terms.worker)
        return Judged(receipt, serial, life.ground.known_serial(host.round.oldest_serial), marks)
