"""TensorFlow and the facade, where TensorFlow is installed."""

import contextlib
import warnings

import pytest

from tests.parity.conftest import graphs, live  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def tf(graphs):  # noqa: F811 - the fixture, which loads TensorFlow as quietly as can be
    """TensorFlow; the test is skipped where it is not installed."""
    return pytest.importorskip("tensorflow", reason="TensorFlow is not installed")


@pytest.fixture(scope="session")
def gqtf(tf):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import gradquorum.tensorflow

    return gradquorum.tensorflow


@pytest.fixture
def in_graph(tf):
    """Open a graph of TensorFlow 1 and, when it is built, a session on it."""
    v1 = tf.compat.v1

    class InGraph:
        def __init__(self):
            self.graph = v1.Graph()

        def build(self):
            return self.graph.as_default()

        @contextlib.contextmanager
        def session(self):
            # A wait that nothing ends is an error, not a hang.
            with v1.Session(graph=self.graph, config=v1.ConfigProto(operation_timeout_in_ms=20_000)) as session:
                yield session

    return InGraph()
