"""TensorFlow, for the tests that run beside it."""

import warnings

import pytest

from tests.parity.replay import TensorFlowGraphs


@pytest.fixture(scope="session")
def graphs():
    """Adapters to TensorFlow's accumulators; the test is skipped where TensorFlow is not installed."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's own imports warn
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        patch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        tensorflow = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
        return TensorFlowGraphs(tensorflow)
