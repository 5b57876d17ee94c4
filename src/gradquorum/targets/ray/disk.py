"""Where a round is kept that survives everybody: one file, written before those who changed it hear of it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

import numpy as np

from gradquorum.checkpoint import read_checkpoint, sync_folder, write_checkpoint
from gradquorum.errors import GradQuorumError, InvalidArgumentError
from gradquorum.targets.host import RoundHost
from gradquorum.waiters import Handle

__all__ = ["Disk"]

_DELIVERED = "delivered"
_TOKEN_BYTES = 16
_RECORD = np.dtype([("session", f"V{_TOKEN_BYTES}"), ("number", "<i8")])

Take = tuple[bytes, int]


class Disk:
    """The file of one round. A folder may hold those of many, and has to be the same one on all nodes.

    Guarded by ``_lock``: ``_saved`` and the file.
    """

    def __init__(self, folder: str, shared_name: str) -> None:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise InvalidArgumentError(f"folder: expected one that can be made: {error}") from error
        self._path = os.path.join(folder, quote(shared_name, safe="", errors="surrogatepass") + ".safetensors")
        self._lock = threading.Lock()
        self._saved: tuple[Any, int] = (None, -1)
        """The round as it was when it was last saved: its host and version."""

    def load(self) -> tuple[dict[str, Any], list[Take]] | None:
        """Return the state of the round and the takes that were delivered last, None if it was never saved."""
        if not os.path.lexists(self._path):
            return None
        state = read_checkpoint(self._path)
        records = state.pop(_DELIVERED).view(_RECORD)
        return state, [(bytes(record["session"]), int(record["number"])) for record in records]

    def save(self, host: RoundHost, keeper: Handle, delivered: Iterable[Take]) -> None:
        """Save the round if it has changed. Of several threads one writes for all.

        Raises:
            GradQuorumError: it could not be written. The file is as it was.
        """
        with self._lock:
            version = host.round.version  # what changes from here on is saved the next time, perhaps twice
            if self._saved == (host, version):
                return
            records = np.array([(np.void(session), number) for session, number in tuple(delivered)], _RECORD)
            try:
                write_checkpoint(self._path, {**host.state(keeper), _DELIVERED: records.view(np.uint8)})
            except OSError as error:
                raise GradQuorumError(f"the round could not be saved: {error}") from error
            self._saved = (host, version)

    def remove(self) -> None:
        """Remove the file: the round is over."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
            sync_folder(os.path.dirname(self._path))
