"""The server's side of one connection: one thread that answers one request after the other."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec

from gradquorum.background import background
from gradquorum.errors import ClosedError, GradQuorumError, UnavailableError
from gradquorum.targets.process.channel import AUTHENTICATE_SECONDS, HEARTBEAT_SECONDS, BrokenChannel, Channel
from gradquorum.targets.process.failures import to_failure
from gradquorum.targets.process.lending import Blocks
from gradquorum.targets.process.messages import (
    FROM_CLIENT,
    VERSION,
    Apply,
    Ask,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    LoadState,
    Member,
    Publish,
    Retract,
    SetStep,
    Welcome,
    encode,
)
from gradquorum.targets.process.requests import ANSWERS
from gradquorum.targets.process.taking import Taking

if TYPE_CHECKING:
    from gradquorum.targets.process.server import Service

__all__ = ["Link"]

_RETRACT_SECONDS = 0.1
"""How long after its acknowledgement a round can be given back, unless the client goes on before."""
_STEPS = (SetStep, Publish, LoadState)
"""After these, a discard and takes, a round that is kept is saved in any case: nothing of them is ever undone."""
_CHANGES = (Apply, Ask, Member)
"""Others that may change one."""
_HEARTBEAT = encode(Heartbeat())

_logger = logging.getLogger("gradquorum")


class Link:
    """One connection and the thread that serves it, which alone touches what is not said to be for others."""

    def __init__(self, server: Service, channel: Channel) -> None:
        self.server = server
        self.channel = channel
        self.session: Any = None
        """The `Session`, from when the client has said hello."""
        self.blocks = Blocks()
        self.taking = Taking(channel, server.memory)
        self.thread = server.thread(self._run, "connection")
        self._is_anchor = False
        """Whether the session lives as long as this connection."""
        self._busy_since: float | None = None
        """Since when a request waits for its reply. Read by the thread that sends heartbeats."""

    # For other threads

    def beat(self) -> None:
        """Tell the client that its reply is still to come, if it has waited for a while."""
        since = self._busy_since
        if since is not None and time.monotonic() - since >= HEARTBEAT_SECONDS / 2:
            self.channel.send_at_once(_HEARTBEAT)

    def finish(self) -> None:
        """Let the thread end once it has sent its reply and, after a take, heard that it arrived.

        One that still authenticates its client ends by itself, after it has said that the server is closed.
        """
        if self.session is not None and not self.taking.in_hand:
            self.channel.shut_down(socket.SHUT_RD)

    # The thread

    def _run(self) -> None:
        try:
            if self._begin():
                while (not self.server.closing or self.taking.in_hand) and self._answer():
                    pass
        except (BrokenChannel, msgspec.MsgspecError, ValueError):
            pass  # it is gone, or does not speak our language
        except Exception:
            _logger.exception("a connection was closed because of an error in the server")
        finally:
            self._end()

    def _begin(self) -> bool:
        """Authenticate the client and add the connection to its session; False if there is none."""
        background.start()
        timer = background.call_at(time.monotonic() + AUTHENTICATE_SECONDS, self.channel.shut_down)
        try:
            self.channel.demand_key(self.server.key)
            hello = FROM_CLIENT.decode(self.channel.receive())
        finally:
            background.cancel(timer)
        if not isinstance(hello, Hello):
            return False
        if hello.version != VERSION:
            error = GradQuorumError(f"the server speaks version {VERSION} of the protocol, the client {hello.version}")
            self.channel.send(encode(to_failure(error)))
            return False
        try:
            session = self.server.session(hello.session, self)
        except ClosedError as error:
            self.channel.send(encode(to_failure(error)))
            return False
        if session is None:
            return False
        self.session = session
        self._is_anchor = hello.session is None
        self.channel.send(encode(Welcome(VERSION, session.token)))
        return True

    def _answer(self) -> bool:
        """Answer one request; False after a goodbye."""
        if self.taking.acknowledged and not self.channel.readable(_RETRACT_SECONDS):
            self.taking.forget()
        message = FROM_CLIENT.decode(self.channel.receive(ahead=True))
        self._busy_since = time.monotonic()
        kind = type(message)
        if kind is Goodbye:
            self.session.orderly = True
            return False
        if self.taking.acknowledged and kind is not Retract:
            self.taking.forget()
        reply = self._reply(message)
        del message
        if type(reply) is Failure:  # what failed has died by now, and with it what it read
            reply = msgspec.structs.replace(reply, freed=self.blocks.freed())
        if type(reply) is tuple:
            self._send(*reply)
        elif reply is not None:
            self.channel.send(encode(reply))
        self._busy_since = None
        return True

    def _reply(self, message: Any) -> Any:
        answer = ANSWERS.get(type(message))
        if answer is None:
            raise BrokenChannel("a second hello")
        try:
            reply = answer(self, message)
            if self.server.keeps:
                self._keep(message, reply)
            return reply
        except (BrokenChannel, msgspec.MsgspecError, ValueError) as error:
            if not isinstance(error, GradQuorumError):
                raise  # no way to go on with this client
            return to_failure(error)
        except Exception as error:
            if not isinstance(error, (GradQuorumError, MemoryError)):
                _logger.exception("a request failed because of an error in the server")
            return to_failure(error)

    def _keep(self, message: Any, reply: Any) -> None:
        """Save what the reply is about to say, if it must be. If that fails, the reply's descriptor is closed.

        Raises:
            UnavailableError: it has happened, and could not be saved.
        """
        is_discard = isinstance(message, Ask) and message.what == "discard"
        if is_discard or isinstance(message, _STEPS) or (self.server.keeps_each and isinstance(message, _CHANGES)):
            try:
                self.session.get(message.handle)[0].save()
            except BaseException as error:
                if type(reply) is tuple and reply[1] is not None:
                    os.close(reply[1])
                if not isinstance(error, GradQuorumError):
                    raise
                raise UnavailableError(f"{error}. It has changed all the same", outcome_known=False) from error

    def _send(self, reply: Any, descriptor: int | None) -> None:
        try:
            self.channel.send(encode(reply), descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _end(self) -> None:
        self.taking.end()
        self.blocks = Blocks()
        self.server.remove_link(self)
        if self._is_anchor:
            self.server.end_session(self.session)
        self.channel.close()
