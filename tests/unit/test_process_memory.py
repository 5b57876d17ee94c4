"""Shared memory: sealed, counted, and gone with its last user; blocks that are never written to while they are read."""

import gc
import mmap
import os
import sys

import numpy as np
import pytest

import gradquorum as gq
from gradquorum.memory_file import map_private, map_shared
from tests.process.leftovers import descriptors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several processes need Linux")
if sys.platform == "linux":
    from gradquorum.targets.process.lending import Blocks
    from gradquorum.targets.process.memory import SharedMemory, as_bytes, make_memory
    from gradquorum.targets.process.parts import LEND_FROM_BYTES


@pytest.fixture
def descriptor():
    found = make_memory(8192)
    yield found
    os.close(found)


@pytest.mark.parametrize("size", [0, 4096, 8191, 8193, 1 << 20])
def test_sealed_memory_neither_shrinks_nor_grows(descriptor, size):
    with pytest.raises(OSError):
        os.ftruncate(descriptor, size)
    assert os.fstat(descriptor).st_size == 8192


def test_shared_mappings_see_each_other_and_a_private_one_does_not_write_through(descriptor):
    one, two, private = map_shared(descriptor, 8192), map_shared(descriptor, 8192), map_private(descriptor, 8192)
    one[0] = 7
    assert (two[0], private[0]) == (7, 7)
    private[0] = 8
    assert (one[0], private[0]) == (7, 8)


@pytest.mark.parametrize("num_bytes", [1 << 50, 1 << 62, 1 << 70])
def test_memory_that_is_not_there_is_refused(num_bytes):
    with pytest.raises(gq.ResourceExhaustedError) as caught:
        make_memory(num_bytes)
    assert caught.value.needed_bytes == num_bytes


def test_memory_is_counted_while_it_is_mapped():
    memory = SharedMemory()
    mapping, descriptor = memory.make(4096)
    os.close(descriptor)
    array = as_bytes(mapping)[10:20]
    del mapping
    assert memory.num_bytes == 4096
    del array
    assert memory.num_bytes == 0


def test_failed_mapping_leaves_no_descriptor(monkeypatch):
    def fail(*args, **options):
        raise OSError("no address space")

    before = [path for path in descriptors() if "memfd" in path]
    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(gq.ResourceExhaustedError):
        SharedMemory().make(4096)
    assert [path for path in descriptors() if "memfd" in path] == before


def test_small_block_is_free_with_the_answer_and_never_in_use():
    blocks = Blocks()
    number = blocks.add(mmap.mmap(-1, LEND_FROM_BYTES - 1))
    memory = blocks.read(number)
    assert (blocks.num_in_use, blocks.lent_bytes) == (0, 0)
    blocks.mark_lent(number)  # cannot be
    blocks.reclaim()  # in another thread: the client has not been told that it is free, and it is read
    assert (blocks.num_in_use, blocks.lent_bytes, blocks.reclaimed()) == (0, 0, ())
    assert (blocks.freed(), blocks.freed()) == ((number,), ())
    assert np.shares_memory(blocks.read(number), memory)
    memory[5] = 7
    copy = blocks.take_back(number)
    assert copy[5] == 7 and not np.shares_memory(copy, memory)
    for call in (blocks.read, blocks.take_back):
        with pytest.raises(ValueError):
            call(number)


def test_small_block_that_was_dropped_is_no_more():
    blocks = Blocks()
    number = blocks.add(mmap.mmap(-1, 4096))
    blocks.drop([number, 99])
    with pytest.raises(ValueError):
        blocks.read(number)


def test_block_is_free_once_nothing_reads_it():
    blocks = Blocks()
    number = blocks.add(mmap.mmap(-1, LEND_FROM_BYTES))
    view = blocks.read(number)[64:128].view(np.float32).reshape(4, 4)
    gc.collect()
    assert (blocks.freed(), blocks.num_in_use, blocks.lent_bytes) == ((), 1, 0)  # it may yet be copied
    blocks.mark_lent(number)
    assert blocks.lent_bytes == LEND_FROM_BYTES
    del view
    blocks.mark_lent(number)  # too late
    assert (blocks.num_in_use, blocks.lent_bytes) == (0, 0)
    assert blocks.freed() == (number,)
    assert blocks.freed() == ()


def test_block_in_use_can_be_neither_offered_again_nor_taken_back():
    blocks = Blocks()
    number = blocks.add(mmap.mmap(-1, LEND_FROM_BYTES))
    memory = blocks.read(number)
    for call in (blocks.read, blocks.take_back):
        with pytest.raises(ValueError):
            call(number)
    blocks.drop([number, 99])
    del memory
    assert blocks.freed() == (number,)
    blocks.drop([number])
    with pytest.raises(ValueError):
        blocks.read(number)


def test_reclaimed_block_is_no_more_and_its_pages_are_gone():
    blocks = Blocks()
    descriptor = make_memory(LEND_FROM_BYTES)
    clients = map_shared(descriptor, LEND_FROM_BYTES)
    clients[0] = 7
    number, kept = blocks.add(map_shared(descriptor, LEND_FROM_BYTES)), blocks.add(mmap.mmap(-1, LEND_FROM_BYTES))
    reading = blocks.read(kept)
    del reading  # freed as well, and the client is told so: it may be writing there
    assert blocks.freed() == (kept,)
    memory = blocks.read(number)
    blocks.reclaim()  # not while it is read
    assert memory[0] == 7
    del memory
    blocks.reclaim()
    assert (blocks.freed(), blocks.reclaimed(), blocks.reclaimed()) == ((), (number,), ())
    assert os.fstat(descriptor).st_blocks == 0
    assert clients[0] == 0
    assert blocks.read(kept).nbytes == LEND_FROM_BYTES
    os.close(descriptor)
