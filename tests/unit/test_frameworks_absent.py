"""Where no framework is loaded none is loaded, and where one is missing it is named."""

import re
import subprocess
import sys

import pytest

LOADED = "import sys; print({'torch', 'jax', 'tensorflow', 'ray'} & {name.split('.')[0] for name in sys.modules})"


def output_of(code):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_what_is_used_without_a_framework_loads_none():
    code = (
        "import numpy as np, gradquorum as gq; acc = gq.SparseConditionalAccumulator('float32', (5, 1))\n"
        "acc.apply_grad([1], [[1.0]]); acc.apply_indexed_slices_grad(([1], [[1.0]])); acc.take_grad(1)\n"
        "try: acc.apply_indexed_slices_grad(object())\n"
        "except gq.InvalidArgumentError: pass\n"
    )
    assert output_of(f"import warnings; warnings.simplefilter('ignore')\n{code}{LOADED}") == "set()\n"


NEEDS = [("torch", "needs PyTorch"), ("jax", "needs JAX"), ("tensorflow", "needs TensorFlow")]


@pytest.mark.parametrize(("name", "words"), NEEDS)
def test_a_missing_framework_is_named(name, words):
    code = (
        f"import sys; sys.modules['{name}'] = None\n"
        f"try: import gradquorum.{name}\n"
        f"except ModuleNotFoundError as error: print(error.name, error)"
    )
    expected = rf"{name} gradquorum\.{name} {words}.*pip install {name}\n"
    assert re.fullmatch(expected, output_of(code))


def test_a_missing_ray_is_named_and_no_thread_dies_of_it():
    code = (
        "import sys, threading, gradquorum as gq; sys.modules['ray'] = None\n"
        "try: gq.SparseConditionalAccumulator('float32', target='ray')\n"
        "except gq.GradQuorumError as error: print(error, threading.active_count())\n"
    )
    assert re.fullmatch(r"target='ray': needs Ray: pip install 'gradquorum\[ray\]' 1\n", output_of(code))


def test_other_names_are_no_attributes():
    import gradquorum as gq

    with pytest.raises(AttributeError, match="has no attribute 'numpy'"):
        gq.numpy  # noqa: B018
