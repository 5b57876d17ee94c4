"""`shared_table`: one array for many processes, by handle."""

import fcntl
import gc
import mmap
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import gradquorum as gq
from tests.process import children
from tests.process.leftovers import descriptors, shared_files
from tests.process.running import exit_code, start
from tests.support import TIMEOUT

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int32", "int64"]
both_kinds = pytest.mark.parametrize("consistent", [False, True], ids=["plain", "consistent"])
start_methods = pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])


def again(table):
    return pickle.loads(pickle.dumps(table))


def num_descriptors():
    """Return how many tables this process has: connections of other tests may be closed meanwhile."""
    gc.collect()
    return sum("memfd:gradquorum-" in path for path in descriptors())


# What it is


@both_kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (3, 2), (0, 4), (2, 1, 5)], ids=str)
def test_table_when_made_is_of_zeros_and_its_pickle_leads_to_it(shape, dtype, consistent):
    table = gq.shared_table(shape, dtype, consistent=consistent)
    same = again(table)
    for one in (table, same):
        assert one.shape == shape
        assert one.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        np.testing.assert_array_equal(one[...], np.zeros(shape, one.dtype))
    table[...] = 3
    np.testing.assert_array_equal(np.asarray(same), np.full(shape, 3, table.dtype))


@pytest.mark.parametrize(
    ("shape", "expected"), [(3, (3,)), (np.int64(3), (3,)), ([3, 2], (3, 2)), (np.array([3]), (3,))]
)
def test_table_takes_what_numpy_calls_a_shape(shape, expected):
    assert gq.shared_table(shape, "f4").shape == expected


@both_kinds
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "S4", "O", "datetime64[s]", [("a", "f4"), ("b", "i8")], None], ids=str
)
def test_table_of_a_dtype_that_is_not_supported_is_refused_by_name(dtype, consistent):
    with pytest.raises(gq.InvalidDTypeError, match="expected one of float16, bfloat16, float32"):
        gq.shared_table((3,), dtype, consistent=consistent)


@pytest.mark.parametrize("shape", [None, 2.5, -1, (2, -1), (2, None), "ab", {3}, True, (1,) * 33], ids=str)
def test_table_of_a_shape_that_is_none_is_refused(shape):
    with pytest.raises(gq.InvalidArgumentError, match="shape"):
        gq.shared_table(shape, "float32")


def test_table_neither_consistent_nor_not_is_refused():
    with pytest.raises(gq.InvalidArgumentError, match="consistent"):
        gq.shared_table(3, "float32", consistent="yes")


@both_kinds
@pytest.mark.parametrize("shape", [2**43, (2**31, 2**31), 2**62, (2**63 - 1,), (0, 2**62)], ids=str)
def test_table_that_no_memory_can_hold_raises_and_leaves_nothing(shape, consistent):
    before = num_descriptors()
    with pytest.raises(gq.ResourceExhaustedError, match="shape"):
        gq.shared_table(shape, "float64", consistent=consistent)
    assert num_descriptors() == before


def test_table_elsewhere_than_on_linux_is_refused_by_an_error_of_ours(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(gq.GradQuorumError, match="several processes need Linux, and this is darwin"):
        gq.shared_table(3, "float32")


@both_kinds
def test_table_without_address_space_raises_and_leaves_no_descriptor(monkeypatch, consistent):
    table = gq.shared_table(3, "float32", consistent=consistent)
    handle, before = pickle.dumps(table), num_descriptors()

    def fail(*args, **options):
        raise OSError("no address space")

    monkeypatch.setattr(mmap, "mmap", fail)
    for call in (lambda: gq.shared_table(3, "float32", consistent=consistent), lambda: pickle.loads(handle)):
        with pytest.raises(gq.ResourceExhaustedError, match="address space"):
            call()
    assert num_descriptors() == before


@both_kinds
def test_table_when_dropped_closes_its_descriptors(consistent):
    before = num_descriptors()
    table = gq.shared_table((100, 3), "float32", consistent=consistent)
    same = again(table)
    row = table[5]
    assert num_descriptors() > before
    del table, same, row
    assert num_descriptors() == before


def test_table_is_not_truncated_by_anybody():
    table = gq.shared_table(4096, "float64")
    path = f"/proc/self/fd/{table._memory.handle().descriptor}"
    descriptor = os.open(path, os.O_RDWR)
    try:
        for size in (0, 2**20):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(descriptor)
    table[-1] = 1.0


# A plain one is an array


def test_views_pickle_as_handles_and_copies_as_copies():
    table = gq.shared_table((6, 4), "float32")
    for view in (table[2:5], table[1], table.T, table[::-2, 1:], table.reshape(-1)[5:9]):
        same = again(view)
        assert same.shape == view.shape
        view[...] = np.random.default_rng(0).random(view.shape)
        np.testing.assert_array_equal(same, view)
    for copy in (table.copy(), table[[1, 2]], table + 1, table[table > 0], np.array(table)):
        before = copy.copy()
        same = again(copy)
        assert type(same) is np.ndarray
        table += 1
        np.testing.assert_array_equal(same, before)


def test_results_of_arithmetic_are_plain_arrays():
    table = gq.shared_table((6, 4), "float32")
    for result in (table + 1, 1 - table, table[[1, 2]], np.exp(table), table.sum(axis=0)):
        assert type(result) is np.ndarray
    assert isinstance(table.sum(), np.float32)
    before = table
    table += 1
    table *= 2
    assert table is before
    assert np.add(table, 1, out=table) is table
    np.testing.assert_array_equal(again(table), np.full((6, 4), 3))


# Other processes


@both_kinds
@start_methods
def test_table_given_to_a_child_is_the_same_memory(method, consistent):
    table = gq.shared_table((3, 2), "float64", consistent=consistent)
    table[1] = 4.0
    assert exit_code(start(children.add, table, 1.0, method=method)) == 0
    np.testing.assert_array_equal(table[...], [[1, 1], [5, 5], [1, 1]])


@start_methods
def test_handle_goes_through_queues_and_on_from_there(method):
    context = multiprocessing.get_context(method)
    inbox, outbox = context.Queue(), context.Queue()
    child = start(children.add_received, inbox, outbox, 2.0, method=method)
    table = gq.shared_table(3, "float32")
    inbox.put(table)
    back = outbox.get(timeout=TIMEOUT)
    back[0] = 7.0
    np.testing.assert_array_equal(table, [7, 2, 2])
    inbox.put(None)
    assert exit_code(child) == 0
    for queue in (inbox, outbox):
        queue.close()
        queue.join_thread()


@both_kinds
def test_handle_is_unpickled_by_an_unrelated_process_as_often_as_it_likes(consistent):
    table = gq.shared_table(3, "float32", consistent=consistent)
    program = "import pickle, sys; d = sys.stdin.buffer.read(); pickle.loads(d)[0] = 1; pickle.loads(d)[1] = 2"
    subprocess.run([sys.executable, "-c", program], input=pickle.dumps(table), check=True, timeout=60)
    np.testing.assert_array_equal(table[...], [1, 2, 0])


def test_table_outlives_its_maker_and_leaves_nothing():
    shm_before = shared_files()
    here, there = multiprocessing.Pipe()
    maker = start(children.make_and_die, there, method="spawn")
    table = here.recv()
    here.send("used")
    assert exit_code(maker) == -signal.SIGKILL
    np.testing.assert_array_equal(table, [0, 1, 2, 3])
    assert exit_code(start(children.add, table, 1.0, method="spawn")) == 0  # the handle of this process is as good
    np.testing.assert_array_equal(table, [1, 2, 3, 4])
    assert shared_files() == shm_before


def test_child_keeps_what_its_parent_drops():
    table = gq.shared_table(3, "float32")
    table[0] = 1.0
    here, there = multiprocessing.Pipe()
    child = start(children.hold, table, there, method="spawn")
    assert here.recv() == 1.0
    table[0] = 2.0
    del table
    gc.collect()
    here.send("go on")
    assert here.recv() == 2.0
    assert exit_code(child) == 0


@both_kinds
def test_handle_of_a_table_that_was_dropped_says_so(consistent):
    table = gq.shared_table(3, "float32", consistent=consistent)
    handle = pickle.dumps(table)
    del table
    gc.collect()
    with pytest.raises(gq.UnavailableError, match=f"process {os.getpid()}, which pickled the table"):
        pickle.loads(handle)


def test_handle_of_a_process_that_ended_says_so():
    program = "import pickle, sys, gradquorum as gq; sys.stdout.buffer.write(pickle.dumps(gq.shared_table(3, 'f4')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    with pytest.raises(gq.UnavailableError, match="which pickled the table"):
        pickle.loads(done.stdout)


def test_handle_whose_number_is_another_file_by_now_opens_nothing(tmp_path):
    table = gq.shared_table(3, "float32")
    handle, number = pickle.dumps(table), table._memory.handle().descriptor
    del table
    gc.collect()
    os.mkfifo(tmp_path / "fifo")  # to open it for reading alone would wait for ever
    fifo = os.open(tmp_path / "fifo", os.O_RDWR)
    ends = {fifo, os.dup2(fifo, number)}
    try:
        with pytest.raises(gq.UnavailableError, match="another file"):
            pickle.loads(handle)
    finally:
        for end in ends:
            os.close(end)


# A consistent one


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_reader_beside_a_writer_sees_whole_versions_only(method):
    table, enough = gq.shared_table((512, 64), "float64", consistent=True), gq.shared_table((), "int64")
    child = start(children.fill_until, table, enough, method=method)
    seen = set()
    while len(seen) < 20:
        found = table[...]
        assert found.min() == found.max() >= max(seen, default=0)
        seen.add(found[0, 0])
        assert child.is_alive()
    enough[()] = 1
    assert exit_code(child) == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_writers_of_several_processes_take_turns(method):
    table = gq.shared_table((3, 500), "int64", consistent=True)
    writers = [start(children.fill_row, table, row, 200, method=method) for row in (0, 1)]
    children.fill_row(table, 2, 200)
    assert [exit_code(writer) for writer in writers] == [0, 0]
    assert table.version == 600
    np.testing.assert_array_equal(table[...], np.full((3, 500), 200))


def test_writer_killed_in_the_midst_leaves_the_version_before():
    table = gq.shared_table((3, 2), "float32", consistent=True)
    assert exit_code(start(children.die_writing, table, method="spawn")) == -signal.SIGKILL
    assert table.version == 1
    np.testing.assert_array_equal(table[...], [[5, 5], [0, 0], [0, 0]])
    table[2] = 7.0
    assert table.version == 2
    np.testing.assert_array_equal(table[...], [[5, 5], [0, 0], [7, 7]])


def test_write_that_fails_changes_nothing():
    table = gq.shared_table((3, 2), "float32", consistent=True)
    table[0] = 5.0
    for index, values in [(3, 1.0), ([0, 9], 1.0), (0, [1.0, 2.0, 3.0]), (0, "x"), ("x", 1.0)]:
        with pytest.raises((IndexError, ValueError)):
            table[index] = values
        assert table.version == 1
        np.testing.assert_array_equal(table[...], [[5, 5], [0, 0], [0, 0]])
    table[1] = 6.0
    np.testing.assert_array_equal(table[...], [[5, 5], [6, 6], [0, 0]])


def test_write_whose_index_cannot_be_kept_changes_nothing():
    class Index:
        def __index__(self):
            return 1

        def __deepcopy__(self, memo):
            raise MemoryError

    table = gq.shared_table((3, 2), "float32", consistent=True)
    with pytest.raises(MemoryError):
        table[Index()] = 5.0
    assert table.version == 0
    np.testing.assert_array_equal(table[...], np.zeros((3, 2)))


def test_reads_are_copies_that_stay_what_they_were():
    table = gq.shared_table((3, 2), "float32", consistent=True)
    found = [table[1], table[1:], table[[1, 2]], table[...], table[1, 0], np.asarray(table), np.array(table)]
    table[...] = 1.0
    table[...] = 2.0
    for one in found:
        np.testing.assert_array_equal(one, np.zeros_like(one))
    found[0][...] = 9.0
    np.testing.assert_array_equal(table[...], np.full((3, 2), 2.0))


def test_any_sequence_of_writes_through_any_handle_adds_up():
    rng = np.random.default_rng(5)
    table, plain = gq.shared_table((20, 3), "float32", consistent=True), np.zeros((20, 3), np.float32)
    handles = [table, again(table), again(table)]
    for version in range(1, 400):
        ids = rng.permutation(20)[: rng.integers(0, 6)]
        index = [ids, np.arange(20) % 7 == version % 7, slice(2, 9, 3), (ids, 1), ..., int(ids.sum()) % 20]
        chosen = index[rng.integers(len(index))]
        amount = rng.random(np.shape(plain[chosen]), np.float32)
        writer = handles[int(rng.integers(3)) * (version % 3 == 0)]  # mostly the same one twice
        writer[chosen] += amount
        plain[chosen] += amount
        ids[:] = 0  # the caller's array is the caller's
        assert table.version == version
        np.testing.assert_array_equal(handles[version % 3][...], plain)


def test_consistent_table_is_read_as_one_version_not_row_by_row():
    table = gq.shared_table((3, 2), "float32", consistent=True)
    assert (len(table), table.version) == (3, 0)
    with pytest.raises(TypeError, match=r"table\[\.\.\.\]"):
        iter(table)
    with pytest.raises(ValueError, match="copy"):
        np.asarray(table, copy=False)
    assert np.asarray(table, np.float64).dtype == np.float64
    assert repr(table) == "<ConsistentTable float32 (3, 2): version 0>"


def test_shape_with_a_negative_size_expect_which_and_nothing_that_is_not_allowed():
    with pytest.raises(gq.InvalidArgumentError, match=r"^shape\[1\]: expected a size of 0 or more; got -2$"):
        gq.shared_table((4, -2), "float32")
