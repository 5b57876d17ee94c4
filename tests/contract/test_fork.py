"""SEMANTICS 1: a local accumulator used in a forked child raises."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
import gradquorum as gq
acc = gq.SparseConditionalAccumulator("float32", (5, 1), engine=sys.argv[1], shared_name="s")
acc.apply_grad([0], [[1.0]])
group = gq.SparseConditionalAccumulator("float32", expected_workers=1, max_per_worker=1)
worker = gq.SyncReplicas(group, 1, num_workers=1, update=print).worker(0)
future = acc.submit_take(2)
child = os.fork()
if child == 0:
    status = 0
    calls = [lambda: acc.apply_grad([0], [[1.0]]), lambda: acc.take_grad(1, timeout=0), acc.num_accumulated,
             lambda: acc.set_global_step(3), lambda: acc.submit_take(1), acc.publish, acc.discard,
             lambda: acc.wait_published(1, timeout=0), lambda: list(worker)]
    for number, call in enumerate(calls):
        try:
            call()
            status = 10 + number
        except gq.ClosedError as error:
            if "fork" not in str(error):
                status = 30
    mine = gq.SparseConditionalAccumulator("float64", (5, 1), engine=sys.argv[1], shared_name="s")
    late = mine.submit_take(1)
    mine.apply_grad([0], [[2.0]])
    if late.result(10).values[0, 0] != 2.0:
        status = 50
    os._exit(status)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
acc.apply_grad([0], [[3.0]])
print(status, future.result(10).values[0, 0], acc.global_step)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_local_accumulator_in_a_forked_child_raises_and_the_parent_goes_on(engine):
    # Forking beside the library's own threads is what DeprecationWarning is about: it is on purpose here.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, engine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "2.0", "1"], done.stderr
