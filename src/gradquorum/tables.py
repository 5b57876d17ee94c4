"""Parameters that processes share: arrays in shared memory that pickle as handles."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any, Literal, NamedTuple, NoReturn, Self, overload

import numpy as np
from numpy.typing import NDArray

from gradquorum.arrays import as_dims, as_integer
from gradquorum.dtypes import as_dtype
from gradquorum.errors import InvalidArgumentError, ResourceExhaustedError
from gradquorum.memory_file import Handle, MemoryFile
from gradquorum.specs import MAX_BYTES, MAX_DIMS

__all__ = ["ConsistentTable", "SharedTable", "shared_table"]

_ALIGNMENT = 64  # of buffers behind one another: a cache line


@overload
def shared_table(shape: Any, dtype: Any, *, consistent: Literal[False] = False) -> SharedTable: ...
@overload
def shared_table(shape: Any, dtype: Any, *, consistent: Literal[True]) -> ConsistentTable: ...
def shared_table(shape: Any, dtype: Any, *, consistent: bool = False) -> SharedTable | ConsistentTable:
    """Return an array of zeros in shared memory, to which its pickle leads other processes.

    Give it to a child as an argument (`spawn`, `forkserver`; after `fork` the child has it anyway), send it through a
    queue or a pipe, or pickle it for an unrelated process of the same user: all see the same numbers. Only Linux.

    Without `consistent` it is a `numpy.ndarray`, written and read in place without any lock. A read beside a write can
    be *torn*: it finds some of the numbers new and the others old (each number by itself is whole, but for complex128).
    A round makes that harmless: its step has advanced before a taker has the gradients with which it writes, so what
    was computed on a torn read carries an older step and is dropped as stale. `publish` then only moves the step.

    With `consistent` there are two buffers, and readers outside the round (an evaluation, a checkpoint) never see a
    torn read: `table[index]` returns a copy from one version, `table[index] = values` makes the next version, which is
    out as a whole when the assignment ends. So `table[ids] -= rows` reads, computes, and publishes one version. A
    reader never stops a writer; it reads again when two versions came out meanwhile. Writers take turns.

    Args:
        shape: `[rows, *row]`, or one integer. Sizes may be 0; `()` is one number.
        dtype: what accumulators take: float16, bfloat16, float32, float64, complex64, complex128, int32 or int64.
        consistent: whether to keep two buffers; that takes twice the memory, and a write costs the rows of two writes.

    Returns:
        A `numpy.ndarray` of zeros `[*shape]`; with `consistent` a table with `[...]`, `shape`, `dtype` and `version`.
        Views of the array pickle as handles to the same memory, copies of it as what they are. The memory is freed when
        the last process that has it drops it or dies.

    Raises:
        InvalidArgumentError: the shape is none.
        InvalidDTypeError: the dtype is not supported; structured ones are not.
        ResourceExhaustedError: there is no memory of that size.
        UnavailableError: when unpickled: the process that pickled it has ended, or has dropped the table.
        GradQuorumError: this is not Linux.

    Threads:
        Any number; nothing here waits but a consistent write, for another one to end.

    Example:
        >>> import pickle
        >>> import gradquorum as gq
        >>> table = gq.shared_table((1000, 2), "float32")
        >>> same = pickle.loads(pickle.dumps(table))  # here or in another process
        >>> table[7] = [1.0, 2.0]
        >>> same[7].tolist()
        [1.0, 2.0]
        >>> table = gq.shared_table((1000, 2), "float32", consistent=True)
        >>> table[[3, 7]] += 0.5
        >>> table[7].tolist(), table.version
        ([0.5, 0.5], 1)
    """
    layout = _Layout(_as_shape(shape), as_dtype(dtype).name)
    if math.prod(filter(None, layout.shape)) * as_dtype(dtype).itemsize > MAX_BYTES:  # NumPy's limit, rows or not
        raise ResourceExhaustedError(f"shape: expected less than 2**63 bytes, got {layout.shape} of {layout.dtype}")
    if not isinstance(consistent, (bool, np.bool_)):
        raise InvalidArgumentError(f"consistent: expected True or False, got {consistent!r}")
    if consistent:
        return ConsistentTable(MemoryFile.create(ConsistentTable.num_bytes(layout)), layout)
    return SharedTable(MemoryFile.create(layout.num_bytes), layout)


def _as_shape(shape: Any) -> tuple[int, ...]:
    if not hasattr(shape, "__len__"):
        shape = (as_integer("shape", shape),)
    sizes = as_dims("shape", shape, unknown=())
    if len(sizes) > MAX_DIMS:
        raise InvalidArgumentError(f"shape: expected at most {MAX_DIMS} dims, got {len(sizes)}")
    return sizes  # type: ignore[return-value]  # nothing is unknown


class _Layout(NamedTuple):
    """What an array in the memory looks like."""

    shape: tuple[int, ...]
    dtype: str
    offset: int = 0
    strides: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * as_dtype(self.dtype).itemsize


class SharedTable(np.ndarray[Any, np.dtype[Any]]):
    """An array in shared memory, made by `shared_table`: a `numpy.ndarray` `[*shape]` of its dtype.

    It and its views pickle as handles to the same memory, and keep it alive. What NumPy computes from it is a plain
    `numpy.ndarray`; a copy made of it pickles as what it is.

    Raises:
        UnavailableError: when unpickled: the process that pickled it has ended, or has dropped the table.
        ResourceExhaustedError: when unpickled: there is no address space.

    Threads:
        As for any array: nothing waits, and nothing keeps reads and writes apart.
    """

    _memory: MemoryFile | None = None  # of the whole table; views have it as their base

    def __new__(cls, memory: MemoryFile, layout: _Layout) -> Self:
        """Lay an array over the memory."""
        dtype = as_dtype(layout.dtype)
        self = super().__new__(cls, layout.shape, dtype, memory.map, layout.offset, layout.strides)
        self._memory = memory
        return self

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        is_copy = type(found) is SharedTable and found._find_memory() is None
        return found.view(np.ndarray) if is_copy else found

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if array is self:  # it was computed in place
            return array
        return array[()] if return_scalar else array.view(np.ndarray)

    def __reduce_ex__(self, protocol: Any) -> Any:
        memory = self._find_memory()
        if memory is None:  # a copy
            return self.view(np.ndarray).__reduce_ex__(protocol)
        start = np.frombuffer(memory.map, np.uint8, 1).ctypes.data
        layout = _Layout(self.shape, self.dtype.name, self.ctypes.data - start, self.strides)
        return _attach_table, (tuple(memory.handle()), tuple(layout), len(memory.map))

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def _find_memory(self) -> MemoryFile | None:
        """Return the memory that this array, or one that it is a view of, was laid over."""
        array: Any = self
        while isinstance(array, np.ndarray):
            if isinstance(array, SharedTable) and array._memory is not None:
                return array._memory
            array = array.base
        return None


def _attach_table(handle: tuple[Any, ...], layout: tuple[Any, ...], num_bytes: int) -> SharedTable:
    return SharedTable(MemoryFile.attach(Handle(*handle), num_bytes), _Layout(*layout))


class ConsistentTable:
    """A table of which readers see whole versions, made by `shared_table(..., consistent=True)`.

    `table[index]` returns a copy of `[*shape][index]` from one version; `table[index] = values` publishes the next
    one, and if it raises there is none. `numpy.asarray(table)` is `table[...]`. It pickles as a handle.

    Raises:
        UnavailableError: when unpickled: the process that pickled it has ended, or has dropped the table.
        ResourceExhaustedError: when unpickled: there is no address space.

    Threads:
        Any, of any process. Reads never wait; writes wait for one another, in no order.

    Version v is in buffer v % 2 until v + 2 is begun. Two words go before the buffers: the version that is out, and the
    one that was begun last. A reader copies from the buffer that is out, and does it again if the one after the next
    has been begun meanwhile. A writer that dies leaves a buffer that is not out.

    Guarded by `MemoryFile.exclusive`, for writers: the word of the begun version, the buffer that is not out, `_last`.
    """

    __slots__ = ("_begun", "_buffers", "_last", "_layout", "_memory", "_published")

    def __init__(self, memory: MemoryFile, layout: _Layout) -> None:
        self._memory = memory
        self._layout = layout
        dtype = as_dtype(layout.dtype)
        words = np.frombuffer(memory.map, np.int64, 2)
        self._published, self._begun = words[:1], words[1:]
        self._buffers = [
            np.ndarray(layout.shape, dtype, memory.map, _ALIGNMENT + i * _aligned(layout.num_bytes)) for i in (0, 1)
        ]
        self._last: tuple[int, Any] = (0, None)
        """The version that this handle has written, and where it differs from the one before. None: everywhere."""

    @staticmethod
    def num_bytes(layout: _Layout) -> int:
        """Return how much memory such a table needs."""
        return _ALIGNMENT + 2 * _aligned(layout.num_bytes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes, `[rows, *row]`."""
        return self._layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its elements."""
        return self._buffers[0].dtype

    @property
    def version(self) -> int:
        """How often it has been written: the number of the version that is out, 0 for all zeros."""
        return int(self._published[0])

    def __len__(self) -> int:
        return len(self._buffers[0])

    def __getitem__(self, index: Any) -> Any:
        while True:
            version = self.version
            buffer = self._buffers[version % 2]
            _fence()
            found = buffer[index]
            if np.may_share_memory(found, buffer):
                found = found.copy()
            _fence()
            if self._begun[0] < version + 2:
                return found

    def __setitem__(self, index: Any, values: Any) -> None:
        written = copy.deepcopy(index)  # before there is anything to see: an array may be the caller's
        with self._memory.exclusive():
            version = self.version
            old, new = self._buffers[version % 2], self._buffers[(version + 1) % 2]
            last, where = self._last
            self._last = (0, None)  # until this is over
            self._begun[0] = version + 1
            _fence()
            behind = where if where is not None and last == version else ...
            new[behind] = old[behind]
            new[written] = values
            _fence()
            self._published[0] = version + 1
            self._last = (version + 1, written)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a consistent table is read by copying; copy=False cannot be")
        return np.asarray(self[...], dtype)

    def __iter__(self) -> NoReturn:
        raise TypeError("iterate over table[...], which is one version; the rows of a table may change meanwhile")

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_consistent, (tuple(self._memory.handle()), tuple(self._layout))

    def __repr__(self) -> str:
        return f"<ConsistentTable {self.dtype.name} {self.shape}: version {self.version}>"


def _attach_consistent(handle: tuple[Any, ...], layout: tuple[Any, ...]) -> ConsistentTable:
    found = _Layout(*layout)
    return ConsistentTable(MemoryFile.attach(Handle(*handle), ConsistentTable.num_bytes(found)), found)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _fence() -> None:
    """Keep the processor from moving what comes before to what comes after.

    Python has no name for that. A lock taken and given back lets its neighbours move in, not out; with two of them,
    what is before the first has ended where the second begins. (x86-64 needs none of it here.)
    """
    for _ in range(2):
        with threading.Lock():  # its own: a fork or a signal handler may come in between
            pass
