"""Accumulators in a graph of TensorFlow 1: names, what a shared name is one of, and dtypes."""

import numpy as np
import pytest

from tests.support import TIMEOUT

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def rows(taken):
    return list(zip(taken.indices.tolist(), taken.values.ravel().tolist(), strict=True))


@pytest.mark.parametrize("where", ["graph", "server"])
@pytest.mark.parametrize("kind", ["SparseConditionalAccumulator", "ConditionalAccumulator"])
def test_names_are_those_of_tensorflow(request, tf, gqtf, where, kind):
    options = {"target": request.getfixturevalue("server").address} if where == "server" else {}
    gradient = ([1], [[1.0]]) if kind.startswith("Sparse") else ([1.0],)
    names = []
    for classes in (gqtf, tf.compat.v1):
        with tf.compat.v1.Graph().as_default(), tf.compat.v1.name_scope("outer"):
            make = getattr(classes, kind)
            accs = [make(tf.float32, name="Q", **(options if classes is gqtf else {})) for _ in range(2)]
            acc = accs[0]
            made = [*accs, acc.apply_grad(*gradient), acc.apply_grad(*gradient, name="mine"), acc.num_accumulated()]
            made += [acc.set_global_step(1), acc.set_global_step(1, name="set")]
            if kind.startswith("Sparse"):
                slices = acc.take_indexed_slices_grad(1)
                made += [*acc.take_grad(1), *acc.take_grad(1, name="taken"), slices.values, slices.dense_shape]
                made += [acc.apply_indexed_slices_grad(slices)]
            else:
                made += [acc.take_grad(1), acc.take_grad(1, name="taken")]
            names.append([each.name for each in made])
    assert names[0] == names[1]


def test_shared_name_is_one_round_and_another_spec_is_refused(tf, gqtf, in_graph):
    with in_graph.build():
        one = gqtf.SparseConditionalAccumulator(tf.float32, shape=[5, 1], shared_name="test-shared")
        two = gqtf.SparseConditionalAccumulator(tf.float32, shape=[5, 1], shared_name="test-shared")
        apply, take = one.apply_grad([1], [[3.0]]), two.take_grad(1)
        with pytest.raises(ValueError, match=r"float32.*float64"):
            gqtf.SparseConditionalAccumulator(tf.float64, shape=[5, 1], shared_name="test-shared")
    with in_graph.session() as session:
        session.run(apply)
        assert rows(session.run(take)) == [(1, 3.0)]


def test_bfloat16_which_tensorflows_own_has_not(tf, gqtf, in_graph):
    with in_graph.build():
        acc = gqtf.SparseConditionalAccumulator(tf.bfloat16, shape=[5, 1])
        apply, take = acc.apply_grad([1, 1], [[1.0], [2.0]]), acc.take_grad(1)
    with in_graph.session() as session:
        session.run(apply)
        assert session.run(take).values.astype(np.float32).tolist() == [[3.0]]


def test_wrong_dtypes_are_refused_when_the_graph_is_built(tf, gqtf, in_graph):
    with in_graph.build():
        acc = gqtf.SparseConditionalAccumulator(tf.float32, shape=[5, 1])
        with pytest.raises(TypeError, match="expected float32, got float64"):
            acc.apply_grad([1], np.ones((1, 1)))
        with pytest.raises(TypeError, match="expected integers, got float32"):
            acc.apply_grad([1.5], [[1.0]])
        for classes in (gqtf, tf.compat.v1):
            with pytest.raises(ValueError, match=r"MEAN.*SUM"):
                classes.SparseConditionalAccumulator(tf.float32, reduction_type="Invalid")


def test_shared_name_is_one_of_its_graph_and_container(tf, gqtf):
    v1 = tf.compat.v1
    for rows in (5, 9):
        with v1.Graph().as_default() as graph:
            accs = []
            for container in ("a", "b"):
                with graph.container(container):
                    shape = [rows + len(accs), 1]
                    accs.append(gqtf.SparseConditionalAccumulator(tf.float32, shape, shared_name="table"))
            again = gqtf.SparseConditionalAccumulator(tf.float32, [99, 1], shared_name="table")
            with graph.container("a"):
                same = gqtf.SparseConditionalAccumulator(tf.float32, [rows, 1], shared_name="table", name="same")
                with pytest.raises(ValueError, match="'table': there is"):
                    gqtf.SparseConditionalAccumulator(tf.float32, [rows + 1, 1], shared_name="table")
            applies = [acc.apply_grad([1], [[1.0]]) for acc in (*accs, again)]
            takes, counts = same.take_grad(1).values, [acc.num_accumulated() for acc in (*accs, again)]
        with v1.Session(graph=graph) as session:
            session.run(applies)
            assert session.run(takes).tolist() == [[1.0]]
            assert session.run(counts) == [0, 1, 1]


@pytest.mark.parametrize("devices", [("/cpu:0", "/cpu:1"), ("/cpu:1", "/device:CPU:1"), ("", "/cpu:0")])
def test_shared_name_is_one_of_its_device(tf, gqtf, devices):
    """As with TensorFlow's own, and however the device is written."""
    v1, seen = tf.compat.v1, []
    for classes in (v1, gqtf):
        with v1.Graph().as_default():
            ops = []
            for device, value in zip(devices, (1.0, 2.0), strict=True):
                with tf.device(device):
                    acc = classes.SparseConditionalAccumulator(tf.float32, shared_name="test-devices")
                    apply, take = acc.apply_grad([1], [[value]], local_step=5), acc.take_grad(1).values
                    ops.append((apply, acc.num_accumulated(), take))
            counts = [count for _, count, _ in ops]
            config = v1.ConfigProto(device_count={"CPU": 2}, operation_timeout_in_ms=int(1000 * TIMEOUT))
            with v1.Session(config=config) as session:
                taken = []
                for apply, _, _ in ops:
                    session.run(apply)
                    taken.append(session.run(counts))
                for _, _, take in ops[: 2 if devices == ("/cpu:0", "/cpu:1") else 1]:
                    taken.append((session.run(take).tolist(), session.run(counts)))
                seen.append(taken)
    assert seen[0] == seen[1]
