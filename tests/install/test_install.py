"""What an install does when the compiler fails, and when there is none."""

import os
import sys
from pathlib import Path

import pytest

from tests.install.installing import copy_sources, need_build_tools, pip_install, run_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def build_tools():
    need_build_tools()


def test_install_when_the_cpp_does_not_compile_expect_failure(tmp_path):
    sources = copy_sources(tmp_path / "sources")
    header = sources / "cpp" / "bind" / "common.hpp"
    header.write_text(header.read_text() + "\nthis does not compile;\n")
    site = tmp_path / "site"
    done = pip_install(sources, site)
    assert done.returncode != 0, done.stdout
    assert "this does not compile" in done.stdout
    assert not (site / "gradquorum").exists()


USE = """
import warnings
import gradquorum as gq
assert gq.__file__.startswith({site!r}), gq.__file__
assert gq.engine_name == "reference", gq.engine_name
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for number in range(3):
        with gq.SparseConditionalAccumulator("float32", (5, 1)) as acc:
            acc.apply_grad([3, 1, 3], [[30.0], [10.0], [1.0]])
            print(acc.engine, acc.take_grad(1).values.ravel().tolist())
        if number == 0:
            assert [w.category for w in caught] == [RuntimeWarning], caught
            assert "without its native engine" in str(caught[0].message)
assert len(caught) == 1, caught
"""


def test_install_when_there_is_no_compiler_expect_the_reference_engine_and_one_warning(tmp_path):
    sources, site = copy_sources(tmp_path / "sources"), tmp_path / "site"
    # CMake looks for compilers in the system's folders, whatever PATH says, unless a toolchain file forbids it.
    (tmp_path / "hidden.cmake").write_text("set(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH OFF)\n")
    settings = f"-Ccmake.define.CMAKE_TOOLCHAIN_FILE={tmp_path / 'hidden.cmake'}"
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("cmake", "ninja"):  # nothing else: a virtual environment's folder may hold a compiler, too
        if (Path(sys.executable).parent / tool).exists():
            (tools / tool).symlink_to(Path(sys.executable).parent / tool)
    done = pip_install(sources, site, settings, PATH=os.fspath(tools))
    assert done.returncode == 0, done.stdout
    assert "no C++ compiler found; installing without the native engine" in done.stdout
    used = run_python(USE.format(site=os.fspath(site)), site)
    assert used.returncode == 0, used.stderr
    assert used.stdout.split("\n")[0] == "reference [10.0, 31.0]"
