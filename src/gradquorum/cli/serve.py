"""`gradquorum serve`: a server as a process of its own."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from gradquorum.errors import GradQuorumError

_MAX_KEY_BYTES = 4096
_EVERY_SECONDS = 30.0


@click.command()
@click.option(
    "--address",
    type=click.Path(path_type=Path),
    required=True,
    metavar="PATH",
    help="The Unix socket to make, in a folder made for this user if it is not there; clients give its absolute path, "
    "as printed, as target=.",
)
@click.option(
    "--authkey-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A file with the key that clients must know; without it one is made and kept beside the socket.",
)
@click.option("--max-bytes", type=click.IntRange(1), metavar="N", help="Budget for all that is held.")
@click.option(
    "--checkpoint",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="A folder to keep rounds in, so that they outlive this server; made if it is not there.",
)
@click.option(
    "--every",
    type=click.FloatRange(0),
    metavar="S",
    help="Seconds after which a changed round is saved [default: 30]; 0 saves each change before it is answered.",
)
def serve(
    address: Path, authkey_file: Path | None, max_bytes: int | None, checkpoint: Path | None, every: float | None
) -> None:
    """Host accumulators for the processes of this machine until SIGTERM or Ctrl-C.

    Waiting takes of clients then end with CancelledError, and the exit status is 0. With --checkpoint, rounds are
    saved, and the next server of that folder begins with them.
    """
    if every is not None and checkpoint is None:
        raise click.UsageError("--every needs --checkpoint")
    from gradquorum.server import Server

    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        server = Server(
            address,
            authkey=_read(authkey_file),
            max_bytes=max_bytes,
            checkpoint=checkpoint,
            checkpoint_every=_EVERY_SECONDS if every is None else every,
        )
    except GradQuorumError as error:
        raise click.ClickException(str(error)) from None
    try:
        with server:
            click.echo(f"gradquorum serve: listening at {server.address}")
            _wait(stopped)
    except GradQuorumError as error:  # what a client waits for is answered to that client
        raise click.ClickException(str(error)) from None
    click.echo("gradquorum serve: closed")


def _read(file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        with file.open("rb") as key_file:
            key = key_file.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise click.ClickException(f"--authkey-file: {error}") from None
    if not key or len(key) > _MAX_KEY_BYTES:
        raise click.ClickException(f"--authkey-file: expected 1 to {_MAX_KEY_BYTES} bytes in {file}")
    return key


def _wait(stopped: threading.Event) -> None:
    """Wait for a signal, whose handler runs in this thread, the main one."""
    while not stopped.wait(1.0):  # a signal that comes just before a wait begins does not end it
        pass
