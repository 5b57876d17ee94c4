"""The examples with TensorFlow run, and do what they say; and the learning-rate note is as measured."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.facade.learning_rate import measure

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def run(name):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("tf")
def test_keras_replicas():
    found = re.fullmatch(r"60 steps of 3 of 4 replicas: loss (\d\.\d+) -> (\d\.\d+)\n", run("keras_replicas.py"))
    assert found
    assert float(found[2]) < 0.6 * float(found[1])


@pytest.mark.usefixtures("tf")
def test_tensorflow_accumulation():
    assert re.fullmatch(
        r"(step \d: \d\d rows of 100000 held, taken and updated\n){3}", run("tensorflow_accumulation.py")
    )


def test_learning_rate_note_is_as_measured(tf, gqtf):
    """Raw Zipf ids from four workers: the table of docs/from-tensorflow.md."""
    theirs = measure(tf.compat.v1, 1.3, 4096, "MEAN")
    row = f"| 1.3 | 4096 | {theirs:.2f} | {measure(gqtf, 1.3, 4096, 'MEAN'):.2f} | 1.00 |"
    assert 3.9 < theirs < 4.0
    assert measure(gqtf, 1.3, 4096, "MEAN_BY_COUNT") == 1.0
    assert row in (ROOT / "docs" / "from-tensorflow.md").read_text()
