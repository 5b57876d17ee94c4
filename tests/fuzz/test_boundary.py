"""No input from Python crashes the library, hangs it or gets a silently wrong answer out of it."""

import json
import subprocess
import sys

import pytest

from tests.fuzz.running import ROOT, environment, run_boundary

pytest.importorskip("gradquorum._native", exc_type=ImportError)

QUICK_CALLS = 9_000
SLOW_SEEDS = (1, 2, 3, 4)
SLOW_CALLS = 30_000


def test_boundary_when_fuzzed_expect_right_results_or_proper_errors(tmp_path):
    report = run_boundary(0, QUICK_CALLS, tmp_path, seconds=110)
    assert report["calls"] >= QUICK_CALLS
    assert report["results"] > QUICK_CALLS // 4  # else nearly everything was refused, and little was tried


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_boundary_when_fuzzed_a_hundred_thousand_times_expect_no_fault(seed, tmp_path):
    assert SLOW_CALLS * len(SLOW_SEEDS) >= 100_000
    report = run_boundary(seed, SLOW_CALLS, tmp_path, seconds=500)
    assert report["calls"] >= SLOW_CALLS
    assert report["results"] > SLOW_CALLS // 3


def test_boundary_when_a_call_crashes_expect_the_case_named(tmp_path, monkeypatch):
    # The net itself: a process that dies must not pass for one that found nothing.
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(AssertionError, match=r"exit status 1: python -m tests.fuzz.boundary --seed 3 --only \?"):
        run_boundary(3, 10, tmp_path, seconds=10)


def test_boundary_when_one_case_is_asked_for_expect_it_alone():
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.boundary", "--seed", "0", "--only", "5"],
        cwd=ROOT, env=environment(), timeout=110, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert 0 < json.loads(done.stdout)["calls"] < 500
