"""Runs what may crash in a process of its own, and says which case it was."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**more):
    """Return the environment of a child process: this one's, with sanitizers that let huge requests for memory fail."""
    env = {**os.environ, **more}
    if "ASAN_OPTIONS" in env:
        env["ASAN_OPTIONS"] += ":allocator_may_return_null=1"
    return env


def run_boundary(seed, calls, tmp_path, seconds):
    """Run at least `calls` fuzzed calls; return what the process reports about them."""
    progress = tmp_path / "case"
    command = [sys.executable, "-m", "tests.fuzz.boundary", "--seed", str(seed), "--calls", str(calls)]
    try:
        done = subprocess.run(
            [*command, "--progress", str(progress)], cwd=ROOT, env=environment(), timeout=seconds,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"a fuzzed call hangs: {_again(seed, progress)}\n{error.output}") from None
    assert done.returncode == 0, f"exit status {done.returncode}: {_again(seed, progress)}\n{done.stdout[-8000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def _again(seed, progress):
    case = struct.unpack("q", progress.read_bytes())[0] if progress.exists() else "?"
    return f"python -m tests.fuzz.boundary --seed {seed} --only {case}"
