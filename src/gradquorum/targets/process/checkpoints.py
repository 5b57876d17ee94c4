"""Where a server keeps the states of its rounds: a folder with one file for each round.

When they are written, and what that promises: see ``docs/processes.md``.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from urllib.parse import quote, unquote

from gradquorum.checkpoint import HALF_WRITTEN, read_checkpoint, read_spec, sync_folder, write_checkpoint
from gradquorum.errors import GradQuorumError, InvalidArgumentError, ResourceExhaustedError
from gradquorum.specs import RoundSpec
from gradquorum.targets.host import RoundHost
from gradquorum.targets.interface import PRIVATE
from gradquorum.targets.process.specs import from_json, to_json
from gradquorum.waiters import Handle

__all__ = ["Checkpoints", "RoundFile"]

_SUFFIX = ".safetensors"
_MAX_NAME_BYTES = 255
"""What Linux allows."""

_logger = logging.getLogger("gradquorum")


class Checkpoints:
    """The folder of one server, which has it to itself. Nothing here changes after `__init__`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = os.path.abspath(os.fsdecode(directory))
        self._pid = os.getpid()
        try:
            import safetensors  # noqa: F401 - better now than when there is something to save
        except ImportError as error:
            raise GradQuorumError("checkpoint: needs safetensors: pip install safetensors") from error
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            self._lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:  # a NUL in it
            raise InvalidArgumentError(f"checkpoint: expected a directory that can be made or read: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in os.listdir(self._directory):
                if HALF_WRITTEN.fullmatch(name):  # of a server that was killed
                    os.unlink(os.path.join(self._directory, name))
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise InvalidArgumentError(
                    f"checkpoint: expected a directory of this server's own, but a living one uses {self._directory}"
                ) from None
            if isinstance(error, OSError):
                raise InvalidArgumentError(f"checkpoint: cannot use {self._directory}: {error}") from error
            raise

    def file_of(self, shared_name: str) -> RoundFile | None:
        """Return where a round of that name is kept; None for one that nobody can name.

        Raises:
            InvalidArgumentError: the name is too long for a file.
        """
        if shared_name.startswith(PRIVATE):
            return None
        name = _file_name(shared_name)
        if len(name) > _MAX_NAME_BYTES:
            raise InvalidArgumentError(
                f"shared_name: expected one that makes a file name of at most {_MAX_NAME_BYTES} bytes, as this server "
                f"keeps checkpoints, got one of {len(name)}"
            )
        return RoundFile(os.path.join(self._directory, name))

    def kept(self) -> Iterator[tuple[str, RoundFile]]:
        """Return the names and the files of the rounds that are kept here. Other files of the folder are left alone."""
        for name in sorted(os.listdir(self._directory)):
            try:
                shared_name = unquote(name.removesuffix(_SUFFIX), errors="surrogatepass")
            except UnicodeDecodeError:
                continue
            if name == _file_name(shared_name) and not shared_name.startswith(PRIVATE):
                yield shared_name, RoundFile(os.path.join(self._directory, name))

    def close(self) -> None:
        """Let another server have the folder. In a forked child, which shares the lock, that changes nothing."""
        if os.getpid() == self._pid:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child forked a moment ago may still have the descriptor, too
        os.close(self._lock)


def _file_name(shared_name: str) -> str:
    return quote(shared_name, safe="", errors="surrogatepass") + _SUFFIX


class RoundFile:
    """The file of one round.

    Guarded by ``_lock``: all that is assigned outside `__init__`, and the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._version = -1
        """That of the round when it was last saved."""
        self._is_over = False

    @property
    def exists(self) -> bool:
        """Whether a round of that name has been saved."""
        return os.path.lexists(self.path)

    def spec(self) -> RoundSpec:
        """Return the spec of the round.

        Raises:
            InvalidArgumentError: it is not in the file, or of another release, or there is no checkpoint.
            GradQuorumError: the file cannot be read.
        """
        with self._lock, self._reading():
            text = read_spec(self.path)
            if text is None:
                raise InvalidArgumentError("its spec is not in it")
            return from_json(text)

    def restore(self, host: RoundHost, keeper: Handle) -> None:
        """Put what was saved in the place of a new round. The workers that were live have to join anew.

        Raises:
            InvalidArgumentError: it is of another spec, or no checkpoint.
            GradQuorumError: it cannot be read.
        """
        with self._lock, self._reading():
            host.load_state(keeper, read_checkpoint(self.path), rejoin=True)
            self._version = host.round.version
        if host.round.num_undelivered:
            _logger.warning(
                "%s: %d rounds may have arrived before the last server ended; they come again, whole, with their steps",
                self.path,
                host.round.num_undelivered,
            )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Say of errors which file they are about, and what to do."""
        try:
            yield
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"the checkpoint {self.path} does not fit; it is as it was. Come with its spec, or move it "
                f"away: {error}"
            ) from error
        except OSError as error:
            raise GradQuorumError(f"the checkpoint {self.path} cannot be read: {error}") from error
        except MemoryError as error:
            raise ResourceExhaustedError(f"no memory for the checkpoint {self.path}") from error

    def save(self, host: RoundHost, keeper: Handle) -> None:
        """Save the round if it has changed. Of several threads one writes for all.

        Raises:
            OSError: it could not be written. The file is as it was.
            GradQuorumError: there is no memory, or a worker's name cannot be written. The file is as it was.
        """
        with self._lock:
            version = host.round.version  # what changes from here on is saved the next time, perhaps twice
            if version != self._version and not self._is_over:
                write_checkpoint(self.path, host.state(keeper), spec=to_json(host.spec))
                self._version = version

    def remove(self) -> None:
        """Remove the file, for good: the round is over.

        Raises:
            GradQuorumError: it cannot be removed. The round is kept as before.
        """
        with self._lock:
            try:
                os.unlink(self.path)
                sync_folder(os.path.dirname(self.path))
            except FileNotFoundError:
                pass
            except OSError as error:
                self._version = -1  # the next save writes it anew, if it is gone already
                raise GradQuorumError(
                    f"the checkpoint {self.path} cannot be removed, and so its round is not closed: {error}"
                ) from error
            self._is_over = True
