"""What an engine is: the arithmetic on gradients, and nothing else.

An engine makes *blocks* of gradients and merges a log of them. It never waits, knows no step, no worker
and no lock. Blocks are opaque to everything above and immutable once made, so any number of threads may
merge the same ones. All ids and shapes that come in have been checked.

Both engines give the same bits (NaN payloads apart). What they compute:

* Rows of one id within one gradient are added in order of appearance, in the accumulate dtype, starting
  from the first row (so that -0 stays -0).
* Rows of one id in a log are added in the order of the log, again starting from the first, each first
  multiplied by the weight of its gradient under ``"MEAN_BY_WEIGHT"``.
* The sum is *divided* (never multiplied by a reciprocal) by the denominator of the reduction, converted to
  the accumulate dtype, and then converted once to the dtype, round to nearest even.
* A complex row is a real row of twice the width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gradquorum.engine.parts import DenseParts, SparseParts
from gradquorum.engine.splitting import PackedRows

__all__ = ["AbstractDenseReducer", "AbstractEngine", "AbstractSparseReducer", "Block", "PlainBlock", "ReducerSpec"]


class ReducerSpec(NamedTuple):
    """What fixes the arithmetic of one member of a round.

    Attributes:
        dtype: of the gradients and of the result.
        accumulate_dtype: of the sums.
        reduction_type: ``"MEAN"``, ``"SUM"``, ``"MEAN_BY_COUNT"`` or ``"MEAN_BY_WEIGHT"``.
        num_threads: threads that a merge may use; None for all cores of this process.
    """

    dtype: np.dtype[Any]
    accumulate_dtype: np.dtype[Any]
    reduction_type: str
    num_threads: int | None = None


class Block(Protocol):
    """One or several gradients of one member, in the form its engine likes.

    Attributes:
        num_bytes: memory that the block keeps alive, lent memory included.
        lent: whether it reads the caller's array.
        finite: False if `check_finite` was asked for and a row is NaN or infinite.
    """

    @property
    def num_bytes(self) -> int: ...
    @property
    def lent(self) -> bool: ...
    @property
    def finite(self) -> bool: ...


class PlainBlock(Block, Protocol):
    """What `plain_block` returns.

    Attributes:
        packed_bytes: memory that `pack` needs.
    """

    @property
    def packed_bytes(self) -> int: ...
    def __len__(self) -> int: ...


class AbstractSparseReducer(ABC):
    """The arithmetic of one sparse member."""

    @abstractmethod
    def block(
        self,
        indices: NDArray[np.int64],
        values: NDArray[Any],
        *,
        weight: float = 1.0,
        lend: bool = False,
        check_finite: bool = False,
    ) -> Block:
        """Put one gradient in order and copy it.

        Args:
            indices: int64 `[n]`, not negative, private to the engine from here on.
            values: `[n, *row]` of the dtype, any layout, native byte order.
            weight: the weight of the gradient, already rounded to the accumulate dtype.
            lend: read `values` until the block dies instead of copying them. Only done for C-contiguous
                values whose ids ascend without repeats.
            check_finite: judge the rows, after repeats are summed, in the accumulate dtype.

        Raises:
            MemoryError: there is no room.
        """

    def plain_block(
        self,
        indices: Any,
        values: Any,
        row_shape: tuple[int, ...],
        num_table_rows: int,
        weight: float,
        lend: bool,
        check_finite: bool,
    ) -> PlainBlock | None:
        """Check one gradient and do what `block` does, if it is as plain as can be.

        Plain are int64 ids `[n]` from 0 to below `num_table_rows`, and values `[n, *row_shape]` of the dtype, n above
        0, both in contiguous NumPy arrays or from `coo_memory`. None for all others, right or wrong: they need a
        closer look.

        Raises:
            MemoryError: there is no room.
        """
        return None

    def pack(self, block: PlainBlock, memory: Any) -> None:
        """Write a plain block to memory with room for it: ids, then values at the next multiple of 64 bytes.

        The dtype must be that of the sums, too.
        """
        raise NotImplementedError("an engine whose plain_block returns blocks packs them, too")

    def packed_block(
        self,
        memory: Any,
        num_rows: int,
        row_shape: tuple[int, ...],
        num_table_rows: int,
        weight: float,
        lend: bool,
        check_finite: bool,
    ) -> PlainBlock | None:
        """Do what `plain_block` does with the gradient of `num_rows` rows that lies in memory as `pack` writes it.

        The memory may change meanwhile, and nothing that is said of it is trusted. Also None if there is not so much.
        """
        return None

    @abstractmethod
    def merge(
        self, blocks: Sequence[Block], row_shape: tuple[int, ...], num_gradients: int
    ) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
        """Return the reduced gradient of a log: ids `[r]`, ascending, values `[r, *row]`, counts `[r]`."""

    def consume(
        self, blocks: Sequence[Block], row_shape: tuple[int, ...], num_gradients: int, kept: list[Any]
    ) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
        """Do what `merge` does, in less memory if possible: the blocks, which nobody else may have, may be lost.

        What takes their place is in `kept` at once, and makes a second call return the same. One that fails loses
        nothing.
        """
        return self.merge(blocks, row_shape, num_gradients)

    @abstractmethod
    def compact(self, blocks: Sequence[Block]) -> Block:
        """Merge a prefix of a log, undivided, into one block that can stand in its place."""

    @abstractmethod
    def distinct_bytes(self, blocks: Sequence[Block]) -> int:
        """Estimate the bytes of the distinct rows of a log: an id and a row each.

        An element counts as in the dtype, but at least as half of one in the accumulate dtype.
        """

    @abstractmethod
    def export_block(self, block: Block) -> SparseParts:
        """Return copies of what a block holds, the same for all engines."""

    @abstractmethod
    def import_block(self, parts: SparseParts, num_gradients: int) -> Block:
        """Return a block of that content, which is copied and has been checked; it merges to the same bits.

        Raises:
            MemoryError: there is no room.
        """


class AbstractDenseReducer(ABC):
    """The arithmetic of one dense member."""

    @abstractmethod
    def block(
        self, value: NDArray[Any] | None, *, weight: float = 1.0, lend: bool = False, check_finite: bool = False
    ) -> Block:
        """Copy one gradient, as for the sparse reducer. None is a gradient without this member."""

    @abstractmethod
    def merge(self, blocks: Sequence[Block], shape: tuple[int, ...], num_gradients: int) -> NDArray[Any]:
        """Return the reduced gradient of a log: `shape`, zeros if no block has a value."""

    @abstractmethod
    def compact(self, blocks: Sequence[Block]) -> Block:
        """Add up a prefix of a log, undivided, into one block that can stand in its place."""

    @abstractmethod
    def distinct_bytes(self, blocks: Sequence[Block]) -> int:
        """Return the bytes of one gradient of a log, counted as for sparse members."""

    @abstractmethod
    def export_block(self, block: Block) -> DenseParts:
        """Return copies of what a block holds, as for the sparse reducer."""

    @abstractmethod
    def import_block(self, parts: DenseParts, num_gradients: int) -> Block:
        """Return a block of that content, as for the sparse reducer."""


class AbstractEngine(ABC):
    """Makes the reducers of the members of a round."""

    name: str
    tensor_memory: tuple[type, ...] = ()
    """The types of what `coo_memory` returns."""

    @abstractmethod
    def sparse_reducer(self, spec: ReducerSpec) -> AbstractSparseReducer: ...

    @abstractmethod
    def dense_reducer(self, spec: ReducerSpec) -> AbstractDenseReducer: ...

    def coo_memory(self, indices: Any, values: Any, format: str) -> tuple[Any, Any] | None:
        """Return the memory of a sparse tensor's ids `[1, n]`, as `[n]`, and values, for `plain_block`.

        None where that takes a closer look, as for values of another format (NumPy's character of a dtype). Both export
        their memory by the buffer protocol and keep the tensors alive.
        """
        return None

    def coo_tensors(self, type: Any, indices: Any, values: Any) -> tuple[Any, Any] | None:
        """Return what a reducer returned as tensors of a framework's type, ids as `[1, n]`, on the same memory.

        None where that takes a closer look.
        """
        return None

    @abstractmethod
    def split(
        self, indices: NDArray[np.int64], values: NDArray[Any], num_parts: int, bounds: tuple[int, ...] | None
    ) -> list[PackedRows]:
        """Split a gradient by its ids; each part is a copy, its rows in the order in which they are.

        Args:
            indices: int64 `[n]`, contiguous.
            values: `[n, *row]`, contiguous, of any dtype.
            num_parts: how many there are.
            bounds: as for `parts_of`.

        Raises:
            MemoryError: there is no room.
        """

    def trim_memory(self, from_bytes: int = 0) -> int:
        """Give the memory kept for reuse back to the system, in pieces from that size on; return how many bytes."""
        return 0
