"""Is what TensorFlow did, as recorded, what this library does? Bit for bit, without TensorFlow."""

import collections
import copy
import re

import numpy as np
import pytest

from tests.parity.generator import generate
from tests.parity.record import read
from tests.parity.replay import GradQuorumAdapter, differences, run

ABOUT, RECORDED = read()

BY_CONFIG = collections.defaultdict(list)
for _program, _trace in RECORDED:
    BY_CONFIG[_program.config].append((_program, _trace))

# Programs are full of gradients that come late on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::gradquorum.StaleGradientWarning")

MESSAGES = {
    "local_step": r"Argument local_step must be scalar, but had bad shape \[1(,1)?\]",
    "ids rank": r"Input indices should be vector but received shape: \[.*\]",
    "values rank": r"Values cannot be 0-dimensional\.",
    "length": r"Expected \d+ non-empty input values, got \d+",
    "grad_shape rank": r"Shape mismatch: expected shape rank at least \d, got \d",
    "grad_shape dim": r"Shape mismatch: expected shape dim \d to be \d+, got \d+",
    "id": r"Shape mismatch: index of slice \d exceeded limits of shape; index is \d+ exceeded \d+",
    "rank in round": r"Shape mismatch: expected values rank \d, got \d",
    "rank declared": r"Shape mismatch: expected values rank at least \d, got \d",
    "dim": r"Shape mismatch: expected values dim \d to be \d, got \d",
    "dense": r"Shape mismatch: expected \[.*\], got \[.*\]",
    "num_required": r"Argument num_required must be positive, but was (0|-\d)",
}
"""Every way to refuse that we have in common with TensorFlow: SEMANTICS 2, rows 2 to 8 and 10; 4; and 8."""


def faults_of(program, make, trace):
    with GradQuorumAdapter(make, program) as adapter:
        return list(differences(program, trace, run(program, adapter)))


@pytest.mark.parametrize("config", BY_CONFIG)
def test_recorded_programs_when_replayed_give_the_same_bits(config, make):
    faults = [line for program, trace in BY_CONFIG[config] for line in faults_of(program, make, trace)]
    assert not faults, "\n".join(faults)


def test_recorded_file_holds_enough_of_every_kind():
    assert ABOUT["tensorflow"].startswith("2.")
    assert ABOUT["programs"] == len(RECORDED) >= 500
    kinds = collections.Counter(program.kind for program, _ in RECORDED)
    assert kinds["sparse"] >= 500
    assert kinds["dense"] >= 100
    assert len(BY_CONFIG) == 84
    outcomes = collections.Counter(step["outcome"] for program, _ in RECORDED for step in program.steps)
    for outcome in ("accepted", "stale", "taken", "set", "num_required"):
        assert outcomes[outcome] >= 100, outcome


@pytest.mark.parametrize("kind", MESSAGES)
def test_recorded_file_holds_every_refusal(kind):
    errors = [entry["error"] for _, trace in RECORDED for entry in trace if "error" in entry]
    assert sum(bool(re.fullmatch(MESSAGES[kind], error)) for error in errors) >= 10
    assert all(any(re.fullmatch(pattern, error) for pattern in MESSAGES.values()) for error in errors)


def test_recorded_programs_are_those_of_the_generator():
    # NumPy may change its streams of random numbers; a new recording then, not a failure here.
    if np.__version__.split(".")[0] != ABOUT["numpy"].split(".")[0]:
        pytest.skip(f"recorded with NumPy {ABOUT['numpy']}: another generation of its random numbers")
    for program, _ in RECORDED[:60]:
        assert generate(ABOUT["seed"], program.number) == program


def test_differences_when_one_bit_or_count_or_word_is_wrong_names_it(make):
    """The comparison sees what it is there to see."""

    def first(entries, wanted):
        return next(entry for entry in entries if wanted(entry))

    def flip(trace):
        plain = first(trace, lambda entry: entry.get("values", {}).get("bits"))["values"]
        plain["bits"] = f"{int(plain['bits'][0:2], 16) ^ 1:02x}" + plain["bits"][2:]

    def miscount(trace):
        trace[-1]["count"] += 1

    def reword(trace):
        first(trace, lambda entry: "error" in entry)["error"] = "Something else."

    def accept(trace):
        del first(trace, lambda entry: "error" in entry)["error"]

    program, trace = next(
        (program, trace)
        for program, trace in RECORDED
        if program.kind == "sparse"
        and any("error" in entry for entry in trace)
        and any(entry.get("ids") for entry in trace)
        and "7ff8" not in str(trace)
    )
    assert faults_of(program, make, trace) == []
    seen = {flip: "bits of values", miscount: "num_accumulated", reword: "message", accept: "no error"}
    for spoil, word in seen.items():
        spoiled = copy.deepcopy(trace)
        spoil(spoiled)
        (line,) = faults_of(program, make, spoiled)
        assert word in line
