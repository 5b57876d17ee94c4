"""Ways to rounds that live in a server: `connect` and `attach`, and what unpickling a handle does."""

from __future__ import annotations

import os
import sys
from typing import Any

from gradquorum.accumulators import ConditionalAccumulator, SparseConditionalAccumulator
from gradquorum.errors import InvalidArgumentError
from gradquorum.groups import AccumulatorGroup
from gradquorum.handle import AbstractAccumulator
from gradquorum.specs import RoundSpec
from gradquorum.targets import attach_target, open_shared, set_default

__all__ = ["attach", "connect", "reattach", "spawning_key"]

_KINDS: dict[str, type[AbstractAccumulator[Any]]] = {
    kind.__name__: kind for kind in (SparseConditionalAccumulator, ConditionalAccumulator, AccumulatorGroup)
}


def connect(address: str | os.PathLike[str] | None, authkey: bytes | None = None) -> None:
    """Let a server be the default target of this process, and know its key.

    From here on accumulators and groups made with `target=None` live there. Child processes do not inherit it.

    Args:
        address: path of the server's socket (`Server.address`); None or ``"local"`` for this process again.
        authkey: what the server was given as `authkey`; None for the key that lies beside the socket.

    Raises:
        InvalidArgumentError: the address is no path, or the key is none.
        UnavailableError: there is no server, or the key is not its key. The default stays as it was.

    Threads:
        Any, but it is meant to be called once, before there are others. It waits for the server, at most 30 s.

    Example:
        >>> import gradquorum as gq
        >>> with gq.Server() as server:
        ...     gq.connect(server.address)
        ...     acc = gq.SparseConditionalAccumulator("float32", (5, 1), shared_name="emb")
        ...     gq.connect("local")
        ...     acc.apply_grad([3], [[1.0]])
        ApplyReceipt(ACCEPTED, step=0, num_accumulated=1)
    """
    if address is None or address == "local":
        set_default(None)
        return
    from gradquorum.targets.process.client import connect_to

    set_default(connect_to(address, authkey))


def attach(shared_name: str, target: Any = None) -> Any:
    """Return a new handle on a round that is there, whatever its spec.

    Args:
        shared_name: the round's.
        target: where it lives, as for the classes: None for the default.

    Returns:
        A `SparseConditionalAccumulator`, `ConditionalAccumulator` or `AccumulatorGroup`.

    Raises:
        InvalidArgumentError: there is no round of that name, or a class of the user's made it.
        UnavailableError: there is no server.
        ClosedError: the server is being closed.

    Example:
        >>> import gradquorum as gq
        >>> with gq.Server() as server:
        ...     acc = server.accumulator("float32", (5, 1), "emb")
        ...     gq.attach("emb", server.address).dtype
        dtype('float32')
    """
    if not isinstance(shared_name, str):
        raise InvalidArgumentError(f"shared_name: expected a string, got {shared_name!r}")
    opened, spec = attach_target(shared_name, target)
    kind = _KINDS.get(spec.kind)
    if kind is None:
        opened.close(False)
        raise InvalidArgumentError(
            f"shared_name {shared_name!r}: it was made by a class of its user's, {spec.kind}: make one of those"
        )
    return kind._attached(spec, shared_name, shared_name, opened)


def reattach(
    kind: type[AbstractAccumulator[Any]],
    spec: RoundSpec,
    shared_name: str,
    name: str,
    address: str,
    authkey: bytes | None,
) -> AbstractAccumulator[Any]:
    """Unpickle a handle: attach to the round that it was a handle on.

    Raises:
        ClosedError: the round has been closed, or is not at this server any more.
        InvalidArgumentError: another round has its name by now.
        UnavailableError: there is no server.
    """
    if authkey is not None:
        from gradquorum.targets.process.address import know_key

        know_key(address, authkey)
    opened = open_shared(address, shared_name, spec, create=False)
    return kind._attached(spec, shared_name, name, opened)


def spawning_key(address: str) -> bytes | None:
    """Return the key that a user gave for a server, if this handle is on its way to a child that is being started.

    Otherwise it stays here: nobody knows where a pickle ends up.
    """
    context = sys.modules.get("multiprocessing.context")
    known = sys.modules.get("gradquorum.targets.process.address")
    if context is None or known is None or context.get_spawning_popen() is None:
        return None
    key: bytes | None = known.known_key(address)
    return key
