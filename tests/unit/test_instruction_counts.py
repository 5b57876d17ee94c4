"""The regression guard: what callgrind wrote is read right, and counts are judged as promised."""

import json

import pytest

from benchmarks.instructions import counts
from benchmarks.instructions.__main__ import ACCEPTED, judge

COMPILER = "gcc 1.2.3 x86_64"

DUMP = """\
# callgrind format
positions: line
events: Ir
summary: 1234567

ob=(8) /somewhere/build/instructions
fl=(161) ???
fn=(1) gradquorum::one()
0 432
cob=(3) /usr/lib/libc.so.6
cfn=(2) memcpy
calls=72 80
0 512
+5 16

ob=(3)
fn=(2)
0 999

ob=(8)
fn=(3) gradquorum::two()
0 50
cfn=(1)
calls=1 0
0 944
* 2

totals: 1499
"""


def test_own_instructions_expect_the_own_cost_of_the_program_alone():
    assert counts.own_instructions(DUMP.splitlines(), "instructions") == 432 + 16 + 50 + 2


@pytest.mark.parametrize(("got", "fits"), [(1000, True), (1030, True), (970, True), (1031, False), (969, False)])
def test_compare_expect_three_percent_either_way(got, fits):
    faults = counts.compare({"merge": got}, {"merge": 1000})
    assert bool(faults) != fits
    assert fits or all(words in faults[0] for words in ("merge", f"{got:,}", "1,000", f"{got / 1000 - 1:+.2%}"))


def test_compare_when_a_case_is_new_or_gone_expect_a_fault_for_each():
    new, gone = {"merge": 5, "new": 1}, {"merge": 5, "gone": 1}
    assert [fault.split(":")[0] for fault in counts.compare(new, gone)] == ["gone", "new"]


@pytest.fixture
def accepted(tmp_path):
    path = tmp_path / "accepted.json"
    counts.write(path, {"clang 7 x86_64": {"merge": 1}, COMPILER: {"merge": 1000, "merge wide": 500}})
    return path


def test_judge_when_as_accepted_expect_nothing_wrong(accepted, capsys):
    assert judge(COMPILER, {"merge": 1001, "merge wide": 500}, accepted) is None
    assert "all 2 counts are within 3%" in capsys.readouterr().out


def test_judge_when_a_count_differs_expect_it_named_and_how_to_accept(accepted):
    wrong = judge(COMPILER, {"merge": 1001, "merge wide": 400}, accepted)
    assert "merge wide: 400 instructions, accepted are 500" in wrong
    assert "merge: " not in wrong
    assert "make accept-instructions" in wrong


def test_judge_when_the_compiler_is_unknown_expect_a_pass_that_says_so(accepted, capsys):
    assert judge("gcc 99 x86_64", {"merge": 7}, accepted) is None
    out = capsys.readouterr().out
    assert "NOTHING COMPARED" in out
    assert "gcc 99 x86_64" in out
    assert COMPILER in out
    assert judge("gcc 99 x86_64", {"merge": 7}, accepted, required=True) is not None


def test_judge_when_the_processor_is_old_expect_wide_kernels_left_out_and_kept(accepted, capsys):
    assert judge(COMPILER, {"merge": 1000}, accepted) is None
    assert "cannot run the wide kernels" in capsys.readouterr().out
    assert judge(COMPILER, {"merge": 1100}, accepted) is not None
    assert judge(COMPILER, {"merge": 1100}, accepted, accept=True) is None
    assert counts.read(accepted)[COMPILER] == {"merge": 1100, "merge wide": 500}


def test_judge_when_told_to_accept_expect_this_compiler_replaced_and_others_kept(accepted):
    assert judge(COMPILER, {"new": 5, "new wide": 3}, accepted, accept=True) is None
    assert json.loads(accepted.read_text()) == {"clang 7 x86_64": {"merge": 1}, COMPILER: {"new": 5, "new wide": 3}}
    assert judge(COMPILER, {"new": 5, "new wide": 3}, accepted) is None


def test_accepted_file_expect_every_case_with_and_without_wide_kernels():
    for compiler, cases in counts.read(ACCEPTED).items():
        assert cases, compiler
        if compiler.endswith("x86_64"):
            assert {f"{name} wide" for name in counts.without_wide(cases)} == set(filter(counts.is_wide, cases))
