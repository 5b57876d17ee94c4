"""The examples run, and do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def check(output, errors):
    assert errors == ""
    found = re.fullmatch(r"200 steps; mean distance to the optimum: (\d\.\d+)\n", output)
    assert found, output
    assert float(found[1]) < 0.2  # it is 1 before training


def test_multiprocessing_workers():
    command = [sys.executable, "-W", "error", str(EXAMPLES / "multiprocessing_workers.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    check(done.stdout, done.stderr)


def test_torchrun_style(tmp_path):
    command = [sys.executable, "-W", "error", str(EXAMPLES / "torchrun_style.py"), str(tmp_path)]
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
