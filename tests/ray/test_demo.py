"""`gradquorum demo --ray`: the word vectors, trained by tasks."""

import sys

import numpy as np
import pytest

from gradquorum.cli import main
from gradquorum.cli.corpus import Corpus
from gradquorum.cli.training import Examples, Settings, Training

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the tables are in shared memory"),
]

TEXT = " ".join(f"word{i:02d}" for i in (50 * np.random.default_rng(0).random(3000) ** 2).astype(int))
SETTINGS = Settings(workers=3, required=3, dim=8, batch_size=128)


def test_training_by_tasks_gives_the_bits_that_training_by_threads_gives(ray_cluster):
    examples = Examples.from_corpus(Corpus.from_text(TEXT), seed=0)
    trained = []
    for where in (None, "ray"):
        training = Training(examples, SETTINGS, where)
        progress = training.run(num_pairs=10 * 128)
        assert (progress.pairs, progress.stale) == (128 * progress.accepted, 0)
        trained.append(training.vectors)
    np.testing.assert_array_equal(trained[0].input, trained[1].input)
    np.testing.assert_array_equal(trained[0].output, trained[1].output)


@pytest.mark.parametrize("others", [["--processes", "2"], ["--study"]])
def test_demo_on_ray_refuses_what_does_not_go_with_it(capsys, others):
    assert main(["demo", "--ray", *others]) != 0
    assert "--ray" in capsys.readouterr().err
