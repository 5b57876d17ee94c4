"""The examples run, and do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import STRICT_PYTHON

EXAMPLES = Path(__file__).parents[2] / "examples"


def check(output, errors):
    assert errors == ""
    found = re.fullmatch(r"200 steps; mean distance to the optimum: (\d\.\d+)\n", output)
    assert found, output
    assert float(found[1]) < 0.2  # it is 1 before training


def test_multiprocessing_workers():
    command = [*STRICT_PYTHON, str(EXAMPLES / "multiprocessing_workers.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    check(done.stdout, done.stderr)


TORCHRUN_STYLE = [*STRICT_PYTHON, str(EXAMPLES / "torchrun_style.py")]


def run_torchrun_style(folder):
    command = [*TORCHRUN_STYLE, str(folder)]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "4"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (3, 1, 0, 2)  # whichever comes first
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0, 0], outputs
    check(*outputs[2])
    assert [output for i, output in enumerate(outputs) if i != 2] == [("", "")] * 3


def test_torchrun_style_twice_in_one_folder(tmp_path):
    run_torchrun_style(tmp_path / "run")
    assert not (tmp_path / "run" / "handle").exists()
    make = "import pickle, sys, gradquorum as gq; sys.stdout.buffer.write(pickle.dumps(gq.shared_table(3, 'int32')))"
    dead = subprocess.run([sys.executable, "-c", make], capture_output=True, check=True, timeout=100).stdout
    (tmp_path / "run" / "handle").write_bytes(dead)  # as a run that was killed leaves it
    run_torchrun_style(tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        ([], {"RANK": "0", "WORLD_SIZE": "4"}, "usage: .*DIRECTORY"),
        (["x"], {}, "RANK and WORLD_SIZE: expected numbers, as torchrun sets them; got 'RANK'"),
        (["x"], {"RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE: expected 2 or more .*, got 1"),
    ],
)
def test_torchrun_style_when_it_cannot_run_expect_one_line(tmp_path, arguments, variables, words):
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | variables
    done = subprocess.run(
        [*TORCHRUN_STYLE, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert re.fullmatch(words + r".*\n", done.stderr), done.stderr
    assert not list(tmp_path.iterdir())
