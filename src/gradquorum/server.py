"""The server, for several processes of one machine."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Self

from gradquorum.accumulators import ConditionalAccumulator, SparseConditionalAccumulator
from gradquorum.errors import GradQuorumError, InvalidArgumentError
from gradquorum.groups import AccumulatorGroup
from gradquorum.specs import RoundSpec
from gradquorum.targets import AbstractTarget
from gradquorum.targets.process.server import Service

__all__ = ["Server"]


class Server:
    """Hosts accumulators and groups that other processes of this machine use by `target=address, shared_name=...`.

    It serves from threads of this process, from the moment it is made until `close()`, the end of the ``with`` block
    or the end of the process. The rounds live here: a client that dies takes nothing with it but what it had not
    committed. A round closes with its last handle, unless that handle's process died: then it stays, with its step
    and its marks, until somebody attaches again and closes it, or the server is closed.

    Args:
        address: path of the Unix socket, in a folder that is made with mode 0700 if it is not there; None for a socket
            in a new directory of its own. What a dead server left there is replaced.
        authkey: what clients must know, bytes; None makes a key and keeps it in a file of mode 0600 beside the socket,
            where every process of this user finds it.
        max_bytes: budget for shared memory and for what all rounds hold; None without one. What does not fit is
            refused with `ResourceExhaustedError`, or waits where the accumulator was made with ``on_full="block"``.
        checkpoint: a folder to keep rounds in, made if it is not there; None keeps none. Rounds that have a
            `shared_name` then outlive their handles and the server: the next server of the folder begins with them,
            and ``close(for_all=True)`` ends them. Needs the extra ``checkpoint``.
        checkpoint_every: seconds after which a round that has changed is saved, besides before and after each take; 0
            saves each change before the client hears of it. ``docs/processes.md`` says what that promises.

    Raises:
        InvalidArgumentError: there is a living server at the address or with the folder, the folder of the address
            cannot be made, or an argument cannot be.
        GradQuorumError: this is not Linux, or safetensors is not installed.

    Threads:
        All methods may be called from any thread. One thread for each connection; idle ones cost nothing.

    Example:
        >>> import gradquorum as gq
        >>> with gq.Server() as server:
        ...     acc = gq.SparseConditionalAccumulator("float32", (5, 1), "emb", target=server.address)
        ...     _ = acc.apply_grad([3], [[1.0]])
        ...     print(gq.attach("emb", server.address).take_grad(1).indices)
        [3]
    """

    def __init__(
        self,
        address: str | os.PathLike[str] | None = None,
        *,
        authkey: bytes | None = None,
        max_bytes: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: float = 30.0,
    ) -> None:
        if sys.platform != "linux":
            raise GradQuorumError(f"several processes need Linux, and this is {sys.platform}; use the local target")
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            raise InvalidArgumentError(f"max_bytes: expected 1 or more, or None; got {max_bytes!r}")
        if checkpoint is not None and not (isinstance(checkpoint, (str, os.PathLike)) and os.fspath(checkpoint)):
            raise InvalidArgumentError(f"checkpoint: expected the path of a folder, or None; got {checkpoint!r}")
        if type(checkpoint_every) not in (int, float) or not 0 <= checkpoint_every <= threading.TIMEOUT_MAX:
            raise InvalidArgumentError(f"checkpoint_every: expected seconds, 0 or more; got {checkpoint_every!r}")
        self._service = Service(address, authkey, max_bytes, checkpoint, checkpoint_every)

    @property
    def address(self) -> str:
        """The absolute path of the socket: what clients give as `target`."""
        return self._service.address

    def accumulator(
        self, dtype: Any, shape: Any = None, shared_name: str | None = None, *, dense: bool = False, **options: Any
    ) -> SparseConditionalAccumulator | ConditionalAccumulator:
        """Return an accumulator on a round of this server, for this process: its calls do not leave it.

        It pickles, and attaches over the socket where it is unpickled.

        Args:
            dtype: as for the class, like all that follows.
            shape: of the table, or of the whole gradient.
            shared_name: None makes a name that nobody else has.
            dense: make a `ConditionalAccumulator`.
            options: of the class.

        Returns:
            A `SparseConditionalAccumulator`, or with `dense` a `ConditionalAccumulator`.

        Raises:
            InvalidArgumentError: what the class refuses, or the round of that name was made from another spec.
            ClosedError: the server has been closed.
        """
        kind = ConditionalAccumulator if dense else SparseConditionalAccumulator
        return kind(dtype, shape, shared_name, target=self, **options)

    def group(self, members: Mapping[str, Any], shared_name: str | None = None, **options: Any) -> AccumulatorGroup:
        """Return a group on a round of this server, as `accumulator` does: `members` and options are of the class."""
        return AccumulatorGroup(members, shared_name, target=self, **options)

    def close(self) -> int:
        """Close all rounds, end all conversations and remove the socket; closing again does nothing.

        Waiting takes, here and in other processes, end with `CancelledError`, later calls with `ClosedError`. Rounds
        that are kept are saved.

        Returns:
            How many accepted, not delivered gradients of other rounds that discarded.

        Raises:
            GradQuorumError: a round could not be saved: its file is as it was. All is closed nevertheless.
        """
        return self._service.close()

    def _open(self, spec: RoundSpec | None, shared_name: str) -> AbstractTarget:
        """Return a handle of this process."""
        return self._service.open(spec, shared_name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._service.closing else f"{len(self._service.rounds.all())} rounds"
        return f"<Server at {self.address}: {state}>"
