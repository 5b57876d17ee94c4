"""Programs written for TensorFlow's class, run on it and, with the import changed, on ours."""

import functools
import re
import threading
import types

import numpy as np
import pytest

from tests.support import TIMEOUT

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::gradquorum.StaleGradientWarning"),
]


@pytest.fixture(params=["tensorflow", "gradquorum", "server"])
def classes(request, tf, gqtf):
    if request.param != "server":
        return tf.compat.v1 if request.param == "tensorflow" else gqtf
    target = request.getfixturevalue("server").address
    kinds = gqtf.SparseConditionalAccumulator, gqtf.ConditionalAccumulator
    return types.SimpleNamespace(**{kind.__name__: functools.partial(kind, target=target) for kind in kinds})


@pytest.fixture
def session(tf):
    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session(config=v1.ConfigProto(operation_timeout_in_ms=20_000)) as session:
        yield session


def test_accumulators_of_one_name_and_several_dtypes(tf, classes, session):
    made = [classes.SparseConditionalAccumulator(dtype, name="Q") for dtype in (tf.float16, tf.float32, tf.float64) * 2]
    assert [acc.name for acc in made] == ["Q", "Q_1", "Q_2", "Q_3", "Q_4", "Q_5"]
    for number, acc in enumerate(made):
        values = np.full((1, 2), number).astype(acc.dtype.as_numpy_dtype)
        acc.apply_indexed_slices_grad(tf.IndexedSlices(values, [number])).run()
    for number, acc in enumerate(made):
        taken = session.run(acc.take_indexed_slices_grad(1))
        assert (taken.indices.tolist(), taken.values.tolist()) == ([number], [[number, number]])
        assert taken.values.dtype == acc.dtype.as_numpy_dtype
        assert taken.dense_shape.tolist() == [-1, 2]


def test_forms_in_which_ids_shapes_and_steps_come(tf, classes, session):
    acc = classes.SparseConditionalAccumulator(tf.float32, shape=tf.TensorShape([3, 2]))
    ids, shape = tf.constant([0, 2], tf.int32), tf.constant([3, 2], tf.int32)
    values = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    step = tf.compat.v1.train.get_or_create_global_step()
    session.run(step.initializer)
    acc.apply_grad(ids, values, shape, local_step=step).run()
    acc.apply_indexed_slices_grad(tf.IndexedSlices(values, ids, shape), local_step=0).run()
    acc.apply_grad([0, 2], values, (3, 2), local_step=np.int32(0)).run()
    assert acc.num_accumulated().eval() == 3
    taken = session.run(acc.take_grad(tf.constant(3)))
    assert taken.values.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    acc.set_global_step(step).run()
    assert acc.num_accumulated(name="mine").eval() == 0


def test_scalar_rows_and_an_empty_shape(tf, classes, session):
    acc = classes.SparseConditionalAccumulator(tf.float32, shape=[])
    wrong_ids = "Input indices should be vector but received shape: "
    for ids, values, words in (
        (0, [1.0], f"{wrong_ids}[]"),
        ([[0, 1]], [1.0], f"{wrong_ids}[1,2]"),
        ([0], 1.0, "Values cannot be 0-dimensional."),
    ):
        for shape in ([], None):
            with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(words)):
                acc.apply_grad(ids, values, grad_shape=shape).run()
    acc.apply_grad([0], [1.0], grad_shape=[]).run()
    acc.apply_grad([0], [2.0]).run()
    assert session.run(acc.take_grad(2)).values.tolist() == [1.5]


def test_rows_are_bound_by_the_round_until_it_is_taken(tf, classes, session):
    acc = classes.SparseConditionalAccumulator(tf.float32, shape=[2, 2, None])

    def refused(words, shape, ids=(0,), step=0, **options):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            acc.apply_grad(ids, np.ones(shape, np.float32), local_step=step, **options).run()

    refused("Shape mismatch: expected shape rank at least 3, got 2", (1, 2), grad_shape=[2, 2])
    refused("Shape mismatch: expected shape dim 1 to be 2, got 3", (1, 3, 2), grad_shape=[2, 3, 2])
    refused("index of slice 0 exceeded limits of shape; index is 3 exceeded 2", (1, 2, 2), ids=(3,))
    refused("Shape mismatch: expected values rank at least 3, got 2", (2, 2), ids=(0, 1))
    refused("Shape mismatch: expected values dim 1 to be 2, got 3", (1, 3, 2))
    acc.apply_grad([0], np.ones((1, 2, 2, 2), np.float32)).run()
    refused("Shape mismatch: expected values rank 4, got 3", (1, 2, 2))
    refused("Shape mismatch: expected values dim 3 to be 2, got 3", (1, 2, 2, 3))
    assert session.run(acc.take_indexed_slices_grad(1)).dense_shape.tolist() == [2, 2, 2, 2]
    acc.apply_grad([0], np.ones((1, 2, 2, 3), np.float32), local_step=1).run()
    refused("Shape mismatch: expected values dim 3 to be 3, got 2", (1, 2, 2, 2), step=1)


def test_ten_takes_wait_and_are_served_one_gradient_each(tf, classes, session, run_thread):
    acc = classes.SparseConditionalAccumulator(tf.float32)
    applies = [acc.apply_grad([1], [[float(step)]], local_step=step) for step in range(10)]
    take = acc.take_grad(1)
    calls = [run_thread(session.run, take) for _ in range(10)]
    for apply in applies:
        session.run(apply)
    assert sorted(float(call.result().values[0, 0]) for call in calls) == list(range(10))


def test_gradient_after_the_quorum_is_stale_for_the_waiting_take(tf, classes, session, run_thread):
    """Three workers, a quorum of two: the third is late however soon it comes."""
    acc = classes.SparseConditionalAccumulator(tf.float32)
    step = tf.compat.v1.placeholder(tf.int64)
    applies = [acc.apply_grad([0], [[value]], local_step=step) for value in (1.0, 3.0, 100.0)]
    take, count = acc.take_grad(2), acc.num_accumulated()
    for number in range(30):
        taking = run_thread(session.run, take)
        for apply in applies[:2]:
            session.run(apply, {step: number})
        mean = taking.result().values.tolist()
        session.run(applies[2], {step: number})
        assert mean == [[2.0]]
        assert session.run(count) == 0


@pytest.mark.parametrize("classes", ["tensorflow", "gradquorum"], indirect=True)
def test_close_ends_a_waiting_take_with_these_words(tf, classes, run_thread):
    v1 = tf.compat.v1
    for _ in range(5):  # it may not have come to its gate when the session is closed
        with v1.Graph().as_default(), v1.Session() as session:
            acc = classes.SparseConditionalAccumulator(tf.float32, shape=[1, 2, 3])
            take, count = acc.take_grad(1), acc.num_accumulated()
            taking = run_thread(session.run, take)
            started = threading.Event()
            started.wait(0.3)  # TensorFlow has nothing that tells when a take waits
            session.run(count)
            session.close()
            error = taking.error()
        assert isinstance(error, tf.errors.CancelledError)
        if "TakeGrad operation was cancelled" in error.message:
            return
    raise AssertionError(f"{error.message} within {TIMEOUT} s")


def test_operations_in_a_conditional_and_in_a_loop(tf, classes, session):
    v1 = tf.compat.v1
    acc = classes.SparseConditionalAccumulator(tf.float32)

    def offer(number):
        with tf.control_dependencies([acc.apply_grad([1], [[2.0]])]):
            return number + 1

    v1.disable_control_flow_v2()  # a reference cannot pass into a function, here as there
    try:
        assert session.run(v1.while_loop(lambda number: number < 3, offer, [tf.constant(0)])) == 3
        session.run(v1.cond(tf.constant(True), lambda: offer(tf.constant(0)), lambda: tf.constant(0)))
    finally:
        v1.enable_control_flow_v2()
    assert acc.num_accumulated().eval() == 4


def test_variables_of_tensorflow_1_as_dtype_and_as_values(tf, gqtf, in_graph):
    """Such a variable's dtype is a reference, `float32_ref`."""
    v1 = tf.compat.v1
    taken = []
    for classes in (v1, gqtf):
        with in_graph.build():
            table = v1.Variable([[1.0, 2.0]] * 5, use_resource=False)
            rows = v1.Variable([[3.0, 4.0]], use_resource=False)
            acc = classes.SparseConditionalAccumulator(table.dtype, table.shape)
            (slices,) = tf.gradients(tf.reduce_sum(tf.gather(table, [0, 1])), table)
            applies = acc.apply_indexed_slices_grad(slices), acc.apply_grad([1], rows)
            init, take = v1.global_variables_initializer(), acc.take_grad(2)
        with in_graph.session() as session:
            session.run(init)
            for apply in applies:
                session.run(apply)
            taken.append([array.tolist() for array in session.run(take)])
    assert taken[0] == taken[1] == [[0, 1], [[1.0, 1.0], [2.0, 2.5]], [5, 2]]


@pytest.mark.parametrize(
    ("shape", "kind", "words"),
    [
        ("x", TypeError, "Error converting shape to a TensorShape: Failed to convert ''x'' to a shape"),
        ([2.5, 1], TypeError, "Error converting shape to a TensorShape: Dimension value must be integer or None"),
        ([-1, 2], ValueError, "Error converting shape to a TensorShape: Dimension -1 must be >= 0."),
    ],
)
def test_shape_that_is_none_is_refused(classes, session, shape, kind, words):
    for name in ("SparseConditionalAccumulator", "ConditionalAccumulator"):
        with pytest.raises(kind, match=re.escape(words)):
            getattr(classes, name)("float32", shape=shape)


def test_shape_of_one_dimension_as_a_number(tf, classes, session):
    acc = classes.SparseConditionalAccumulator(tf.float32, shape=3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="index is 3 exceeded 3"):
        acc.apply_grad([3], [1.0]).run()


def test_empty_shared_name_is_none(tf, classes, session):
    one, other = (classes.SparseConditionalAccumulator(tf.float32, shared_name="") for _ in range(2))
    one.apply_grad([1], [[1.0]]).run()
    assert (one.num_accumulated().eval(), other.num_accumulated().eval()) == (1, 0)


@pytest.mark.parametrize("kind", ["SparseConditionalAccumulator", "ConditionalAccumulator"])
def test_numbers_that_are_known_to_be_no_scalars_are_refused_when_the_graph_is_built(tf, classes, session, kind):
    acc = getattr(classes, kind)(tf.float32)
    gradient = ([1], [[1.0]]) if kind.startswith("Sparse") else ([1.0],)
    for build in (
        lambda: acc.apply_grad(*gradient, local_step=[3]),
        lambda: acc.take_grad([1]),
        lambda: acc.set_global_step([3]),
    ):
        with pytest.raises(ValueError, match=r"must be (rank 0 but is rank 1|scalar, got shape \(1,\))"):
            build()


def test_table_without_rows_or_without_columns(tf, classes, session):
    for shape, ids in (([0, 2], []), ([5, 0], [3])):
        acc = classes.SparseConditionalAccumulator(tf.float32, shape=shape)
        acc.apply_grad(np.array(ids, np.int64), np.zeros((len(ids), shape[1]), np.float32)).run()
        taken = session.run(acc.take_grad(1))
        assert (taken.indices.tolist(), taken.values.shape, taken.shape.tolist()) == (ids, (len(ids), shape[1]), shape)


def test_no_gradient_flows_through_an_accumulator(tf, classes, session):
    variable = tf.compat.v1.get_variable("variable", [1, 1])
    acc = classes.SparseConditionalAccumulator(tf.float32)
    with tf.control_dependencies([acc.apply_grad([1], 2 * variable)]):
        taken = acc.take_grad(1)
    assert tf.gradients(tf.reduce_sum(taken.values), variable) == [None]


def test_optimizer_of_replicas_with_its_accumulators_changed(tf, classes, monkeypatch):
    """`SyncReplicasOptimizer` makes one for each variable, of both kinds, and takes in a thread of its own."""
    from tensorflow.python.training import sync_replicas_optimizer

    ops = types.SimpleNamespace(**vars(sync_replicas_optimizer.data_flow_ops))
    ops.SparseConditionalAccumulator = classes.SparseConditionalAccumulator
    ops.ConditionalAccumulator = classes.ConditionalAccumulator
    monkeypatch.setattr(sync_replicas_optimizer, "data_flow_ops", ops)
    v1 = tf.compat.v1
    with v1.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        table = v1.get_variable("table", [4, 2], initializer=v1.ones_initializer(), use_resource=False)
        weights = v1.get_variable("weights", [2, 1], initializer=v1.ones_initializer(), use_resource=False)
        loss = tf.reduce_sum(tf.matmul(tf.gather(table, [1, 3]), weights))
        optimizer = v1.train.SyncReplicasOptimizer(
            v1.train.GradientDescentOptimizer(0.25), replicas_to_aggregate=2, total_num_replicas=2
        )
        train = optimizer.minimize(loss, global_step=step)
        hooks = [optimizer.make_session_run_hook(is_chief=True, num_tokens=2)]
        config = v1.ConfigProto(operation_timeout_in_ms=3000)  # which ends the take that waits in the end
        with v1.train.MonitoredTrainingSession(hooks=hooks, config=config) as session:
            for _ in range(5):  # the last one needs a token of the second round
                session.run(train)
            assert session.run(step) == 2
            assert session.run(table).tolist() == [[1.0, 1.0], [0.625, 0.625], [1.0, 1.0], [0.625, 0.625]]
            assert session.run(weights).tolist() == [[0.125], [0.125]]
