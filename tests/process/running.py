"""How the tests start processes, and see them end."""

import multiprocessing
import os
import signal

from tests.support import TIMEOUT


def start(target, *arguments, method="forkserver"):
    """Start a process."""
    process = multiprocessing.get_context(method).Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def start_connected(target, *arguments, method="forkserver"):
    """Start a process whose first argument is a connection to us; return both."""
    here, there = multiprocessing.Pipe()
    process = start(target, there, *arguments, method=method)
    there.close()
    return process, here


def hear(connection):
    assert connection.poll(TIMEOUT), "nothing was said in time"
    return connection.recv()


def exit_code(process):
    process.join(TIMEOUT)
    return process.exitcode


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    assert exit_code(process) == -signal.SIGKILL
