"""What is kept of a round beyond its takes: its state, for a restart, and its arrival times, for choosing a quorum."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from gradquorum.arrays import as_integer
from gradquorum.arrivals import ArrivalReport
from gradquorum.errors import InvalidArgumentError
from gradquorum.targets import AbstractTarget

__all__ = ["Keeping"]


class Keeping:
    """The methods of `AbstractAccumulator` for that."""

    _target: AbstractTarget

    # Checkpoints

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return all that the round holds at one moment, while others may go on: arrays by name, all of them copies.

        In it: step, published step, the gradients accumulated, deferred, and detached but not delivered (also those
        that a take is about to deliver), with counts and weights, the marks of the workers, who has joined and left.
        Not in it: waiting calls and recorded arrivals. All arrays are plain NumPy, so they may be put into a
        checkpoint of any format beside the parameters.

        Raises:
            InvalidArgumentError: a worker's name cannot be written in UTF-8.
            ResourceExhaustedError: there is no memory for the copies.
            ClosedError: the handle is closed.

        Example:
            >>> import gradquorum as gq
            >>> acc = gq.SparseConditionalAccumulator("float32")
            >>> _ = acc.apply_grad([2], [[1.0]])
            >>> restored = gq.SparseConditionalAccumulator("float32")
            >>> restored.load_state_dict(acc.state_dict())
            >>> restored.take_grad(1).values
            array([[1.]], dtype=float32)
        """
        return self._target.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state in the place of what the round holds: the same takes then return the same bits.

        It may come from either engine. Step, published step, marks and members are replaced; gradients are not, so the
        round must hold none. Takes that wait are served from the restored round, and who waits for a published step
        looks again.

        Args:
            state: what `state_dict` of an accumulator or group of the same spec has returned.

        Raises:
            InvalidArgumentError: it is no such state or one of another spec, or the round holds gradients: take or
                `discard` them first. Nothing has changed.
            ResourceExhaustedError: there is no memory for the copies. Nothing has changed.
            ClosedError: the handle is closed.
        """
        self._target.load_state(state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict` to a file, which is the old one or the new one at any moment, also after a crash.

        The format is safetensors; needs the extra ``checkpoint``. A symbolic link of that name is replaced by the file.

        Raises:
            InvalidArgumentError: the path is none, or a worker's name cannot be written.
            OSError: it could not be written. A file that was there is as it was.
            GradQuorumError: safetensors is not installed.
            ClosedError: the handle is closed.
        """
        from gradquorum.checkpoint import write_checkpoint

        write_checkpoint(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Do what `load_state_dict` does, with a file that `save` wrote.

        Raises:
            InvalidArgumentError: it is no such file, no regular one, or not all of one, or as for `load_state_dict`.
                Nothing has changed.
            OSError: it could not be read.
            GradQuorumError: safetensors is not installed.
            ClosedError: the handle is closed.
        """
        from gradquorum.checkpoint import read_checkpoint

        self.load_state_dict(read_checkpoint(path))

    # Which quorum

    def observe_arrivals(self, num_rounds: int | None = 256) -> None:
        """Record, from now on and anew, when gradients arrive, for the last so many rounds; None ends it.

        Costs well below a microsecond for each gradient. The open round is recorded if it is empty, else the first
        one is the next.

        Raises:
            InvalidArgumentError: it is no number from 1 on.
            ClosedError: the handle is closed.
        """
        if num_rounds is not None and (num_rounds := as_integer("num_rounds", num_rounds)) < 1:
            raise InvalidArgumentError(f"num_rounds: expected 1 or more, or None; got {num_rounds}")
        self._target.observe(num_rounds)

    def arrivals(self) -> ArrivalReport:
        """Return for every quorum what waiting and dropping would have been in the rounds recorded.

        Print it for a table. What it is made of and what it cannot know: see `gradquorum.arrivals`.

        Raises:
            ClosedError: the handle is closed.
        """
        return self._target.arrivals()

    def suggest_num_required(self, *, gain: float = 1.0) -> int:
        """Return the quorum N that would have given the most progress per second: ``N ** gain / mean_wait(N)``.

        Args:
            gain: what a round gains from more gradients; see `ArrivalReport.suggest_num_required`.

        Raises:
            InvalidArgumentError: nothing has been recorded (call `observe_arrivals` first), or `gain` cannot be.
            ClosedError: the handle is closed.
        """
        return self.arrivals().suggest_num_required(gain=gain)
