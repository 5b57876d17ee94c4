"""
The native engine of gradquorum: arithmetic on gradients, and nothing else.
"""



def end_calls() -> None:
    """
    Wait for the calls of other threads; those that come later keep the GIL. To be called when the program ends.
    """

class Memory:
    """
    Memory of a result, for NumPy to build an array on; its bytes are writable.
    """

    def __len__(self) -> int: ...

class TensorMemory:
    """The memory of a framework's tensor, by the buffer protocol."""

def coo_memory(indices: object, values: object, format: str) -> tuple[TensorMemory, TensorMemory] | None:
    """
    Return the memory of ids `[1, n]`, as `[n]`, and of values `[n, *row]` of that format; None unless both are contiguous in this machine's memory, and their framework has DLPack's exchange interface in C.
    """

def coo_tensors(type: object, indices: object, values: object) -> tuple[object, object] | None:
    """
    Return ids `[n]`, as `[1, n]`, and values `[n, *row]` of floats as tensors of that type on their memory; None where that takes a closer look.
    """

class SparseBlock:
    """One sparse gradient, or the merged prefix of a log. Immutable."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def lent(self) -> bool: ...

    @property
    def finite(self) -> bool: ...

    @property
    def packed_bytes(self) -> int:
        """What `pack` takes."""

    def __len__(self) -> int: ...

class SparseReducer:
    """The arithmetic of one sparse member."""

    def __init__(self, dtype: str, accumulate_dtype: str, reduction_type: str, num_threads: int) -> None: ...

    def block(self, indices: object, values: object, weight: float, lend: bool, check_finite: bool) -> SparseBlock: ...

    def plain_block(self, indices: object | None, values: object | None, row_shape: object, num_table_rows: int, weight: float, lend: bool, check_finite: bool) -> SparseBlock | None:
        """
        Return None for whatever `block` would refuse, and for anything else that needs a second look.
        """

    def packed_block(self, memory: object, num_rows: int, row_shape: object, num_table_rows: int, weight: float, lend: bool, check_finite: bool) -> SparseBlock | None:
        """
        Return what `plain_block` returns for the ids and values that lie in memory as `pack` writes them.
        """

    def pack(self, block: SparseBlock, memory: object) -> None:
        """
        Write ids and values to writable memory: the ids, then the values at the next multiple of 64 bytes.
        """

    def merge(self, blocks: object, row_shape: object, num_gradients: int) -> tuple[object, object, object]: ...

    def consume(self, blocks: object, row_shape: object, num_gradients: int, results: list) -> None:
        """
        Append what `merge` returns, without the number of rows, to a list in the same call. Then the values of the blocks are lost, but for lent ones.
        """

    def compact(self, blocks: object) -> SparseBlock: ...

    def export_block(self, block: SparseBlock) -> tuple:
        """
        Return rows, width, whether they are sums, the weight, and copies of ids, values and counts (None for one gradient).
        """

    def import_block(self, indices: object, rows: object, summed: bool, counts: object | None, weight: float, num_gradients: int) -> SparseBlock:
        """
        Return a block of what `export_block` of this or another engine has returned.
        """

    def distinct_bytes(self, blocks: object) -> int: ...

def split(indices: object, values: object, num_parts: int, bounds: object | None) -> list:
    """
    Return for each part its number of rows, and memory in which they lie as `pack` writes them.
    """

class DenseBlock:
    """One dense gradient, or the running sum of several. Immutable."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def lent(self) -> bool: ...

    @property
    def finite(self) -> bool: ...

class DenseReducer:
    """The arithmetic of one dense member."""

    def __init__(self, dtype: str, accumulate_dtype: str, reduction_type: str, num_threads: int) -> None: ...

    def block(self, value: object | None, weight: float, lend: bool, check_finite: bool) -> DenseBlock: ...

    def merge(self, blocks: object, shape: object, num_gradients: int) -> Memory: ...

    def compact(self, blocks: object) -> DenseBlock: ...

    def export_block(self, block: DenseBlock) -> tuple:
        """
        Return the elements, whether they are sums, the weight, whether it is compacted, how many carried it, and a copy of the values.
        """

    def import_block(self, total: object | None, summed: bool, weight: float, compacted: bool, count: int) -> DenseBlock:
        """
        Return a block of what `export_block` of this or another engine has returned.
        """

    def distinct_bytes(self, blocks: object) -> int: ...

def trim_memory(from_bytes: int = 0) -> int:
    """
    Give the memory kept for reuse back to the system, pieces from that size on; return how many bytes that were.
    """

def set_memory_cap(cap_bytes: int) -> None:
    """Set the most bytes kept for reuse."""

def memory_stats() -> dict:
    """Return what the memory pool keeps and what is in use."""
