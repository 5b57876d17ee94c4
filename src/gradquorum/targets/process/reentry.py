"""Calls that would wait for themselves, where a server and its client are in one process.

A finalizer or a signal handler can run inside of the server: in one of its threads, or in any thread that is in a call
on one of its rounds. If it calls the server over the socket, another thread has to answer, and may need a lock that
this one holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gradquorum.errors import GradQuorumError

__all__ = ["check_outside", "forget", "forget_all", "is_inside", "log_discarded", "remember"]

_logger = logging.getLogger("gradquorum")

_servers: dict[str, Callable[[], bool]] = {}
"""Those of this process by address, and what says whether the thread that asks is inside. It takes no lock."""


def remember(path: str, is_inside: Callable[[], bool]) -> None:
    """Remember a server of this process."""
    _servers[path] = is_inside


def forget(path: str, is_inside: Callable[[], bool]) -> None:
    """Forget a server that has ended, unless another has its place already."""
    if _servers.get(path) == is_inside:
        del _servers[path]


def forget_all() -> None:
    """Forget them in a forked child: they are the parent's."""
    _servers.clear()


def is_inside(path: str) -> bool:
    """Return whether a call of this thread on a server might wait for itself."""
    found = _servers.get(path)
    return found is not None and found()


def check_outside(path: str) -> None:
    """Refuse a call that might wait for itself.

    Raises:
        GradQuorumError: this is a signal handler or finalizer that interrupted the server.
    """
    if _servers and is_inside(path):
        raise GradQuorumError(
            "this call would wait for ever: it was made by a signal handler or finalizer that interrupted the server "
            f"at {path}, which is in this process; make it in another thread. Nothing has changed"
        )


def log_discarded(count: int) -> None:
    """Say how many gradients a close has discarded whose caller does not hear of it."""
    if count:
        _logger.warning("%d gradients were discarded: a signal handler or finalizer closed their accumulator", count)
