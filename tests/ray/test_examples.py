"""The examples run to their end."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.ray
@pytest.mark.slow
def test_ray_tasks():
    pytest.importorskip("ray")
    command = [sys.executable, str(EXAMPLES / "ray_tasks.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 5, done.stdout
    assert any(line.startswith("mean of the table: 0.") for line in lines), done.stdout
