"""What a round of a server does in another way than one of this process."""

import os
import sys

import pytest

import gradquorum as gq
from gradquorum.engine.reference import ReferenceEngine
from gradquorum.specs import Options, RoundSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several processes need Linux")
if sys.platform == "linux":
    from gradquorum.targets.process.hosted import HostedRound


@pytest.mark.parametrize(("asked", "cores", "expected"), [(None, 8, 4), (None, 3, 1), (None, 1, 1), (6, 8, 6)])
def test_round_is_compacted_on_half_of_the_cores_unless_told(monkeypatch, asked, cores, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    made = {}
    original = ReferenceEngine.sparse_reducer

    def sparse_reducer(self, spec):
        reducer = original(self, spec)
        made[id(reducer)] = spec.num_threads
        return reducer

    monkeypatch.setattr(ReferenceEngine, "sparse_reducer", sparse_reducer)
    spec = RoundSpec("sparse", {"": gq.SparseSpec("float32")}, Options(engine="reference", num_threads=asked))
    host = HostedRound("name", spec).host
    [compactor], [reducer] = host._compactors, host._reducers
    assert made[id(reducer)] == asked
    assert made[id(compactor)] == expected
