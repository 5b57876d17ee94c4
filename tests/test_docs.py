"""The examples in the documentation do what it says."""

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", ["staleness.md", "checkpoints.md"])
def test_examples_print_what_the_page_says(name):
    if name == "checkpoints.md":
        pytest.importorskip("safetensors")
    done = doctest.testfile(str(DOCS / name), module_relative=False)
    assert done.attempted > 5
    assert not done.failed
