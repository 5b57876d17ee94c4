"""What all targets do for takes that wait: how an outcome gets to a coroutine, and what a long wait says in the log."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

__all__ = ["log_waiting", "try_to_resolve"]

_logger = logging.getLogger("gradquorum")


def try_to_resolve(loop: Any, arrived: Any, result: Any, error: BaseException | None) -> bool:
    """Give a coroutine's future a result or an error, from any thread; False if its event loop is closed.

    A future that was cancelled stays so.
    """
    try:
        loop.call_soon_threadsafe(_resolve, arrived, result, error)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return False
    return True


def _resolve(arrived: Any, result: Any, error: BaseException | None) -> None:
    if arrived.done():  # cancelled
        return
    if error is None:
        arrived.set_result(result)
    else:
        arrived.set_exception(error)


def log_waiting(look: Callable[[], Any], num_required: int, since: float) -> None:
    """Say how long a take has waited, in seconds since a reading of the monotonic clock, and for what.

    `look` returns what `Figures` has. Nothing that fails in it, or in a log handler of the user's, ends the take.
    """
    with contextlib.suppress(Exception):
        figures = look()
        _logger.warning(
            "take_grad has waited %.0f s: have %d, need %d at step %d; %d dropped as stale since the round began",
            time.monotonic() - since,
            figures.have,
            num_required,
            figures.step,
            figures.num_stale,
        )
