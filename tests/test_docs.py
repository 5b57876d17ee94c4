"""The examples in the documentation do what it says."""

import doctest
import re
from pathlib import Path

import pytest

import gradquorum as gq

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", ["staleness.md", "checkpoints.md"])
def test_examples_print_what_the_page_says(name):
    if name == "checkpoints.md":
        pytest.importorskip("safetensors")
    done = doctest.testfile(str(DOCS / name), module_relative=False)
    assert done.attempted > 5
    assert not done.failed


def test_overview_names_everything_public():
    words = set(re.findall(r"\w+", (DOCS / "api.md").read_text()))
    names = {name for name in gq.__all__ if not name.startswith("_")}
    for kind in (gq.SparseConditionalAccumulator, gq.AccumulatorGroup, gq.SyncReplicas, gq.ApplyReceipt):
        names |= {name for name in dir(kind) if not name.startswith("_")}
    names |= {status.name for status in gq.ApplyStatus}
    missing = names - words
    assert not missing
