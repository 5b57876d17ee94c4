"""What processes may leave behind: descriptors, threads, children, memory."""

import contextlib
import gc
import multiprocessing
import os
import threading
import time
from collections import Counter
from pathlib import Path

import gradquorum as gq

SETTLE_SECONDS = 5.0


def start_helpers():
    """Start what stays until the end of the program: multiprocessing's helpers and the library's few threads."""
    with gq.SparseConditionalAccumulator("float32") as acc:
        future = acc.submit_take(1)
        acc.apply_grad([0], [[1.0]])
        future.result()
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=int)
        process.start()
        process.join()
        process.close()


def descriptors():
    """Return what each open descriptor of this process is of."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}").partition("[")[0])
    return sorted(found)


def shared_files():
    """Return the files of ours in shared memory: other programs of the machine have files there, too."""
    return sorted(name for name in os.listdir("/dev/shm") if "gradquorum" in name)


def _children():
    """Return the processes that this one has started, those not waited for included."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return sorted(int(child) for child in children.split())


def _now():
    gc.collect()
    return {
        "descriptors": descriptors(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": _children(),
        "memory files": ["one"] * Path("/proc/self/maps").read_text().count("memfd:gradquorum"),
        "shared memory": shared_files(),
    }


def leftovers(before=None):
    """Return what there is of each kind; with what there was before, wait a short while, and return what is new."""
    now = _now()
    if before is None:
        return now
    deadline = time.monotonic() + SETTLE_SECONDS
    while now != before and time.monotonic() < deadline:
        time.sleep(0.01)
        now = _now()
    new = {kind: (Counter(now[kind]) - Counter(before[kind])) for kind in now}
    return {kind: dict(found) for kind, found in new.items() if found}
