"""The state of a round on its way between client and server: in one piece of memory, as it may be large.

The memory begins with a table, the name, dtype and shape of each array in msgpack; the arrays follow in that order,
each aligned.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from gradquorum.errors import InvalidArgumentError, ResourceExhaustedError
from gradquorum.memory_file import map_private
from gradquorum.targets.process import messages as m
from gradquorum.targets.process.channel import BrokenChannel
from gradquorum.targets.process.client import Client
from gradquorum.targets.process.failures import to_error
from gradquorum.targets.process.memory import SharedMemory, as_bytes
from gradquorum.targets.process.sending import Sender

__all__ = ["pack", "receive_state", "send_state", "unpack"]

_ALIGNMENT = 64
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, "BHILQbhilqefd")}
"""Those of states; no others are let in."""


class _Entry(msgspec.Struct, array_like=True, gc=False):
    name: m.Text
    dtype: Annotated[str, Meta(max_length=8)]
    shape: m.Sizes


_to_table = msgspec.msgpack.Encoder().encode
_from_table = msgspec.msgpack.Decoder(list[_Entry])


def _aligned(end: int) -> int:
    return -(-end // _ALIGNMENT) * _ALIGNMENT


def _table(state: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return the table of a state, and the bytes that it takes with its arrays.

    Raises:
        InvalidArgumentError: it is none.
    """
    entries = []
    for name, array in state.items() if isinstance(state, Mapping) else [(None, None)]:
        if not isinstance(name, str) or not isinstance(array, np.ndarray) or array.dtype.str not in _DTYPES:
            raise InvalidArgumentError(
                f"state: expected a mapping of names to plain arrays, as state_dict() returns it; got {name!r}: "
                f"{type(array).__name__}"
            )
        entries.append(_Entry(m.to_text(name), array.dtype.str, array.shape))
    table = _to_table(entries)
    end = len(table)
    for array in state.values():
        end = _aligned(end) + array.nbytes
    return table, end


def _write(memory: NDArray[np.uint8], table: bytes, arrays: Sequence[NDArray[Any]]) -> None:
    end = len(table)
    memory[:end] = np.frombuffer(table, np.uint8)
    for array in arrays:
        start = _aligned(end)
        end = start + array.nbytes
        np.copyto(memory[start:end].view(array.dtype).reshape(array.shape), array)


def unpack(memory: NDArray[np.uint8], table_bytes: int) -> dict[str, NDArray[Any]]:
    """Return the state that lies in some memory, as views of it. What the arrays mean remains to be checked.

    Raises:
        ValueError: there is none.
    """
    if table_bytes > len(memory):
        raise ValueError("the table does not fit into its memory")
    state: dict[str, NDArray[Any]] = {}
    end = table_bytes
    for entry in _from_table.decode(memory[:table_bytes].tobytes()):
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ValueError("no dtype of a state")
        start = _aligned(end)
        end = start + math.prod(entry.shape) * dtype.itemsize  # Python's integers do not overflow
        if end > len(memory):
            raise ValueError("the arrays do not fit into their memory")
        state[m.from_text(entry.name)] = memory[start:end].view(dtype).reshape(entry.shape)
    return state


def pack(state: Mapping[str, NDArray[Any]], memory: SharedMemory) -> tuple[m.State, int]:
    """Return the reply that announces a state, and the descriptor of the memory that holds it.

    Raises:
        ResourceExhaustedError: there is no shared memory.
    """
    table, num_bytes = _table(state)
    mapping, descriptor = memory.make(num_bytes)
    _write(as_bytes(mapping), table, list(state.values()))
    return m.State(num_bytes, len(table)), descriptor


def receive_state(client: Client, handle: int) -> dict[str, NDArray[Any]]:
    """Ask for the state of a round. The arrays are views of memory that is this process's own.

    Raises:
        GradQuorumError: what the server answered.
        UnavailableError: the server is gone.
    """
    connection = client.check_out()
    try:
        reply = client.exchange(connection, m.Ask(handle, "state"))
        if type(reply) is m.State:
            descriptor = connection.channel.receive_descriptor()
            try:
                memory = map_private(descriptor, reply.num_bytes)
            finally:
                os.close(descriptor)
    except BaseException as error:
        connection.channel.close()
        if isinstance(error, BrokenChannel):
            client.fail(error)
        raise
    client.check_in(connection)
    if type(reply) is m.Failure:
        raise to_error(reply)
    return unpack(as_bytes(memory), reply.table_bytes)


def send_state(client: Client, handle: int, sender: Sender, state: Mapping[str, Any]) -> None:
    """Let a state take the place of what the round holds.

    Raises:
        GradQuorumError: what the server answered. Nothing has changed.
        UnavailableError: the server is gone.
    """
    table, num_bytes = _table(state)
    connection = client.check_out()
    try:
        reply = sender.block(connection, num_bytes, 0.0)
        if type(reply) is not m.Failure:
            block = reply
            _write(connection.free.pop(block), table, list(state.values()))
            reply = client.exchange(connection, m.LoadState(handle, block, len(table)), outcome_known=False)
    except BaseException:
        connection.channel.close()
        raise
    client.check_in(connection)
    if type(reply) is m.Failure:
        error = to_error(reply)
        if isinstance(error, TimeoutError):  # no room, where applies would wait for it
            raise ResourceExhaustedError(f"no room for the state: {error}") from error
        raise error
