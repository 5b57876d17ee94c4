"""The benchmarks: ratios that a changing clock does not move, the floors, and the pages that they write."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import bench_shapes, docs
from benchmarks.bench_shapes import FLOORS, LEND_CASES, Measured, floors_of, moves_of_copyto
from benchmarks.cases import CASES, Case
from benchmarks.measure import Timing, interleave, ratios
from benchmarks.report import Floor, Report, floors_summary, floors_table
from benchmarks.rivals import TENSORFLOW


def test_ratios_when_the_clock_halves_and_doubles_expect_the_true_ratio():
    clock = [1, 1, 2, 1, 2, 2, 1, 2]  # seconds per unit of work, turn by turn
    quick = Timing([2.0 * speed for speed in clock for _ in range(2)], [t + d for t in range(8) for d in (0.0, 0.4)])
    slow = Timing([6.0 * clock[t] for t in (0, 3, 5)], [0.2, 3.2, 5.2])
    assert slow.median / quick.median != pytest.approx(3.0)
    assert ratios(slow, quick) == pytest.approx([3.0] * 3)
    assert ratios(quick, slow) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(("quick", "least"), [(False, 3), (True, 1)])
def test_interleave_expect_anchors_around_every_turn_and_each_job_in_time(quick, least):
    calls = []
    jobs = {name: lambda name=name: calls.append(name) for name in ("ours", "a", "b")}
    timings = interleave(jobs, budget=0.05, quick=quick, anchors=["ours"])
    merged = sorted((t, name) for name, timing in timings.items() for t in timing.times)
    order = [name for _, name in merged]
    assert order[0] == order[-1] == "ours"
    assert all(one == "ours" or other == "ours" for one, other in itertools.pairwise(order))
    assert len(timings["a"].samples) >= least
    assert len(timings["b"].samples) >= least
    assert len(timings["ours"].samples) == len(timings["a"].samples) + len(timings["b"].samples) + 1


@pytest.mark.parametrize(
    ("floor", "verdict"),
    [
        (Floor("", 2.0, 2.0), "met"),
        (Floor("", 1.99, 2.0), "SHORT"),
        (Floor("", 1.3, 1.3, at_least=False), "met"),
        (Floor("", 1.31, 1.3, at_least=False), "SHORT"),
        (Floor("", 1.9, None, 2.0), "SHORT"),
        (Floor("", 1.9, 1.5, 2.0), "met"),
        (Floor("", None, 2.0), "not measured"),
        (Floor("", 5.0, 2.0, judged=False), "not judged"),
    ],
)
def test_floor_expect_verdict(floor, verdict):
    assert floor.result == verdict


def test_floors_table_expect_bound_and_verdict_of_floor_and_goal():
    floors = [Floor("mid", 1.5, 1.3, 2.0, samples=[1.4, 1.5, 1.6]), Floor("import", 250.0, 100.0, at_least=False)]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in floors_table(floors).splitlines()]
    assert lines[2] == ["mid", "1.50 (1.45-1.55) x", ">= 1.3 x", "met", ">= 2 x", "SHORT"]
    assert lines[3] == ["import", "250 x", "<= 100 x", "SHORT", "", ""]
    assert floors_summary(floors) == "1 of 2 floors are met; SHORT: import."


def measured(name):
    copy = {TENSORFLOW: [50.0], "slow": [9.0, 9.0, 1.0], "best": [3.0, 4.0, 2.0]}
    lend = {TENSORFLOW: [60.0], "slow": [18.0], "best": [6.0, 8.0, 4.0]}
    return Measured(name, {}, copy, lend, [[2.0], [1.2]])


def test_floors_of_a_case_expect_the_best_other_of_this_run():
    floors = {floor.what: floor for floor in floors_of(measured("large"), complete=True)}
    assert [floor.got for floor in floors.values()] == [50.0, 3.0, 6.0, 1.2]
    assert list(floors) == [
        "large: TF op / ours",
        "large: best other (best) / ours",
        "large: best other (best) / ours, lending",
        "large: ours, lending / moving the bytes",
    ]
    assert {floor.result for floor in floors.values()} == {"met"}


def test_floors_of_a_case_when_rivals_are_missing_expect_no_verdict():
    incomplete = measured("large")
    del incomplete.copy[TENSORFLOW]
    results = [floor.result for floor in floors_of(incomplete, complete=False)]
    assert results == ["not measured", "not judged", "not judged", "met"]


def test_floors_expect_what_was_promised_for_each_shape():
    assert {name: best for name, (_, best) in FLOORS.items()} == {
        **dict.fromkeys(["tiny", "small", "raw", "large", "many", "wide"], 2.0),
        **{"thin": 1.5, "mid": 1.3},
    }
    assert {name: tf for name, (tf, _) in FLOORS.items()} == {
        **dict.fromkeys(["tiny", "small", "large"], 20.0),
        **dict.fromkeys(["mid", "wide"], 10.0),
        **dict.fromkeys(["thin", "raw"], 5.0),
        "many": 100.0,
    }
    assert set(LEND_CASES) == {"small", "large", "many", "wide"}
    assert set(CASES) == {*FLOORS, "half"}


def test_moves_of_copyto_expect_gradients_read_once_and_result_written_once():
    case = Case("", 3, 2, 2, 100)
    gradients = [(np.array(ids), np.ones((3, 2), np.float32)) for ids in ([1, 2, 3], [3, 4, 5])]
    read, written = 2 * (3 * 8 + 3 * 8), 5 * (8 + 8 + 8)
    assert moves_of_copyto(case, gradients) == (read + written) / (2 * 48)


def test_cases_expect_the_same_gradients_every_time():
    for case in CASES.values():
        small = Case(case.name, 100, 2, 2, case.table, case.zipf, case.unique, case.dtype)
        for (ids, values), (again, values_again) in zip(small.gradients(), small.gradients(), strict=True):
            np.testing.assert_array_equal(ids, again)
            np.testing.assert_array_equal(values, values_again)
            assert bool(np.all(ids[1:] > ids[:-1])) == case.unique


def test_replace_between_marks_expect_only_what_is_between_them_new():
    text = f"above\n{docs.BEGIN}\nold\n{docs.END}\nbelow\n"
    new = docs.replace_between_marks(text, "\nnew\n", "x.md")
    assert new == f"above\n{docs.BEGIN}\n\nnew\n\n{docs.END}\nbelow\n"
    assert docs.replace_between_marks(new, "new", "x.md") == new


@pytest.mark.parametrize("text", ["", docs.BEGIN, f"{docs.END}\n{docs.BEGIN}", f"{docs.BEGIN}{docs.END}{docs.END}"])
def test_replace_between_marks_when_they_are_not_there_expect_error(text):
    with pytest.raises(ValueError, match=r"x\.md: expected one line"):
        docs.replace_between_marks(text, "new", "x.md")


def test_figures_expect_a_short_table_in_the_readme_and_every_floor_in_the_page():
    floors = [
        Floor("one-row apply", 5.0, 4.0, at_least=False),
        Floor("mid: TF op / ours", 5.0, 10.0),
        Floor("mid: best other (x) / ours, lending", 5.0, 3.0),
        Floor("tiny: TF op / ours", 50.0, 20.0),
    ]
    readme = docs.figures_of_readme("Run.", floors)
    assert "| mid: TF op / ours |" in readme
    assert "SHORT" in readme
    assert not any(what in readme for what in ("one-row", "lending", "tiny"))
    assert "2 of 4 floors are met" in readme
    page = docs.figures_of_page("Run.", {"round": Report("Rounds", ["text"])}, floors)
    assert all(floor.what in page for floor in floors)
    assert page.index("### Floors") < page.index("### Rounds\n\ntext")


def test_pages_expect_marks_for_the_figures():
    for page in ("README.md", "docs/benchmarks.md"):
        docs.replace_between_marks((docs.ROOT / page).read_text(), "new", page)


def test_command_expect_a_table_of_floors_and_json_with_commit_and_processor(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--quick",
        "--only",
        "tiny",
        "round",
        "--json",
        tmp_path / "out.json",
    ]
    done = subprocess.run(command, cwd=docs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "## Floors" in done.stdout
    assert "floors are met" in done.stdout
    out = json.loads((tmp_path / "out.json").read_text())
    assert {"commit", "cpu", "versions"} <= set(out["environment"])
    assert {floor["what"] for floor in out["floors"]} >= {"one-row apply", "one-row take", "tiny: TF op / ours"}
    assert out["questions"]["shapes"]["tiny"]["systems"]
    assert bench_shapes.COPYTO in out["questions"]["shapes"]["tiny"]["systems"]


def test_command_when_pages_are_to_be_written_from_a_part_expect_a_refusal():
    command = [sys.executable, "-m", "benchmarks", "--only", "tiny", "--write-docs"]
    done = subprocess.run(command, cwd=docs.ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert docs.COMMAND in done.stderr
