"""Anybody can be killed at any moment, and every gradient is in exactly one take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_every_accepted_gradient_is_in_one_take_or_named_once_and_then_in_one_take():
    pytest.importorskip("ray")
    seed = int.from_bytes(os.urandom(4), "big")
    command = [sys.executable, "-m", "tests.ray.chaos", "--kills", "15", "--seed", str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
