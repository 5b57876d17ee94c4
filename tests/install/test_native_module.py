"""The native module as it was built: its stub, and what it leaves behind."""

import ast
import subprocess
import sys

import pytest

from tests.install.installing import ROOT, run_python

pytest.importorskip("gradquorum._native", exc_type=ImportError)

STUB = ROOT / "src" / "gradquorum" / "_native.pyi"


def test_stub_is_what_the_module_says(tmp_path):
    pytest.importorskip("nanobind")
    fresh = tmp_path / "_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "gradquorum._native", "-o"]
    subprocess.run([*command, fresh], check=True, timeout=110)
    how = f"write it anew: python -m nanobind.stubgen -m gradquorum._native -o {STUB.relative_to(ROOT)}"
    assert _lines(STUB) == _lines(fresh), how


def _lines(stub):
    """Return a stub's declarations, without what only Python 3.12 and later show of the buffer protocol."""
    module = ast.parse(stub.read_text())
    for declared in module.body:
        if isinstance(declared, ast.ClassDef):
            declared.body = [each for each in declared.body if getattr(each, "name", None) != "__buffer__"]
    return ast.unparse(module).splitlines()


USE_EVERYTHING = """
import asyncio, threading
import numpy as np
import gradquorum as gq
from gradquorum import _native
_native._warn_of_leaks(True)

def use():
    ids, rows = np.array([3, 1, 3]), np.ones((3, 2), np.float32)
    acc = gq.SparseConditionalAccumulator("float32", shared_name="one")
    other = gq.SparseConditionalAccumulator("float32", shared_name="one")
    for _ in range(50):
        receipt = acc.apply_grad(np.arange(3), rows, local_step=None, copy=False)
        other.apply_indexed_slices_grad([gq.IndexedSlices(rows, ids)] * 2, local_step=None)
    try:
        acc.apply_grad(ids, np.ones((3, 5), np.float32), local_step=None)
    except gq.InvalidArgumentError:
        pass
    grad = acc.take_grad(100)
    acc.apply_grad(ids, rows, local_step=None)
    _native._fail_allocation_after(0)
    try:
        acc.take_grad(1)
    except gq.ResourceExhaustedError:
        pass
    assert acc.submit_take(1).result(20).num_gradients == 1
    acc.apply_grad(ids, rows, local_step=None)
    asyncio.run(acc.take_grad_async(1))
    acc.apply_grad(ids, rows, local_step=None)  # and left in the round
    dense = gq.ConditionalAccumulator("float64", (2,), num_threads=2)
    dense.apply_grad(np.ones(2), copy=False)
    group = gq.AccumulatorGroup({"a": gq.SparseSpec("float16"), "b": gq.DenseSpec("complex64")}, compact=False)
    group.apply({"a": (ids, np.ones((3, 1), "f2"))}, worker=1)
    thread = threading.Thread(target=lambda: group.take(1))
    thread.start()
    thread.join()
    for function in (_native.SparseReducer, _native.SparseReducer("float32", "float32", "SUM", 1).block):
        try:
            function(1)
        except TypeError:
            pass
    return acc, dense, group, grad, receipt

use()
HELD
"""


@pytest.mark.parametrize(
    "held", ["", "held = use()", "import builtins; builtins.held = use()"], ids=["dropped", "global", "kept"]
)
def test_program_when_it_has_used_everything_expect_no_leak(held):
    done = run_python(USE_EVERYTHING.replace("HELD", held))
    assert done.returncode == 0, done.stderr
    assert "nanobind" not in done.stderr
    assert done.stderr == ""
