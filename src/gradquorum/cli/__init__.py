"""The `gradquorum` command: `gradquorum demo`, and more commands as they come.

Only this package imports click and rich (extra `cli`); the library does without them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

__all__ = ["main"]

_INTERRUPTED = 130  # what shells expect of a program that Ctrl-C ended: 128 + SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: the words after the program's name; None takes those of this process.

    Returns:
        0 when all went well, 2 for input that cannot be used, 130 after Ctrl-C, 1 if click or rich is not
        installed. Each failure prints one line on standard error. Any other exception is a bug, and raised.
    """
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("gradquorum: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _run(words: list[str]) -> int:
    try:
        import click

        from gradquorum.cli.app import gradquorum
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"click", "rich"}:
            raise
        print(f"gradquorum: {package} is missing: pip install click rich", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a text's words may be foreign to this terminal
    try:
        with gradquorum.make_context("gradquorum", words) as context:
            gradquorum.invoke(context)
    except click.exceptions.Exit as done:  # --help and --version
        return done.exit_code
    except click.ClickException as error:
        print(f"gradquorum: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    return 0
