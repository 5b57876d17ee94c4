"""A block written to memory, and memory read as one: the layout is that of `parts.py`, and nothing said is believed."""

import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

import gradquorum as gq
from gradquorum.engine import ReducerSpec, get_engine
from tests.support import assert_same_bits, available_engines

pytestmark = [
    pytest.mark.skipif("native" not in available_engines(), reason="only the native engine packs blocks"),
    pytest.mark.skipif(sys.platform != "linux", reason="several processes need Linux"),
]
if sys.platform == "linux":
    from gradquorum.targets.process.parts import arrays_of, gradient_parts, write
    from gradquorum.validation import check_sparse

DTYPES = [np.dtype(name) for name in ("float32", "float64", "complex64", "int64")]
NARROW = [np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]
ROWS = 100
TERMS = (ROWS, 1.0, False, False)
"""Of a block: the rows of the table, the weight, and neither lent nor looked at for NaN."""


def reducer(dtype):
    sums = np.dtype("float32") if dtype in NARROW else dtype
    return get_engine("native").sparse_reducer(ReducerSpec(dtype, sums, "SUM", 1))


def packed(ids, values):
    """Return a gradient in memory, written as one that is not plain is."""
    gradient, _ = check_sparse(gq.SparseSpec(values.dtype, None, "SUM"), "", ids, values)
    _, arrays, num_bytes = gradient_parts([gradient])
    memory = np.zeros(num_bytes, np.uint8)
    write(memory, arrays)
    return memory


IDS = np.array([3, 9, 12, 40, 99])
VALUES = np.arange(30, dtype=np.float32).reshape(5, 2, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ids", [[7], [1, 2, 3], list(range(9)), [3, 1, 2], [5, 1, 5, 0]], ids=repr)
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 2), (0,)])
def test_packed_block_lies_as_the_arrays_of_a_gradient_do(dtype, ids, row_shape):
    values = np.arange(1, 1 + len(ids) * int(np.prod(row_shape))).reshape(len(ids), *row_shape).astype(dtype)
    made = reducer(dtype)
    block = made.plain_block(np.array(ids), values, row_shape, *TERMS)
    memory = np.full(block.packed_bytes, 255, np.uint8)
    made.pack(block, memory)
    spec = gq.SparseSpec(dtype, None, "SUM")
    parts, _, num_bytes = gradient_parts([check_sparse(spec, "", np.unique(ids), values[: len(block)])[0]])
    assert num_bytes == len(memory)
    ids_there, values_there = arrays_of(memory, [spec], parts)
    expected = made.merge([block], row_shape, 1)
    np.testing.assert_array_equal(ids_there, expected[0])
    assert_same_bits(np.array(values_there), expected[1])
    again = made.packed_block(memory, len(block), row_shape, *TERMS)
    for one, other in zip(made.merge([again], row_shape, 1), expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", DTYPES + NARROW, ids=str)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 0, 1]], ids=repr)
def test_arrays_in_memory_make_the_block_that_they_make_themselves(dtype, order):
    ids, values = IDS[order], VALUES[order].astype(dtype)
    made = reducer(dtype)
    expected = made.merge([made.block(ids, values)], (2, 3), 1)
    block = made.packed_block(packed(ids, values), 3, (2, 3), *TERMS)
    for one, other in zip(made.merge([block], (2, 3), 1), expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 0, 3, 1, 2]], ids=["ascending", "not ascending"])
def test_copied_block_is_what_memory_held_then(order):
    memory = packed(IDS[order], VALUES[order])
    made = reducer(VALUES.dtype)
    block = made.packed_block(memory, 5, (2, 3), *TERMS)
    memory[:] = 255
    ids, values, _ = made.merge([block], (2, 3), 1)
    np.testing.assert_array_equal(ids, IDS)
    np.testing.assert_array_equal(values, VALUES)


def test_lent_block_keeps_the_memory_alive():
    memory = packed(IDS, VALUES)[:]  # a view, so that the array itself can be watched
    died = []
    watch = weakref.ref(memory, died.append)
    block = reducer(VALUES.dtype).packed_block(memory, 5, (2, 3), ROWS, 1.0, True, False)
    del memory
    assert block.lent and not died and watch() is not None
    del block
    assert died


@pytest.mark.parametrize(
    ("num_rows", "row_shape"),
    [
        pytest.param(0, (2, 3), id="no rows"),
        pytest.param(6, (2, 3), id="more rows"),
        pytest.param(5, (2, 4), id="longer rows"),
        pytest.param(2**62, (2, 3), id="ids of more bytes than there are numbers"),
        pytest.param(2**63 - 1, (0,), id="as many ids as can be said, of rows without elements"),
        pytest.param(1, (2**63 - 1,), id="a row as long as can be said"),
        pytest.param(1, (2**32, 2**32), id="a row whose size wraps around to 0"),
        pytest.param(1, (2**62 + 1, 4), id="a row whose size wraps around to 4"),
    ],
)
def test_what_is_not_there_is_not_read(num_rows, row_shape):
    assert reducer(VALUES.dtype).packed_block(packed(IDS, VALUES), num_rows, row_shape, *TERMS) is None


@pytest.mark.parametrize("wrong", [-1, ROWS, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_ids_beyond_the_table_make_no_block(wrong, place):
    memory = packed(IDS, VALUES)
    memory[: IDS.nbytes].view(np.int64)[place] = wrong
    assert reducer(VALUES.dtype).packed_block(memory, 5, (2, 3), *TERMS) is None


def test_unaligned_memory_goes_the_long_way():
    memory = packed(IDS, VALUES)
    shifted = np.zeros(len(memory) + 1, np.uint8)[1:]
    shifted[:] = memory
    assert reducer(VALUES.dtype).packed_block(shifted, 5, (2, 3), *TERMS) is None


def test_pack_refuses_memory_that_is_too_small_or_read_only():
    made = reducer(VALUES.dtype)
    block = made.plain_block(IDS, VALUES, (2, 3), *TERMS)
    short = np.zeros(block.packed_bytes - 1, np.uint8)
    with pytest.raises(ValueError, match="no room"):
        made.pack(block, short)
    assert not short.any()
    with pytest.raises(BufferError):
        made.pack(block, bytes(block.packed_bytes))
