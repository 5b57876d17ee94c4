"""`gradquorum demo --study`: what it measures, what it concludes, and what it writes."""

import itertools
import json
import re
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

import gradquorum.cli.study_command
from gradquorum.cli import main
from gradquorum.cli.corpus import Corpus
from gradquorum.cli.study import Curve, Stragglers, StudySettings, run_study
from gradquorum.cli.study_report import plot, reached, summarise, target_loss, verdicts
from gradquorum.cli.training import Examples

SHORT = StudySettings(
    workers=3, required=2, seconds=0.2, straggler=0.02, dim=4, num_seeds=1, base=0.001, batch_size=32
)  # fmt: skip


def some_text(num_words=3000):
    rng = np.random.default_rng(0)
    return " ".join(f"word{i:02d}" for i in (50 * rng.random(num_words) ** 2).astype(int))


@pytest.fixture(scope="module")
def examples():
    return Examples.from_corpus(Corpus.from_text(some_text()), seed=0)


def curves_that_take(times, num_seeds=3):
    """Return curves that go from loss 2 to 1 in a straight line, in so many seconds for each regime."""
    settings = replace(SHORT, num_seeds=num_seeds)
    return settings, [
        Curve(stragglers.name, regime.name, seed, [0.0, times[regime.name][seed]], [0, 100], [2.0, 1.0], steps=10)
        for stragglers in settings.stragglers
        for seed in settings.seeds
        for regime in settings.regimes
    ]


# Measuring


def test_study_trains_each_regime_under_each_kind_of_stragglers(examples):
    seen = []
    curves = run_study(examples, replace(SHORT, seconds=2.0), seen.append)  # long for a busy machine
    assert seen == curves
    found = [(curve.stragglers, curve.regime) for curve in curves]
    assert found == list(itertools.product(("none", "tail"), ("all 3", "2 of 3", "async")))
    for curve in curves:
        assert len(curve.seconds) == len(curve.gradients) == len(curve.losses) > 1
        assert curve.seconds == sorted(curve.seconds)
        assert curve.gradients[0] == 0
        assert curve.losses[-1] < curve.losses[0]
    by_regime = {curve.regime: curve for curve in curves if curve.stragglers == "none"}
    assert by_regime["all 3"].stale == 0
    assert by_regime["all 3"].lag == by_regime["2 of 3"].lag == 0
    assert by_regime["all 3"].gradients[-1] == 3 * by_regime["all 3"].steps
    assert by_regime["async"].stale == 0


class _AtOnce(threading.Timer):
    """A timer whose time is over when it starts, whatever else the machine does."""

    def start(self):
        self.function()


def test_study_whose_time_is_over_at_once_has_the_beginning_and_no_steps(examples, monkeypatch):
    monkeypatch.setattr(threading, "Timer", _AtOnce)
    curves = run_study(examples, SHORT)
    assert [(curve.gradients, curve.steps) for curve in curves] == [([0], 0)] * 6


def test_study_when_a_worker_fails_raises_it_and_leaves_no_thread(examples, monkeypatch):
    def fail(self, batch):
        raise ZeroDivisionError

    monkeypatch.setattr("gradquorum.cli.study.WordVectors.gradients", fail)
    with pytest.raises(ZeroDivisionError):
        run_study(examples, replace(SHORT, seconds=60))


def test_delays_are_those_of_the_seed_and_the_worker():
    stragglers = Stragglers("tail", 0.01, 0.25, 0.5)

    def draw(seed, worker, number=400):
        return list(itertools.islice(stragglers.delays(seed, worker), number))

    assert draw(0, 0) == draw(0, 0)
    assert draw(0, 0) != draw(0, 1)
    assert draw(0, 0) != draw(1, 0)
    assert set(draw(0, 0)) == {0.01, 0.51}
    assert 60 < sum(delay > 0.1 for delay in draw(0, 0)) < 140
    assert stragglers.words == "each gradient takes 10 ms, one in 4 takes 500 ms more"


# Concluding


def test_loss_is_reached_between_two_points():
    curve = Curve("none", "all 3", 0, [0.0, 1.0, 3.0], [0, 10, 50], [4.0, 3.0, 1.0])
    assert reached(curve, 2.0) == (2.0, 30.0)
    assert reached(curve, 4.5) == (0.0, 0.0)
    assert target_loss([curve, replace(curve, losses=[4.0, 2.5, 2.6])]) == 2.5


def test_verdict_says_that_backups_paid_only_if_they_did_for_every_seed():
    everybody = (1.0, 1.0, 1.0)
    for backups, expected in (
        ((0.5, 0.6, 0.4), "2.00 times as fast as all 3 (seeds: 1.67 to 2.50): it paid"),
        ((2.0, 2.0, 2.0), "0.50 times as fast as all 3 (seeds: 0.50 to 0.50): it did not pay: it was slower"),
        ((0.5, 1.0, 0.5), "no difference beyond the spread"),
        ((0.97, 0.97, 0.97), "no difference beyond the spread"),
    ):
        settings, curves = curves_that_take({"all 3": everybody, "2 of 3": backups, "async": everybody})
        lines = verdicts(curves, settings)
        assert len(lines) == 4
        assert lines[0].startswith("stragglers none: 2 of 3 reached loss 1.000 ")
        assert lines[0].endswith(expected)
        assert lines[1].endswith("no difference beyond the spread")


def test_verdict_of_one_seed_is_none():
    times = {"all 3": [1.0], "2 of 3": [0.5], "async": [0.5]}
    settings, curves = curves_that_take(times, num_seeds=1)
    assert all(line.endswith("too few seeds to say more") for line in verdicts(curves, settings))


def test_summary_has_the_spread_over_the_seeds():
    settings, curves = curves_that_take({"all 3": (1.0, 2.0, 4.0), "2 of 3": (1.0,) * 3, "async": (1.0,) * 3})
    row = summarise(curves, settings)[0]
    spread = row.seconds_to_target
    assert (row.regime, spread.median, spread.least, spread.most) == ("all 3", 2.0, 1.0, 4.0)


# Writing


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Return a text, and let studies be short."""

    def run_short(examples, settings, on_trial):
        return run_study(examples, replace(settings, seconds=0.1, base=0.001), on_trial)

    monkeypatch.setattr(gradquorum.cli.study_command, "run_study", run_short)
    path = tmp_path / "text.txt"
    path.write_text(some_text())
    return path


def study(text, *arguments):
    return main(["demo", "--text", str(text), "--dim", "4", "--seeds", "1", "--straggler", "2", *arguments])


def test_study_prints_tables_and_verdicts_and_writes_all_it_found(text, tmp_path, capsys):
    folder = tmp_path / "a" / "b"
    assert study(text, "--seed", "7", "--study", str(folder)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "6 trainings of 5 s each" in out
    assert "stragglers tail: each gradient takes 20 ms, one in 10 takes 2 ms more" in out
    assert re.search(r"steps/s .* \d+\.\d .* \d+\.\d .* \d+\.\d ", out)
    assert len(re.findall("too few seeds to say more", out)) == 4
    assert re.fullmatch(r"gradquorum demo --study: succeeded in \d+ s", out.splitlines()[-1])
    found = json.loads((folder / "study.json").read_text())
    assert {"version", "engine", "machine", "settings", "summary", "verdicts", "trials"} <= set(found)
    assert [trial["seed"] for trial in found["trials"]] == [7] * 6
    assert found["settings"]["straggler"] == 0.002
    assert found["settings"]["num_seeds"] == 1


def test_study_without_matplotlib_says_what_to_install(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert study(text, "--study", str(tmp_path)) == 0
    assert "no plots: matplotlib is missing: pip install matplotlib" in capsys.readouterr().out
    assert (tmp_path / "study.json").exists()
    assert not (tmp_path / "study.svg").exists()


@pytest.mark.frameworks
@pytest.mark.filterwarnings("default")
def test_study_plots_both_formats(tmp_path):
    pytest.importorskip("matplotlib")
    settings, curves = curves_that_take({"all 3": (1.0, 2.0, 4.0), "2 of 3": (1.0,) * 3, "async": (1.0,) * 3})
    paths = [tmp_path / "study.svg", tmp_path / "study.png"]
    plot(paths, curves, settings)
    assert "<svg" in paths[0].read_text()
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_seeds_without_a_study_are_refused(text, capsys):
    assert main(["demo", "--text", str(text), "--seeds", "2"]) == 2
    assert "'--seeds': only a study has several: give --study too" in capsys.readouterr().err


def test_study_without_a_folder_writes_to_one_of_its_own_name(text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert study(text, "--study") == 0
    assert (tmp_path / "study" / "study.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare", "0"], "'--compare': a study needs at least 1"),
        (["--workers", "1"], "'--workers': a study needs at least 2"),
        (["--seeds", "0"], "'--seeds'"),
        (["--study", "text.txt"], "'--study'"),
        (["--study", "text.txt/below"], "'--study': cannot write to text.txt/below: Not a directory"),
    ],
)
def test_study_refuses_what_cannot_be_in_one_line(text, tmp_path, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert study(text, "--study", *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
