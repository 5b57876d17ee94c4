"""A graph of TensorFlow 1 and its sessions: the gate, what it waits for, and what ends a wait."""

import gc
import threading

import numpy as np
import pytest

import gradquorum.engine
from tests.support import TIMEOUT, wait_until

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def built(tf, gqtf, in_graph):
    """A graph with one accumulator and its operations, fed from placeholders."""
    v1 = tf.compat.v1
    with in_graph.build():
        built = in_graph
        built.acc = gqtf.SparseConditionalAccumulator(tf.float32, shape=[1000, 1])
        built.ids, built.values = v1.placeholder(tf.int64), v1.placeholder(tf.float32)
        built.step, built.number = v1.placeholder(tf.int64), v1.placeholder(tf.int32)
        built.apply = built.acc.apply_grad(built.ids, built.values, local_step=built.step)
        built.take = built.acc.take_grad(built.number)
        built.count = built.acc.num_accumulated()
        built.set_step = built.acc.set_global_step(built.step)
    return built


def offer(session, built, ids, values, step=0):
    feed = {built.ids: ids, built.values: np.reshape(values, (-1, 1)), built.step: step}
    session.run(built.apply, feed)


def rows(taken):
    return list(zip(taken.indices.tolist(), taken.values.ravel().tolist(), strict=True))


def num_held(built):
    return built.acc._backend._store.num_held


def started_takes(built):
    """Takes that wait at their gate, over all sessions (a look behind the public names)."""
    return built.acc._backend._store.num_waiting


def test_operations_run_and_tensors_eval(tf, built):
    with built.session():
        feed = {built.ids: [3, 1, 3], built.values: [[1.0], [2.0], [4.0]], built.step: 0}
        assert built.apply.run(feed) is None
        assert built.count.eval() == 1
        assert built.take.values.eval({built.number: 1}).tolist() == [[2.0], [5.0]]
        assert built.count.eval() == 0
        assert num_held(built) == 0


def test_sessions_of_one_graph_have_rounds_of_their_own(built):
    with built.session() as one, built.session() as two:
        offer(one, built, [1], [1.0])
        offer(two, built, [2], [2.0])
        offer(two, built, [2], [4.0])
        assert (one.run(built.count), two.run(built.count)) == (1, 2)
        assert rows(two.run(built.take, {built.number: 1})) == [(2, 3.0)]
        assert rows(one.run(built.take, {built.number: 1})) == [(1, 1.0)]


def test_take_when_its_session_is_closed_is_cancelled_with_tensorflows_words(tf, built, run_thread):
    with built.session() as session:
        taking = run_thread(session.run, built.take, {built.number: 1})
        wait_until(lambda: started_takes(built) == 1)
        session.close()
        error = taking.error()
    assert isinstance(error, tf.errors.CancelledError)


def test_take_when_its_time_is_over_leaves_the_round_as_it_was(tf, built):
    options = tf.compat.v1.RunOptions(timeout_in_ms=50)
    with built.session() as session:
        offer(session, built, [1], [1.0])
        with pytest.raises(tf.errors.DeadlineExceededError):
            session.run(built.take, {built.number: 2}, options=options)
        assert session.run(built.count) == 1
        offer(session, built, [1], [3.0])
        assert rows(session.run(built.take, {built.number: 2})) == [(1, 2.0)]


def test_waiting_takes_do_not_keep_applies_waiting(built, run_thread):
    with built.session() as session:
        takes = [run_thread(session.run, built.take, {built.number: 1}) for _ in range(16)]
        wait_until(lambda: started_takes(built) == 16)
        for step in range(16):
            offer(session, built, [1], [1.0], step)
        assert [rows(call.result()) for call in takes] == [[(1, 1.0)]] * 16


def test_refused_gradient_changes_nothing(tf, built):
    with built.session() as session:
        offer(session, built, [1], [1.0])
        for ids, values in (([1000], [1.0]), ([-1], [1.0]), ([1, 2], [1.0])):
            with pytest.raises(tf.errors.InvalidArgumentError):
                offer(session, built, ids, values)
        assert session.run(built.count) == 1
        assert num_held(built) == 1


def test_gradients_whose_rows_differ_from_the_rounds_are_refused_by_the_gate(tf, gqtf, in_graph):
    v1 = tf.compat.v1
    with in_graph.build():
        acc = gqtf.SparseConditionalAccumulator(tf.float32)
        values = v1.placeholder(tf.float32)
        apply, take = acc.apply_grad([1], values), acc.take_grad(1)
    with in_graph.session() as session:
        session.run(apply, {values: np.ones((1, 2))})
        for wrong, words in (((1, 3), "expected values dim 1 to be 2, got 3"), ((1, 2, 1), "values rank 2, got 3")):
            with pytest.raises(tf.errors.InvalidArgumentError, match=words):
                session.run(apply, {values: np.ones(wrong)})
        assert session.run(take).values.tolist() == [[1.0, 1.0]]


def test_concurrent_workers_every_accepted_gradient_is_in_exactly_one_take(tf, built, run_thread):
    """Values are powers of two on rows of their own: a take tells exactly which gradients are in it."""
    workers, rounds = 4, 40
    stop = threading.Event()
    step = [0]
    with built.session() as session:

        def work(number):
            while not stop.is_set():
                offer(session, built, [number, 999], [1.0, 1.0], step[0])

        calls = [run_thread(work, number) for number in range(workers)]
        taken = 0.0
        for _ in range(rounds):
            mean = dict(rows(session.run(built.take, {built.number: 3})))
            step[0] += 1
            assert mean.pop(999) == 1.0  # the mean, however many there are
            assert all(value == 1.0 for value in mean.values())
            assert mean
            taken += 1
        stop.set()
        for call in calls:
            call.result()
        left = int(session.run(built.count))
    assert taken == rounds
    assert left <= num_held(built)  # what is open, and what is stale and not yet forgotten


def test_sum_counts_every_accepted_gradient_once(tf, gqtf, in_graph, run_thread):
    with in_graph.build():
        acc = gqtf.SparseConditionalAccumulator(tf.float32, reduction_type="SUM")
        apply = acc.apply_grad([7, 7], [[0.5], [0.5]], local_step=2**40)  # never stale
        take, count = acc.take_grad(1), acc.num_accumulated()
    with in_graph.session() as session:
        calls = [run_thread(lambda: [session.run(apply) for _ in range(50)]) for _ in range(4)]
        total = 0.0
        while total < 200.0:
            total += float(session.run(take).values[0, 0])
        for call in calls:
            call.result()
        assert (total, session.run(count)) == (200.0, 0)


def test_stale_gradients_are_forgotten_at_once_where_nobody_takes(built):
    with built.session() as session:
        session.run(built.set_step, {built.step: 10})
        for _ in range(3):
            offer(session, built, [1], [100.0], 3)
            assert num_held(built) == 0
        offer(session, built, [1], [1.0], 10)
        assert num_held(built) == 1


def test_stale_gradients_are_forgotten_two_takes_later_where_somebody_waits(tf, built, run_thread):
    with built.session() as session:
        session.run(built.set_step, {built.step: 10})
        for step in (10, 11):
            taking = run_thread(session.run, built.take, {built.number: 1})
            wait_until(lambda: started_takes(built) == 1)
            if step == 10:
                offer(session, built, [1], [100.0], 3)
                assert num_held(built) == 1
            offer(session, built, [1], [1.0], step)
            assert rows(taking.result()) == [(1, 1.0)]
        assert num_held(built) == 0


def test_gradients_go_with_their_session(tf, built):
    """When the session object is gone, or at the latest when TensorFlow is called after that."""
    with built.session() as other:
        with built.session() as session:
            for value in range(3):
                offer(session, built, [1], [float(value)])
            offer(other, built, [1], [7.0])
        del session
        gc.collect()
        assert other.run(built.count) == 1
        assert num_held(built) == 1
        assert rows(other.run(built.take, {built.number: 1})) == [(1, 7.0)]


def test_gradient_that_the_gate_refuses_is_forgotten_with_the_next_take(tf, gqtf, in_graph, monkeypatch):
    v1 = tf.compat.v1
    with in_graph.build():
        acc = gqtf.SparseConditionalAccumulator(tf.float32)
        values = v1.placeholder(tf.float32)
        apply, take = acc.apply_grad([1], values), acc.take_grad(1)
    in_graph.acc = acc
    monkeypatch.setattr(type(acc._backend._store), "_row_shape_of_round", lambda *_: None)  # as if it came too early
    with in_graph.session() as session:
        session.run(apply, {values: np.ones((1, 2))})
        with pytest.raises(tf.errors.InvalidArgumentError, match="expected values dim 1 to be 2, got 3"):
            session.run(apply, {values: np.ones((1, 3))})
        assert session.run(take).values.tolist() == [[1.0, 1.0]]
        assert num_held(in_graph) == 0


def test_round_that_is_merged_when_its_time_is_over_is_what_the_next_take_gets(tf, built, monkeypatch, run_thread):
    """TensorFlow's own would lose a round that is taken when its time is over."""
    store = built.acc._backend._store
    merge, merging, go_on = store._merge, threading.Event(), threading.Event()

    def slow(round_):
        merging.set()
        assert go_on.wait(TIMEOUT)
        return merge(round_)

    v1 = tf.compat.v1
    with built.session() as session:
        offer(session, built, [1], [5.0])
        monkeypatch.setattr(store, "_merge", slow)
        options = v1.RunOptions(timeout_in_ms=1000)
        taking = run_thread(session.run, built.take, {built.number: 1}, options)
        assert merging.wait(TIMEOUT)
        offer(session, built, [1], [6.0], 1)
        with pytest.raises(tf.errors.DeadlineExceededError):  # began later, so the time of the other one is over, too
            session.run(built.take, {built.number: 9}, options)
        go_on.set()
        assert isinstance(taking.error(), tf.errors.DeadlineExceededError)
        assert session.run(built.count) == 1
        assert rows(session.run(built.take, {built.number: 5})) == [(1, 5.0)]  # that one, however many were in it
        assert rows(session.run(built.take, {built.number: 1})) == [(1, 6.0)]


def test_empty_gradient_counts(tf, built):
    with built.session() as session:
        session.run(built.apply, {built.ids: [], built.values: np.zeros((0, 1)), built.step: 0})
        session.run(built.apply, {built.ids: [], built.values: np.zeros(0), built.step: 0})
        taken = session.run(built.take, {built.number: 2})
        assert (taken.indices.shape, taken.values.shape, taken.shape.tolist()) == ((0,), (0, 1), [1000, 1])


def test_merge_when_memory_runs_out_says_so_and_keeps_the_round(tf, built, monkeypatch):
    def failing(*_):
        raise MemoryError("injected")

    with built.session() as session:
        offer(session, built, [1], [1.0])
        monkeypatch.setattr(type(built.acc._backend._store._reducer), "merge", failing)
        with pytest.raises(tf.errors.ResourceExhaustedError):
            session.run(built.take, {built.number: 1})
        monkeypatch.undo()
        offer(session, built, [1], [2.0], 1)
        assert [rows(session.run(built.take, {built.number: 1})) for _ in range(2)] == [[(1, 1.0)], [(1, 2.0)]]


def test_number_of_several_entries_with_which_tensorflows_own_ends_the_process(tf, built):
    with built.session() as session:
        offer(session, built, [1], [1.0])
        with pytest.raises(tf.errors.InvalidArgumentError, match="num_required must be scalar"):
            session.run(built.take, {built.number: [1]})
        assert rows(session.run(built.take, {built.number: 1})) == [(1, 1.0)]


def test_the_engine_is_the_one_of_the_library(built):
    reducer = built.acc._backend._store._reducer
    assert type(reducer).__module__.endswith(gradquorum.engine.engine_name)
