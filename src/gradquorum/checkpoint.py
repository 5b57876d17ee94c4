"""Checkpoints: the state of a round in a file that is there whole or not at all.

The format is safetensors, which holds nothing but arrays and text: reading one runs no code. Needs the extra
``checkpoint``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from gradquorum.errors import GradQuorumError, InvalidArgumentError

__all__ = ["HALF_WRITTEN", "read_checkpoint", "read_spec", "sync_folder", "write_checkpoint"]

HALF_WRITTEN = re.compile(r"\.[0-9a-f]{16}\.gradquorum\.tmp")
"""The name of a file that is being written, however long that of the file it will be."""
_FORMAT = "gradquorum.round"


def write_checkpoint(
    path: str | os.PathLike[str], state: Mapping[str, NDArray[Any]], *, spec: str | None = None
) -> None:
    """Write a state so that the file is the old one or the new one at any moment, also after a crash.

    It is written beside `path`, synced, and renamed, and the folder is synced.

    Args:
        path: of the file; an existing one is replaced, and so is a symbolic link, not what it points to.
        state: what `state_dict` has returned.
        spec: what `read_spec` is to return, for who has to make the round anew from the file alone.

    Raises:
        InvalidArgumentError: the path is none.
        GradQuorumError: safetensors is not installed.
        OSError: it could not be written. A file that was there is as it was.
    """
    numpy_format = _safetensors().numpy
    metadata = {"format": _FORMAT} if spec is None else {"format": _FORMAT, "spec": spec}
    target = _as_path(path)
    folder = os.path.dirname(os.path.abspath(target))
    beside = os.path.join(folder, f".{secrets.token_hex(8)}.gradquorum.tmp")
    try:
        file = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        with open(file, "wb") as out:
            out.write(numpy_format.save(dict(state), metadata=metadata))
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
        InvalidArgumentError: it is no checkpoint, or not all of one, or no regular file.
        GradQuorumError: safetensors is not installed.
        OSError: it could not be read.
    """
    with _opened(path) as (file, _):
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def read_spec(path: str | os.PathLike[str]) -> str | None:
    """Return the spec that a file was written with, None if with none. Raises what `read_checkpoint` raises."""
    with _opened(path) as (_, metadata):
        return metadata.get("spec")


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[Any, dict[str, str]]]:
    """Open a checkpoint, with its metadata."""
    package = _safetensors()
    where = _as_path(path)
    _check_file(where)
    try:
        with package.safe_open(where, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise InvalidArgumentError(
                    f"{where}: expected a checkpoint of gradquorum, got a safetensors file with {metadata}"
                )
            yield file, metadata
    except InvalidArgumentError:
        raise
    except (package.SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:  # of its dtypes, too
        raise InvalidArgumentError(f"{where}: expected a checkpoint of gradquorum, whole: {error}") from error


def _as_path(path: Any) -> str:
    where = os.fsdecode(path)
    if not where or "\0" in where:
        raise InvalidArgumentError(f"path: expected that of a file, got {path!r}")
    return where


def _check_file(where: str) -> None:
    """Refuse what is no file, such as a pipe, which one could wait for without end. Does not wait itself."""
    opened = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # says in the usual way what is in the way
    try:
        mode = os.fstat(opened).st_mode
    finally:
        os.close(opened)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), where)
    if not stat.S_ISREG(mode):
        raise InvalidArgumentError(f"{where}: expected a regular file, got {stat.filemode(mode)}")


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
            "checkpoints in files need safetensors: pip install safetensors; state_dict() needs nothing"
        ) from error
    return safetensors
