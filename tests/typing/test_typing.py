"""The annotations say what the library does: mypy --strict on files of right and of wrong usage."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradquorum

pytest.importorskip("mypy")

HERE = Path(__file__).parent
SOURCE = Path(gradquorum.__file__).parent.parent


def mypy(file, tmp_path):
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--config-file=",
        f"--cache-dir={tmp_path}",
        file,
    ]
    env = {**os.environ, "MYPYPATH": str(SOURCE)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.timeout(600)
def test_right_usage_has_no_error(cache):
    assert mypy(HERE / "usage.py", cache) == ""


@pytest.mark.timeout(600)
def test_wrong_usage_is_found_line_by_line(cache):
    expected = {n for n, line in enumerate((HERE / "wrong.py").read_text().splitlines(), 1) if "# wrong" in line}
    found = {int(n) for n in re.findall(r"wrong\.py:(\d+): error:", mypy(HERE / "wrong.py", cache))}
    assert found == expected


def test_package_declares_its_types():
    assert (Path(gradquorum.__file__).parent / "py.typed").exists()
