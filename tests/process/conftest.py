import multiprocessing
import sys

import pytest

collect_ignore_glob = [] if sys.platform == "linux" else ["*"]  # several processes need Linux

# Its children begin where this one is: with the library loaded and nothing used.
multiprocessing.set_forkserver_preload(["tests.process.chaos", "tests.process.children", "tests.process.restarts"])


@pytest.fixture
def folder(tmp_path):
    """Where a server keeps its rounds. It makes the folder."""
    return tmp_path / "kept"
