"""The facade's face is TensorFlow's, and only those who ask for it load TensorFlow."""

import inspect

import pytest

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CLASSES = ["SparseConditionalAccumulator", "ConditionalAccumulator", "ConditionalAccumulatorBase"]


def face_of(function):
    """Return names, kinds and defaults of the parameters, without what types say."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", CLASSES)
def test_constructor_is_tensorflows_but_for_target(tf, gqtf, name):
    ours, theirs = face_of(getattr(gqtf, name).__init__), face_of(getattr(tf.compat.v1, name).__init__)
    if name != "ConditionalAccumulatorBase":
        assert ours.pop() == ("target", inspect.Parameter.KEYWORD_ONLY, None)
    assert ours == theirs


@pytest.mark.parametrize("name", CLASSES)
def test_methods_and_properties_are_tensorflows(tf, gqtf, name):
    ours, theirs = getattr(gqtf, name), getattr(tf.compat.v1, name)
    public = {attribute for attribute in dir(theirs) if not attribute.startswith("_")}
    assert {attribute for attribute in dir(ours) if not attribute.startswith("_")} == public
    for attribute in public:
        mine, other = inspect.getattr_static(ours, attribute), inspect.getattr_static(theirs, attribute)
        assert isinstance(mine, property) == isinstance(other, property)
        if not isinstance(other, property):
            assert face_of(mine) == face_of(other), attribute


def test_properties_in_a_graph_are_tensorflows(tf, gqtf, in_graph):
    with in_graph.build():
        ours = gqtf.SparseConditionalAccumulator(tf.float32, shape=[5, 1], name="scope/Q")
        again = gqtf.SparseConditionalAccumulator(tf.float32, name="scope/Q")
    with tf.compat.v1.Graph().as_default():
        theirs = tf.compat.v1.SparseConditionalAccumulator(tf.float32, shape=[5, 1], name="scope/Q")
        theirs_again = tf.compat.v1.SparseConditionalAccumulator(tf.float32, name="scope/Q")
    assert (ours.name, again.name) == (theirs.name, theirs_again.name) == ("Q", "Q_1")
    assert ours.dtype == theirs.dtype
    assert ours.accumulator_ref.name == theirs.accumulator_ref.name == "scope/Q:0"
    assert ours.accumulator_ref.dtype == theirs.accumulator_ref.dtype
