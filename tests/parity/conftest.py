"""TensorFlow, for the tests that run beside it."""

import warnings

import pytest

from tests.parity.generator import generate
from tests.parity.record import check
from tests.parity.replay import TensorFlowGraphs, differences, run

CHUNK = 12
"""Programs in one test."""


class Live:
    """Random programs of one seed, run on TensorFlow, each once, and on whatever is compared with it."""

    def __init__(self, graphs, seed):
        self._graphs = graphs
        self._seed = seed
        self._traces = {}

    def program(self, number):
        """Return a program and its trace on TensorFlow."""
        program = generate(self._seed, number)
        if number not in self._traces:
            with self._graphs.adapter(program) as adapter:
                self._traces[number] = run(program, adapter)
            check(program, self._traces[number])
        return program, self._traces[number]

    def check_chunk(self, start, adapter_of):
        """Assert that a chunk of programs gives on `adapter_of(program)` what it gives on TensorFlow."""
        faults = []
        for number in range(start, start + CHUNK):
            program, expected = self.program(number)
            with adapter_of(program) as adapter:
                faults += differences(program, expected, run(program, adapter))
        assert not faults, "\n".join([f"seed {self._seed}", *faults])


@pytest.fixture(scope="module")
def live(request, graphs):
    """The random programs of the module's `SEED`."""
    return Live(graphs, request.module.SEED)


@pytest.fixture(scope="session")
def graphs():
    """Adapters to TensorFlow's accumulators; the test is skipped where TensorFlow is not installed."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's own imports warn
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        patch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        tensorflow = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
        return TensorFlowGraphs(tensorflow)
