"""Servers with a folder, for the tests of checkpoints."""

import shutil
from contextlib import contextmanager

import gradquorum as gq

LATE = 1e6  # seconds: not before this test is over


def sparse(server, name="emb", shape=(10, 1), **options):
    """Make a handle that reaches the server as those of other processes do."""
    return gq.SparseConditionalAccumulator("float32", shape, name, target=server.address, **options)


@contextmanager
def serving(folder, every=LATE):
    with gq.Server(checkpoint=folder, checkpoint_every=every) as server:
        yield server


@contextmanager
def after_a_crash_now(folder):
    """A server of what would be in the folder if the server were killed at this moment."""
    copy = copied(folder, "copy")
    try:
        with serving(copy) as server:
            yield server
    finally:
        shutil.rmtree(copy)


def copied(folder, name):
    """Copy what a crash would leave at this moment; not what is half written, which may be renamed meanwhile."""
    copy = folder.with_name(name)
    return shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.gradquorum.tmp"))


def files(folder):
    return sorted(path.name for path in folder.iterdir())
