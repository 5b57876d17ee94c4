"""Worker processes that are told when to work: each repeats its job and answers with the seconds of each repetition."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

ANSWER_SECONDS = 120.0
"""Whoever is silent for longer has failed."""

Prepare = Callable[..., tuple[Callable[[], Any], Callable[[], Any]]]
"""Called in the process with its arguments; returns the job, and what is done after each turn, untimed."""


def _work(connection: Connection, prepare: Prepare, arguments: Sequence[Any]) -> None:
    job, after = prepare(*arguments)
    job()  # warm
    after()
    connection.send("ready")
    while (count := connection.recv()) is not None:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            job()
            seconds.append(time.perf_counter() - start)
        connection.send(seconds)
        connection.recv()  # all others are done, too
        after()
        connection.send("ready")


class Crew:
    """One process for each tuple of arguments."""

    def __init__(self, prepare: Prepare, arguments: Sequence[Sequence[Any]]) -> None:
        self._members = [start(_work, prepare, each) for each in arguments]
        for _, connection in self._members:
            receive(connection)

    def turn(self, count: int, members: int | None = None) -> list[list[float]]:
        """Let the first `members` repeat their jobs at the same time; return the seconds of each repetition."""
        taking_part = [connection for _, connection in self._members[:members]]
        for connection in taking_part:
            connection.send(count)
        seconds = [receive(connection) for connection in taking_part]
        for connection in taking_part:
            connection.send("all done")
            receive(connection)
        return seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for process, connection in self._members:
            end(process, connection)


def start(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Start a process whose first argument is a connection to us."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    return process, here


def receive(connection: Connection) -> Any:
    if not connection.poll(ANSWER_SECONDS):
        raise TimeoutError(f"a process was silent for {ANSWER_SECONDS:.0f} s")
    return connection.recv()


def end(process: Any, connection: Connection) -> None:
    """Tell a process to end, and see to it that it does."""
    with contextlib.suppress(OSError):  # it is gone
        connection.send(None)
    process.join(5.0)
    process.kill()
    process.join()
