"""Installs a copy of the package from its sources, beside whatever is installed here."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "cpp", "src"]


def copy_sources(folder):
    """Copy what an install needs; return the folder."""
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def need_build_tools():
    pytest.importorskip("scikit_build_core")
    pytest.importorskip("nanobind")


def pip_install(sources, site, *settings, **environment):
    """Install with the build tools of this environment and no network; return the finished process."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-build-isolation",
        "--no-deps",
    ]
    command += ["--no-index", "--verbose", "--target", site, *settings, sources]
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "LD_PRELOAD")} | environment
    return subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def run_python(code, site=None):
    """Run code in a process of its own, with the package from the folder `site`, or the one installed here."""
    command = [sys.executable, "-c", code]
    if site is not None:  # without the hooks of an editable install, which come first
        paths = [os.fspath(site), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)
