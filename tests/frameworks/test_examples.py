"""The examples and the page run, and do what they say; the adapters load when they are named, and only then."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks
ROOT = Path(__file__).parents[2]
TIMEOUT = 280


def run(*command, **environment):
    command = [sys.executable, "-W", "error", *map(str, command)]
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output_of(process):
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output


@pytest.mark.timeout(300)
def test_torch_micro_batches():
    pytest.importorskip("torch")
    found = re.fullmatch(
        r"80 steps; loss (\S+) at first, (\S+) at last\n", output_of(run(ROOT / "examples" / "torch_micro_batches.py"))
    )
    assert found
    assert float(found[2]) < float(found[1]) / 4


@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="the process target is for Linux")
def test_torch_quorum(tmp_path):
    pytest.importorskip("torch")
    example = ROOT / "examples" / "torch_quorum.py"
    processes = [run(example, tmp_path, RANK=str(rank), WORLD_SIZE="4") for rank in (3, 1, 0, 2)]  # whichever is first
    try:
        outputs = [output_of(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = re.fullmatch(r"100 steps; mean distance to the optimum: (\d\.\d+)\n", outputs.pop(2))
    assert found
    assert float(found[1]) < 0.3  # it is 1 before training
    assert outputs == [""] * 3


@pytest.mark.timeout(300)
def test_jax_word_vectors():
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    output = output_of(run(ROOT / "examples" / "jax_word_vectors.py"))
    found = re.fullmatch(r"100 steps; the nearest word is of the same topic for (\d+)% of the words\n", output)
    assert found
    assert int(found[1]) > 80  # one in five by chance


def test_page():
    for framework in ("torch", "jax", "optax"):
        pytest.importorskip(framework)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testfile(str(ROOT / "docs" / "pytorch-and-jax.md"), module_relative=False, optionflags=flags)
    assert result.attempted > 20
    assert result.failed == 0


LOADED = "import sys; print(sorted({{'torch', 'jax', 'tensorflow'}} & {{name.split('.')[0] for name in sys.modules}}))"


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_an_adapter_is_loaded_when_it_is_named(name):
    pytest.importorskip(name)
    code = f"import gradquorum as gq; gq.{name}.apply_grad; {LOADED.format()}"
    assert output_of(run("-c", code)) == f"['{name}']\n"
