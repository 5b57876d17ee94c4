"""The examples run to their end, on the cluster of the other tests."""

import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


LAST_LINES = {
    "ray_tasks": r"mean of the table: 0\.[3-9]\d",
    "ray_train": r"distance from what the loss asks for: 0\.[0-7]\d",
}


@pytest.mark.parametrize("name", LAST_LINES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_example_trains(ray_cluster, capsys, name):
    if name == "ray_train":
        pytest.importorskip("pyarrow")
    run_example(name)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("step ")] == [f"step {i}" for i in range(5)], lines
    assert re.fullmatch(LAST_LINES[name], lines[-1]), lines
