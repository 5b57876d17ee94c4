"""`gradquorum demo --processes`: the word vectors, trained by worker processes."""

import multiprocessing
import os
import signal
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest

from gradquorum.cli import main
from gradquorum.cli.corpus import Corpus
from gradquorum.cli.training import Examples, Settings, Training

TEXT = " ".join(f"word{i:02d}" for i in (50 * np.random.default_rng(0).random(3000) ** 2).astype(int))
SETTINGS = Settings(workers=3, required=3, dim=8, batch_size=128)


@pytest.fixture(scope="module")
def examples():
    return Examples.from_corpus(Corpus.from_text(TEXT), seed=0)


def test_training_by_processes_gives_the_bits_that_training_by_threads_gives(examples, server):
    trained = []
    for where in (None, server):
        training = Training(examples, SETTINGS, where)
        progress = training.run(num_pairs=20 * 128)
        assert (progress.pairs, progress.stale) == (128 * progress.accepted, 0)
        trained.append(training.vectors)
    np.testing.assert_array_equal(trained[0].input, trained[1].input)
    np.testing.assert_array_equal(trained[0].output, trained[1].output)


def test_training_when_a_worker_process_dies_ends_and_says_so(examples, server):
    def kill_one(_):
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    with pytest.raises(BrokenProcessPool):
        Training(examples, SETTINGS, server).run(num_pairs=10**9, on_step=kill_one)
    assert multiprocessing.active_children() == []


def test_training_by_processes_ends_in_time_though_one_sleeps(examples, server):
    settings = Settings(workers=2, required=2, dim=8, batch_size=128, straggler=60.0)
    assert Training(examples, settings, server).run(seconds=0.5).steps == 0


def test_demo_by_processes_prints_what_it_prints_by_threads(tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    arguments = ["--dim", "8", "--epochs", "1", "--straggler", "1", "--compare", "1"]
    assert main(["demo", "--text", str(path), "--processes", "2", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\n2 worker processes, one of which sleeps 1 ms before each gradient; quorum 1; epochs 1; " in out
    assert "100%  loss " in out
    assert "2 of 2" in out
    assert out.splitlines()[-1].startswith("gradquorum demo: succeeded in ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "0"], "'--processes': 0 is not in the range"),
        (["--processes", "2", "--workers", "2"], "give one of the two"),
        (["--processes", "2", "--study"], "'--processes': a study compares regimes of threads: give --workers instead"),
        (["--processes", "2", "--required", "3"], "'--required': 3 is more than --processes 2"),
    ],
)
def test_demo_when_processes_cannot_be_says_so_in_one_line(capsys, arguments, words):
    assert main(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
