"""`gradquorum serve`: a server as a process of its own."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from gradquorum.errors import GradQuorumError

_MAX_KEY_BYTES = 4096


@click.command()
@click.option(
    "--address",
    type=click.Path(path_type=Path),
    required=True,
    metavar="PATH",
    help="The Unix socket to make; clients give it as target=.",
)
@click.option(
    "--authkey-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A file with the key that clients must know; without it one is made and kept beside the socket.",
)
@click.option("--max-bytes", type=click.IntRange(1), metavar="N", help="Budget for all that is held.")
def serve(address: Path, authkey_file: Path | None, max_bytes: int | None) -> None:
    """Host accumulators for the processes of this machine until SIGTERM or Ctrl-C.

    Waiting takes of clients then end with CancelledError, and the exit status is 0.
    """
    from gradquorum.targets.process.server import Server

    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        server = Server(address, authkey=_read(authkey_file), max_bytes=max_bytes)
    except GradQuorumError as error:
        raise click.ClickException(str(error)) from None
    with server:
        click.echo(f"gradquorum serve: listening at {server.address}")
        _wait(stopped)
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
