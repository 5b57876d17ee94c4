"""Checkpoints: the state of a round in a file that is there whole or not at all.

The format is safetensors, which holds nothing but arrays and text: reading one runs no code. Needs the extra
``checkpoint``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from gradquorum.errors import GradQuorumError, InvalidArgumentError

__all__ = ["read_checkpoint", "sync_folder", "write_checkpoint"]

_METADATA = {"format": "gradquorum.round"}


def write_checkpoint(path: str | os.PathLike[str], state: Mapping[str, NDArray[Any]]) -> None:
    """Write a state so that the file is the old one or the new one at any moment, also after a crash.

    It is written beside `path`, synced, and renamed, and the folder is synced.

    Args:
        path: of the file; an existing one is replaced.
        state: what `state_dict` has returned.

    Raises:
        GradQuorumError: safetensors is not installed.
        OSError: it could not be written. A file that was there is as it was.
    """
    numpy_format = _safetensors().numpy
    target = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(target))
    beside = os.path.join(folder, f".{os.path.basename(target)}.{secrets.token_hex(8)}.tmp")
    try:
        file = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        with open(file, "wb") as out:
            out.write(numpy_format.save(dict(state), metadata=_METADATA))
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    sync_folder(folder)


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Return the state that a file holds.

    Raises:
        InvalidArgumentError: it is no checkpoint, or not all of one.
        GradQuorumError: safetensors is not installed.
        OSError: it could not be read.
    """
    package = _safetensors()
    where = os.fspath(path)
    with open(where, "rb"):  # says in the usual way what keeps us from reading it
        pass
    try:
        with package.safe_open(where, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _METADATA["format"]:
                raise InvalidArgumentError(
                    f"{where}: expected a checkpoint of gradquorum, got a safetensors file with {metadata}"
                )
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (package.SafetensorError, KeyError, TypeError, ValueError, UnicodeDecodeError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{where}: expected a checkpoint of gradquorum, whole: {error}") from error


def sync_folder(folder: str) -> None:
    """Make sure that a renamed file is there after a crash."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise GradQuorumError(
            "checkpoints in files need safetensors: pip install 'gradquorum[checkpoint]'; state_dict() needs nothing"
        ) from error
    return safetensors
