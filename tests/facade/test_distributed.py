"""Rounds of a server, in each mode: several programs, several TensorFlows, one round."""

import contextlib
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import gradquorum as gq
from tests.support import TARGETS, TIMEOUT, wait_until

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif("process" not in TARGETS, reason="several processes need Linux"),
]


@pytest.fixture
def shared(server, request):
    """A handle of this library's on the round that a test shares."""
    acc = gq.SparseConditionalAccumulator(
        "float32", [5, 1], shared_name=f"facade-{request.node.name}", target=server.address
    )
    yield acc
    acc.close(for_all=True)


@pytest.fixture
def name(request):
    return f"facade-{request.node.name}"


def test_eager_accumulator_shares_a_servers_round(gqtf, server, shared, name):
    acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name, target=server.address)
    acc.apply_grad([1, 1], [[1.0], [2.0]])
    shared.apply_grad([1], np.float32([[5.0]]))
    assert acc.take_grad(2).values.numpy().tolist() == [[4.0]]


def test_function_shares_a_servers_round(tf, gqtf, server, shared, name):
    acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name, target=server.address)

    @tf.function
    def both():
        acc.apply_grad([1, 1], [[1.0], [2.0]])
        return acc.take_grad(1).values

    assert both().numpy().tolist() == [[3.0]]
    assert shared.global_step == 1


def test_session_shares_a_servers_round(tf, gqtf, server, shared, name, in_graph):
    with in_graph.build():
        acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name, target=server.address)
        apply, take, count = acc.apply_grad([1, 1], [[1.0], [2.0]]), acc.take_grad(2), acc.num_accumulated()
        slices, step = acc.take_indexed_slices_grad(1), acc.set_global_step(7)
        bad = acc.apply_grad([9], [[1.0]], local_step=100)
    with in_graph.session() as session:
        session.run(apply)
        shared.apply_grad([1], np.float32([[5.0]]))
        assert session.run(count) == 2
        assert session.run(take).values.tolist() == [[4.0]]
        session.run(step)
        assert shared.global_step == 7
        shared.apply_grad([2], np.float32([[5.0]]), local_step=7)
        assert session.run(slices).dense_shape.tolist() == [5, 1]
        with pytest.raises(tf.errors.InvalidArgumentError, match="exceeded limits of shape"):
            session.run(bad)


@pytest.mark.parametrize("ending", ["close", "deadline"])
def test_sessions_take_from_a_server_can_be_ended(tf, gqtf, server, shared, name, in_graph, run_thread, ending):
    with in_graph.build():
        acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name, target=server.address)
        take = acc.take_grad(1)
    with in_graph.session() as session:
        if ending == "deadline":
            with pytest.raises(tf.errors.DeadlineExceededError):
                session.run(take, options=tf.compat.v1.RunOptions(timeout_in_ms=300))
        else:
            taking = run_thread(session.run, take)
            rounds = server._service.rounds._rounds[name].round
            wait_until(lambda: len(rounds._queue) == 1)
            session.close()
            assert isinstance(taking.error(), tf.errors.CancelledError)
    shared.apply_grad([1], np.float32([[5.0]]))
    assert shared.take_grad(1, timeout=TIMEOUT).values.tolist() == [[5.0]]  # nothing was lost


def test_dense_over_a_server(gqtf, server, name, in_graph):
    with in_graph.build():
        acc = gqtf.ConditionalAccumulator("float32", [2], shared_name=name, target=server.address)
        apply, take = acc.apply_grad([1.0, 2.0]), acc.take_grad(1)
    with in_graph.session() as session:
        session.run(apply)
        assert session.run(take).tolist() == [1.0, 2.0]


def test_worker_process_with_a_session_of_its_own(server, shared, name):
    """What a distributed program of TensorFlow 1 becomes: each worker runs its own session against the server."""
    script = textwrap.dedent(
        """
        import sys
        import tensorflow as tf
        import gradquorum.tensorflow as gqtf
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], sys.argv[1], target=sys.argv[2])
            session.run(acc.apply_grad([3, 3], [[1.0], [2.0]]))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, name, server.address], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert shared.take_grad(1, timeout=0).values.tolist() == [[3.0]]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_connect_makes_a_server_the_default(tf, gqtf, server, shared, name, in_graph, mode):
    gq.connect(server.address)
    try:
        if mode == "eager":
            gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name).apply_grad([1], [[1.0]])
        else:
            with in_graph.build():
                apply = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name).apply_grad([1], [[1.0]])
            with in_graph.session() as session:
                session.run(apply)
    finally:
        gq.connect(None)
    assert shared.num_accumulated() == 1


def test_program_with_the_behaviour_of_version_2_switched_off(server, shared, name):
    """As programs of TensorFlow 1 begin today; both kinds of rounds, in the default graph."""
    script = textwrap.dedent(
        """
        import sys
        import tensorflow.compat.v1 as tf
        import gradquorum.tensorflow as gqtf
        tf.disable_v2_behavior()
        sparse = gqtf.SparseConditionalAccumulator(tf.float32, [5, 1])
        remote = gqtf.SparseConditionalAccumulator(tf.float32, [5, 1], sys.argv[1], target=sys.argv[2])
        dense = gqtf.ConditionalAccumulator(tf.float32, [2])
        applies = [acc.apply_grad([3, 3], [[1.0], [2.0]]) for acc in (sparse, remote)] + [dense.apply_grad([1.0, 2.0])]
        takes = [sparse.take_grad(1).values, remote.take_grad(1).values, dense.take_grad(1)]
        with tf.Session() as session:
            session.run(applies)
            print(*(take.tolist() for take in session.run(takes)))
            print(*session.run([sparse.num_accumulated(), remote.num_accumulated(), dense.num_accumulated()]))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, name, server.address], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[3.0]] [[3.0]] [1.0, 2.0]\n0 0 0\n"
    assert shared.global_step == 1


def test_variables_of_tensorflow_1_in_a_session_over_a_server(tf, gqtf, server, shared, name, in_graph):
    v1 = tf.compat.v1
    with in_graph.build():
        rows = v1.Variable([[3.0]], use_resource=False)
        acc = gqtf.SparseConditionalAccumulator(rows.dtype, [5, 1], shared_name=name, target=server.address)
        apply, init = acc.apply_grad([1], rows), v1.global_variables_initializer()
    with in_graph.session() as session:
        session.run(init)
        session.run(apply)
    assert shared.take_grad(1).values.tolist() == [[3.0]]


@pytest.mark.parametrize("threads", [1, 2])
def test_waiting_takes_of_a_session_leave_threads_to_applies(
    tf, gqtf, server, shared, name, in_graph, run_thread, threads
):
    """Two tables, as a chief takes them, in a session with no more threads than takes."""
    v1 = tf.compat.v1
    with in_graph.build():
        accs = [
            gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=f"{name}/{i}", target=server.address)
            for i in range(2)
        ]
        apply = tf.group(*[acc.apply_grad([1], [[2.0]]) for acc in accs])
        takes = [acc.take_grad(1).values for acc in accs]
    config = v1.ConfigProto(inter_op_parallelism_threads=threads, use_per_session_threads=True)
    with v1.Session(graph=in_graph.graph, config=config) as session:
        taking = run_thread(session.run, takes)
        wait_until(lambda: any(server._service.rounds._rounds[f"{name}/{i}"].round._queue for i in range(2)))
        session.run(apply, options=v1.RunOptions(timeout_in_ms=int(1000 * TIMEOUT)))
        assert [values.tolist() for values in taking.result()] == [[[2.0]], [[2.0]]]
    for acc in accs:
        acc.accumulator_ref.close(for_all=True)


def test_takes_of_sessions_are_served_in_the_order_in_which_they_began(
    tf, gqtf, server, shared, name, in_graph, run_thread
):
    v1 = tf.compat.v1
    with in_graph.build():
        acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name, target=server.address)
        number = v1.placeholder(tf.int32)
        take = acc.take_grad(number).values
    line = server._service.rounds._rounds[name].round._queue
    needs = (3, 1, 2, 1)
    with in_graph.session() as one, v1.Session(graph=in_graph.graph) as two:
        takes = []
        for i, need in enumerate(needs):
            takes.append(run_thread((one, two)[i % 2].run, take, {number: need}))
            wait_until(lambda i=i: len(line) == i + 1)
        assert [ticket.num_required for ticket in line] == list(needs)
        for i, need in enumerate(needs):
            for _ in range(need):
                shared.apply_grad([1], np.float32([[float(i)]]), local_step=None)
        assert [call.result().tolist() for call in takes] == [[[float(i)]] for i in range(len(needs))]


def test_gradient_between_the_end_of_a_session_and_that_of_its_look_is_not_lost(
    tf, gqtf, server, shared, name, in_graph, run_thread, monkeypatch
):
    """A Python operation does not notice that its run was cancelled, and one after it would run, too."""
    monkeypatch.setattr("gradquorum.tensorflow.session_wait.LOOK_SECONDS", TIMEOUT)
    with in_graph.build():
        acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name, target=server.address)
        take = acc.take_grad(1)
    rounds = server._service.rounds._rounds[name].round

    def run(session):
        with contextlib.suppress(tf.errors.CancelledError):
            return [session.run(take.values).tolist()]
        return []

    num_cancelled = 0
    for step in range(5):
        with in_graph.session() as session:
            taking = run_thread(run, session)
            wait_until(lambda: len(rounds._queue) == 1)
            closing = run_thread(session.close)
            wait_until(lambda: session._closed)
            shared.apply_grad([1], np.float32([[float(step)]]), local_step=step)
            closing.result()
            taken = taking.result()
        num_cancelled += not taken
        taken = taken or [shared.take_grad(1, timeout=TIMEOUT).values.tolist()]
        assert taken == [[[float(step)]]]
    assert num_cancelled


def test_round_that_was_read_when_the_time_was_over_goes_back(
    tf, gqtf, server, shared, name, in_graph, run_thread, monkeypatch
):
    v1 = tf.compat.v1
    with in_graph.build():
        acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name, target=server.address)
        wait, reading, go_on = acc._backend._wait, threading.Event(), threading.Event()
        read = type(wait)._read

        def slow(offers, *arguments):
            result = read(wait, offers, *arguments)
            if result[0]:
                reading.set()
                assert go_on.wait(TIMEOUT)
            return result

        monkeypatch.setattr(wait, "_read", slow)
        take, never = acc.take_grad(1), v1.FIFOQueue(1, tf.bool, [[]]).dequeue()
    options = v1.RunOptions(timeout_in_ms=1000)
    with in_graph.session() as session:
        shared.apply_grad([1], np.float32([[5.0]]))
        taking = run_thread(session.run, take, None, options)
        assert reading.wait(TIMEOUT)
        with pytest.raises(tf.errors.DeadlineExceededError):  # began later, so the time of the other one is over, too
            session.run(never, options=options)
        go_on.set()
        assert isinstance(taking.error(), tf.errors.DeadlineExceededError)
        shared.apply_grad([1], np.float32([[6.0]]), local_step=1)
        assert [session.run(take).values.tolist() for _ in range(2)] == [[[5.0]], [[6.0]]]
    assert shared.num_undelivered == 0


@pytest.mark.parametrize("closed", ["accumulator", "server"])
def test_take_when_its_accumulator_or_server_is_closed_is_cancelled_with_the_words(
    tf, gqtf, in_graph, run_thread, closed
):
    with gq.Server() as server, in_graph.build():
        acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name="Q", target=server.address)
        take = acc.take_grad(1)
        with in_graph.session() as session:
            taking = run_thread(session.run, take)
            wait_until(lambda: len(server._service.rounds._rounds["Q"].round._queue) == 1)
            (acc.accumulator_ref if closed == "accumulator" else server).close()
            error = taking.error()
    assert isinstance(error, tf.errors.CancelledError)
    assert "TakeGrad operation was cancelled" in error.message


@pytest.mark.parametrize("mode", ["function", "graph"])
def test_server_knows_of_a_delivery_while_the_run_of_the_take_goes_on(
    tf, gqtf, server, shared, name, in_graph, run_thread, mode
):
    """So that nothing that happens to the rest of the run, or to this process, can bring the round a second time."""
    using, go_on = threading.Event(), threading.Event()

    def use(values):
        using.set()
        assert go_on.wait(TIMEOUT)
        return values

    with in_graph.build() if mode == "graph" else contextlib.nullcontext():
        acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name, target=server.address)
        used = tf.function(lambda: tf.numpy_function(use, [acc.take_grad(1).values], tf.float32))
        fetch = used() if mode == "graph" else None
    with in_graph.session() as session:
        shared.apply_grad([1], np.float32([[5.0]]))
        running = run_thread(session.run, fetch) if mode == "graph" else run_thread(lambda: used().numpy())
        assert using.wait(TIMEOUT)
        wait_until(lambda: not server._service.rounds._rounds[name].round.num_in_flight)
        go_on.set()
        assert running.result().tolist() == [[5.0]]
    assert shared.num_undelivered == 0


@pytest.mark.parametrize("control_flow", ["cond", "loop", "function", "dataset"])
def test_operations_of_a_graph_inside_functions_where_tensorflows_own_is_refused(
    tf, gqtf, server, shared, name, in_graph, control_flow
):
    """A reference cannot pass into a function; what is on a server has none."""
    v1 = tf.compat.v1

    def offer_and_take(acc, i):
        with tf.control_dependencies([acc.apply_grad([1], [[5.0]], local_step=i)]):
            return acc.take_grad(1).values + tf.cast(i, tf.float32)

    def build(acc):
        if control_flow == "cond":
            return v1.cond(tf.constant(True), lambda: offer_and_take(acc, 0), lambda: tf.zeros([1, 1]))
        if control_flow == "loop":

            def body(i, _):
                return i + 1, tf.ensure_shape(offer_and_take(acc, i), [1, 1])

            loop = v1.while_loop(lambda i, _: i < 3, body, [tf.constant(0), tf.zeros([1, 1])], parallel_iterations=1)
            return loop[1]
        if control_flow == "function":
            return tf.function(lambda: offer_and_take(acc, 0))()
        return v1.data.make_one_shot_iterator(tf.data.Dataset.range(1).map(lambda i: offer_and_take(acc, i))).get_next()

    with in_graph.build():
        with pytest.raises((TypeError, ValueError)):
            build(v1.SparseConditionalAccumulator("float32", [5, 1]))
        values = build(gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name, target=server.address))
    with in_graph.session() as session:
        assert session.run(values).tolist() == [[7.0 if control_flow == "loop" else 5.0]]
    assert shared.num_accumulated() == shared.num_undelivered == 0


def test_number_of_64_bits_is_taken_and_a_shared_name_is_one_round_in_all_containers(
    tf, gqtf, server, shared, name, in_graph
):
    v1 = tf.compat.v1
    with in_graph.build():
        with in_graph.graph.container("one"):
            acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name, target=server.address)
            apply = acc.apply_grad([1], [[5.0]])
        with in_graph.graph.container("other"):
            acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name, target=server.address)
            take = acc.take_grad(tf.constant(1, tf.int64)).values
        with pytest.raises(TypeError, match="num_required: expected integers, got bool"):
            acc.take_grad(True)
        with pytest.raises(TypeError, match="int64 that does not match expected type of int32"):
            v1.SparseConditionalAccumulator("float32").take_grad(tf.constant(1, tf.int64))
    with in_graph.session() as one, v1.Session(graph=in_graph.graph) as two:
        one.run(apply)
        assert two.run(take).tolist() == [[5.0]]


def test_number_that_is_no_integer_is_refused_when_the_graph_is_built(tf, gqtf, server, shared, name, in_graph):
    with in_graph.build():
        acc = gqtf.SparseConditionalAccumulator("float32", [5, 1], shared_name=name, target=server.address)
        with pytest.raises(TypeError, match="num_required: expected integers, got float32"):
            acc.take_grad(1.7)
