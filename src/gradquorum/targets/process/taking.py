"""The server's side of a take: it waits for round and client at once, and keeps the round until it has arrived."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select

from gradquorum.targets.interface import Merged
from gradquorum.targets.process.channel import BrokenChannel, Channel
from gradquorum.targets.process.hosted import HostedRound
from gradquorum.targets.process.memory import SharedMemory, as_bytes
from gradquorum.targets.process.messages import (
    FROM_CLIENT,
    Cancel,
    Detached,
    Queued,
    Take,
    Taken,
    Withdrawn,
    encode,
    to_worker,
)
from gradquorum.targets.process.parts import result_parts, write
from gradquorum.waiters import Deadline, Handle, Ticket

__all__ = ["INLINE_BYTES", "Taking"]

INLINE_BYTES = 1 << 15
"""Up to here arrays travel within the message; from here on in shared memory, whose set-up costs more than a copy."""
_LONG_SECONDS = 1e6

_logger = logging.getLogger("gradquorum")


class Taking:
    """The take of one connection: there is one at a time. Only the connection's thread calls this."""

    def __init__(self, channel: Channel, memory: SharedMemory) -> None:
        self._channel = channel
        self._memory = memory
        self._hosted: HostedRound | None = None
        self._ticket: Ticket | None = None
        """Until it has ended and cannot be given back any more."""
        self._number = 0
        self.acknowledged = False
        self._event: int | None = None
        """Counts the wake-ups of tickets."""
        self._poll = select.poll()

    @property
    def in_hand(self) -> bool:
        """Whether a round may be on its way."""
        return self._ticket is not None and not self.acknowledged

    def take(self, hosted: HostedRound, handle: Handle, message: Take) -> tuple[Taken, int | None] | Withdrawn:
        """Wait for a round and return the reply that carries it, and the descriptor that goes with it.

        Raises:
            GradQuorumError: what a local take raises.
            BrokenChannel: the client is gone; nothing has changed.
        """
        self.forget()
        if self._event is None:
            self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._poll.register(self._event, select.POLLIN)
            self._poll.register(self._channel.fileno(), select.POLLIN)
        wake = functools.partial(os.eventfd_write, self._event, 1)
        ticket = Ticket(handle, message.num_required, message.exact, wake=wake)
        self._hosted, self._ticket, self.acknowledged = hosted, ticket, False
        self._number = message.number
        try:
            hosted.round.enqueue(ticket)
            if message.announce:
                self._channel.send(encode(Queued()))
            if self._wait(hosted, ticket, Deadline(message.timeout)):
                self._ticket = None
                return Withdrawn()
            ticket.raise_error()
            assert ticket.batch is not None
            hosted.save()  # from here on it may arrive: if the server dies it comes again, this very round
            if message.announce:
                self._channel.send(encode(Detached()))
            return self._reply(hosted, hosted.host.merge(ticket.batch))
        except BaseException:
            self.give_back()
            raise

    def _wait(self, hosted: HostedRound, ticket: Ticket, deadline: Deadline) -> bool:
        """Wait until the ticket is decided; True if the client withdrew it before."""
        while not ticket.decided:
            has_message = self._channel.has_read_ahead
            ready = dict(self._poll.poll(0 if has_message else deadline.left(_LONG_SECONDS) * 1000))
            if self._event in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._event)
            elif ready or has_message:
                if not isinstance(FROM_CLIENT.decode(self._channel.receive()), Cancel):
                    raise BrokenChannel("the client has given up")
                if hosted.round.withdraw(ticket):
                    return True
            elif deadline.passed:
                hosted.round.expire(ticket)
        return False

    def _reply(self, hosted: HostedRound, merged: Merged) -> tuple[Taken, int | None]:
        parts, arrays, num_bytes = result_parts(hosted.members, merged.members)
        inline: bytearray | None = None
        descriptor: int | None = None
        if num_bytes <= INLINE_BYTES:
            inline = bytearray(num_bytes)
            write(as_bytes(inline), arrays)
        else:
            mapping, descriptor = self._memory.make(num_bytes)
            write(as_bytes(mapping), arrays)
        workers = tuple(to_worker(worker) for worker in merged.workers)
        return Taken(parts, num_bytes, inline, merged.num_gradients, merged.step, workers), descriptor

    def acknowledge(self, *, final: bool) -> None:
        """Record that the round has arrived; if that is final, it cannot be given back.

        Raises:
            BrokenChannel: none was on its way.
        """
        if not self.in_hand or self._ticket is None or self._hosted is None or self._ticket.batch is None:
            raise BrokenChannel("nothing to acknowledge")
        self._hosted.round.deliver(self._ticket)
        self.acknowledged = True
        self._hosted.try_to_save()
        if final:
            self.forget()

    def give_back(self) -> None:
        """Keep the round for the next take: it did not arrive, or was lost by who had received it."""
        ticket, self._ticket = self._ticket, None
        was_delivered, self.acknowledged = self.acknowledged, False
        if ticket is None or self._hosted is None:
            return
        self._hosted.round.abandoned.append(ticket)
        orphaned = self._hosted.round.settle()
        if orphaned:
            _logger.warning("%d gradients were discarded: a take was cut off after the accumulator closed", orphaned)
        if was_delivered:
            self._hosted.try_to_save()

    def retract(self, number: int) -> None:
        """Keep the round of that take for the next one, unless it is too late."""
        if number == self._number:
            self.give_back()

    def forget(self) -> None:
        """Let go of a round that has arrived: it cannot be given back any more."""
        if self.acknowledged and self._ticket is not None:
            self._ticket.batch = None
            self._ticket = None
            self.acknowledged = False

    def end(self) -> None:
        """The connection is gone."""
        self.forget()
        self.give_back()  # after this nobody wakes the ticket any more
        if self._event is not None:
            os.close(self._event)
            self._event = None
